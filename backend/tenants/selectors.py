"""Reading organizations."""

from __future__ import annotations

from django.db.models import QuerySet

from backend.tenants.models import Organization, User


def organizations_of(user: User) -> QuerySet[Organization]:
    """What the person may look at, by name: an operator every organization, others their own."""
    everything = Organization.objects.order_by("name", "pk")
    return everything if user.is_staff else everything.filter(memberships__user=user)
