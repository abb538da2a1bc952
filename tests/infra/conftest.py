"""A folder per test; whatever still runs in it at the end is stopped."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.embedded import paths, processes, sweep


@pytest.fixture
def var() -> Iterator[Path]:
    """In a short place: below a long one, sockets lie elsewhere (what that does has tests of its own)."""
    with tempfile.TemporaryDirectory(prefix="jigsaw-", dir="/tmp") as short:
        folder = Path(short) / "var"
        folder.mkdir()
        yield folder
        sweep.everything(folder)


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that can import the project and whose output is read."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=paths.PROJECT,
        start_new_session=True,
    )


def commands_with(text: str) -> list[str]:
    """Command lines of live processes that contain the text."""
    lines = [processes.command_line(process.pid) for process in processes.everyone()]
    return [line for line in lines if text in line]
