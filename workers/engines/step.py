"""The flat batch of one decode step: what each running row is fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.cache import Fed
from workers.engines.rows import Row, Run


@dataclass(frozen=True)
class Step:
    """``parts`` in the order of the runs; ``tokens`` and ``places`` are flat, in the order ``Fed`` says."""

    parts: list[Fed]
    tokens: list[int]
    places: list[int]
    fed: list[tuple[Run, Row, int]]  # every row with the number of its tokens in this step
    ready: list[tuple[int, Run, Row]]  # rows whose context is complete, with the flat index of the last token

    @classmethod
    def of(cls, runs: Sequence[Run], max_tokens: int) -> Step:
        """One token of every row, and up to ``max_tokens`` more that rows miss, the first rows first."""
        step = cls([], [], [], [], [])
        for run in runs:
            max_tokens -= step._add(run, max_tokens)
        return step

    def _add(self, run: Run, spare: int) -> int:
        begin, used = len(self.tokens), 0
        last: list[int] = []
        firsts: list[tuple[int, range]] = []
        for index, row in enumerate(run.running):
            count = min(row.missing, 1 + spare - used)
            used += count - 1
            last.append(row.cached + count - 1)
            if count > 1:
                firsts.append((index, range(row.cached, last[-1])))
            if count == row.missing:
                self.ready.append((begin + index, run, row))
            self.fed.append((run, row, count))
        self.parts.append(Fed(run.pool, last, firsts))
        for row, place in zip(run.running, last, strict=True):
            self.tokens.append(row.token(place))
        for index, places in firsts:
            self.tokens.extend(run.running[index].token(place) for place in places)
        self.places.extend(last)
        self.places.extend(place for _, places in firsts for place in places)
        return used
