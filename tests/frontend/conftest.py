"""Two tenants with people signed in at the console, and a stranger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from django.test import Client

from backend.jobs.models import Job
from backend.tenants.models import Organization, Role, User
from tests import factories


@dataclass(frozen=True)
class Tenant:
    organization: Organization
    user: User
    client: Client  # a member, signed in
    viewer: Client


@pytest.fixture(autouse=True)
def folders(settings, tmp_path: Path) -> None:
    """Nothing a test writes lands in var/."""
    settings.FILES_DIR = tmp_path / "files"
    settings.MODELS_DIR = tmp_path / "models"
    settings.CHECKPOINTS_DIR = tmp_path / "checkpoints"


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def make_tenant(name: str) -> Tenant:
    organization = factories.organization(name)
    user = factories.member(organization)
    viewer = factories.member(organization, Role.VIEWER)
    return Tenant(organization, user, signed_in(user), signed_in(viewer))


@pytest.fixture
def acme(db) -> Tenant:
    return make_tenant("Acme")


@pytest.fixture
def northwind(db) -> Tenant:
    return make_tenant("Northwind")


@pytest.fixture
def stranger(db) -> Client:
    """A person who belongs to no organization."""
    return signed_in(factories.user())


@pytest.fixture
def job(acme: Tenant, tmp_path: Path) -> Job:
    return factories.job(acme.organization, tmp_path, name="lighthouse")
