"""Virtual time of tenants: who waited may go first, who was away may not make up for it.

Start-time fair queueing: ``Organization.service`` grows by device-seconds / weight. Where a turn holds whole
devices, it keeps everybody else off them whether it computes or waits for its grader: holding is charged,
when the turn ends. Elsewhere what is charged is the part of the device that a sub-stage had, from its grant
to the report that it is over, as its allotments close. It is the same charge that the scheduler expects of
what is under way; the bill is by compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db.models import F, Max, Min

from backend.jobs.models import Attempt
from backend.jobs.states import ATTEMPT_TERMINAL
from backend.pool.models import ServiceInterval
from backend.tenants.models import Organization


def service_add(*, attempt: Attempt, device_seconds: float) -> None:
    """Let the virtual time of the attempt's organization pass by what a turn of it held."""
    Organization.objects.filter(jobs__attempts=attempt.pk).update(
        service=F("service") + device_seconds / F("weight")
    )


def held_seconds(services: Iterable[ServiceInterval], since: datetime, until: datetime) -> float:
    """How long a hold kept a device from others: not while it was out of service."""
    nothing = timedelta()
    held = (
        max(nothing, min(service.end or until, until) - max(service.start, since)) for service in services
    )
    return sum(held, nothing).total_seconds()


def service_lift(*, organization_id: int) -> None:
    """Lift the organization's virtual time to that of the pool, unless it is at work already.

    The pool's time is the least service of those at work. While nobody is, it is the most that anybody has
    received: whoever comes first after a quiet night starts level with whoever comes second, and not ahead
    of it by all that the second has ever received.
    """
    at_work = Attempt.objects.exclude(status__in=[status.value for status in ATTEMPT_TERMINAL])
    if at_work.filter(job__organization_id=organization_id).exists():
        return
    time = at_work.aggregate(least=Min("job__organization__service"))["least"]
    if time is None:
        time = Organization.objects.aggregate(most=Max("service"))["most"]
    Organization.objects.filter(pk=organization_id, service__lt=time).update(service=time)
