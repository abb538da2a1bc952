"""Worker messages become rows: each report once, in order; of those that come together, all or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db import transaction

from backend.jobs.attempts import (
    attempt_fail,
    attempt_fence,
    attempt_stopped,
    attempt_succeed,
    checkpoint_record,
    log_record,
    step_record,
)
from backend.jobs.models import Attempt
from backend.jobs.states import ATTEMPT_TERMINAL, NOT_BILLED, AttemptStatus
from backend.metering.services import attempt_credit, device_meter
from backend.pool import reads, selectors
from backend.pool.models import Allotment, Placement, SubStage
from backend.pool.services import placements_close
from backend.pool.states import SubStageStatus
from backend.pool.substages import (
    substage_cross,
    substage_finish,
    substage_leave,
    substage_offer,
    substages_lose,
)
from scheduler.shell import profiles
from scheduler.shell.facts import Lore
from scheduler.shell.orders import PipelineOrder, resize_orders
from scheduler.shell.running import rebalance
from scheduler.shell.touch import Touch
from workers.protocol import (
    CheckpointSaved,
    Crossed,
    Ended,
    Failure,
    FailureKind,
    Finished,
    Log,
    Offer,
    Report,
    StepDone,
)


@dataclass(frozen=True)
class News:
    """What a report changed: where to look again, and what pipelines must be told at once."""

    touch: Touch = field(default_factory=Touch)
    orders: Sequence[PipelineOrder] = ()


@transaction.atomic
def reports_apply(reports: Sequence[Report], lore: Lore) -> News | None:
    """Apply reports of one attempt that follow each other; None when the first is not the next one, or the
    attempt is over.
    """
    first = reports[0]
    attempt = attempt_fence(attempt_id=first.attempt_id, seq=first.seq, count=len(reports))
    if attempt is None:
        return None
    now = datetime.now(UTC)
    touch, orders = Touch(), list[PipelineOrder]()
    for report in reports:
        news = _apply(attempt, report, lore, now)
        touch.add(news.touch)
        orders += news.orders
    return News(touch, orders)


def _apply(attempt: Attempt, report: Report, lore: Lore, now: datetime) -> News:
    match report.body:
        case Offer() as offer:
            return _offered(attempt, offer, now)
        case Crossed() as crossed:
            return _crossed(attempt, crossed, lore, now)
        case Finished() as finished:
            return _finished(attempt, finished, lore, now)
        case StepDone() as done:
            return _step_done(attempt, done, lore, now)
        case CheckpointSaved() as saved:
            checkpoint_record(attempt=attempt, saved=saved)
        case Log() as log:
            log_record(attempt=attempt, log=log)
        case Ended() as ended:
            homes = set(attempt.home)
            _end(attempt, ended, now=now, stimulus=f"report {attempt.pk}/{report.seq}")
            return News(Touch(devices=homes, admission=True))
    return News()


def _offered(attempt: Attempt, offer: Offer, now: datetime) -> News:
    substage_offer(attempt=attempt, offer=offer, now=now)
    if attempt.step_began_at is None:
        attempt.step_began_at = now
        Attempt.objects.filter(pk=attempt.pk).update(step_began_at=now)
    return News(Touch(pipelines={attempt.pk})) if offer.kind.needs_device else News()


def _crossed(attempt: Attempt, crossed: Crossed, lore: Lore, now: datetime) -> News:
    crossing = substage_cross(attempt=attempt, crossed=crossed, now=now)
    if crossing is None or crossing.into.device is None:
        return News()
    node, device = crossing.into.node, crossing.into.device
    # Who waits for an order that came too late, waits on a device that is fuller than the plan has it.
    changed = rebalance(device, now) if crossing.was_leaving else []
    if attempt.status == AttemptStatus.STOPPING:
        substage_leave(attempt_id=attempt.pk, node=node, moves_to="", now=now)
    touch = Touch(devices={device.name}) if crossing.was_leaving else lore.ends(attempt, device.name)
    return News(touch, resize_orders(changed) if changed else ())


def _finished(attempt: Attempt, finished: Finished, lore: Lore, now: datetime) -> News:
    substage = substage_finish(attempt=attempt, finished=finished, now=now)
    if substage is None or substage.device is None:
        return News()
    return News(lore.ends(attempt, substage.device.name))


def _step_done(attempt: Attempt, done: StepDone, lore: Lore, now: datetime) -> News:
    """Whole devices are free again, unless another step computes there."""
    held = _held(attempt)
    if held:
        lore.pool = None
    rows = reads.step_substages(attempt.pk, done.step)
    for device_id in sorted({row.device_id for row in rows if row.device_id is not None}):
        device_meter(device_id=device_id, until=now)
    step_record(attempt=attempt, done=done)
    if held and not _computes(attempt):
        placements_close(attempt=attempt, now=now)
    over = [row for row in rows if row.status == SubStageStatus.DONE]
    attempt.profile = _profile(attempt, over, lore)
    attempt.step_began_at = now
    attempt.save(update_fields=["step_began_at", "profile"])
    return News(Touch(devices=set(held.values())))


def _computes(attempt: Attempt) -> bool:
    return SubStage.objects.filter(
        attempt=attempt, status=SubStageStatus.GRANTED, device__isnull=False
    ).exists()


def _held(attempt: Attempt) -> dict[int, str]:
    """Name by key of the devices that the attempt holds whole."""
    held = Placement.objects.filter(attempt=attempt, closed_at__isnull=True)
    return dict(held.values_list("device_id", "device__name"))


def _profile(attempt: Attempt, over: Sequence[SubStage], lore: Lore) -> dict[str, object]:
    """What is known of the attempt's steps after this one, whose sub-stages are ``over``, as they ended."""
    known = lore.profile_of(attempt)
    if known is None:
        return attempt.profile
    streams, profile = known
    own: dict[int, list[Allotment]] = {}
    for one in reads.allotments([row.pk for row in over]):
        own.setdefault(one.substage_id, []).append(one)
    done = {pk: profiles.solo_seconds(allotments) for pk, allotments in own.items()}
    return {"streams": streams, **profiles.dump(profiles.observed(profile, over, done))}


