"""Steps in a row whose rewards taught nothing: a warning each, and in the end the job stops if it asks to."""

from __future__ import annotations

import json
from pathlib import Path

from workers.train.checkpoint import STATE_FILE

#: In a checkpoint's state.
FIELD = "idle_steps"


class NothingLearned(Exception):
    """As many steps as the job allows have taught nothing."""


class Idleness:
    def __init__(self, limit: int | None, resume_from: str | None) -> None:
        self._limit = limit
        self._cause = ""
        self.steps = 0 if resume_from is None else _kept(Path(resume_from))

    def note(self, step: int, cause: str) -> str:
        """Count the step, from 0; the warning, if its rewards taught nothing for this cause."""
        self._cause = cause
        self.steps = self.steps + 1 if cause else 0
        return f"Step {step + 1} teaches nothing: {cause}." if cause else ""

    def check(self) -> None:
        """Raises ``NothingLearned`` when that is enough."""
        if self._limit is not None and self.steps >= self._limit:
            raise NothingLearned(
                f"{self.steps} steps in a row taught nothing (rl.max_idle_steps): {self._cause}"
            )


def _kept(folder: Path) -> int:
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    return int(state.get(FIELD, 0))
