"""Attempts: opening one, believing its reports once, and what its end means for the job.

Reports are fenced: an attempt's row remembers the last report applied, and is locked while one is. A report
of an attempt that is over, or one that was applied before, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from backend.catalog.models import Checkpoint
from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job, JobCheckpoint, Sample, StepMetrics
from backend.jobs.states import (
    ATTEMPT_TERMINAL,
    MAX_FRUITLESS_ATTEMPTS,
    REASON_TEXT,
    RETRY_AFTER_S,
    RETRYABLE,
    AttemptStatus,
    JobStatus,
    Reason,
)
from backend.jobs.transitions import attempt_status_change, job_status_change
from workers.protocol import CheckpointSaved, Failure, FailureKind, Log, StepDone

SCHEDULER = "scheduler"

OVER = [status.value for status in ATTEMPT_TERMINAL]
#: Every report asks for these. SQL written out, since putting a query together takes longer than to answer
#: it; a column that is not named is read when it is asked for. The locks are the weaker ones: rows that point
#: here may still be written meanwhile.
CLAIM = """
UPDATE jobs_attempt SET report_seq = %(last)s
WHERE id = %(attempt)s AND report_seq = %(before)s AND status <> ALL(%(over)s)
RETURNING id, job_id, number, status, start_step, home, step_began_at, report_seq
"""
LOCK_JOB = """
SELECT id, public_id, organization_id, base_model_id, status, steps, steps_done, tokens, last_reward,
    event_seq
FROM jobs_job WHERE id = %s FOR NO KEY UPDATE
"""

FAILURE_REASON: dict[FailureKind, Reason] = {
    FailureKind.WORKER_LOST: Reason.WORKER_LOST,
    FailureKind.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    FailureKind.GRADER_FAILED: Reason.GRADER_FAILED,
    FailureKind.BAD_DATA: Reason.INVALID_DATA,
    FailureKind.NOT_FINITE: Reason.NOT_FINITE,
    FailureKind.MODEL_LOAD: Reason.MODEL_LOAD,
    FailureKind.TIME_LIMIT: Reason.TIME_LIMIT,
    FailureKind.NOTHING_LEARNED: Reason.NOTHING_LEARNED,
    FailureKind.INTERNAL: Reason.INTERNAL,
}


@transaction.atomic(savepoint=False)
def attempt_open(*, job_public_id: str, home: Iterable[str], reason: str, stimulus: str) -> Attempt | None:
    """Start the queued job's next attempt from its newest checkpoint; None when it is no longer queued."""
    job = Job.objects.select_for_update().filter(public_id=job_public_id, status=JobStatus.QUEUED).first()
    if job is None:
        return None
    newest = _newest_checkpoint(job)
    number = (job.attempts.aggregate(last=Max("number"))["last"] or 0) + 1
    attempt = Attempt.objects.create(
        job=job,
        number=number,
        resume_from=newest,
        start_step=newest.step if newest else 0,
        home=list(home),
    )
    Job.objects.filter(pk=job.pk).update(steps_done=attempt.start_step)
    job_status_change(
        job=job,
        new=JobStatus.RUNNING,
        reason=Reason.ADMITTED,
        actor=SCHEDULER,
        detail=reason,
        attempt=attempt,
        stimulus=stimulus,
    )
    return attempt


def _newest_checkpoint(job: Job) -> Checkpoint | None:
    return (
        Checkpoint.objects.filter(produced_by__job=job, deleted_at__isnull=True)
        .order_by("-step", "-id")
        .first()
    )


def attempt_fence(*, attempt_id: int, seq: int, count: int = 1) -> Attempt | None:
    """Lock the attempt and its job, and claim ``count`` reports from ``seq`` on; None when that is not the
    next one, or the attempt is over.

    Call inside the transaction that applies the reports.
    """
    values = {"attempt": attempt_id, "before": seq - 1, "last": seq + count - 1, "over": OVER}
    attempt = next(iter(Attempt.objects.raw(CLAIM, values)), None)
    if attempt is None:
        return None
    (attempt.job,) = Job.objects.raw(LOCK_JOB, [attempt.job_id])
    if attempt.status == AttemptStatus.STARTING:
        attempt_status_change(
            attempt=attempt, new=AttemptStatus.RUNNING, reason=Reason.STARTED, actor=SCHEDULER
        )
    return attempt


@transaction.atomic(savepoint=False)
def step_record(*, attempt: Attempt, done: StepDone) -> None:
    """Keep a trained step's numbers and samples. A step run again after a resume replaces its first run."""
    job = attempt.job
    before = StepMetrics.objects.filter(job=job, step=done.step).values_list("values", flat=True).first()
    tokens = int(done.metrics["tokens"]) - (int(before["tokens"]) if before else 0)
    StepMetrics.objects.bulk_create(
        [StepMetrics(job=job, step=done.step, attempt=attempt, values=done.metrics)],
        update_conflicts=True,
        unique_fields=["job", "step"],
        update_fields=["attempt", "values"],
    )
    if before is not None:
        Sample.objects.filter(job=job, step=done.step).delete()
    Sample.objects.bulk_create(
        Sample(
            job=job,
            step=done.step,
            **sample.model_dump(exclude={"error"}),
            error=sample.error or "",
        )
        for sample in done.samples
    )
    job.steps_done = done.step + 1
    job.last_reward = done.metrics.get("reward")
    job.tokens += tokens
    job.save(update_fields=["steps_done", "last_reward", "tokens"])
    event_add(job=job, type=Event.Type.METRICS, data={"step": done.step, "values": done.metrics})


