"""Failures of the numbers themselves. They cross processes, so they are rebuilt from their arguments."""

from __future__ import annotations


class NotFinite(ArithmeticError):
    """A run's outputs, loss or gradient are infinite or not a number; other runs are untouched."""

    def __init__(self, run_key: str, what: str) -> None:
        super().__init__(run_key, what)
        self.run_key = run_key
        self.what = what

    def __str__(self) -> str:
        return f"run {self.run_key}: {self.what}"
