"""Fixtures that everybody shares. Services come from the plugin ``infra.embedded.pytest_services``."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Generated cases are the same in every run, so that a failure is of the change that is tested;
# ``--hypothesis-profile explore`` looks at new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("same")


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    postgres_url: str, django_db_modify_db_settings_parallel_suffix: None
) -> None:
    """pytest-django asks for this before it makes the test database: the server must run by then."""
