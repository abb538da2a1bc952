"""The one place where a status changes: guarded, recorded, and told, in one transaction."""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone

from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job, Transition
from backend.jobs.states import (
    ATTEMPT_TERMINAL,
    JOB_TERMINAL,
    REASON_TEXT,
    AttemptStatus,
    JobStatus,
    Reason,
    attempt_may_change,
    job_may_change,
)
from backend.notify.services import SCHEDULER, ring


class IllegalTransition(Exception):
    """An edge that the table of states does not have: a bug of the caller."""


def _update_if_still(row: Job | Attempt, old: str, changes: dict[str, object]) -> bool:
    """Write the changes if the row's status is what the caller has read; False, and nothing, if it is not."""
    if not type(row).objects.filter(pk=row.pk, status=old).update(**changes):
        return False
    for name, value in changes.items():
        setattr(row, name, value)
    return True


@transaction.atomic(savepoint=False)
def job_status_change(
    *,
    job: Job,
    new: JobStatus,
    reason: Reason,
    actor: str,
    detail: str = "",
    attempt: Attempt | None = None,
    stimulus: str = "",
    error_param: str = "",
) -> bool:
    """Move the job from the status the caller has read to ``new``; False when somebody was faster."""
    old = JobStatus(job.status)
    if not job_may_change(old, new):
        raise IllegalTransition(f"job {job.public_id}: {old} -> {new}")
    now = timezone.now()
    changes: dict[str, object] = {
        "status": new,
        "reason": reason,
        "detail": detail,
        "error_param": error_param,
        "wait_code": "",
        "wait_text": "",
        "ahead": 0,
    }
    if new is JobStatus.QUEUED:
        changes["queued_at"] = now
    if new is JobStatus.RUNNING and job.started_at is None:
        changes["started_at"] = now
    if new in JOB_TERMINAL:
        changes["finished_at"] = now
    if not _update_if_still(job, old, changes):
        return False
    Transition.objects.create(
        job=job,
        attempt=attempt,
        old=old,
        new=new,
        reason=reason,
        detail=detail,
        actor=actor,
        stimulus=stimulus,
    )
    text = REASON_TEXT[reason].format(detail=detail)
    level = "error" if new is JobStatus.FAILED else "info"
    event_add(
        job=job, type=Event.Type.STATUS, message=text, data={"status": new, "reason": reason}, level=level
    )
    ring(SCHEDULER, why=f"job {new}")
    return True


@transaction.atomic(savepoint=False)
def attempt_status_change(
    *,
    attempt: Attempt,
    new: AttemptStatus,
    reason: Reason,
    actor: str,
    detail: str = "",
    stimulus: str = "",
) -> bool:
    """The same for an attempt."""
    old = AttemptStatus(attempt.status)
    if not attempt_may_change(old, new):
        raise IllegalTransition(f"attempt {attempt.pk}: {old} -> {new}")
    changes: dict[str, object] = {"status": new, "reason": reason, "detail": detail}
    if new in ATTEMPT_TERMINAL:
        changes["ended_at"] = timezone.now()
    if not _update_if_still(attempt, old, changes):
        return False
    Transition.objects.create(
        job_id=attempt.job_id,
        attempt=attempt,
        old=old,
        new=new,
        reason=reason,
        detail=detail,
        actor=actor,
        stimulus=stimulus,
    )
    return True
