from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import redis

from infra.embedded import processes, valkey
from tests.infra.conftest import commands_with, start_python

START = """
import sys
from pathlib import Path
from infra.embedded import valkey
print(valkey.ensure(Path(sys.argv[1])))
"""


def test_celery_spells_unix_sockets_its_own_way() -> None:
    assert valkey.celery_url("unix:///var/run/v.sock") == "redis+socket:///var/run/v.sock?virtual_host=0"
    assert valkey.celery_url("redis://queue:6379/1") == "redis://queue:6379/1"
    with pytest.raises(ValueError, match="REDIS_URL must start with"):
        valkey.celery_url("amqp://queue")


def test_several_cold_starters_make_one_server(var: Path) -> None:
    starters = [start_python(START, var) for _ in range(4)]
    for starter in starters:
        output, _ = starter.communicate(timeout=60)
        assert (starter.returncode, output.strip()) == (0, valkey.url(var))
    assert len(commands_with(f"unixsocket:{var}")) == 1


def test_keys_survive_kill_9(var: Path) -> None:
    client = redis.Redis.from_url(valkey.ensure(var))
    client.config_set("appendfsync", "always")
    client.set("kept", "7")
    pid = valkey.running(var)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert processes.wait_until(lambda: valkey.running(var) is None, 10)
    assert redis.Redis.from_url(valkey.ensure(var)).get("kept") == b"7"


def test_stop_leaves_no_process(var: Path) -> None:
    valkey.ensure(var)
    valkey.stop(var)
    valkey.stop(var)
    assert valkey.running(var) is None
    assert commands_with(f"unixsocket:{var}") == []


def test_path_too_long_for_a_socket(var: Path) -> None:
    deep = var / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    client = redis.Redis.from_url(valkey.ensure(deep))
    try:
        assert client.ping()
    finally:
        valkey.stop(deep)
    assert not Path(valkey.url(deep).removeprefix("unix://")).parent.is_symlink()
