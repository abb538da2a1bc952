"""What each sub-stage has of its device, in whole parts per million.

Slots share a device; those of one slot compute in one batch and have its share by their rows. Shares that add
up to more than a device, of which the scheduler should make none, are cut in proportion: nobody is billed for
time that somebody else has paid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

#: A whole device, in parts per million.
WHOLE = 1_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """A sub-stage that runs. All members of a slot name the slot's share."""

    key: int
    slot: Hashable
    share: float
    rows: int


def share_ppm(share: float) -> int:
    """A share as parts per million, rounded down, so that shares which fill a device still fit on it."""
    return max(1, int(share * WHOLE + 1e-3))


def parts(members: Iterable[Member]) -> dict[int, int]:
    """Key -> parts per million of the device, rounded down; together never more than the whole."""
    slots: dict[Hashable, list[Member]] = defaultdict(list)
    for member in members:
        slots[member.slot].append(member)
    shares = {slot: share_ppm(max(member.share for member in group)) for slot, group in slots.items()}
    over = max(WHOLE, sum(shares.values()))
    found: dict[int, int] = {}
    for slot, group in slots.items():
        share = shares[slot] * WHOLE // over
        rows = sum(max(1, member.rows) for member in group)
        found |= {member.key: share * max(1, member.rows) // rows for member in group}
    return found
