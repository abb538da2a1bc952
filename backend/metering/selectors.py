"""Reading the ledger: what a job and a tenant pay, and whether the books add up.

Whoever asks has passed the tenants' door: a job comes from its access function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, Q, QuerySet, Sum
from django.db.models.functions import Greatest

from backend.jobs.models import Job
from backend.metering.division import MICRO_USD, device_price, occupant_price, to_us
from backend.metering.models import AttemptCredit, UsageRecord
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.states import BEGUN, SubStageStatus

Entry = UsageRecord.Entry

#: What a tenant pays is the sum of these.
BILLED = (Entry.USAGE, Entry.CREDIT)


def job_cost(job: Job) -> dict[str, dict[str, float | int]]:
    """Sub-stage kind -> what it cost, net of credits; and the same for ``total``.

    Each value: ``micro_usd``, ``device_seconds`` (interval x share), ``credit_micro_usd`` (given back, >= 0).
    """
    rows = list(_sums(UsageRecord.objects.filter(job=job, entry__in=BILLED), "kind"))
    costs = {row.pop("kind"): row for row in rows}
    costs["total"] = {name: sum(row[name] for row in rows) for name in _AMOUNTS}
    return costs


def job_live_cost(job: Job, now: datetime) -> dict[str, int]:
    """The ledger's amount, an estimate for what is not in it yet, and their sum, in micro-dollars.

    What is not in it yet begins with the fraction that the ledger carries: the sum is what will be billed.
    """
    ledger, carried = _total(UsageRecord.objects.filter(job=job, entry__in=BILLED))
    credited = dict(AttemptCredit.objects.filter(attempt__job=job).values_list("attempt_id", "since_step"))
    open_substages = SubStage.objects.filter(
        job=job,
        metered=False,
        device__isnull=False,
        status__in=[*BEGUN, SubStageStatus.DONE],
    )
    open_substages = open_substages.select_related("device").prefetch_related("allotments")
    running = [s for s in open_substages if s.step < credited.get(s.attempt_id, s.step + 1)]
    booked, fraction = _total(UsageRecord.objects.filter(substage__in=running, entry=Entry.USAGE))
    unbooked = sum(_price_so_far(substage, now) for substage in running) - (booked * MICRO_USD + fraction)
    estimate = max(0, carried + unbooked) // MICRO_USD if running else 0
    return {
        "ledger_micro_usd": ledger,
        "estimate_micro_usd": estimate,
        "total_micro_usd": ledger + estimate,
    }


def job_alone_micro_usd(job: Job) -> int:
    """What the job's finished sub-stages would have cost with their devices to themselves, one job after
    another: the seconds that the planner's tables say they take alone, at the whole price. An estimate.
    """
    began = Greatest(F("start"), F("substage__started_at"))
    alone = ExpressionWrapper((F("end") - began) * F("speed"), output_field=DurationField())
    ran = Allotment.objects.filter(substage__job=job, end__gt=F("substage__started_at"))
    by_price = ran.values("device__price_micro_usd_hour").annotate(alone=Sum(alone))
    hour = timedelta(hours=1)
    return round(sum(row["device__price_micro_usd_hour"] * (row["alone"] / hour) for row in by_price))


@dataclass(frozen=True, slots=True)
class Accounting:
    """Capacity on one side, the ledger on the other; ``difference_micro_usd`` is 0 or the books are wrong."""

    capacity_micro_usd: int
    tenants_micro_usd: int
    idle_micro_usd: int
    waste_micro_usd: int
    difference_micro_usd: int


def accounting(start: datetime | None = None, end: datetime | None = None) -> Accounting:
    """Compare the devices' price x time in service with the ledger's sum, as far as the meters were read.

    Rows are not cut: where a limit falls into one, that device's window is widened to hold it whole.
    """
    capacity = 0
    sums = dict.fromkeys(Entry, 0)
    for device in Device.objects.prefetch_related("service_intervals").order_by("pk"):
        first, last = _window(device, start, end)
        capacity += _capacity(device, first, last)
        rows = device.usage.filter(started_at__gte=first, ended_at__lte=last)
        for entry, amount in rows.values_list("entry").annotate(Sum("micro_usd")):
            sums[Entry(entry)] += amount
    tenants = sums[Entry.USAGE] + sums[Entry.CREDIT]
    return Accounting(
        capacity_micro_usd=capacity,
        tenants_micro_usd=tenants,
        idle_micro_usd=sums[Entry.IDLE],
        waste_micro_usd=sums[Entry.WASTE],
        difference_micro_usd=capacity - tenants - sums[Entry.IDLE] - sums[Entry.WASTE],
    )


_AMOUNTS = ("micro_usd", "device_seconds", "credit_micro_usd")


def _sums(records: QuerySet[UsageRecord], by: str) -> Iterable[dict[str, Any]]:
    rows = records.values(by).annotate(
        cost=Sum("micro_usd"),
        time=Sum("device_microseconds"),
        credit=Sum("micro_usd", filter=Q(entry=Entry.CREDIT), default=0),
    )
    for row in rows.order_by(by):
        yield {
            by: row[by],
            "micro_usd": row["cost"],
            "device_seconds": row["time"] / 1e6,
            "credit_micro_usd": -row["credit"],
        }


def _total(records: QuerySet[UsageRecord]) -> tuple[int, int]:
    """Micro-dollars, and the fractions beside them in parts of ``MICRO_USD``."""
    sums = records.aggregate(total=Sum("micro_usd", default=0), rest=Sum("fraction", default=0))
    return sums["total"], sums["rest"]


def _price_so_far(substage: SubStage, now: datetime) -> int:
    """Of a sub-stage that runs, counted from its grant: at most what it has cost by now, exactly."""
    start = substage.started_at or substage.granted_at
    end = min(substage.ended_at or now, now)
    price = substage.device.price_micro_usd_hour
    return sum(
        occupant_price(price, row.part_ppm, _overlap_us(row, start, end)) for row in substage.allotments.all()
    )


def _overlap_us(row: Allotment, start: datetime, end: datetime) -> int:
    return max(0, to_us(min(row.end or end, end)) - to_us(max(row.start, start)))


def _window(device: Device, start: datetime | None, end: datetime | None) -> tuple[datetime, datetime]:
    """[start, end) within what is metered, widened to instants at which no row of the device is cut."""
    began = min(service.start for service in device.service_intervals.all())
    first = min(max(start or began, began), device.metered_until)
    last = max(min(end or device.metered_until, device.metered_until), first)
    while cut := device.usage.filter(started_at__lt=first, ended_at__gt=first).order_by("started_at").first():
        first = cut.started_at
    while cut := device.usage.filter(started_at__lt=last, ended_at__gt=last).order_by("-ended_at").first():
        last = cut.ended_at
    return first, last


def _capacity(device: Device, first: datetime, last: datetime) -> int:
    """Price x time in service between the two instants, independent of the ledger."""
    price, total = device.price_micro_usd_hour, 0
    for service in device.service_intervals.all():
        since, until = max(first, service.start), min(last, service.end or last)
        if since < until:
            began = to_us(service.start)
            total += device_price(price, to_us(until) - began) - device_price(price, to_us(since) - began)
    return total
