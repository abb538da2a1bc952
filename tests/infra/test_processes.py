from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from infra.embedded import processes

# A child, and a grandchild in a session of its own that no group signal reaches.
FAMILY = "setsid sleep 1000 & sleep 1000 & echo up; wait"


def spawn_family(var: Path, record: Path) -> set[processes.Process]:
    root = processes.spawn(["sh", "-c", FAMILY], var / "family.log")
    processes.remember(record, root.pid)
    assert processes.wait_until(lambda: len(processes.family(root.pid)) == 3, 10)
    return processes.family(root.pid)


def alive(members: set[processes.Process]) -> set[processes.Process]:
    return members & set(processes.everyone())


def test_end_reaches_other_sessions(var: Path) -> None:
    record = var / "family.pid"
    members = spawn_family(var, record)
    processes.end(record)
    assert alive(members) == set()
    assert not record.exists()


def test_end_finds_the_session_of_a_dead_leader(var: Path) -> None:
    record = var / "leader.pid"
    leader = processes.spawn(["sh", "-c", "sleep 1000 & wait"], var / "leader.log")
    processes.remember(record, leader.pid)
    assert processes.wait_until(lambda: len(processes.family(leader.pid)) == 2, 10)
    members = processes.family(leader.pid)
    leader.kill()
    leader.wait()
    assert processes.recall(record) is None
    assert len(alive(members)) == 1
    processes.end(record)
    assert alive(members) == set()


def test_end_forces_who_ignores_the_polite_signal(var: Path) -> None:
    record = var / "stubborn.pid"
    stubborn = processes.spawn(["sh", "-c", "trap '' TERM; echo up; sleep 1000"], var / "stubborn.log")
    processes.remember(record, stubborn.pid)
    assert processes.wait_until(lambda: "up" in processes.tail(var / "stubborn.log"), 10)
    processes.end(record, ((signal.SIGTERM, 0.1),))
    assert processes.look_up(stubborn.pid) is None


def test_a_reused_pid_is_left_alone(var: Path) -> None:
    record = var / "reused.pid"
    record.write_text(f'{{"pid": {os.getpid()}, "started": "1"}}')
    assert processes.recall(record) is None
    assert processes.survivors(record) == set()
    processes.end(record)
    assert not record.exists()


def test_a_broken_record_names_nobody(var: Path) -> None:
    record = var / "broken.pid"
    record.write_text("{")
    assert processes.recall(record) is None
    processes.end(record)


def test_lock_times_out_with_the_name_of_the_file(var: Path) -> None:
    path = var / "a.lock"
    began = time.monotonic()
    with (
        processes.locked(path, 1.0),
        pytest.raises(TimeoutError, match=r"a\.lock"),
        processes.locked(path, 0.05),
    ):
        pass
    assert time.monotonic() - began < 1.0
