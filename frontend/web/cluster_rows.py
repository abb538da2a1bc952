"""What the operators' page reads: allotments, waits and decisions of all tenants, over a window of time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Count, DurationField, ExpressionWrapper, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce, Greatest, Least

from backend.pool.models import Allotment, Decision, Device, ServiceInterval, SubStage
from backend.pool.selectors import pool_timeline

#: Kinds of decisions that the timeline marks: work was held back, stopped or moved on purpose.
MARKED = ("wait", "yield", "merge", "rehome")

#: What began to wait longer before a window is not looked for in it.
LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Window:
    since: datetime
    until: datetime

    @property
    def seconds(self) -> float:
        return (self.until - self.since).total_seconds()

    def overlap(self, start: datetime, end: datetime | None) -> float:
        """Seconds of the window within [start, end); an open end lasts."""
        inside = min(end or self.until, self.until) - max(start, self.since)
        return max(0.0, inside.total_seconds())


@dataclass(frozen=True)
class Turn:
    """A sub-stage with one share of its device: what one allotment says. ``end`` is None while it runs."""

    device: str
    start: datetime
    end: datetime | None
    part: float
    share: float
    reason: str
    kind: str
    step: int
    worker: int
    sequences: int
    slot: str
    attempt: int
    node: str
    moves_to: str
    job: str
    title: str
    tenant: int
    tenant_name: str


@dataclass(frozen=True)
class Column:
    """A tenant's mean part of a device from ``start`` to ``end``."""

    device: str
    start: datetime
    end: datetime
    part: float
    tenant: int
    tenant_name: str


@dataclass(frozen=True)
class Wait:
    """An attempt was held back; ``until`` is None while it still is, with ``at_most`` as its limit."""

    since: datetime
    until: datetime | None
    at_most: datetime | None
    reason: str
    job: str
    title: str
    tenant: int
    tenant_name: str


def turns(devices: Collection[Device], window: Window, limit: int) -> list[Turn]:
    """The turns that the window touches, of the newest ``limit`` sub-stages, by sub-stage."""
    found = pool_timeline(devices, since=window.since, until=window.until, limit=limit)
    return [
        _turn(row, had)
        for row in found
        for had in row["allotments"]
        if had["start"] < window.until and (had["end"] is None or had["end"] > window.since)
    ]


def turns_now(devices: Collection[Device], now: datetime) -> list[Turn]:
    """What computes at this moment."""
    found = pool_timeline(devices, since=now, until=now)
    return [_turn(row, had) for row in found for had in row["allotments"] if had["end"] is None]


def _turn(row: dict[str, Any], had: dict[str, Any]) -> Turn:
    return Turn(
        device=row["device"],
        start=had["start"],
        end=had["end"],
        part=had["part"],
        share=had["share"],
        reason=had["reason"] or row["reason"],
        kind=row["kind"],
        step=row["step"],
        worker=row["worker"],
        sequences=row["sequences"],
        slot=row["slot"],
        attempt=row["attempt"],
        node=row["node"],
        moves_to=row["moves_to"],
        job=row["job"],
        title=row["name"],
        tenant=row["tenant"],
        tenant_name=row["organization"],
    )


def _touching(window: Window) -> QuerySet[Allotment]:
    return Allotment.objects.filter(Q(end__gt=window.since) | Q(end__isnull=True), start__lt=window.until)


def columns(devices: Collection[Device], window: Window, number: int) -> list[Column]:
    """Who had which part of a device on average, in ``number`` equal times of the window."""
    width = (window.until - window.since) / number
    with connection.cursor() as cursor:
        cursor.execute(_COLUMNS, {
            "since": window.since, "until": window.until, "width": width,
            "devices": [device.pk for device in devices],
        })  # fmt: skip
        found = cursor.fetchall()
    return [
        Column(device, start, start + width, seconds / width.total_seconds(), tenant, name)
        for device, tenant, name, start, seconds in found
    ]


_COLUMNS = """
SELECT device.name, tenant.id, tenant.name, bin.start,
       sum(allotment.part_ppm * 1e-6 * extract(epoch FROM
           least(coalesce(allotment."end", %(until)s), bin.start + %(width)s)
           - greatest(allotment.start, bin.start)))::float8
FROM pool_allotment allotment
JOIN pool_device device ON device.id = allotment.device_id
JOIN pool_substage substage ON substage.id = allotment.substage_id
JOIN jobs_job job ON job.id = substage.job_id
JOIN tenants_organization tenant ON tenant.id = job.organization_id
CROSS JOIN LATERAL generate_series(
    date_bin(%(width)s, greatest(allotment.start, %(since)s), %(since)s),
    least(coalesce(allotment."end", %(until)s), %(until)s) - interval '1 microsecond',
    %(width)s
) AS bin(start)
WHERE allotment.device_id = ANY(%(devices)s)
  AND allotment.start < %(until)s
  AND (allotment."end" > %(since)s OR allotment."end" IS NULL)
GROUP BY device.name, tenant.id, tenant.name, bin.start
ORDER BY bin.start, device.name, tenant.id
"""


