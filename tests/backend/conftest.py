"""Two tenants and a stranger, for every test of the backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from rest_framework.test import APIClient

from backend.tenants.access import Actor
from backend.tenants.models import Organization, Role, User
from tests import factories


@dataclass(frozen=True)
class Tenant:
    organization: Organization
    owner: Actor
    member: Actor
    viewer: Actor
    client: APIClient  # with a member's key
    viewer_client: APIClient


@pytest.fixture(autouse=True)
def folders(settings, tmp_path: Path) -> None:
    """Nothing a test writes lands in var/."""
    settings.FILES_DIR = tmp_path / "files"
    settings.MODELS_DIR = tmp_path / "models"
    settings.CHECKPOINTS_DIR = tmp_path / "checkpoints"


@pytest.fixture
def acme(db) -> Tenant:
    return make_tenant("Acme")


@pytest.fixture
def northwind(db) -> Tenant:
    return make_tenant("Northwind")


@pytest.fixture
def stranger(db) -> User:
    """A person who belongs to no organization."""
    return factories.user()


@pytest.fixture
def anonymous() -> APIClient:
    return APIClient()


def make_tenant(name: str) -> Tenant:
    organization = factories.organization(name)
    return Tenant(
        organization=organization,
        owner=factories.actor(organization, Role.OWNER),
        member=factories.actor(organization, Role.MEMBER),
        viewer=factories.actor(organization, Role.VIEWER),
        client=client_of(organization, Role.MEMBER),
        viewer_client=client_of(organization, Role.VIEWER),
    )


def client_of(organization: Organization, role: Role) -> APIClient:
    client = APIClient()
    _, secret = factories.api_key(organization, role)
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client
