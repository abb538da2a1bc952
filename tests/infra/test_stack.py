from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infra.embedded import postgres, ray_head, valkey
from infra.embedded.stack import Stack, embedded
from infra.embedded.supervisor import StartFailed


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, (postgres, valkey, ray_head)),
        ({"DATABASE_URL": "postgresql://db/jigsaw"}, (valkey, ray_head)),
        ({"REDIS_URL_FILE": "/run/secrets/redis"}, (postgres, ray_head)),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "DATABASE_URL": ""}, (postgres, valkey)),
        ({"DATABASE_URL": "x", "REDIS_URL": "y", "RAY_ADDRESS": "z"}, ()),
    ],
)
def test_what_is_given_is_not_started(given: dict[str, str], left: tuple[object, ...]) -> None:
    assert embedded(given) == left


def test_a_taken_port_is_told_at_once(var: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=f"port {port} on 127.0.0.1 cannot be used"):
            Stack(var, port=port, console=None).start()
    assert list((var / "run").glob("*.pid")) == []
    assert not (var / "postgres").exists()
