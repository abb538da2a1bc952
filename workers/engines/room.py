"""Who gets a row and memory: at most ``kv_tokens`` tokens of KV cache, over pools and kept caches.

A sequence is admitted with all that it may come to need, so a running one never has to be thrown out. Kept
caches and rows that nobody uses only fill what is free: they give way when a sequence needs the room, the
largest kept cache first.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.engines.cache import rounded
from workers.engines.packed import PaddedArea
from workers.engines.rows import Row, Run


class Room:
    def __init__(self, runs: Mapping[str, Run], max_batch: int, kv_tokens: int) -> None:
        """``runs`` is looked at, not copied."""
        self._runs = runs
        self._max_batch = max_batch
        self.kv_tokens = kv_tokens

    @property
    def held(self) -> int:
        """Tokens of KV cache held now."""
        return sum(run.pool.tokens + _kept(run) for run in self._runs.values())

    def admit(self, run: Run, max_tokens: int) -> tuple[list[Row], list[Row]]:
        """Move waiting sequences, oldest first, to the run's rows: (those that go on from a kept cache, those
        to be computed from their prompt), which now are the last rows in this order.

        The latter fit one pass of ``max_tokens``, padding included, or are one sequence.
        """
        free = self._max_batch - sum(len(other.running) for other in self._runs.values())
        length = max((rounded(row.sequence.longest) for row in run.running), default=0)
        kept: list[Row] = []
        fresh: list[Row] = []
        area = PaddedArea()
        for row in list(run.waiting)[: max(0, free)]:
            length_with = max(length, rounded(row.sequence.longest))
            count = len(run.running) + len(kept) + len(fresh) + 1
            if not self._make_room(run, count * length_with, [*kept, row]):
                break
            if row.key in run.kept:
                kept.append(row)
            else:
                area_with = area.plus(row.sequence.request.prompt, len(row.sequence.tokens))
                if fresh and area_with.tokens > max_tokens:
                    break
                fresh.append(row)
                area = area_with
            length = length_with
        self._seat(run, kept, fresh, length)
        return kept, fresh

    def keep(self, run: Run, index: int) -> None:
        """Hold the cache of a running row that ends its turn."""
        row = run.running[index]
        context = (*row.sequence.request.prompt, *row.sequence.tokens)
        run.kept[row.key] = run.pool.take(index, context[: row.cached])

    def fit(self) -> None:
        """After ``keep``: give back what is above the limit."""
        if self.held > self.kv_tokens:
            for run in self._runs.values():
                _trim(run)
        while self.held > self.kv_tokens:
            self._drop_largest([])

    def _seat(self, run: Run, kept: list[Row], fresh: list[Row], length: int) -> None:
        taken = len(kept) + len(fresh)
        if not taken:
            return
        first, count = len(run.running), len(run.running) + taken
        found = [run.kept.pop(row.key) for row in kept]
        free = self.kv_tokens - (self.held - run.pool.tokens)
        if count > run.pool.rows or length > run.pool.length or run.pool.tokens > free:
            # Half as many again, where they fit: sequences that join one by one must not copy the pool each.
            spare = run.pool.rows * 3 // 2 if run.running else count
            run.pool.resize(max(count, min(spare, free // length)), length, first)
        for index, (row, cache) in enumerate(zip(kept, found, strict=True), start=first):
            run.pool.put(index, cache)
            row.cached = len(cache.tokens)
        run.running += [*kept, *fresh]
        for row in [*kept, *fresh]:
            run.waiting.remove(row)

    def _make_room(self, run: Run, needed: int, going_on: list[Row]) -> bool:
        """Whether the run's pool may take ``needed`` tokens, with others trimmed as far as that helps.

        The kept caches of ``going_on`` move into the pool, so they are not counted, nor dropped.
        """

        def free() -> int:
            moving = sum(len(run.kept[row.key].tokens) for row in going_on if row.key in run.kept)
            return self.kv_tokens - (self.held - run.pool.tokens - moving)

        if needed <= free():
            return True
        for other in self._runs.values():
            if other is not run:
                _trim(other)
        spared = [run.kept[row.key] for row in going_on if row.key in run.kept]
        while needed > free() and self._drop_largest([id(cache) for cache in spared]):
            pass
        return needed <= free()

    def _drop_largest(self, spared: list[int]) -> bool:
        found = [
            (len(cache.tokens), run, key)
            for run in self._runs.values()
            for key, cache in run.kept.items()
            if id(cache) not in spared
        ]
        if not found:
            return False
        _, run, key = max(found, key=lambda entry: entry[0])
        del run.kept[key]
        return True


def _kept(run: Run) -> int:
    return sum(len(cache.tokens) for cache in run.kept.values())


def _trim(run: Run) -> None:
    if run.pool.rows > len(run.running):
        run.pool.resize(len(run.running), run.pool.length, len(run.running))