@transaction.atomic
def attempt_lost(*, attempt_id: int, failure: Failure, stimulus: str) -> bool:
    """The pipeline itself is gone and reports nothing any more."""
    attempt = Attempt.objects.select_for_update(of=("self",)).select_related("job").get(pk=attempt_id)
    if AttemptStatus(attempt.status) in ATTEMPT_TERMINAL:
        return False
    _end(attempt, Ended(outcome="failed", failure=failure), now=datetime.now(UTC), stimulus=stimulus)
    return True


def _end(attempt: Attempt, ended: Ended, *, now: datetime, stimulus: str) -> None:
    """Free what the attempt holds, close it, and give back what our fault cost the tenant."""
    begun = SubStage.objects.filter(
        attempt=attempt, status__in=[SubStageStatus.GRANTED, SubStageStatus.LEAVING], device__isnull=False
    )
    devices = sorted({*_held(attempt), *begun.values_list("device_id", flat=True)})
    substages_lose(attempt=attempt, now=now)
    placements_close(attempt=attempt, now=now)
    for device_id in devices:
        device_meter(device_id=device_id, until=now)
    if attempt.status == AttemptStatus.STOPPING and ended.outcome != "failed":
        attempt_stopped(attempt=attempt, stimulus=stimulus)
    elif ended.outcome == "succeeded":
        attempt_succeed(attempt=attempt, stimulus=stimulus)
    else:
        missing = Failure(kind=FailureKind.INTERNAL, message="the pipeline stopped without being asked")
        cancelled = attempt.status == AttemptStatus.STOPPING
        reason = attempt_fail(attempt=attempt, failure=ended.failure or missing, stimulus=stimulus)
        if reason in NOT_BILLED and not cancelled:
            attempt_credit(attempt=attempt, since_step=_saved_step(attempt))


def stopping_leave(attempts: Sequence[Attempt], now: datetime) -> None:
    """They were asked to stop: what of them computes makes room for others at once."""
    if not attempts:
        return
    begun = SubStage.objects.filter(
        attempt__in=[attempt.pk for attempt in attempts], status=SubStageStatus.GRANTED, device__isnull=False
    )
    for attempt_id, node in begun.values_list("attempt_id", "node"):
        substage_leave(attempt_id=attempt_id, node=node, moves_to="", now=now)


def holds_close() -> None:
    """Close what attempts that are over still hold: a hold that was written while they ended."""
    now = datetime.now(UTC)
    for placement in selectors.stale_placements():
        placements_close(attempt=placement.attempt, now=now)


def _saved_step(attempt: Attempt) -> int:
    """The first step whose work is lost: what the attempt's newest checkpoint does not hold."""
    saved = (
        attempt.job.job_checkpoints.filter(attempt=attempt)
        .order_by("-checkpoint__step")
        .values_list("checkpoint__step", flat=True)
        .first()
    )
    return attempt.start_step if saved is None else saved