def allotted_seconds(devices: Collection[Device], window: Window) -> dict[int, float]:
    """Device -> seconds of the whole device that were allotted within the window."""
    inside = Least(Coalesce(F("end"), window.until), window.until) - Greatest(F("start"), window.since)
    parts = ExpressionWrapper(inside * F("part_ppm"), output_field=DurationField())
    sums = _touching(window).filter(device__in=devices).values("device").annotate(total=Sum(parts))
    return {row["device"]: row["total"].total_seconds() / 1_000_000 for row in sums}


def capacity_seconds(devices: Collection[Device], window: Window) -> dict[int, float]:
    """Device -> seconds of the window in which it was in service."""
    found = ServiceInterval.objects.filter(
        Q(end__gt=window.since) | Q(end__isnull=True), device__in=devices, start__lt=window.until
    )
    sums: dict[int, float] = {}
    for interval in found:
        sums[interval.device_id] = sums.get(interval.device_id, 0.0) + window.overlap(
            interval.start, interval.end
        )
    return sums


def moved_away(devices: Collection[Device], window: Window) -> dict[int, int]:
    """Device -> sub-stages whose sequences left it for another batch within the window."""
    left = SubStage.objects.filter(device__in=devices, ended_at__range=(window.since, window.until))
    return _counted(left.exclude(moves_to=""))


def made_room(devices: Collection[Device], window: Window) -> dict[int, int]:
    """Device -> times that training on it was told to make room within the window."""
    told = Decision.objects.filter(kind="yield", device__in=devices, at__range=(window.since, window.until))
    return _counted(told)


def _counted(rows: QuerySet[Any]) -> dict[int, int]:
    return dict(rows.order_by().values("device").annotate(n=Count("pk")).values_list("device", "n"))


def latest_decisions(limit: int) -> list[Decision]:
    return list(_decisions().order_by("-at", "-pk")[:limit])


def marked_decisions(window: Window, limit: int) -> list[Decision]:
    """The newest ``limit`` that the timeline marks, oldest first."""
    found = _decisions().filter(kind__in=MARKED, at__range=(window.since, window.until))
    return list(reversed(found.order_by("-at", "-pk")[:limit]))


def _decisions() -> QuerySet[Decision]:
    return Decision.objects.select_related("job__organization", "device").defer("job__spec", "job__metadata")


def waits(window: Window, limit: int) -> list[Wait]:
    """The newest ``limit`` times in which an attempt was held back, oldest first.

    One ends with the attempt's next grant, with a newer decision to wait, or with the attempt.
    """
    begun = (window.since - LONGEST_WAIT, window.until)
    grants = SubStage.objects.filter(
        attempt=OuterRef("attempt"), device__isnull=False, granted_at__gt=OuterRef("at")
    )
    newest = (
        _decisions()
        .filter(kind="wait", attempt__isnull=False, at__range=begun)
        .select_related("attempt__job__organization")
        .annotate(granted_at=Subquery(grants.order_by("granted_at").values("granted_at")[:1]))
        .order_by("-at", "-pk")[:limit]
    )
    found = _waits(list(reversed(newest)))
    return [wait for wait in found if wait.until is None or wait.until > window.since]


def _waits(decisions: Sequence[Any]) -> list[Wait]:
    following: dict[int, datetime] = {}
    found = []
    for decision in reversed(decisions):
        attempt = decision.attempt
        ends = (decision.granted_at, following.get(attempt.pk), attempt.ended_at)
        until = min((end for end in ends if end is not None), default=None)
        following[attempt.pk] = decision.at
        job = attempt.job
        found.append(
            Wait(
                since=decision.at,
                until=until,
                at_most=attempt.wait_until if until is None else None,
                reason=decision.reason,
                job=job.public_id,
                title=job.name,
                tenant=job.organization_id,
                tenant_name=job.organization.name,
            )
        )
    return found[::-1]


def window_before(now: datetime, minutes: int) -> Window:
    return Window(now - timedelta(minutes=minutes), now)
