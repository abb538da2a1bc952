from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from infra.embedded import processes, ray_head
from tests.infra.conftest import start_python

pytestmark = pytest.mark.slow

CLIENT = """
import json, os, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")

@ray.remote
def look():
    import workers.protocol
    names = ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RAY_AUTH_MODE", "DATABASE_URL", "JIGSAW_SECRET_KEY"]
    return {name: os.environ.get(name) for name in names}

print(json.dumps(ray.get(look.remote(), timeout=60)))
"""


def test_head_serves_its_own_clients_and_ends_with_its_workers(
    var: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("JIGSAW_SECRET_KEY", "secret")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = ray_head.ensure(var, cpus=1, object_store_bytes=100_000_000)
    assert ray_head.ensure(var, cpus=1) == address == ray_head.running(var)
    # Ray opens its own folder to everybody; what is above it does not.
    assert (var / "run").stat().st_mode & 0o777 == 0o700
    assert stat.S_IMODE((var / "run" / "ray_token").stat().st_mode) == 0o600

    for name, value in ray_head.environment(var).items():
        monkeypatch.setenv(name, value)
    client = start_python(CLIENT, address)
    output, _ = client.communicate(timeout=120)
    assert json.loads(output.splitlines()[-1]) == {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "RAY_AUTH_MODE": "token",
        "DATABASE_URL": None,
        "JIGSAW_SECRET_KEY": None,
    }

    # Without the token there is no way in.
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/dev/null")
    stranger = start_python(CLIENT, address)
    output, _ = stranger.communicate(timeout=120)
    assert stranger.returncode != 0

    pid = processes.recall(var / "run" / "ray.pid")
    assert pid is not None
    members = processes.family(pid)
    assert len(members) >= 4
    # Even when the process that would end the others was killed.
    os.kill(pid, signal.SIGKILL)
    ray_head.stop(var)
    assert members & set(processes.everyone()) == set()
    assert ray_head.running(var) is None
