"""A step's training under way: its work in pieces, by worker, and what was computed of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workers.fleet import Fleet
from workers.grants import Lease
from workers.rl.batching import Batch
from workers.rl.sums import Sums

#: What is left of a sub-stage that has to end with an optimizer step and nothing else.
LEAST = 0.01

#: What may be computed of a batch before its update: log-probs by the weights as they are, by those that
#: training started from, and the value head's numbers.
Column = Literal["old", "reference", "values"]


@dataclass
class Piece:
    """What one call to a worker's trainer takes; afterwards, the numbers of its samples' tokens."""

    batch: Batch
    column: Column = "old"
    numbers: list[list[float]] = field(default_factory=list)


#: By worker.
Pieces = dict[int, list[Piece]]
#: Takes the first of the pieces, or several, to the trainer of the lease.
Compute = Callable[[Lease, list[Piece]], Awaitable[None]]


class Load:
    """The pieces of a sub-stage, in rounds; ``now`` are those of the round that is computed."""

    def __init__(self, rounds: Sequence[Pieces]) -> None:
        self._rounds = list(rounds)
        self.now = self._rounds[0]
        self._whole = self._count()

    def _count(self) -> dict[int, int]:
        return {worker: sum(len(pieces[worker]) for pieces in self._rounds) for worker in self.now}

    def next_round(self) -> None:
        del self._rounds[0]
        self.now = self._rounds[0]

    def left(self) -> dict[int, float]:
        """The part that is not computed yet, by worker."""
        return {
            worker: max(LEAST, count / max(1, self._whole[worker])) for worker, count in self._count().items()
        }


class Step:
    """The samples of a step by worker, and the sums of what was computed."""

    def __init__(self, number: int, devices: int) -> None:
        self.number = number
        self.workers = range(devices)
        self.streamed: set[int] = set()
        self._sums = Sums()

    def shard(self, batch: Batch, worker: int) -> Batch:
        count = len(self.workers)
        return batch.of_groups({group for group in batch.groups if group % count == worker})

    def unshard(self, batch: Batch, parts: Mapping[int, list[list[float]]]) -> list[list[float]]:
        """Numbers per worker, back in the batch's order."""
        queues = {worker: iter(numbers) for worker, numbers in parts.items()}
        return [next(queues[group % len(self.workers)]) for group in batch.groups]

    def unstreamed(self, batch: Batch) -> Batch:
        """What was not computed early."""
        return batch.of_groups(set(batch.groups) - self.streamed)

    def backward(self, run_key: str, fleet: Fleet) -> Compute:
        async def compute(lease: Lease, pieces: list[Piece]) -> None:
            fleet.midway = True
            micros = [piece.batch for piece in pieces]
            trained = await lease.run(lease.resident.forward_backward, run_key, micros)
            self._sums += trained.sums
            del pieces[: trained.done]

        return compute

    def take_sums(self) -> Sums:
        sums, self._sums = self._sums, Sums()
        return sums
