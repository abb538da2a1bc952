"""What a node has for all runs on it beside its devices, as an actor: graders, tools, and searches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from workers.envs import reasoning_gym
from workers.envs.search import search
from workers.graders.run import GradeInput, GradeResult, grade_batch
from workers.sandbox.pool import SandboxPool
from workers.sandbox.process import CallResult
from workers.sandbox.view import packages
from workers.spec import Grader
from workers.timing import Ran, Stopwatch


class GraderPool:
    def __init__(self) -> None:
        # At least two, so that one run's slow grades cannot keep all others waiting.
        self._sandbox = SandboxPool(max(2, os.cpu_count() or 1))
        self._closed: set[str] = set()

    def grade(
        self,
        owner: str,
        grader: Grader,
        samples: Sequence[GradeInput],
        secrets: Mapping[str, str],
        share: float,
    ) -> Ran[list[GradeResult]]:
        """One result per sample. ``share`` is of no device: graders run beside the devices."""
        watch = Stopwatch()
        grades = grade_batch(
            grader,
            samples,
            pool=self._sandbox,
            owner=owner,
            secrets=secrets,
            stopped=lambda: owner in self._closed,
        )
        return watch.ran(grades, 0)

    def call(
        self, owner: str, source: str, function: str, arguments: list[Any], timeout_s: float, apart: str
    ) -> CallResult:
        """One call of a function in the owner's sandbox; calls with another ``apart`` use other processes."""
        # A process serves one owner and source: the comment makes it another source, of the same owner.
        told = f"{source}\n# {apart}\n" if apart else source
        (result,) = self._sandbox.call(told, function, [arguments], timeout_s, owner=owner)
        return result

    def score_puzzle(self, owner: str, puzzle: dict[str, Any], text: str) -> CallResult:
        """In processes of the owner alone: an answer may be code, and change the process that scores it."""
        (result,) = self._sandbox.call(
            reasoning_gym.SOURCE,
            "score",
            [(puzzle, text)],
            reasoning_gym.TIMEOUT_S,
            owner=owner,
            load_timeout_s=reasoning_gym.LOAD_TIMEOUT_S,
            paths=packages(),
        )
        return result

    def search(self, path: str, query: str, count: int) -> list[tuple[str, str]]:
        """Title and text of the best passages of the corpus."""
        return search(path, query, count)

    def close(self, owner: str) -> None:
        """Stop what computes for the owner, at once and for good, and end its processes."""
        self._closed.add(owner)
        self._sandbox.cancel(owner)
