"""Making and changing organizations, members and keys."""

from __future__ import annotations

import secrets
import string

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.text import slugify

from backend.common.errors import InvalidRequest
from backend.tenants.access import Actor, api_key_digest, require_admin
from backend.tenants.models import ApiKey, Membership, Organization, Role, User

KEY_PREFIX = "jsk-"
_ALPHABET = string.ascii_letters + string.digits
_SECRET_LENGTH = 32
_VISIBLE = 12
MAX_KEY_NAME = 100


def user_create(*, email: str, password: str | None, name: str = "", is_staff: bool = False) -> User:
    """A person. Without a password nobody can sign in with one."""
    try:
        validate_email(email)
    except ValidationError:
        raise InvalidRequest(f"{email!r} is not an e-mail address.", param="email") from None
    if password is not None:
        try:
            validate_password(password)
        except ValidationError as error:
            raise InvalidRequest(" ".join(error.messages), param="password") from None
    try:
        with transaction.atomic():
            return User.objects.create_user(email, password, name=name, is_staff=is_staff)
    except IntegrityError:
        raise InvalidRequest(f"There is already a user {email}.", param="email", code="exists") from None


@transaction.atomic
def organization_create(
    *, name: str, owner: User | None = None, slug: str | None = None, weight: float = 1.0
) -> Organization:
    """A tenant, with its first owner. The slug comes from the name unless it is given."""
    chosen = slug or slugify(name)[:64]
    if not chosen:
        raise InvalidRequest("An organization's name needs a letter or a digit.", param="name")
    try:
        with transaction.atomic():
            organization = Organization.objects.create(name=name, slug=chosen, weight=weight)
    except IntegrityError:
        raise InvalidRequest(
            f"There is already an organization {chosen!r}.", param="slug", code="exists"
        ) from None
    if owner is not None:
        member_add(organization=organization, user=owner, role=Role.OWNER)
    return organization


def member_add(*, organization: Organization, user: User, role: Role = Role.MEMBER) -> Membership:
    """Put a person into an organization, or give the member another role."""
    membership, _ = Membership.objects.update_or_create(
        organization=organization, user=user, defaults={"role": role}
    )
    return membership


def api_key_create(*, actor: Actor, name: str, role: Role = Role.MEMBER) -> tuple[ApiKey, str]:
    """A key and its secret. The secret is never seen again: only its digest is kept."""
    require_admin(actor)
    if role is Role.OWNER and actor.role is not Role.OWNER:
        raise InvalidRequest("Only an owner can make a key with the role of an owner.", param="role")
    return api_key_issue(organization=actor.organization, name=name, role=role, created_by=actor.user)


def api_key_issue(
    *, organization: Organization, name: str, role: Role = Role.MEMBER, created_by: User | None = None
) -> tuple[ApiKey, str]:
    """The same on behalf of the service itself."""
    name = name.strip()
    if not name:
        raise InvalidRequest("A key needs a name.", param="name")
    if len(name) > MAX_KEY_NAME or not name.isprintable():
        raise InvalidRequest(f"A key's name is one line of at most {MAX_KEY_NAME} characters.", param="name")
    secret = KEY_PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_LENGTH))
    key = ApiKey.objects.create(
        organization=organization,
        created_by=created_by,
        name=name,
        prefix=secret[:_VISIBLE],
        digest=api_key_digest(secret),
        role=role,
    )
    return key, secret


def api_key_revoke(*, actor: Actor, key: ApiKey) -> bool:
    """From now on the key opens nothing; False when it already did not."""
    require_admin(actor)
    return bool(
        ApiKey.objects.filter(pk=key.pk, organization=actor.organization, revoked_at__isnull=True).update(
            revoked_at=timezone.now()
        )
    )
