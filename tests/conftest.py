"""Fixtures that everybody shares. Services come from the plugin ``infra.embedded.pytest_services``."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    postgres_url: str, django_db_modify_db_settings_parallel_suffix: None
) -> None:
    """pytest-django asks for this before it makes the test database: the server must run by then."""
