"""Who environments ask: the sandbox and the search of their node, and the organization's secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.calls import call
from workers.sandbox.process import CallResult


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

    async def search(self, corpus: str, query: str, count: int) -> list[tuple[str, str]]:
        """Title and text of the best passages."""
        found: list[tuple[str, str]] = await call(self.actor.search, self.corpora[corpus], query, count)
        return found
