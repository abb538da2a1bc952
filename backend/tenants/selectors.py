"""Reading organizations and keys."""

from __future__ import annotations

from django.db.models import QuerySet

from backend.common.errors import NotFound
from backend.tenants.models import ApiKey, Organization, User


def organizations_of(user: User) -> QuerySet[Organization]:
    """What the person may look at, by name: an operator every organization, others their own."""
    everything = Organization.objects.order_by("name", "pk")
    return everything if user.is_staff else everything.filter(memberships__user=user)


def api_keys(organization: Organization, *, max_revoked: int = 50) -> list[ApiKey]:
    """Every key that opens something, then the last of those that were revoked; the newest first."""
    keys = organization.api_keys.select_related("created_by")
    valid = keys.filter(revoked_at__isnull=True).order_by("-pk")
    revoked = keys.filter(revoked_at__isnull=False).order_by("-revoked_at", "-pk")
    return [*valid, *revoked[:max_revoked]]


def api_key_find(organization: Organization, key_id: int) -> ApiKey:
    """A key of the organization; ``NotFound`` for any other."""
    key = organization.api_keys.select_related("created_by").filter(pk=key_id).first()
    if key is None:
        raise NotFound("There is no such key.")
    return key
