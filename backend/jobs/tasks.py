"""Checking the data of submitted jobs, outside the request.

    job stored ──► message ──► check ──► queued or failed
                      ▲          │
                      └──────────┘ the organization's next

One check of an organization runs at a time, so that its long files keep nobody else waiting: a message that
comes meanwhile is dropped, and whoever finishes sends the next. The sweep sends again what got lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection, transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from backend.jobs.models import Job
from backend.jobs.states import JobStatus, Reason
from backend.jobs.transitions import job_status_change
from backend.jobs.validation import BadData, data_check

log = logging.getLogger(__name__)

VALIDATOR = "validator"
#: The largest file of short rows takes 7 minutes of a core that is free (77 µs a row).
CHECK_MINUTES = 30
#: A check that ends without a verdict took its process with it; another is likely to do the same.
MAX_CHECKS = 5
SWEEP_SECONDS = 60.0
LOST_AFTER = timedelta(minutes=1)
#: First half of the advisory locks' names, so that they meet nobody else's.
LOCK_CLASS = 0x4A56


@shared_task(soft_time_limit=CHECK_MINUTES * 60, time_limit=CHECK_MINUTES * 60 + 60)
def validate_job(job_pk: int) -> None:
    """Check every row and queue the job, or fail it with the row and the reason. Twice is once."""
    organization_pk = Job.objects.filter(pk=job_pk).values_list("organization_id", flat=True).first()
    if organization_pk is None:
        return
    with _alone(organization_pk) as alone:
        if not alone:
            return
        job = (
            Job.objects.select_related("base_model", "training_file", "dataset")
            .filter(pk=job_pk, status=JobStatus.VALIDATING)
            .first()
        )
        if job is not None:
            _validate(job)
    # After the lock: a message that was dropped until here belongs to a job that is seen here.
    following = _waiting().filter(organization_id=organization_pk).order_by("pk").first()
    if following is not None:
        validate_job.delay(following.pk)


@shared_task
def validations_sweep() -> None:
    """Send the first waiting job of each organization that has no check running and may have no message.

    What is sent lasts until the next sweep: a long queue does not fill with copies.
    """
    lost = _waiting().filter(created_at__lt=timezone.now() - LOST_AFTER).exclude(organization__in=_busy())
    first = lost.order_by("organization_id", "pk").distinct("organization_id")
    for pk in first.values_list("pk", flat=True):
        validate_job.apply_async((pk,), expires=SWEEP_SECONDS)


def _waiting() -> QuerySet[Job]:
    return Job.objects.filter(status=JobStatus.VALIDATING)


def _validate(job: Job) -> None:
    if job.checks >= MAX_CHECKS:
        _fail(job, Reason.INTERNAL, f"the check of the data broke off {MAX_CHECKS} times")
        return
    Job.objects.filter(pk=job.pk).update(checks=F("checks") + 1)
    try:
        run_bytes = data_check(job)
    except BadData as problem:
        _fail(job, Reason.INVALID_DATA, str(problem), error_param="training_file")
    except SoftTimeLimitExceeded:
        detail = f"checking the rows took more than {CHECK_MINUTES} minutes; send fewer or shorter ones"
        _fail(job, Reason.INVALID_DATA, detail, error_param="training_file")
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
def _alone(organization_pk: int) -> Iterator[bool]:
    """Whether nobody else checks a job of the organization now; held by a lock of the connection."""
    name = [LOCK_CLASS, organization_pk % 2**31]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", name)
        (locked,) = cursor.fetchone()
    try:
        yield locked
    finally:
        if locked:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", name)


def _busy() -> list[int]:
    """Organizations of which a check runs now."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT objid::bigint FROM pg_locks JOIN pg_database ON pg_locks.database = pg_database.oid"
            " WHERE datname = current_database()"
            " AND locktype = 'advisory' AND classid = %s AND objsubid = 2 AND granted",
            [LOCK_CLASS],
        )
        return [pk for (pk,) in cursor.fetchall()]
