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
from django.db.models import Exists, OuterRef, Q, QuerySet

from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job
from backend.metering.division import Occupant, Part, clip, divide, fitting, from_us, to_us
from backend.metering.models import AttemptCredit, UsageRecord
from backend.pool import reads
from backend.pool.models import Device, ServiceInterval, SubStage
from backend.pool.states import BEGUN, DeviceState, SubStageStatus

logger = logging.getLogger(__name__)

Entry = UsageRecord.Entry

#: Asked for at every step of every job, and so written out: see ``backend.pool.reads``. The weaker lock of a
#: device: rows that point to it (grants, holds) may still be written meanwhile.
LOCK_DEVICE = "SELECT * FROM pool_device WHERE id = %s FOR NO KEY UPDATE"
UNMETERED = """
SELECT * FROM pool_substage WHERE device_id = %s AND NOT metered
    AND status IN ('granted', 'leaving', 'done', 'lost') ORDER BY granted_at, id
"""
LOCK_FREE = """
SELECT id, organization_id, cost_fraction FROM jobs_job WHERE id = ANY(%s) ORDER BY id
FOR NO KEY UPDATE SKIP LOCKED
"""
COST = """
UPDATE jobs_job SET cost_micro_usd = cost_micro_usd + %s, cost_fraction = cost_fraction + %s
WHERE id = %s RETURNING id, organization_id, cost_micro_usd
"""


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


@transaction.atomic(savepoint=False)
def device_meter(*, device_id: int, until: datetime) -> int:
    """Book what the device did up to ``until`` (not in the future), or as far as is known; returns new rows.

    Running it twice, late, or at once from two processes books nothing twice.
    """
    (device,) = Device.objects.raw(LOCK_DEVICE, [device_id])
    begun, done, lost = _unmetered(device)
    watermark = min([_in_service_until(device, until, done), *(s.granted_at for s in begun)])
    runs, watermark, jobs = _lockable([s for s in done if s.started_at < watermark], watermark, device)
    if watermark <= device.metered_until:
        return 0
    occupants = _occupants(runs)
    _tell_late(device, occupants)
    carried = {pk: job.cost_fraction for pk, job in jobs.items()}
    usage = _records(device, _parts(device, occupants, watermark, carried), runs, jobs)
    credited = _credited_steps(runs)
    reversals = _reversals(record for record in usage if _forgiven(record, credited))
    UsageRecord.objects.bulk_create(reversals)
    Device.objects.filter(pk=device.pk).update(metered_until=watermark)
    booked = [s.pk for s in [*runs, *lost] if s.ended_at is None or s.ended_at <= watermark]
    if booked:
        SubStage.objects.filter(pk__in=booked).update(metered=True)
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


def _unmetered(device: Device) -> tuple[list[SubStage], list[SubStage], list[SubStage]]:
    """Sub-stages that run, that finished and that were lost, in one query: none must slip through between
    two.
    """
    rows = list(SubStage.objects.raw(UNMETERED, [device.pk]))
    begun = [row for row in rows if row.status in BEGUN]
    done, lost = (
        [row for row in rows if row.status == status] for status in (SubStageStatus.DONE, SubStageStatus.LOST)
    )
    return begun, done, lost


def _in_service_until(device: Device, until: datetime, done: Sequence[SubStage]) -> datetime:
    """A lost device has no capacity to book beyond what it still finished."""
    if device.state != DeviceState.LOST:
        return until
    return min(until, max((s.ended_at for s in done), default=device.metered_until))


def _lockable(
    runs: list[SubStage], watermark: datetime, device: Device
) -> tuple[list[SubStage], datetime, dict[int, Job]]:
    """Lock the jobs that are free; the watermark stays before the runs of the others.

    Returns the runs of the free jobs, the watermark, and those jobs.
    """
    ids = sorted({s.job_id for s in runs})
    free = {job.pk: job for job in Job.objects.raw(LOCK_FREE, [ids])} if ids else {}
    busy = [s for s in runs if s.job_id not in free]
    watermark = min([watermark, *(max(s.started_at, device.metered_until) for s in busy)])
    return [s for s in runs if s.started_at < watermark], watermark, free


def _occupants(substages: Iterable[SubStage]) -> list[Occupant]:
    """What they had of the device while they computed."""
    by_key = {substage.pk: substage for substage in substages}
    had: dict[int, list[Occupant]] = {key: [] for key in by_key}
    for row in reads.allotments(by_key.keys()):
        of = by_key[row.substage_id]
        span = to_us(row.start), to_us(row.end or of.ended_at), row.part_ppm
        if row.part_ppm:
            had[of.pk].append(Occupant(of.pk, *span, of.job_id))
    return [
        occupant
        for key, of in by_key.items()
        for occupant in clip(had[key], to_us(of.started_at), to_us(of.ended_at))
    ]


def _tell_late(device: Device, occupants: Iterable[Occupant]) -> None:
    """What began before ``metered_until`` without a row there came too late: that time is booked as idle."""
    early = {o.key: o.start_us for o in occupants if o.start_us < to_us(device.metered_until)}
    if not early:
        return
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


def _records(
    device: Device, parts: Iterable[Part], runs: Iterable[SubStage], jobs: Mapping[int, Job]
) -> list[UsageRecord]:
    by_key = {s.pk: s for s in runs}
    for substage in runs:
        substage.job = jobs[substage.job_id]
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
        (job,) = Job.objects.raw(COST, [amounts[job_id], fractions[job_id], job_id])
        if amounts[job_id]:
            event_add(job=job, type=Event.Type.COST, data={"cost_micro_usd": job.cost_micro_usd})
