"""Writing the ledger.

    device.metered_until ──── [metered_until, watermark) becomes rows ────► watermark

Everything before ``metered_until`` is in the ledger, once. A reading goes up to the watermark: the earliest
instant at which something may still come in (a sub-stage that was granted and has not reported). A sub-stage
is billed for what its allotments were while it computed.

Order of locks. A report holds its job's row and then meters, so the device comes after the job. A reading
from elsewhere holds the device and must not wait for a job: it takes the rows of jobs that are free, and
leaves the sub-stages of the others to the next reading.

What of a job's cost is below a micro-dollar waits in ``Job.cost_fraction`` for the job's next usage, on any
device. It is read and written under the job's row: two devices that are read at once do not carry it twice.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet

from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job
from backend.metering.division import Occupant, Part, clip, divide, fitting, from_us, to_us
from backend.metering.models import AttemptCredit, UsageRecord
from backend.pool.models import Device, ServiceInterval, SubStage
from backend.pool.states import BEGUN, DeviceState, SubStageStatus

logger = logging.getLogger(__name__)

Entry = UsageRecord.Entry


def pool_meter(now: datetime, *, idle_every: timedelta = timedelta(0)) -> int:
    """Read every device's meter, so that idle capacity is booked too; returns the number of new rows.

    A device where nothing has finished is read only when the last reading is ``idle_every`` ago: the ledger
    keeps a row per reading. A lost one is read only while it has something left to book, so those that are
    gone cost nothing.
    """
    finished = SubStage.objects.filter(
        device=OuterRef("pk"),
        metered=False,
        status=SubStageStatus.DONE,
        ended_at__gt=OuterRef("metered_until"),
    )
    idle = ~Q(state=DeviceState.LOST) & Q(metered_until__lte=now - idle_every)
    due = Device.objects.filter(idle | Exists(finished))
    ids = list(due.order_by("pk").values_list("pk", flat=True))
    return sum(device_meter(device_id=device_id, until=now) for device_id in ids)


@transaction.atomic
def device_meter(*, device_id: int, until: datetime) -> int:
    """Book what the device did up to ``until`` (not in the future), or as far as is known; returns new rows.

    Running it twice, late, or at once from two processes books nothing twice.
    """
    # The weaker lock: rows that point to the device (grants, holds) may still be written meanwhile.
    device = Device.objects.select_for_update(no_key=True).get(pk=device_id)
    begun, done = _unmetered(device)
    watermark = min([_in_service_until(device, until, done), *(s.granted_at for s in begun)])
    runs, watermark, carried = _lockable([s for s in done if s.started_at < watermark], watermark, device)
    if watermark <= device.metered_until:
        return 0
    occupants = [occupant for substage in runs for occupant in _occupants(substage)]
    _tell_late(device, occupants)
    usage = _records(device, _parts(device, occupants, watermark, carried), runs)
    credited = _credited_steps(runs)
    reversals = _reversals(record for record in usage if _forgiven(record, credited))
    UsageRecord.objects.bulk_create(reversals)
    Device.objects.filter(pk=device.pk).update(metered_until=watermark)
    SubStage.objects.filter(pk__in=[s.pk for s in runs if s.ended_at <= watermark]).update(metered=True)
    SubStage.objects.filter(device=device, metered=False, status=SubStageStatus.LOST).update(metered=True)
    _charge([*usage, *reversals])
    return len(usage) + len(reversals)


@transaction.atomic
def attempt_credit(*, attempt: Attempt, since_step: int) -> int:
    """Work of the attempt from ``since_step`` on was lost by our fault; returns micro-dollars given back now.

    Each usage is answered by a credit to the tenant and by the same amount of waste of the operator, once, as
    it was booked; its fraction leaves the job's rest too, so that no later usage makes up for lost work.
    Sub-stages that reach the ledger only later are credited there and then. Meter the attempt's devices
    first all the same: then the tenant sees one change of the cost and not several.

    The tenant's virtual time stays: it did hold the devices, and virtual time that runs backwards would let
    the tenant hold the pool until it has caught up with the others.
    """
    Job.objects.select_for_update(no_key=True).get(pk=attempt.job_id)
    credit, _ = AttemptCredit.objects.get_or_create(attempt=attempt, defaults={"since_step": since_step})
    if since_step < credit.since_step:
        credit.since_step = since_step
        credit.save(update_fields=["since_step"])
    # Under the devices' locks, a reading has either written its rows or will see the credit.
    used = SubStage.objects.filter(attempt=attempt).values("device_id")
    list(Device.objects.select_for_update(no_key=True).filter(pk__in=used).order_by("pk"))
    lost = UsageRecord.objects.filter(
        entry=Entry.USAGE,
        substage__attempt=attempt,
        substage__step__gte=credit.since_step,
        reversals__isnull=True,
    )
    reversals = UsageRecord.objects.bulk_create(_reversals(lost.order_by("pk")))
    _charge(reversals)
    return sum(record.micro_usd for record in reversals if record.entry == Entry.WASTE)


# ---------------------------------------------------------------- what to book


def _unmetered(device: Device) -> tuple[list[SubStage], list[SubStage]]:
    """Sub-stages that run and that finished, in one query: one must not slip through between two."""
    rows = list(
        SubStage.objects.filter(device=device, metered=False, status__in=[*BEGUN, SubStageStatus.DONE])
        .select_related("job")
        .prefetch_related("allotments")
        .order_by("granted_at", "pk")
    )
    begun = [row for row in rows if row.status in BEGUN]
    return begun, [row for row in rows if row.status == SubStageStatus.DONE]


def _in_service_until(device: Device, until: datetime, done: Sequence[SubStage]) -> datetime:
    """A lost device has no capacity to book beyond what it still finished."""
    if device.state != DeviceState.LOST:
        return until
    return min(until, max((s.ended_at for s in done), default=device.metered_until))


def _lockable(
    runs: list[SubStage], watermark: datetime, device: Device
) -> tuple[list[SubStage], datetime, dict[int, int]]:
    """Lock the jobs that are free; the watermark stays before the runs of the others.

    Returns the runs of the free jobs, the watermark, and what each of those jobs carries.
    """
    ids = {s.job_id for s in runs}
    free = Job.objects.select_for_update(no_key=True, skip_locked=True).filter(pk__in=ids)
    carried = dict(free.order_by("pk").values_list("pk", "cost_fraction"))
    busy = [s for s in runs if s.job_id not in carried]
    watermark = min([watermark, *(max(s.started_at, device.metered_until) for s in busy)])
    return [s for s in runs if s.started_at < watermark], watermark, carried


def _occupants(substage: SubStage) -> list[Occupant]:
    """What it had of the device while it computed."""
    rows = sorted(substage.allotments.all(), key=lambda row: row.start)
    spans = [(to_us(row.start), to_us(row.end or substage.ended_at), row.part_ppm) for row in rows]
    had = [Occupant(substage.pk, *span, substage.job_id) for span in spans if span[2]]
    return clip(had, to_us(substage.started_at), to_us(substage.ended_at))


def _tell_late(device: Device, occupants: Iterable[Occupant]) -> None:
    """What began before ``metered_until`` without a row there came too late: that time is booked as idle."""
    early = {o.key: o.start_us for o in occupants if o.start_us < to_us(device.metered_until)}
    known = UsageRecord.objects.filter(substage__in=early).values_list("substage_id", flat=True)
    for key in sorted(early.keys() - set(known)):
        logger.error(
            "sub-stage %s on %s began at %s, but the ledger is closed up to %s: only the rest is billed",
            key,
            device.name,
            from_us(early[key]).isoformat(),
            device.metered_until.isoformat(),
        )


def _parts(
    device: Device, occupants: Iterable[Occupant], watermark: datetime, carried: dict[int, int]
) -> list[Part]:
    fits, over = fitting(occupants)
    for occupant in over:
        logger.error("sub-stage %s did not fit on %s and is not billed", occupant.key, device.name)
    parts: list[Part] = []
    for service in _services(device, watermark):
        start, end = to_us(service.start), to_us(min(service.end or watermark, watermark))
        first = max(start, to_us(device.metered_until))
        parts += divide(device.price_micro_usd_hour, start, first, end, clip(fits, start, end), carried)
    return parts


def _services(device: Device, watermark: datetime) -> QuerySet[ServiceInterval]:
    """Times in service that reach into [metered_until, watermark)."""
    reach = Q(end__isnull=True) | Q(end__gt=device.metered_until)
    return device.service_intervals.filter(reach, start__lt=watermark).order_by("start")


# ---------------------------------------------------------------- booking


def _records(device: Device, parts: Iterable[Part], runs: Iterable[SubStage]) -> list[UsageRecord]:
    by_key = {s.pk: s for s in runs}
    return UsageRecord.objects.bulk_create(
        _record(device, part, None if part.key is None else by_key[part.key]) for part in parts
    )


def _record(device: Device, part: Part, substage: SubStage | None) -> UsageRecord:
    return UsageRecord(
        entry=Entry.IDLE if substage is None else Entry.USAGE,
        device=device,
        organization_id=None if substage is None else substage.job.organization_id,
        job_id=None if substage is None else substage.job_id,
        substage=substage,
        kind="" if substage is None else substage.kind,
        started_at=from_us(part.start_us),
        ended_at=from_us(part.end_us),
        device_microseconds=part.device_microseconds,
        micro_usd=part.micro_usd,
        fraction=part.fraction,
    )


def _credited_steps(runs: Iterable[SubStage]) -> dict[int, int]:
    """Attempt -> first step that is not billed."""
    credits = AttemptCredit.objects.filter(attempt__in={s.attempt_id for s in runs})
    return dict(credits.values_list("attempt_id", "since_step"))


def _forgiven(record: UsageRecord, credited_steps: Mapping[int, int]) -> bool:
    substage = record.substage
    if substage is None or substage.attempt_id not in credited_steps:
        return False
    return substage.step >= credited_steps[substage.attempt_id]


def _reversals(usage: Iterable[UsageRecord]) -> list[UsageRecord]:
    """For each usage its credit and its waste."""
    return [_reversal(record, entry) for record in usage for entry in (Entry.CREDIT, Entry.WASTE)]


def _reversal(usage: UsageRecord, entry: UsageRecord.Entry) -> UsageRecord:
    sign = -1 if entry == Entry.CREDIT else 1
    return UsageRecord(
        entry=entry,
        device_id=usage.device_id,
        organization_id=usage.organization_id if entry == Entry.CREDIT else None,
        job_id=usage.job_id,
        substage_id=usage.substage_id,
        kind=usage.kind,
        started_at=usage.started_at,
        ended_at=usage.ended_at,
        device_microseconds=sign * usage.device_microseconds,
        micro_usd=sign * usage.micro_usd,
        fraction=sign * usage.fraction,
        reverses=usage,
    )


def _charge(records: Iterable[UsageRecord]) -> None:
    """Bring the jobs' costs up to the ledger, and tell each job whose cost has changed."""
    amounts: dict[int, int] = defaultdict(int)
    fractions: dict[int, int] = defaultdict(int)
    for record in records:
        if record.entry in (Entry.USAGE, Entry.CREDIT):
            amounts[record.job_id] += record.micro_usd
            fractions[record.job_id] += record.fraction
    for job_id in sorted(amounts):
        Job.objects.filter(pk=job_id).update(
            cost_micro_usd=F("cost_micro_usd") + amounts[job_id],
            cost_fraction=F("cost_fraction") + fractions[job_id],
        )
    changed = [job_id for job_id, amount in amounts.items() if amount]
    for job in Job.objects.filter(pk__in=changed).order_by("pk"):
        event_add(job=job, type=Event.Type.COST, data={"cost_micro_usd": job.cost_micro_usd})
