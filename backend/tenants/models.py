"""Who there is: people, organizations (the tenants), who belongs where, and the keys programs use."""

from __future__ import annotations

from django.contrib.auth.base_user import BaseUserManager
from django.contrib.auth.models import AbstractBaseUser, PermissionsMixin
from django.db import models
from django.db.models import Q

from backend.common.ids import new_id


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **fields: object) -> User:
        if not email:
            raise ValueError("a user needs an e-mail address")
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields: object) -> User:
        return self.create_user(email, password, is_staff=True, is_superuser=True, **fields)

    def get_by_natural_key(self, username: str | None) -> User:
        return self.get(email=(username or "").lower())


class User(AbstractBaseUser, PermissionsMixin):
    """A person. ``is_staff`` marks an operator of the service, who sees every tenant."""

    email = models.EmailField(unique=True)
    name = models.CharField(max_length=200, blank=True)
    is_staff = models.BooleanField(default=False)
    is_active = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = UserManager()
    USERNAME_FIELD = "email"

    def __str__(self) -> str:
        return self.email


def organization_id() -> str:
    return new_id("org")


class Organization(models.Model):
    """A tenant: the unit of isolation, fair share, quota and billing."""

    public_id = models.CharField(max_length=40, unique=True, default=organization_id, editable=False)
    name = models.CharField(max_length=200)
    slug = models.SlugField(max_length=64, unique=True)
    weight = models.FloatField(default=1.0, help_text="share of the pool against other tenants")
    max_devices = models.PositiveIntegerField(null=True, blank=True, help_text="ceiling; empty: none")
    service = models.FloatField(default=0.0, help_text="virtual time: device-seconds held / weight")
    created_at = models.DateTimeField(auto_now_add=True)
    members = models.ManyToManyField(User, through="Membership", related_name="organizations")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(weight__gt=0), name="organization_weight_positive"),
        ]

    def __str__(self) -> str:
        return self.name


class Role(models.TextChoices):
    OWNER = "owner", "Owner"
    ADMIN = "admin", "Admin"
    MEMBER = "member", "Member"
    VIEWER = "viewer", "Viewer"

    @property
    def can_write(self) -> bool:
        return self is not Role.VIEWER


class Membership(models.Model):
    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.MEMBER)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "user"], name="membership_once"),
        ]


class Secret(models.Model):
    """A value that graders and environments of the organization need: a password of a tenant's own server.

    ``token`` is the value, encrypted (``tenants.vault``); nothing shows it, and only a launch reads it.
    """

    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="secrets")
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    name = models.CharField(max_length=64)
    token = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "name"], name="secret_name"),
        ]

    def __str__(self) -> str:
        return self.name


class ApiKey(models.Model):
    """A program's key. Only its SHA-256 is kept; the prefix lets a person tell keys apart."""

    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="api_keys")
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=16)
    digest = models.CharField(max_length=64, unique=True)
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.MEMBER)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
