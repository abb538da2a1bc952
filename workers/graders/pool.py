"""The grader processes of a node, as an actor that all runs on the node share."""

from __future__ import annotations

import os
from collections.abc import Sequence

from workers.graders.run import GradeInput, GradeResult, grade_batch
from workers.sandbox.pool import SandboxPool
from workers.spec import Grader
from workers.timing import Ran, Stopwatch


class GraderPool:
    def __init__(self) -> None:
        # At least two, so that one run's slow grades cannot keep all others waiting.
        self._sandbox = SandboxPool(max(2, os.cpu_count() or 1))

    def grade(
        self, owner: str, grader: Grader, samples: Sequence[GradeInput], share: float
    ) -> Ran[list[GradeResult]]:
        """One result per sample. ``share`` is of no device: graders run beside the devices."""
        watch = Stopwatch()
        return watch.ran(grade_batch(grader, samples, pool=self._sandbox, owner=owner), 0)

    def close(self, owner: str) -> None:
        """Stop grading for the owner, at once and for good, and end its processes."""
        self._sandbox.cancel(owner)
