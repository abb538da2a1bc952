"""How much sub-stages slow each other down on a device, and how a device can be divided between them.

A sub-stage alone on a whole device has slow-down 1. With a part of it and others beside it,

    slow = alone[character][share] * product of beside[character, partner] * max(1, sum of bandwidths)

The first factor is measured alone at each share; the second is what a partner costs on top of that although
it computes on its own part (caches, launch queues, clocks); the third is the roofline of the memory bus. A
table is measured for each type of device; ``source`` says where and how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, product

from scheduler.core.state import Kind


class Character(StrEnum):
    """What a sub-stage asks of a device. A tail with few sequences (``THIN``) is bound by launch latency."""

    PREFILL = "prefill"
    DECODE = "decode"
    TAIL = "tail"
    THIN = "thin"
    LOGPROB = "logprob"
    UPDATE = "update"
    SYNC = "sync"


#: Running batch below which a tail is THIN.
THIN_BATCH = 32
#: Running batch below which a tail's sequences are so few that moving them costs next to nothing: a boundary
#: at which merging is thought over again.
LAST_BATCH = 8
#: Running batches at which a tail passes from one sub-stage to the next, and the end.
TAIL_BOUNDS = (THIN_BATCH, LAST_BATCH, 1)


def character(kind: Kind, batch: int) -> Character:
    """Raises ``ValueError`` for kinds that need no device."""
    if kind is Kind.TAIL and batch < THIN_BATCH:
        return Character.THIN
    return Character(kind.value)


@dataclass(frozen=True)
class Interference:
    """``alone[c][i]`` is the slow-down of ``c`` at ``shares[i]``; shares ascend and end with 1.

    ``beside[c, partner]`` is 1 where it is left out. ``saturation`` is the running batch from which decode
    is a DECODE and not a TAIL.
    """

    shares: tuple[float, ...]
    alone: Mapping[Character, tuple[float, ...]]
    beside: Mapping[tuple[Character, Character], float]
    saturation: int
    source: str
    _splits: dict[int, tuple[tuple[float, ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _best: dict[tuple[object, ...], tuple[tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.shares or list(self.shares) != sorted(set(self.shares)) or self.shares[-1] != 1.0:
            raise ValueError(f"shares {self.shares} must ascend and end with 1")
        if not self.shares[0] > 0:
            raise ValueError(f"shares {self.shares} must be above 0")
        for name in Character:
            row = self.alone.get(name, ())
            if len(row) != len(self.shares) or row[-1] != 1.0 or any(a < b for a, b in pairwise(row)):
                raise ValueError(f"alone[{name}] {row} must fall to 1, with one value for each share")
        for pair, factor in self.beside.items():
            if not factor >= 1:
                raise ValueError(f"beside[{pair}] is {factor}, must be at least 1")

    def at_share(self, who: Character, share: float) -> float:
        """Slow-down alone, linear between the shares that were measured; below the least one as 1/share."""
        row = self.alone[who]
        if share <= self.shares[0]:
            return row[0] * self.shares[0] / share
        for low, high, slow_low, slow_high in zip(self.shares, self.shares[1:], row, row[1:], strict=False):
            if share <= high:
                return slow_low + (slow_high - slow_low) * (share - low) / (high - low)
        return 1.0

    def slow(self, who: Sequence[Character], shares: Sequence[float], bandwidth: float) -> tuple[float, ...]:
        """Of each of those who compute at once. ``bandwidth`` is the sum of what they use alone."""
        bus = max(1.0, bandwidth) if len(who) > 1 else 1.0
        slowdowns = []
        for place, own in enumerate(who):
            factor = self.at_share(own, shares[place]) * bus
            for other, partner in enumerate(who):
                if other != place:
                    factor *= self.beside.get((own, partner), 1.0)
            slowdowns.append(factor)
        return tuple(slowdowns)

    def splits(self, parts: int) -> tuple[tuple[float, ...], ...]:
        """The ways to divide a device between so many, from the discrete shares: each sums to 1. Where the
        shares allow none, equal parts.
        """
        if parts not in self._splits:
            steps = (*self.shares[:-1], *(1 - share for share in self.shares[:-1]))
            rounded = sorted({round(share, 6) for share in steps if share > 0})
            found = (
                [s for s in product(rounded, repeat=parts) if abs(sum(s) - 1) < 1e-6]
                if parts > 1
                else [(1.0,)]
            )
            self._splits[parts] = tuple(found) or ((1.0 / parts,) * parts,)
        return self._splits[parts]

    def best(
        self, who: tuple[Character, ...], weights: tuple[float, ...], even: bool = False
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The split with the largest sum of weighted speeds, and the slow-downs under it, as far as they do
        not hang on bandwidth. ``even`` takes equal parts instead.
        """
        key = (who, weights, even)
        if key not in self._best:
            equal = (1.0 / len(who),) * len(who)
            options = (equal,) if even or len(who) == 1 else self.splits(len(who))
            split = max(options, key=lambda parts: (self._speed(who, parts, weights), parts))
            self._best[key] = split, self.slow(who, split, 0.0)
        return self._best[key]

    def _speed(
        self, who: tuple[Character, ...], split: tuple[float, ...], weights: tuple[float, ...]
    ) -> float:
        return sum(w / slow for w, slow in zip(weights, self.slow(who, split, 0.0), strict=True))
