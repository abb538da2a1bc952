"""The flat batch of one decode step: what each running row is fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.attention import Fed
from workers.engines.rows import Row, Run


@dataclass(frozen=True)
class Step:
    """Run by run and row by row: ``rows`` and ``fed`` belong together, ``tokens`` and ``places`` are flat."""

    rows: list[tuple[Run, Row]]
    fed: list[Fed]
    tokens: list[int]
    places: list[int]
    counts: list[int]  # flat tokens of each run

    @classmethod
    def of(cls, runs: Sequence[Run], max_tokens: int) -> Step:
        """One token of every row, and up to ``max_tokens`` more that rows miss, the first rows first."""
        step = cls([], [], [], [], [])
        for run in runs:
            begin = len(step.tokens)
            for row in run.running:
                count = min(row.missing, 1 + max_tokens)
                max_tokens -= count - 1
                places = range(row.cached, row.cached + count)
                step.rows.append((run, row))
                step.fed.append(Fed(row.held, len(step.tokens), places))
                step.tokens.extend(row.token(place) for place in places)
                step.places.extend(places)
            step.counts.append(len(step.tokens) - begin)
        return step

    @property
    def ready(self) -> list[tuple[int, Run, Row]]:
        """Rows that are fed all they miss, with the flat index of the token they sample from."""
        return [
            (one.last, run, row)
            for (run, row), one in zip(self.rows, self.fed, strict=True)
            if len(one.places) == row.missing
        ]
