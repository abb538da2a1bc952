from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg
import pytest

from infra.embedded import paths, postgres, processes
from tests.infra.conftest import commands_with, start_python

START = """
import sys
from pathlib import Path
from infra.embedded import postgres
print(postgres.ensure(Path(sys.argv[1]), durable=False))
"""


def query(var: Path, sql: str) -> tuple[object, ...] | None:
    with psycopg.connect(postgres.url(var)) as connection:
        return connection.execute(sql).fetchone()


def test_url_starts_nothing(var: Path) -> None:
    assert postgres.url(var) == f"postgresql://app@/jigsaw?host={var}/run/postgres"
    assert list(var.iterdir()) == []


def test_several_cold_starters_make_one_server(var: Path) -> None:
    starters = [start_python(START, var) for _ in range(4)]
    for starter in starters:
        output, _ = starter.communicate(timeout=90)
        assert (starter.returncode, output.strip()) == (0, postgres.url(var))
    assert len(commands_with(f"-D {var}/postgres")) == 1


def test_app_obeys_row_level_security(var: Path) -> None:
    postgres.ensure(var, durable=False)
    role = query(var, "SELECT rolsuper, rolbypassrls, rolcreatedb FROM pg_roles WHERE rolname = current_user")
    assert role == (False, False, True)
    assert query(var, "SELECT current_user::text, current_database()::text") == ("app", "jigsaw")
    assert query(var, "SHOW listen_addresses") == ("",)


def test_fsync_is_off_only_when_asked(var: Path) -> None:
    postgres.ensure(var)
    assert query(var, "SHOW fsync") == ("on",)
    postgres.stop(var)
    postgres.ensure(var, durable=False)
    assert query(var, "SHOW fsync") == ("off",)


def test_rows_survive_kill_9(var: Path) -> None:
    postgres.ensure(var)
    with psycopg.connect(postgres.url(var)) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    pid = postgres.running(var)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    postgres.ensure(var)
    assert query(var, "SELECT number FROM kept") == (7,)
    assert postgres.running(var) != pid


def test_stale_pid_file_of_another_process_is_no_obstacle(var: Path) -> None:
    postgres.ensure(var, durable=False)
    pid_file = var / "postgres" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    postgres.stop(var)
    # Our own pid: alive, and not a PostgreSQL.
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    postgres.ensure(var, durable=False)
    assert postgres.running(var) not in (None, os.getpid())
    postgres.stop(var)
    assert processes.look_up(os.getpid()) is not None


def test_half_made_data_is_made_anew(var: Path) -> None:
    leftover = var / "postgres.new.abc"
    leftover.mkdir()
    (leftover / "PG_VERSION").write_text("18\n")
    postgres.ensure(var, durable=False)
    assert not leftover.exists()


def test_stop_leaves_no_process_and_may_be_repeated(var: Path) -> None:
    postgres.ensure(var, durable=False)
    postgres.stop(var)
    postgres.stop(var)
    assert commands_with(f"{var}/postgres") == []
    assert postgres.running(var) is None


def test_path_too_long_for_a_socket(var: Path) -> None:
    deep = var / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    url = postgres.ensure(deep, durable=False)
    link = Path(url.partition("host=")[2])
    try:
        assert len(str(link)) < 40
        assert link.readlink() == deep / "run" / "postgres"
        assert query(deep, "SELECT 1") == (1,)
    finally:
        postgres.stop(deep)
    assert not link.is_symlink()


def test_a_foreign_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100)
    link = paths.socket_folder(folder, "socket")
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(RuntimeError, match="is not our link"):
            paths.make_socket_folder(folder, "socket")
    finally:
        link.unlink()
