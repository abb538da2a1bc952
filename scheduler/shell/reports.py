"""Worker messages become rows: each report once, in the order in which it was made."""

from __future__ import annotations

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
from backend.pool import selectors
from backend.pool.models import Placement
from backend.pool.services import (
    placements_close,
    substage_finish,
    substage_offer,
    substages_lose,
)
from workers.protocol import (
    CheckpointSaved,
    Ended,
    Failure,
    FailureKind,
    Finished,
    Log,
    Offer,
    Report,
    StepDone,
)


@transaction.atomic
def report_apply(report: Report) -> bool:
    """Apply one report; False when it was applied before or its attempt is over."""
    attempt = attempt_fence(attempt_id=report.attempt_id, seq=report.seq)
    if attempt is None:
        return False
    now = datetime.now(UTC)
    match report.body:
        case Offer() as offer:
            substage_offer(attempt=attempt, offer=offer, now=now)
        case Finished() as finished:
            substage = substage_finish(attempt=attempt, finished=finished, now=now)
            if substage is not None and substage.device_id is not None:
                device_meter(device_id=substage.device_id, until=now)
        case StepDone() as done:
            step_record(attempt=attempt, done=done)
            placements_close(attempt=attempt, now=now)
        case CheckpointSaved() as saved:
            checkpoint_record(attempt=attempt, saved=saved)
        case Log() as log:
            log_record(attempt=attempt, log=log)
        case Ended() as ended:
            _end(attempt, ended, now=now, stimulus=f"report {attempt.pk}/{report.seq}")
    return True


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
    devices = sorted(
        Placement.objects.filter(attempt=attempt, closed_at__isnull=True).values_list("device_id", flat=True)
    )
    substages_lose(attempt=attempt)
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
