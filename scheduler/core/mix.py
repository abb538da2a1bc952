"""Who computes together in a forecast, and how fast: worked out once for each company.

Most companies are asked for again and again: those of the places where nothing changed, and those that
somebody who waits could join.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.core.interference import Interference
from scheduler.core.rates import Slot, divided, fused
from scheduler.core.state import Segment


class Member(Protocol):
    """A sub-stage; ``number`` names it and what it is for good."""

    number: int
    slot: Slot
    segment: Segment
    owner: int


@dataclass(frozen=True, slots=True)
class Mix:
    """``speeds`` by number, in solo seconds per second, and their sum."""

    speeds: Mapping[int, float]
    total: float


#: What a board remembers for its forecasts: speeds by slots, segments and weights; and the segments, so that
#: their identity stays theirs.
Memo = dict[Hashable, tuple[tuple[float, ...], tuple[Segment, ...]]]
#: Beyond so many companies a memo begins anew.
MEMO_LIMIT = 20_000


class Mixes:
    """``favour`` weighs owners when shares are divided."""

    def __init__(self, table: Interference, shares: bool, favour: Mapping[int, float], memo: Memo) -> None:
        self._table, self._shares, self._favour, self._memo = table, shares, favour, memo
        self._known: dict[Hashable, Mix] = {}

    def of(self, here: Sequence[Member]) -> Mix:
        key = tuple(member.number for member in here)
        mix = self._known.get(key)
        if mix is None:
            speeds = self._speeds(here)
            mix = Mix(dict(zip(key, speeds, strict=True)), sum(speeds))
            self._known[key] = mix
        return mix

    def _speeds(self, here: Sequence[Member]) -> tuple[float, ...]:
        weights = [self._favour.get(member.owner, 1.0) for member in here]
        company = [(m.slot, id(m.segment), weight) for m, weight in zip(here, weights, strict=True)]
        key = self._table.source, self._shares, tuple(company)
        if key not in self._memo:
            if len(self._memo) >= MEMO_LIMIT:
                self._memo.clear()
            self._memo[key] = self._worked_out(here, weights), tuple(member.segment for member in here)
        return self._memo[key][0]

    def _worked_out(self, here: Sequence[Member], weights: Sequence[float]) -> tuple[float, ...]:
        slots: dict[Slot, list[int]] = {}
        for place, member in enumerate(here):
            slots.setdefault(member.slot, []).append(place)
        groups = [[here[place].segment for place in places] for places in slots.values()]
        heaviest = [max(weights[place] for place in places) for places in slots.values()]
        _, slows = divided(groups, heaviest, self._table, self._shares)
        speeds = [0.0] * len(here)
        for places, group, slow in zip(slots.values(), groups, slows, strict=True):
            for place in places:
                speeds[place] = 1 / (slow * fused(here[place].segment, group))
        return tuple(speeds)
