"""The door to tenant data: who acts, in which organization, with which role.

Every access function of the apps above (``catalog.access``, ``jobs.access``) takes an ``Actor`` and answers
``NotFound`` for what is not its organization's, so that no answer tells whether another tenant has it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from backend.common.errors import Forbidden, NotFound
from backend.tenants.models import ApiKey, Membership, Organization, Role, User

LAST_USED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class Actor:
    """Somebody acting inside one organization: a person, or a program with a key."""

    organization: Organization
    role: Role
    user: User | None = None
    key: ApiKey | None = None

    def __post_init__(self) -> None:
        if (self.user is None) == (self.key is None):
            raise ValueError("an actor is a user or a key")

    @property
    def label(self) -> str:
        """How transitions name the actor."""
        if self.key is not None:
            return f"key:{self.key.prefix}"
        assert self.user is not None
        return f"user:{self.user.pk}"

    @property
    def is_authenticated(self) -> bool:
        """What REST framework asks of a request's user."""
        return True


def require_write(actor: Actor) -> None:
    if not actor.role.can_write:
        raise Forbidden(
            f"The role {actor.role.value} may read, not change, what belongs to the organization."
        )


def require_admin(actor: Actor) -> None:
    if actor.role not in {Role.OWNER, Role.ADMIN}:
        raise Forbidden(f"Only owners and admins may do this; the role here is {actor.role.value}.")


def user_actor(*, user: User, slug: str) -> Actor:
    """The person as a member of the organization. An operator reads every organization."""
    membership = (
        Membership.objects.select_related("organization").filter(user=user, organization__slug=slug).first()
    )
    if membership is not None:
        return Actor(organization=membership.organization, role=Role(membership.role), user=user)
    if user.is_staff:
        organization = Organization.objects.filter(slug=slug).first()
        if organization is not None:
            return Actor(organization=organization, role=Role.VIEWER, user=user)
    raise NotFound(f"There is no organization {slug!r}.")


def api_key_actor(secret: str) -> Actor | None:
    """The program that holds ``secret``; None when no valid key has it."""
    key = (
        ApiKey.objects.select_related("organization")
        .filter(digest=api_key_digest(secret), revoked_at__isnull=True)
        .first()
    )
    if key is None:
        return None
    _note_use(key)
    return Actor(organization=key.organization, role=Role(key.role), key=key)


def api_key_digest(secret: str) -> str:
    """SHA-256 is enough for a secret of 190 random bits: there is nothing to guess."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _note_use(key: ApiKey) -> None:
    """At most one write a minute, whatever the rate of requests."""
    now = timezone.now()
    if key.last_used_at is not None and key.last_used_at > now - LAST_USED_EVERY:
        return
    stale = Q(last_used_at__isnull=True) | Q(last_used_at__lte=now - LAST_USED_EVERY)
    ApiKey.objects.filter(stale, pk=key.pk).update(last_used_at=now)
