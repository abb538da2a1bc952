"""Graders: from a completion and its dataset row to a score, or to an error that says why there is none."""
