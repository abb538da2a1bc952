"""Reading the pool: timelines for pages, and the rows a scheduling decision sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from backend.jobs.models import Attempt, Job
from backend.jobs.states import ATTEMPT_TERMINAL, JobStatus
from backend.pool.models import Allotment, Device, Placement, Resident, SubStage
from backend.pool.parts import WHOLE
from backend.pool.states import BEGUN, DeviceState, SubStageStatus

#: A device that is lost for longer does not come back: nobody should wait for it.
GONE_AFTER = timedelta(days=1)


def devices() -> QuerySet[Device]:
    """Devices of the pool: not those that are gone for good, unless something is still open on them."""
    held = Placement.objects.filter(device=OuterRef("pk"), closed_at__isnull=True)
    # Begun means unmetered; saying so lets the small index of those serve.
    running = SubStage.objects.filter(device=OuterRef("pk"), metered=False, status__in=BEGUN)
    there = ~Q(state=DeviceState.LOST) | Q(lost_at__gte=Now() - GONE_AFTER)
    return (
        Device.objects.filter(there | Exists(held) | Exists(running)).select_related("node").order_by("name")
    )


def waiting_jobs() -> QuerySet[Job]:
    """All jobs in the queue, without their long columns."""
    return Job.objects.filter(status=JobStatus.QUEUED).defer("spec", "metadata").order_by("id")


def queued_jobs(now: datetime) -> QuerySet[Job]:
    """Those that may be admitted now."""
    return waiting_jobs().filter(Q(retry_at__isnull=True) | Q(retry_at__lte=now))


def held_back_jobs(now: datetime) -> QuerySet[Job]:
    """Jobs that wait for their next attempt after one was lost."""
    return waiting_jobs().filter(retry_at__gt=now)


def live_attempts() -> QuerySet[Attempt]:
    over = [status.value for status in ATTEMPT_TERMINAL]
    return Attempt.objects.exclude(status__in=over).select_related("job").order_by("id")


def open_placements() -> QuerySet[Placement]:
    return Placement.objects.filter(closed_at__isnull=True).select_related("device").order_by("id")


def stale_placements() -> QuerySet[Placement]:
    """Holds that an attempt left open when it ended: nobody will close them in the course of things."""
    over = [status.value for status in ATTEMPT_TERMINAL]
    return open_placements().filter(attempt__status__in=over).select_related("device", "attempt__job")


def attempts_on_lost_devices() -> QuerySet[Attempt]:
    """Live attempts that hold a lost device or run something there: it will never report."""
    held = Placement.objects.filter(closed_at__isnull=True, device__state=DeviceState.LOST)
    running = SubStage.objects.filter(metered=False, status__in=BEGUN, device__state=DeviceState.LOST)
    return live_attempts().filter(Q(pk__in=held.values("attempt")) | Q(pk__in=running.values("attempt")))


def open_substages() -> QuerySet[SubStage]:
    return (
        SubStage.objects.filter(status__in=[SubStageStatus.READY, *BEGUN])
        .select_related("device__node")
        .order_by("id")
    )


def residents() -> QuerySet[Resident]:
    return Resident.objects.select_related("device").order_by("id")


#: A sub-stage that began longer before is not looked for: without a bound, the scan of a device, newest
#: first, would read its whole history.
LONGEST_SUBSTAGE = timedelta(hours=1)


def job_timeline(
    job: Job, *, since: datetime | None = None, until: datetime | None = None, limit: int = 2000
) -> list[dict[str, Any]]:
    """Sub-stages of the job, and of others on the devices it used meanwhile, newest ``limit``, oldest first.

    Rows: device, kind, step, worker, started_at, ended_at, tokens, moves_to, mine; ``share``, the part of the
    device it had, on average; ``shares``, the same over time: {from, to, share}. ``moves_to`` names the node
    into which its sequences were merged. Of a neighbour only the device, the interval, the kind and its part
    of the device are told.
    """
    own = _interval(SubStage.objects.filter(job=job, ended_at__isnull=False), since, until)
    mine = list(_timeline_values(own.order_by("-started_at")[:limit]))
    if not mine:
        return []
    first, last = min(row["started_at"] for row in mine), max(row["ended_at"] for row in mine)
    used = {row["device__name"] for row in mine if row["device__name"]}
    beside = SubStage.objects.filter(
        device__name__in=used, ended_at__isnull=False, started_at__gte=first - LONGEST_SUBSTAGE
    )
    others = _interval(beside, first, last).exclude(job=job).order_by("-started_at")[:limit]
    neighbours = list(_timeline_values(others))
    had = _allotments(row["pk"] for row in [*mine, *neighbours])
    rows = [_timeline_row(row, had[row["pk"]], mine=True) for row in mine]
    rows += [_timeline_row(row, had[row["pk"]], mine=False) for row in neighbours]
    return sorted(rows, key=lambda row: row["started_at"])


def _interval(rows: QuerySet[SubStage], since: datetime | None, until: datetime | None) -> QuerySet[SubStage]:
    within = Q()
    if since is not None:
        within &= Q(ended_at__gte=since)
    if until is not None:
        within &= Q(started_at__lte=until)
    return rows.filter(within)


def _timeline_values(rows: QuerySet[SubStage]) -> QuerySet[SubStage, dict[str, Any]]:
    return rows.values(
        "pk",
        "device__name",
        "kind",
        "step",
        "worker",
        "started_at",
        "ended_at",
        "share",
        "tokens",
        "moves_to",
    )


def _allotments(substages: Iterable[int]) -> dict[int, list[Allotment]]:
    """The sub-stages' allotments by sub-stage, in order of time."""
    found: dict[int, list[Allotment]] = defaultdict(list)
    for row in Allotment.objects.filter(substage__in=list(substages)).order_by("start", "pk"):
        found[row.substage_id].append(row)
    return found


