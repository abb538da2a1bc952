"""When a decision is due although nothing happens: a job may be tried again, or a chosen wait is over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Min

from backend.pool import selectors
from scheduler.shell.decide import Touch


@dataclass(frozen=True)
class Alarm:
    in_s: float
    why: str
    touch: Touch


def next_alarm(now: datetime) -> Alarm | None:
    """The first of those that are to come; those that are over have had their decision."""
    retry = selectors.held_back_jobs(now).aggregate(first=Min("retry_at"))["first"]
    waits = selectors.live_attempts().filter(wait_until__gt=now).order_by("wait_until", "pk")
    wait = waits.values_list("wait_until", "pk").first()
    if wait is not None and (retry is None or wait[0] <= retry):
        return Alarm((wait[0] - now).total_seconds(), "a wait is over", Touch(pipelines={wait[1]}))
    if retry is not None:
        return Alarm((retry - now).total_seconds(), "a retry is due", Touch(admission=True))
    return None
