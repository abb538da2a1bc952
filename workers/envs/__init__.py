"""Worlds that answer a model's turns: what a job's episodes are when they are more than one completion."""
