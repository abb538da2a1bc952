"""Reading the meters regularly: sub-stages are metered when they end, idle devices only here."""

from __future__ import annotations

from datetime import timedelta

from celery import Celery, shared_task
from django.utils import timezone

from backend.celery import app
from backend.metering.services import pool_meter

SECONDS = 30.0
#: An idle device's row in the ledger spans this long, unless work begins or the books are asked for.
IDLE_EVERY = timedelta(minutes=10)


@shared_task(name="metering.read_meters")
def read_meters() -> None:
    pool_meter(timezone.now(), idle_every=IDLE_EVERY)


@app.on_after_finalize.connect
def schedule(sender: Celery, **_: object) -> None:
    # Readings that waited for a worker longer than a period are overtaken by the next one.
    sender.add_periodic_task(SECONDS, read_meters.s(), name="metering.read_meters", expires=SECONDS)