@transaction.atomic(savepoint=False)
def checkpoint_record(*, attempt: Attempt, saved: CheckpointSaved) -> Checkpoint:
    job = attempt.job
    Checkpoint.objects.filter(
        path__in=[*saved.removed, saved.path], organization_id=job.organization_id, deleted_at__isnull=True
    ).update(deleted_at=timezone.now())
    lora = job.spec["rl"]["tuning"]["type"] == "lora"
    checkpoint = Checkpoint.objects.create(
        organization_id=job.organization_id,
        base_model_id=job.base_model_id,
        format=Checkpoint.Format.PEFT if lora else Checkpoint.Format.FULL,
        step=saved.step,
        path=saved.path,
        bytes=saved.bytes,
    )
    JobCheckpoint.objects.create(job=job, attempt=attempt, checkpoint=checkpoint, final=saved.final)
    event_add(
        job=job,
        type=Event.Type.CHECKPOINT,
        message=f"Checkpoint at step {saved.step} saved.",
        data={"id": checkpoint.public_id, "step": saved.step, "bytes": saved.bytes, "final": saved.final},
    )
    return checkpoint


def log_record(*, attempt: Attempt, log: Log) -> None:
    event_add(job=attempt.job, type=Event.Type.MESSAGE, message=log.message, level=log.level)


@transaction.atomic(savepoint=False)
def attempt_succeed(*, attempt: Attempt, stimulus: str) -> None:
    attempt_status_change(
        attempt=attempt,
        new=AttemptStatus.SUCCEEDED,
        reason=Reason.COMPLETED,
        actor=SCHEDULER,
        stimulus=stimulus,
    )
    job_status_change(
        job=attempt.job,
        new=JobStatus.SUCCEEDED,
        reason=Reason.COMPLETED,
        actor=SCHEDULER,
        attempt=attempt,
        stimulus=stimulus,
    )


@transaction.atomic(savepoint=False)
def attempt_stopped(*, attempt: Attempt, stimulus: str) -> None:
    """The pipeline of a cancelled job is over; the job itself was cancelled when it was asked."""
    attempt_status_change(
        attempt=attempt,
        new=AttemptStatus.CANCELLED,
        reason=Reason.CANCELLED_BY_MEMBER,
        actor=SCHEDULER,
        stimulus=stimulus,
    )


@transaction.atomic(savepoint=False)
def attempt_fail(*, attempt: Attempt, failure: Failure, stimulus: str) -> Reason:
    """Close a failed attempt: the job is queued again when a further attempt may help, else it fails.

    Returns the attempt's reason, which says whether its lost work is billed (``NOT_BILLED``).
    """
    reason = FAILURE_REASON[failure.kind]
    if attempt.status == AttemptStatus.STOPPING:
        attempt_status_change(
            attempt=attempt,
            new=AttemptStatus.LOST,
            reason=reason,
            actor=SCHEDULER,
            detail=failure.message,
            stimulus=stimulus,
        )
        return reason
    retry = reason in RETRYABLE
    attempt_status_change(
        attempt=attempt,
        new=AttemptStatus.LOST if retry else AttemptStatus.FAILED,
        reason=reason,
        actor=SCHEDULER,
        detail=failure.message,
        stimulus=stimulus,
    )
    job = attempt.job
    if job.status != JobStatus.RUNNING:
        return reason
    lost = _fruitless_attempts(job)
    again = retry and lost < MAX_FRUITLESS_ATTEMPTS
    if again:
        message = REASON_TEXT[reason].format(detail=failure.message)
        event_add(job=job, type=Event.Type.MESSAGE, level="warning", message=message)
        new, job_reason = JobStatus.QUEUED, reason
    else:
        new, job_reason = JobStatus.FAILED, Reason.TOO_MANY_ATTEMPTS if retry else reason
    job_status_change(
        job=job,
        new=new,
        reason=job_reason,
        actor=SCHEDULER,
        detail=failure.message,
        attempt=attempt,
        stimulus=stimulus,
    )
    if again:
        _hold_back(job, RETRY_AFTER_S[max(lost, 1) - 1])
    return reason


def _hold_back(job: Job, seconds: float) -> None:
    """No attempt starts before; the job says so while it waits."""
    Job.objects.filter(pk=job.pk).update(
        retry_at=timezone.now() + timedelta(seconds=seconds),
        wait_code="retry",
        wait_text=f"the next attempt starts {seconds:.0f} s after the last was lost",
    )


def _fruitless_attempts(job: Job) -> int:
    """Lost attempts in a row, newest first, that began at the same step: none got to a new checkpoint."""
    newest = _newest_checkpoint(job)
    step = newest.step if newest else 0
    return job.attempts.filter(status=AttemptStatus.LOST, start_step=step).count()
