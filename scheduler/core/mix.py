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


class Mixes:
    """``favour`` weighs owners when shares are divided."""

    def __init__(self, table: Interference, shares: bool, favour: Mapping[int, float]) -> None:
        self._table, self._shares, self._favour = table, shares, favour
        self._known: dict[Hashable, Mix] = {}

    def of(self, here: Sequence[Member]) -> Mix:
        key = tuple(member.number for member in here)
        mix = self._known.get(key)
        if mix is None:
            mix = self._known[key] = self._mixed(here)
        return mix

    def _mixed(self, here: Sequence[Member]) -> Mix:
        slots: dict[Slot, list[Member]] = {}
        for member in here:
            slots.setdefault(member.slot, []).append(member)
        groups = [[member.segment for member in members] for members in slots.values()]
        weights = [max(self._favour.get(m.owner, 1.0) for m in members) for members in slots.values()]
        _, slows = divided(groups, weights, self._table, self._shares)
        speeds = {
            member.number: 1 / (slow * fused(member.segment, group))
            for members, group, slow in zip(slots.values(), groups, slows, strict=True)
            for member in members
        }
        return Mix(speeds, sum(speeds.values()))
