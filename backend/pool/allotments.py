"""What sub-stages have of their devices over time. All of it changes under the device's lock.

    granted ──► allotment ──► allotment ──► … ──► finished, or told to make room
                          ▲ another share, other company, another speed

Locks are taken in this order: attempt, job, device. At every instant the parts of all allotments of a device
add up to the whole at most. To that end nothing begins before what was there already: a ``now`` that was read
before somebody else's, or before the meter's last reading, is moved up to it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.db.models import Max, Q, QuerySet

from backend.pool.fairness import held_seconds, services_add
from backend.pool.models import Allotment, Device, Placement, ServiceInterval, SubStage
from backend.pool.parts import Member, parts
from backend.pool.states import SubStageStatus

#: Speeds that differ by less are one speed.
SAME_SPEED = 1e-6


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sub-stage gets: the share of its slot, the solo seconds it does in a second, and why."""

    share: float
    speed: float
    reason: str


@transaction.atomic(savepoint=False)
def device_allot(*, device_id: int, terms: Mapping[int, Terms], now: datetime) -> None:
    """Give running sub-stages, by their keys, new terms; divide the device anew among all that run there.

    A share given to one member of a slot holds for all of it. Sub-stages that are over meanwhile are passed
    over. With no terms, those who stay in a batch pay for the rows of those who left.
    """
    device = device_lock(device_id)
    device_divide(device, terms, instant(device, now))


def device_lock(device_id: int) -> Device:
    # The weaker lock: rows that point to the device may still be written meanwhile.
    return Device.objects.select_for_update(no_key=True).get(pk=device_id)


def instant(device: Device, now: datetime) -> datetime:
    """``now``, or the last change on the device, if that was later."""
    unmetered = Allotment.objects.filter(device=device, substage__metered=False)
    last = unmetered.aggregate(start=Max("start"), end=Max("end"))
    return max(now, device.metered_until, last["start"] or now, last["end"] or now)


def device_divide(device: Device, terms: Mapping[int, Terms], at: datetime) -> None:
    """Close and open the allotments that change at ``at``; call under the device's lock."""
    running = list(_running(device))
    present = {row.substage_id: row for row in _open(device)}
    shares = _slot_shares(running, terms)
    part = parts(Member(s.pk, _slot(s), shares[_slot(s)], s.sequences) for s in running)
    closed, changed, opened = [], [], []
    for substage in running:
        old = present.get(substage.pk)
        new = _allotment(
            substage, old, terms.get(substage.pk), shares[_slot(substage)], part[substage.pk], at
        )
        if old is None:
            opened.append(new)
        elif _alike(old, new):
            continue
        elif old.start == at:
            new.pk = old.pk
            changed.append(new)
        else:
            old.end = at
            closed.append(old)
            opened.append(new)
    Allotment.objects.bulk_update(closed, ["end"])
    Allotment.objects.bulk_update(changed, ["share", "part_ppm", "speed", "reason"])
    Allotment.objects.bulk_create(opened)
    _shares_keep(running, shares)
    allotments_charge(device, closed)


def allotments_close(device: Device, substages: Iterable[SubStage], at: datetime) -> None:
    """They compute no more from ``at`` on, and have paid with virtual time until then."""
    ending = list(Allotment.objects.filter(substage__in=substages, end__isnull=True))
    for row in ending:
        row.end = at
    Allotment.objects.bulk_update(ending, ["end"])
    allotments_charge(device, ending)


def allotments_cut(substage: SubStage, at: datetime) -> None:
    """The sub-stage was over at ``at``: what it was allotted after that was nobody's."""
    substage.allotments.filter(start__gte=at).delete()
    substage.allotments.filter(end__gt=at).update(end=at)


def allotments_pass(device: Device, old: SubStage, new: SubStage, at: datetime) -> Allotment | None:
    """``old`` went over into ``new`` at ``at``: from then on, what ``old`` was allotted is ``new``'s.

    Returns the newest of all.
    """
    rows = list(old.allotments.order_by("start"))
    cut = [row for row in rows if row.start < at and (row.end is None or row.end > at)]
    tails = [
        Allotment(
            substage=new,
            device=device,
            start=at,
            end=row.end,
            share=row.share,
            part_ppm=row.part_ppm,
            speed=row.speed,
            reason=row.reason,
        )
        for row in cut
    ]
    running = [row for row in cut if row.end is None]
    for row in cut:
        row.end = at
    Allotment.objects.bulk_update(cut, ["end"])
    allotments_charge(device, running)
    Allotment.objects.filter(pk__in=[row.pk for row in rows if row.start >= at]).update(substage=new)
    Allotment.objects.bulk_create(tails)
    return rows[-1] if rows else None


def allotments_charge(device: Device, ended: Sequence[Allotment]) -> None:
    """Let virtual time pass for what was had of the device; who holds whole devices is charged for those."""
    if not ended:
        return
    first, last = min(row.start for row in ended), max(row.end for row in ended)
    there = list(
        ServiceInterval.objects.filter(Q(end__isnull=True) | Q(end__gt=first), device=device, start__lte=last)
    )
    payers = {s.pk: s for s in SubStage.objects.select_related("job").filter(allotments__in=ended)}
    holders = set(
        Placement.objects.filter(
            closed_at__isnull=True, attempt__in={s.attempt_id for s in payers.values()}
        ).values_list("attempt_id", flat=True)
    )
    seconds: dict[int, float] = defaultdict(float)
    for row in ended:
        payer = payers[row.substage_id]
        if payer.attempt_id not in holders:
            held = held_seconds(there, row.start, row.end)
            seconds[payer.job.organization_id] += held * row.part_ppm / 1e6
    services_add(seconds)


def _running(device: Device) -> QuerySet[SubStage]:
    # Granted means unmetered; saying so lets the small index of those serve.
    return SubStage.objects.filter(device=device, metered=False, status=SubStageStatus.GRANTED).order_by("pk")


def _open(device: Device) -> QuerySet[Allotment]:
    return Allotment.objects.filter(device=device, end__isnull=True)


def _slot(substage: SubStage) -> str | int:
    """Who names no slot has one of its own."""
    return substage.slot or substage.pk


def _slot_shares(running: Iterable[SubStage], terms: Mapping[int, Terms]) -> dict[str | int, float]:
    kept: dict[str | int, float] = {}
    given: dict[str | int, float] = {}
    for substage in running:
        slot = _slot(substage)
        kept[slot] = max(kept.get(slot, 0.0), substage.share or 0.0)
        if substage.pk in terms:
            given[slot] = terms[substage.pk].share
    return kept | given


def _allotment(
    substage: SubStage, old: Allotment | None, terms: Terms | None, share: float, part: int, at: datetime
) -> Allotment:
    speed, reason = (old.speed, old.reason) if old else (1.0, substage.reason)
    if terms is not None:
        speed, reason = terms.speed, terms.reason[:300]
    return Allotment(
        substage=substage,
        device_id=substage.device_id,
        start=at,
        share=share,
        part_ppm=part,
        speed=speed,
        reason=reason,
    )


def _alike(old: Allotment, new: Allotment) -> bool:
    same_speed = math.isclose(old.speed, new.speed, rel_tol=SAME_SPEED)
    return old.share == new.share and old.part_ppm == new.part_ppm and same_speed


def _shares_keep(running: Iterable[SubStage], shares: Mapping[str | int, float]) -> None:
    changed = [s for s in running if s.share != shares[_slot(s)]]
    for substage in changed:
        substage.share = shares[_slot(substage)]
    SubStage.objects.bulk_update(changed, ["share"])
