"""pytest plugin: each run has a ``var/`` and services of its own, and leaves neither folder nor process.

Loaded by ``-p`` (see ``addopts``), because pytest-django reads the settings, and with them ``JIGSAW_VAR``,
before any conftest. Services start when a test first asks for them. A ``JIGSAW_VAR`` given from outside is
used as it is and kept; ``DATABASE_URL``, ``REDIS_URL`` and ``RAY_ADDRESS`` replace the services as always.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.embedded import hold, paths, postgres, processes, ray_head, sweep, valkey

_OWN_VAR: Path | None = None

if "JIGSAW_VAR" not in os.environ:
    _OWN_VAR = paths.PROJECT / "var" / "test" / str(os.getpid())
    os.environ["JIGSAW_VAR"] = str(_OWN_VAR)


def _remove_dead_runs(folder: Path) -> None:
    """Folders of runs that were killed; their guards have stopped their services."""
    for run in folder.glob("*"):
        if run.name.isdigit() and processes.look_up(int(run.name)) is None:
            shutil.rmtree(run, ignore_errors=True)


@pytest.fixture(scope="session")
def services_var() -> Iterator[Path]:
    """The run's folder; whatever was started in it is stopped at the end, also if we are killed."""
    var = paths.var_dir()
    if _OWN_VAR is not None:
        _remove_dead_runs(_OWN_VAR.parent)
    var.mkdir(parents=True, exist_ok=True)
    guard = hold.start_guard(var)
    yield var
    sweep.everything(var)
    hold.dismiss_guard(guard)
    if _OWN_VAR is not None:
        shutil.rmtree(_OWN_VAR, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(services_var: Path) -> str:
    return os.environ.get("DATABASE_URL") or postgres.ensure(services_var, durable=False)


@pytest.fixture(scope="session")
def redis_url(services_var: Path) -> str:
    return os.environ.get("REDIS_URL") or valkey.ensure(services_var)


@pytest.fixture(scope="session")
def ray_address(services_var: Path) -> str:
    """Address of a Ray with as many CPUs as there are; set what ray needs before it is imported."""
    if "RAY_ADDRESS" not in os.environ:
        ray_head.ensure(services_var, os.cpu_count() or 1, object_store_bytes=300_000_000)
        os.environ.update(ray_head.environment(services_var))
    return os.environ["RAY_ADDRESS"]
