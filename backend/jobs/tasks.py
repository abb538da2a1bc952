"""Checking the data of submitted jobs, outside the request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from celery import shared_task
from django.db import connection, transaction
from django.utils import timezone

from backend.jobs.models import Job
from backend.jobs.states import JobStatus, Reason
from backend.jobs.transitions import job_status_change
from backend.jobs.validation import BadData, data_check

log = logging.getLogger(__name__)

VALIDATOR = "validator"
LOST_AFTER = timedelta(minutes=1)
GIVE_UP_AFTER = timedelta(hours=1)
#: First half of the advisory locks' names, so that they meet nobody else's.
LOCK_CLASS = 0x4A56


@shared_task
def validate_job(job_pk: int) -> None:
    """Check every row and queue the job, or fail it with the row and the reason. Twice is once."""
    with _alone(job_pk) as alone:
        job = (
            Job.objects.select_related("base_model", "training_file", "dataset")
            .filter(pk=job_pk, status=JobStatus.VALIDATING)
            .first()
        )
        if alone and job is not None:
            _validate(job)


@shared_task
def validations_sweep() -> None:
    """Send jobs again whose task the broker lost; give up on those that no worker got through in an hour."""
    now = timezone.now()
    waiting = Job.objects.filter(status=JobStatus.VALIDATING, created_at__lt=now - LOST_AFTER)
    for job in waiting.filter(created_at__lt=now - GIVE_UP_AFTER):
        _fail(job, Reason.INTERNAL, "the check of the data did not come to an end")
    for pk in waiting.filter(created_at__gte=now - GIVE_UP_AFTER).values_list("pk", flat=True):
        validate_job.delay(pk)


def _validate(job: Job) -> None:
    try:
        run_bytes = data_check(job)
    except BadData as problem:
        _fail(job, Reason.INVALID_DATA, str(problem), error_param="training_file")
    except Exception:
        log.exception("validation of %s", job.public_id)
        _fail(job, Reason.INTERNAL, "the check of the data broke off")
    else:
        _accept(job, run_bytes)


@transaction.atomic
def _accept(job: Job, run_bytes: int) -> None:
    if job_status_change(job=job, new=JobStatus.QUEUED, reason=Reason.DATA_ACCEPTED, actor=VALIDATOR):
        Job.objects.filter(pk=job.pk).update(run_bytes=run_bytes)


def _fail(job: Job, reason: Reason, detail: str, error_param: str = "") -> None:
    job_status_change(
        job=job,
        new=JobStatus.FAILED,
        reason=reason,
        actor=VALIDATOR,
        detail=detail,
        error_param=error_param,
    )


@contextmanager
def _alone(job_pk: int) -> Iterator[bool]:
    """Whether nobody else is checking this job now, held by an advisory lock of the connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", [LOCK_CLASS, job_pk % 2**31])
        (locked,) = cursor.fetchone()
    try:
        yield locked
    finally:
        if locked:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", [LOCK_CLASS, job_pk % 2**31])
