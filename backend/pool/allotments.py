"""What sub-stages have of their devices over time. All of it changes under the device's lock.

    granted ──► allotment ──► allotment ──► … ──► finished, or told to make room
                          ▲ another share, other company, another speed

Locks are taken in this order: attempt, job, device. At every instant the parts of all allotments of a device
add up to the whole at most. To that end nothing begins before what was there already: a ``now`` that was read
before somebody else's, or before the meter's last reading, is moved up to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction

from backend.pool import reads
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.parts import Member, parts
from backend.pool.states import BEGUN, SubStageStatus

#: Speeds that differ by less are one speed.
SAME_SPEED = 1e-6

#: Locking, and moving the instant up to the last change, in one statement. The weaker lock of an update:
#: rows that point to the device may still be written meanwhile.
LOCK = """
UPDATE pool_device SET changed_at = GREATEST(%(now)s::timestamptz, changed_at, metered_until)
WHERE id = {which} RETURNING *
"""
BY_KEY = LOCK.format(which="%(device)s")
OF_SUBSTAGE = LOCK.format(
    which="(SELECT device_id FROM pool_substage"
    " WHERE attempt_id = %(attempt)s AND node = %(node)s AND status = ANY(%(begun)s))"
)

#: Ends allotments and lets virtual time pass for what was had of the device while that was in service; who
#: holds whole devices is charged for those.
CLOSE = """
WITH closed AS (
    UPDATE pool_allotment SET "end" = %(at)s WHERE id = ANY(%(ids)s) RETURNING substage_id, start, part_ppm
), had AS (
    SELECT job.organization_id, SUM(closed.part_ppm / 1e6 * EXTRACT(EPOCH FROM
        GREATEST(interval '0', LEAST(service."end", %(until)s) - GREATEST(service.start, closed.start))
    ))::float8 AS seconds
    FROM closed
    JOIN pool_substage substage ON substage.id = closed.substage_id
    JOIN jobs_job job ON job.id = substage.job_id
    JOIN pool_serviceinterval service ON service.device_id = %(device)s AND service.start <= %(until)s
        AND (service."end" IS NULL OR service."end" > closed.start)
    WHERE NOT EXISTS (
        SELECT FROM pool_placement hold WHERE hold.attempt_id = substage.attempt_id AND hold.closed_at IS NULL
    )
    GROUP BY job.organization_id
)
UPDATE tenants_organization payer SET service = payer.service + had.seconds / payer.weight
FROM had WHERE payer.id = had.organization_id
"""


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
    Company(device_lock(device_id, now)).divide(terms)


def device_lock(device_id: int, now: datetime) -> Device:
    """``changed_at`` of the result is the instant of the change: ``now``, or the last one's, if later."""
    (device,) = Device.objects.raw(BY_KEY, {"device": device_id, "now": now})
    return device


def device_lock_under(attempt_id: int, node: str, now: datetime) -> Device | None:
    """The same for the device on which a sub-stage has begun; None where it has not, or needs none."""
    values = {"attempt": attempt_id, "node": node, "begun": [*map(str, BEGUN)], "now": now}
    return next(iter(Device.objects.raw(OF_SUBSTAGE, values)), None)


