"""Who environments ask: the sandbox and the search of their node, and the organization's secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.calls import call
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.sandbox.process import CallResult, FailureKind

KINDS = {
    FailureKind.TIMEOUT: EpisodeFailure.TIMEOUT,
    FailureKind.CRASHED: EpisodeFailure.CRASHED,
    FailureKind.MEMORY: EpisodeFailure.CRASHED,
    FailureKind.SANDBOX: EpisodeFailure.SANDBOX,
    FailureKind.BAD_VALUE: EpisodeFailure.BAD_ANSWER,
}


@dataclass(frozen=True)
class Helpers:
    """``actor`` is the node's ``workers.graders.pool.GraderPool``; ``corpora`` are paths by the names that
    the job's tools search under.
    """

    actor: Any
    run_key: str
    corpora: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    async def run(
        self, source: str, function: str, arguments: list[Any], timeout_s: float, *, apart: str
    ) -> CallResult:
        """A function of a source in the run's sandbox; calls that are ``apart`` share no process."""
        found: CallResult = await call(
            self.actor.call, self.run_key, source, function, arguments, timeout_s, apart
        )
        return found

    async def score_puzzle(self, puzzle: dict[str, Any], text: str) -> CallResult:
        """The library's score of an answer to a puzzle of ``workers.envs.reasoning_gym``."""
        found: CallResult = await call(self.actor.score_puzzle, self.run_key, puzzle, text)
        return found

    async def search(self, corpus: str, query: str, count: int) -> list[tuple[str, str]]:
        """Title and text of the best passages."""
        found: list[tuple[str, str]] = await call(self.actor.search, self.corpora[corpus], query, count)
        return found


def failure_of(result: CallResult) -> EpisodeFailed:
    """What a call that failed in the sandbox is to its episode."""
    kind = EpisodeFailure.EXCEPTION
    if result.kind is not None:
        kind = KINDS.get(result.kind, kind)
    return EpisodeFailed(kind, result.error or "the call failed")
