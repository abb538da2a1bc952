"""Adding to a job's one stream of events."""

from __future__ import annotations

from typing import Any

from django.db import connection, transaction

from backend.jobs.models import Event, Job
from backend.notify.services import JOBS, ring


@transaction.atomic(savepoint=False)
def event_add(
    *, job: Job, type: Event.Type, message: str = "", data: dict[str, Any] | None = None, level: str = "info"
) -> Event:
    """Append an event. The job's row lock orders writers, so ``seq`` grows in the order of commits."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE jobs_job SET event_seq = event_seq + 1 WHERE id = %s RETURNING event_seq", [job.pk]
        )
        (job.event_seq,) = cursor.fetchone()
    event = Event.objects.create(
        job_id=job.pk, seq=job.event_seq, type=type, level=level, message=message, data=data or {}
    )
    ring(JOBS, org=job.organization_id, job=job.pk)
    return event
