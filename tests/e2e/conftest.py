"""One running service for all end-to-end tests: every process of it is real, in a ``var/`` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.embedded.stack import Stack
from tests.e2e.service import Service
from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Service]:
    """Two devices of two threads, which jobs share however slow the machine makes them by that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JIGSAW_CPU_DEVICE_THREADS", "2")
        patch.setenv("JIGSAW_POLICY", "lookahead")
        patch.setenv("JIGSAW_LATENCY_CAP", "10")
        with Stack(tmp_path_factory.mktemp("var"), port=0, cpus=4, models=False, console=None) as stack:
            running = Service(stack)
            running.manage("model_add", "tiny", str(tiny_folder))
            running.calibrate("tiny")
            yield running