class Company:
    """Those who compute on a device, and the allotment that each has; made under the device's lock."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: datetime = device.changed_at
        self._now = {row.substage_id: row for row in reads.computing(device.pk)}

    def find(self, attempt_id: int, node: str) -> SubStage | None:
        members = (row.substage for row in self._now.values())
        return next((s for s in members if (s.attempt_id, s.node) == (attempt_id, node)), None)

    def divide(self, terms: Mapping[int, Terms], newcomers: Iterable[SubStage] = ()) -> None:
        """Close and open the allotments that change."""
        members = {row.substage_id: row.substage for row in self._now.values()}
        members |= {substage.pk: substage for substage in newcomers}
        running = [substage for substage in members.values() if substage.status == SubStageStatus.GRANTED]
        shares = _slot_shares(running, terms)
        part = parts(Member(s.pk, _slot(s), shares[_slot(s)], s.sequences) for s in running)
        closed, changed, opened = [], [], []
        for substage in running:
            old = self._now.get(substage.pk)
            new = _allotment(
                substage, old, terms.get(substage.pk), shares[_slot(substage)], part[substage.pk], self.device
            )
            if old is None:
                opened.append(new)
            elif _alike(old, new):
                continue
            elif old.start == self.at:
                new.pk = old.pk
                changed.append(new)
            else:
                closed.append(old)
                opened.append(new)
        self._close(closed, self.at, until=self.at)
        if changed:
            Allotment.objects.bulk_update(changed, ["share", "part_ppm", "speed", "reason"])
        if opened:
            Allotment.objects.bulk_create(opened)
        self._now |= {row.substage_id: row for row in (*changed, *opened)}
        _shares_keep(running, shares)

    def leave(self, substages: Iterable[SubStage]) -> None:
        """They compute no more, and have paid with virtual time until now."""
        gone = [self._now.pop(s.pk) for s in substages if s.pk in self._now]
        self._close(gone, self.at, until=self.at)

    def end(self, substage: SubStage, at: datetime) -> None:
        """It was over at ``at``: what it had after that was nobody's, but has cost virtual time."""
        now = self._now.get(substage.pk)
        if now is not None and now.start < at:
            self._close([self._now.pop(substage.pk)], min(at, self.at), until=self.at)
            return
        self.leave([substage])
        substage.allotments.filter(start__gte=at).delete()
        substage.allotments.filter(end__gt=at).update(end=at)

    def hand_over(self, old: SubStage, new: SubStage, at: datetime) -> Allotment | None:
        """``old`` went over into ``new`` at ``at``: from then on, what ``old`` was allotted is ``new``'s.

        Returns the newest of all.
        """
        now = self._now.pop(old.pk, None)
        # Older ones of an unbroken row ended before this one began.
        rows = [now] if now is not None and now.start < at else [*old.allotments.order_by("start")]
        cut = [row for row in rows if row.start < at and (row.end is None or row.end > at)]
        tails = [_tail(row, new, at) for row in cut]
        self._close([row for row in cut if row.end is None], at, until=at)
        over = [row.pk for row in cut if row.end is not None]
        later = [row for row in rows if row.start >= at]
        if over:
            Allotment.objects.filter(pk__in=over).update(end=at)
        if later:
            Allotment.objects.filter(pk__in=[row.pk for row in later]).update(substage=new)
        Allotment.objects.bulk_create(tails)
        moved = [*tails, *later]
        for row in moved:
            row.substage = new
        self._now.update((new.pk, row) for row in moved if row.end is None)
        return moved[-1] if moved else (rows[-1] if rows else None)

    def _close(self, rows: Collection[Allotment], at: datetime, *, until: datetime) -> None:
        if rows:
            ids = [row.pk for row in rows]
            with connection.cursor() as cursor:
                cursor.execute(CLOSE, {"ids": ids, "at": at, "until": until, "device": self.device.pk})


def _tail(row: Allotment, of: SubStage, at: datetime) -> Allotment:
    """What follows ``at`` of an allotment, as another's."""
    return Allotment(
        substage=of,
        device_id=row.device_id,
        start=at,
        end=row.end,
        share=row.share,
        part_ppm=row.part_ppm,
        speed=row.speed,
        reason=row.reason,
    )


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
    substage: SubStage, old: Allotment | None, terms: Terms | None, share: float, part: int, device: Device
) -> Allotment:
    speed, reason = (old.speed, old.reason) if old else (1.0, substage.reason)
    if terms is not None:
        speed, reason = terms.speed, terms.reason[:300]
    return Allotment(
        substage=substage,
        device=device,
        start=device.changed_at,
        share=share,
        part_ppm=part,
        speed=speed,
        reason=reason,
    )


def _alike(old: Allotment, new: Allotment) -> bool:
    same_speed = math.isclose(old.speed, new.speed, rel_tol=SAME_SPEED)
    return old.share == new.share and old.part_ppm == new.part_ppm and same_speed


def _shares_keep(running: Iterable[SubStage], shares: Mapping[str | int, float]) -> None:
    changed: dict[float, list[int]] = {}
    for substage in running:
        share = shares[_slot(substage)]
        if substage.share != share:
            substage.share = share
            changed.setdefault(share, []).append(substage.pk)
    for share, keys in changed.items():
        SubStage.objects.filter(pk__in=keys).update(share=share)
