"""``manage.py up`` whole, with every real part."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.embedded import paths, processes
from tests.infra.conftest import commands_with

pytestmark = pytest.mark.slow


@pytest.fixture
def up(var: Path) -> Iterator[subprocess.Popen[str]]:
    given = {"DATABASE_URL", "REDIS_URL", "RAY_ADDRESS"}
    env = {name: value for name, value in os.environ.items() if name not in given}
    process = subprocess.Popen(
        [sys.executable, "manage.py", "up", "--port", "0", "--no-models"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=paths.PROJECT,
        env=env | {"JIGSAW_VAR": str(var)},
        start_new_session=True,
    )
    yield process
    process.kill()
    process.wait()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"ended without {pattern!r}:\n{''.join(seen[-40:])}")


def status(host: str, path: str) -> int:
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.request("GET", path)
    return connection.getresponse().status


def test_serves_and_one_ctrl_c_leaves_nothing(var: Path, up: subprocess.Popen[str]) -> None:
    host = read_until(up, r"Console +http://(\S+)")[1]
    assert read_until(up, r"Sign in +(\S+)")[1]
    assert status(host, "/healthz") == 200
    members = processes.family(up.pid)
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=90)
    assert up.returncode == 0, output
    assert "stopped; no process is left" in output
    assert members & set(processes.everyone()) == set()
    assert commands_with(str(var)) == []


@pytest.mark.parametrize("moment", [r"postgres is ready", r"^migrate", r"ray_head is ready"])
def test_ctrl_c_during_the_start_leaves_nothing(var: Path, up: subprocess.Popen[str], moment: str) -> None:
    read_until(up, moment)
    members = processes.family(up.pid)
    up.send_signal(signal.SIGTERM)
    output, _ = up.communicate(timeout=90)
    assert up.returncode == 0, output
    assert members & set(processes.everyone()) == set()
    assert commands_with(str(var)) == []
