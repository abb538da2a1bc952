"""The doorbell: a NOTIFY that is delivered when the transaction commits, and only then.

The payload says what to look at, never what it says: whoever is woken reads the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from django.db import connection

#: Rings for browsers and streams: ``{"org": id, "job": id}``.
JOBS = "jigsaw_jobs"
#: Rings for the scheduler daemon: ``{"why": "..."}``.
SCHEDULER = "jigsaw_scheduler"


def ring(channel: str, **payload: int | str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [channel, json.dumps(payload)])


def ring_many(channel: str, payloads: Sequence[Mapping[str, int | str]]) -> None:
    """The same for several payloads, in one query."""
    if payloads:
        with connection.cursor() as cursor:
            texts = [json.dumps(payload) for payload in payloads]
            cursor.execute(
                "SELECT count(pg_notify(%s, said)) FROM unnest(%s::text[]) AS said", [channel, texts]
            )
