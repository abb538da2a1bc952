"""When a decision is due although nothing happens: a job may be tried again, or a chosen wait is over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Min

from backend.pool import selectors
from scheduler.core.state import Wait
from scheduler.shell.decide import Decision
from scheduler.shell.touch import Touch


@dataclass(frozen=True)
class Alarm:
    in_s: float
    why: str
    touch: Touch


def next_retry(now: datetime) -> datetime | None:
    """When the first job that waits to be tried again may be."""
    return selectors.held_back_jobs(now).aggregate(first=Min("retry_at"))["first"]


def next_alarm(decision: Decision, retry_at: datetime | None, now: datetime) -> Alarm | None:
    """The first of those that are to come; those that are over have had their decision."""
    chosen = [(action.until, action.pipeline) for action in decision.plan.actions if isinstance(action, Wait)]
    going_on = [(until, id) for id, until in decision.world.snapshot.waits if until > now.timestamp()]
    first = min((*chosen, *going_on), default=None)
    if first is not None and (retry_at is None or first[0] <= retry_at.timestamp()):
        in_s = max(0.0, first[0] - now.timestamp())
        return Alarm(in_s, "a wait is over", Touch(pipelines={first[1]}))
    if retry_at is not None:
        in_s = max(0.0, (retry_at - now).total_seconds())
        return Alarm(in_s, "a retry is due", Touch(admission=True))
    return None
