"""How fast sub-stages run together on a device: the one rule for plans, look-ahead and simulator.

Those of one resident make up a *slot*: the slots share the device, and the members of a slot share its
forwards. A decode forward of several LoRA jobs over one base costs its fixed part (launches, reading the
weights) once:

    slow(i) = slow(slot) * (floor + sum of (forward_j - floor)) / forward_i
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scheduler.core.interference import Character, Interference, character
from scheduler.core.state import ROLLOUT, Kind, Segment

Slot = tuple[str, str]

#: What a further resident must add to the sum of speeds to be worth its start.
MIN_GAIN = 0.05
#: A sub-stage that is shorter than this part of all it would compute beside may start for no gain, as long as
#: the sum of speeds falls by no more than rounding: it is over soon, and what follows it may gain.
SHORT = 0.25
NO_LOSS = 0.02


@dataclass(frozen=True, slots=True)
class Running:
    """One sub-stage on one device. ``segment`` describes it alone, ``share`` is its slot's."""

    key: Hashable
    slot: Slot
    segment: Segment
    share: float


def slot_of(pipeline: int, weights_key: str, fusible: bool, kind: Kind) -> Slot:
    """The resident that runs the sub-stage: rollouts of LoRA jobs over one base have one in common."""
    if kind in ROLLOUT:
        return "rollout", weights_key if fusible else f"{pipeline}"
    return "train", f"{pipeline}"


def slot_character(members: Sequence[Segment], saturation: int) -> Character:
    """Of a slot: a fused batch is as large as its members together."""
    if len(members) == 1:
        return character(members[0].kind, members[0].batch)
    if any(member.kind is Kind.PREFILL for member in members):
        return Character.PREFILL
    batch = sum(member.batch for member in members)
    return character(Kind.DECODE if batch >= saturation else Kind.TAIL, batch)


def fused(member: Segment, members: Sequence[Segment]) -> float:
    """How much slower the member's forwards are for those of the others in its batch."""
    if len(members) == 1:
        return 1.0
    if member.forward_seconds <= 0:  # a prefill takes turns with the others' forwards
        return float(len(members))
    extra = sum(max(0.0, m.forward_seconds - m.floor_seconds) for m in members)
    return max(1.0, (member.floor_seconds + extra) / member.forward_seconds)


def speeds(running: Sequence[Running], table: Interference) -> dict[Hashable, float]:
    """Solo seconds done per second, for each sub-stage that runs on the device."""
    slots: dict[Slot, list[Running]] = {}
    for one in running:
        slots.setdefault(one.slot, []).append(one)
    groups = [[one.segment for one in members] for members in slots.values()]
    characters = [slot_character(group, table.saturation) for group in groups]
    shares = [members[0].share for members in slots.values()]
    bandwidth = sum(max(segment.bandwidth for segment in group) for group in groups)
    slows = table.slow(characters, shares, bandwidth)
    found: dict[Hashable, float] = {}
    for members, group, slow in zip(slots.values(), groups, slows, strict=True):
        for one in members:
            found[one.key] = 1 / (slow * fused(one.segment, group))
    return found


def gang_speed(of_workers: Sequence[float], shares: bool) -> float:
    """A gang's workers split the micro-batches in proportion to their speeds, or (not ``shares``) evenly."""
    return sum(of_workers) / len(of_workers) if shares else min(of_workers)


def divided(
    groups: Sequence[Sequence[Segment]], weights: Sequence[float], table: Interference, shares: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The best division of a device between slots, and each slot's slow-down under it.

    ``groups`` are the slots' members; ``weights`` say whose speed counts more.
    """
    characters = tuple(slot_character(group, table.saturation) for group in groups)
    parts, slows = table.best(characters, tuple(weights), even=not shares)
    bus = sum(max(segment.bandwidth for segment in group) for group in groups) if len(groups) > 1 else 0.0
    return parts, slows if bus <= 1 else tuple(slow * bus for slow in slows)


def total_speed(groups: Sequence[Sequence[Segment]], slows: Sequence[float]) -> float:
    """Solo seconds done per second by all members of all slots."""
    return sum(
        1 / (slow * fused(member, group))
        for group, slow in zip(groups, slows, strict=True)
        for member in group
    )


def worth_starting(before: float, after: float, left: float, others_left: float) -> bool:
    """Whether a newcomer helps: ``before`` and ``after`` are sums of speeds, ``left`` its solo seconds,
    ``others_left`` the least of those that compute there.
    """
    return after > before + MIN_GAIN or (after >= before - NO_LOSS and left < SHORT * others_left)
