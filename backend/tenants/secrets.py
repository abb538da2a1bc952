"""Secrets of an organization: named values that its graders and environments need, and that nothing shows.

A value comes in by ``secret_put`` and leaves by ``secrets_open`` only, for a launch or a grader's trial run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from django.db import transaction
from pydantic import SecretStr

from backend.common.errors import InvalidRequest, LimitReached, NotFound
from backend.tenants.access import Actor, require_write
from backend.tenants.models import Organization, Secret
from backend.tenants.vault import Unreadable, seal, unseal

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
MAX_VALUE = 4_096
MAX_SECRETS = 100


@transaction.atomic
def secret_put(*, actor: Actor, name: str, value: str) -> Secret:
    """Keep a value under a name; one that is there already is replaced, so that keys can be changed."""
    require_write(actor)
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            "A secret's name has 1 to 64 letters, digits, _ and -, and begins with a letter.", param="name"
        )
    if not value or len(value) > MAX_VALUE or not value.isprintable():
        raise InvalidRequest(
            f"A secret's value is one line of 1 to {MAX_VALUE:,} printable characters.", param="value"
        )
    # One at a time of an organization, for the count to hold.
    Organization.objects.select_for_update().get(pk=actor.organization.pk)
    kept = actor.organization.secrets.exclude(name=name).count()
    if kept >= MAX_SECRETS:
        raise LimitReached(f"The organization has {MAX_SECRETS} secrets, which is the limit.")
    secret, _ = Secret.objects.update_or_create(
        organization=actor.organization,
        name=name,
        defaults={"token": seal(value), "created_by": actor.user},
    )
    return secret


def secret_delete(*, actor: Actor, secret: Secret) -> None:
    """Forget it, whatever still needs it: to take a value back is more urgent than a job."""
    require_write(actor)
    secret.delete()


def secret_access(actor: Actor, name: str, write: bool = False) -> Secret:
    secret = actor.organization.secrets.filter(name=name).first() if NAME.fullmatch(name) else None
    if secret is None:
        raise NotFound(f"There is no secret {name!r}.")
    if write:
        require_write(actor)
    return secret


def secrets_all(organization: Organization) -> list[Secret]:
    """By name."""
    return list(organization.secrets.defer("token").order_by("name"))


def secrets_missing(organization: Organization, names: Collection[str]) -> list[str]:
    """Which of the names the organization has no secret of."""
    if not names:
        return []
    known = set(organization.secrets.filter(name__in=names).values_list("name", flat=True))
    return sorted(set(names) - known)


def secrets_open(organization: Organization, names: Collection[str]) -> dict[str, SecretStr]:
    """The values by name, as far as there are any: what needs another says itself that it is missing."""
    found: dict[str, SecretStr] = {}
    for row in organization.secrets.filter(name__in=names):
        try:
            found[row.name] = SecretStr(unseal(row.token))
        except Unreadable:
            log.error("the secret %s of %s was sealed with another key", row.name, organization.public_id)
    return found
