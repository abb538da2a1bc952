"""Virtual time of tenants: who waited may go first, who was away may not make up for it.

Start-time fair queueing: ``Organization.service`` grows with device-seconds / weight (the ledger adds them);
a tenant whose first work arrives is lifted to the least service of those at work, so that an idle month does
not buy a monopoly.
"""

from __future__ import annotations

from django.db.models import Min

from backend.jobs.models import Attempt
from backend.jobs.states import ATTEMPT_TERMINAL
from backend.tenants.models import Organization


def service_lift(*, organization_id: int) -> None:
    """Lift the organization's virtual time, unless it is at work already."""
    at_work = Attempt.objects.exclude(status__in=[status.value for status in ATTEMPT_TERMINAL])
    if at_work.filter(job__organization_id=organization_id).exists():
        return
    least = at_work.aggregate(least=Min("job__organization__service"))["least"]
    if least is not None:
        Organization.objects.filter(pk=organization_id, service__lt=least).update(service=least)
