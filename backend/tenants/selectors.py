"""Reading organizations, members and keys."""

from __future__ import annotations

from django.db.models import QuerySet

from backend.common.errors import NotFound
from backend.tenants.access import Actor, require_admin
from backend.tenants.models import ApiKey, Organization, User


def organizations_of(user: User) -> QuerySet[Organization]:
    """What the person may look at, by name: an operator every organization, others their own."""
    everything = Organization.objects.order_by("name", "pk")
    return everything if user.is_staff else everything.filter(memberships__user=user)


def api_keys(organization: Organization) -> QuerySet[ApiKey]:
    return organization.api_keys.select_related("created_by").order_by("-pk")


def api_key_access(actor: Actor, key_id: int) -> ApiKey:
    """A key of the actor's organization, for owners and admins."""
    key = actor.organization.api_keys.filter(pk=key_id).first()
    if key is None:
        raise NotFound("There is no such key.")
    require_admin(actor)
    return key
