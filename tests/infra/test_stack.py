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


def test_what_comes_round_waits_for_no_check_of_data(var: Path) -> None:
    """Every queue that tasks are routed to has a worker, and checks have one to themselves."""
    from backend.celery import app

    app.loader.import_default_modules()
    programs = {
        program.name: list(program.command) for program in Stack(var)._programs(("python", "manage.py"))
    }
    readers = {
        command[command.index("-Q") + 1]: name for name, command in programs.items() if "-Q" in command
    }
    read_by = {
        name: readers[app.amqp.router.route({}, name)["queue"].name]
        for name in app.tasks
        if not name.startswith("celery.")
    }
    assert read_by.pop("backend.jobs.tasks.validate_job") == "validator"
    assert read_by.pop("backend.jobs.trials.try_grader") == "grader"
    assert set(read_by.values()) == {"periodic"}


def test_what_comes_round_is_dropped_when_its_next_turn_has_come() -> None:
    from backend.celery import app

    app.loader.import_default_modules()
    app.finalize()
    for name, entry in app.conf.beat_schedule.items():
        assert entry["options"]["expires"] == entry["schedule"], name


def test_a_taken_port_is_told_at_once(var: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=f"port {port} on 127.0.0.1 cannot be used"):
            Stack(var, port=port, console=None).start()
    assert list((var / "run").glob("*.pid")) == []
    assert not (var / "postgres").exists()
