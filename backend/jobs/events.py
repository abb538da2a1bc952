"""Adding to a job's one stream of events."""

from __future__ import annotations

import json
from typing import Any

from django.db import connection
from django.utils import timezone

from backend.jobs.models import Event, Job
from backend.notify.services import JOBS

#: One statement, since every report adds an event: number it under the job's lock, write it, ring.
ADD = """
WITH numbered AS (
    UPDATE jobs_job SET event_seq = event_seq + 1 WHERE id = %(job)s RETURNING event_seq
), added AS (
    INSERT INTO jobs_event (job_id, seq, type, level, message, data, at)
    SELECT %(job)s, event_seq, %(type)s, %(level)s, %(message)s, %(data)s::jsonb, %(at)s::timestamptz
    FROM numbered
    RETURNING id, seq
)
SELECT id, seq, pg_notify(%(channel)s, %(ring)s) FROM added
"""


def event_add(
    *, job: Job, type: Event.Type, message: str = "", data: dict[str, Any] | None = None, level: str = "info"
) -> Event:
    """Append an event. The job's row lock orders writers, so ``seq`` grows in the order of commits."""
    event = Event(job_id=job.pk, type=type, level=level, message=message, data=data or {}, at=timezone.now())
    values = {
        "job": job.pk,
        "type": str(type),
        "level": level,
        "message": message,
        "data": json.dumps(event.data),
        "at": event.at,
        "channel": JOBS,
        "ring": json.dumps({"org": job.organization_id, "job": job.pk}),
    }
    with connection.cursor() as cursor:
        cursor.execute(ADD, values)
        event.pk, event.seq, _ = cursor.fetchone()
    job.event_seq = event.seq
    return event
