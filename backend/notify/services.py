"""The doorbell: a NOTIFY that is delivered when the transaction commits, and only then.

The payload says what to look at, never what it says: whoever is woken reads the rows.
"""

from __future__ import annotations

import json

from django.db import connection

#: Rings for browsers and streams: ``{"org": id, "job": id}``.
JOBS = "jigsaw_jobs"
#: Rings for the scheduler daemon: ``{"why": "..."}``.
SCHEDULER = "jigsaw_scheduler"


def ring(channel: str, **payload: int | str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [channel, json.dumps(payload)])
