from __future__ import annotations


class EnvironmentProblem(ValueError):
    """An episode that cannot be played: its row, or the model's chat template, does not fit."""
