"""Who gets a row and memory: at most ``kv_tokens`` tokens of KV cache, over pools and kept caches.

A sequence is admitted with all that it may come to need, so a running one never has to be thrown out. Kept
caches and rows that nobody uses only fill what is free: they give way when a sequence needs the room, the
largest kept cache first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.engines.cache import Pool, Seat, size_of
from workers.engines.packed import PaddedArea
from workers.engines.rows import Row, Run
from workers.models.config import ModelConfig


class Room:
    def __init__(
        self,
        runs: Mapping[str, Run],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_batch: int,
        kv_tokens: int,
    ) -> None:
        """``runs`` is looked at, not copied."""
        self._runs = runs
        self._make = (config, dtype, device)
        self._max_batch = max_batch
        self._pools: dict[int, Pool] = {}
        self.kv_tokens = kv_tokens

    @property
    def held(self) -> int:
        """Tokens of KV cache held now."""
        kept = sum(len(cache.tokens) for run in self._runs.values() for cache in run.kept.values())
        return kept + sum(pool.tokens for pool in self._pools.values())

    def admit(self, run: Run, max_tokens: int) -> tuple[list[Row], list[Row]]:
        """Move waiting sequences, oldest first, to the run's rows: (those that go on from a kept cache, those
        to be computed from their prompt), which now are the last rows in this order.

        The latter fit one pass of ``max_tokens``, padding included, or are one sequence.
        """
        free = self._max_batch - sum(len(other.running) for other in self._runs.values())
        kept: list[Row] = []
        fresh: list[Row] = []
        area = PaddedArea()
        for row in list(run.waiting)[: max(0, free)]:
            seat = self._seat(run, row, kept)
            if seat is None:
                break
            if row.key in run.kept:
                kept.append(row)
            else:
                area_with = area.plus(row.sequence.request.prompt, len(row.sequence.tokens))
                if fresh and area_with.tokens > max_tokens:
                    seat.leave()
                    break
                fresh.append(row)
                area = area_with
            row.seat = seat
        try:
            self._settle()
        except BaseException:
            for row in (*kept, *fresh):
                row.stand()
            raise
        for row in kept:
            row.go_on(run.kept.pop(row.key))
        run.running += [*kept, *fresh]
        for row in (*kept, *fresh):
            run.waiting.remove(row)
        return kept, fresh

    def fit(self) -> None:
        """After caches were kept: give back what is above the limit."""
        if self.held > self.kv_tokens:
            for pool in self._pools.values():
                pool.trim()
        while self.held > self.kv_tokens:
            self._drop_largest([])

    def _settle(self) -> None:
        for pool in self._pools.values():
            pool.settle(max(0, self.kv_tokens - self.held))

    def _seat(self, run: Run, row: Row, going_on: list[Row]) -> Seat | None:
        """A seat for the row, with others trimmed as far as that helps; None when there is no room.

        The kept caches of the row and of ``going_on`` move into pools, so they are not counted, nor dropped.
        """
        if row.sequence.longest > self.kv_tokens:
            return None
        length = size_of(row.sequence.longest, self.kv_tokens)
        if length not in self._pools:
            self._pools[length] = Pool(self._make[0], length, *self._make[1:])
        pool = self._pools[length]
        spared = [run.kept[one.key].tokens for one in (*going_on, row) if one.key in run.kept]
        moving = sum(map(len, spared))

        def fits() -> bool:
            return self.held - moving + pool.growth <= self.kv_tokens

        if not fits():
            for other in self._pools.values():
                other.trim()
        while not fits() and self._drop_largest(spared):
            pass
        return pool.sit() if fits() else None

    def _drop_largest(self, spared: list[tuple[int, ...]]) -> bool:
        found = [
            (len(cache.tokens), run, key)
            for run in self._runs.values()
            for key, cache in run.kept.items()
            if not any(cache.tokens is tokens for tokens in spared)
        ]
        if not found:
            return False
        _, run, key = max(found, key=lambda entry: entry[0])
        del run.kept[key]
        return True
