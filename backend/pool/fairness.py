"""Virtual time of tenants: who waited may go first, who was away may not make up for it.

Start-time fair queueing: ``Organization.service`` grows by devices x seconds held / weight when a turn ends.
A turn keeps everybody else off its devices, whether it computes or waits for its grader, so holding is what
is shared; the bill is by compute. It is the same charge that the scheduler expects of a turn under way.
"""

from __future__ import annotations

from django.db.models import F, Min

from backend.jobs.models import Attempt
from backend.jobs.states import ATTEMPT_TERMINAL
from backend.tenants.models import Organization


def service_add(*, attempt: Attempt, device_seconds: float) -> None:
    """Let the virtual time of the attempt's organization pass by what a turn of it held."""
    Organization.objects.filter(jobs__attempts=attempt.pk).update(
        service=F("service") + device_seconds / F("weight")
    )


def service_lift(*, organization_id: int) -> None:
    """Lift the organization's virtual time, unless it is at work already."""
    at_work = Attempt.objects.exclude(status__in=[status.value for status in ATTEMPT_TERMINAL])
    if at_work.filter(job__organization_id=organization_id).exists():
        return
    least = at_work.aggregate(least=Min("job__organization__service"))["least"]
    if least is not None:
        Organization.objects.filter(pk=organization_id, service__lt=least).update(service=least)