def _timeline_row(row: dict[str, Any], allotments: Iterable[Allotment], *, mine: bool) -> dict[str, Any]:
    shares = _shares(allotments, row["started_at"], row["ended_at"])
    return {
        "device": row["device__name"],
        "kind": row["kind"],
        "started_at": row["started_at"],
        "ended_at": row["ended_at"],
        "share": _mean(shares) if shares else row["share"],
        "shares": shares,
        "mine": mine,
        "step": row["step"] if mine else None,
        "worker": row["worker"] if mine else None,
        "tokens": row["tokens"] if mine else None,
        "moves_to": row["moves_to"] if mine else None,
    }


def _shares(allotments: Iterable[Allotment], start: datetime, end: datetime) -> list[dict[str, Any]]:
    """The parts of the device within [start, end), one for each change."""
    shares: list[dict[str, Any]] = []
    for row in allotments:
        since, until, share = max(row.start, start), min(row.end or end, end), row.part_ppm / WHOLE
        if since >= until:
            continue
        if shares and shares[-1]["to"] == since and shares[-1]["share"] == share:
            shares[-1]["to"] = until
        else:
            shares.append({"from": since, "to": until, "share": share})
    return shares


def _mean(shares: Sequence[dict[str, Any]]) -> float:
    seconds = [(row["to"] - row["from"]).total_seconds() for row in shares]
    return sum(row["share"] * s for row, s in zip(shares, seconds, strict=True)) / sum(seconds)


def pool_timeline(
    devices: Iterable[Device], *, since: datetime, until: datetime, limit: int = 2000
) -> list[dict[str, Any]]:
    """For operators: what ran or runs on the devices in the interval, newest ``limit``, oldest first.

    Rows: device, tenant (primary key), organization and name (of the job) as people read them, job, kind,
    step, worker, sequences, slot, start, end (None: it runs), reason, attempt and node, moves_to (a node of
    that attempt), and ``allotments``: {start, end, share, part, reason}, in order. What its attempt's end cut
    off is not shown.
    """
    ran = Q(started_at__gte=since - LONGEST_SUBSTAGE, started_at__lte=until, ended_at__gte=since)
    runs = Q(metered=False, status__in=BEGUN, granted_at__lte=until)
    found: list[SubStage] = []
    for side, began in ((ran, "started_at"), (runs, "granted_at")):
        rows = SubStage.objects.filter(side, device__in=devices).select_related("device", "job__organization")
        found += rows.defer("job__spec", "job__metadata").order_by(f"-{began}", "-pk")[:limit]
    found = sorted(found, key=lambda row: (row.started_at or row.granted_at, row.pk))[-limit:]
    had = _allotments(row.pk for row in found)
    return [_pool_row(row, had[row.pk]) for row in found]


def _pool_row(row: SubStage, allotments: Iterable[Allotment]) -> dict[str, Any]:
    return {
        "device": row.device.name,
        "tenant": row.job.organization_id,
        "organization": row.job.organization.name,
        "job": row.job.public_id,
        "name": row.job.name,
        "kind": row.kind,
        "step": row.step,
        "worker": row.worker,
        "sequences": row.sequences,
        "slot": row.slot,
        "start": row.started_at or row.granted_at,
        "end": row.ended_at,
        "reason": row.reason,
        "attempt": row.attempt_id,
        "node": row.node,
        "moves_to": row.moves_to,
        "allotments": [
            {
                "start": had.start,
                "end": had.end,
                "share": had.share,
                "part": had.part_ppm / WHOLE,
                "reason": had.reason,
            }
            for had in allotments
        ],
    }
