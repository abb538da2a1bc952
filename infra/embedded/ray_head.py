"""A Ray head of our own under ``var/``, for when no ``RAY_ADDRESS`` is given.

``ray start --head --block`` runs in a session of its own and keeps its processes as children, so stopping it
is ending that family; ``ray stop`` would end every Ray of this machine. It listens on the loopback only, on
free ports, and asks every client for the token in ``var/run/ray_token``: whoever reaches a Ray head without
one may run code as us. ``environment(var)`` is what a client needs, in ``os.environ`` before ``import ray``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.embedded import paths, processes

OBJECT_STORE_BYTES = 1_000_000_000

# The longest socket Ray makes below its folder, for a pid of seven digits.
_LONGEST = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.0"
_START_SECONDS = 90.0
_STARTED = "Ray runtime started."
# Tenants' code runs below Ray: the keys of the database, the queue and the sessions stay out of it.
_WITHHELD = ("DATABASE_URL", "REDIS_URL", "JIGSAW_SECRET_KEY", "PG", "DJANGO_")


def ensure(var: Path, cpus: int, object_store_bytes: int = OBJECT_STORE_BYTES) -> str:
    """Make sure our head runs; returns its address, ``127.0.0.1:port``. A running one keeps its size."""
    with processes.locked(_lock(var), _START_SECONDS * 2):
        address = running(var)
        if address is None:
            processes.end(_record(var), ())
            address = _start(var, cpus, object_store_bytes)
    return address


def running(var: Path) -> str | None:
    """Address of our head if it runs and is ready."""
    if processes.recall(_record(var)) is None:
        return None
    try:
        return (_folder(var) / "address").read_text().strip()
    except OSError:
        return None


def stop(var: Path) -> None:
    """End exactly our Ray's processes, workers included; nothing happens if none run."""
    with processes.locked(_lock(var), _START_SECONDS * 2):
        processes.end(_record(var), ((signal.SIGTERM, 5.0),))
        (_folder(var) / "address").unlink(missing_ok=True)
        paths.drop_socket_folder(_folder(var), _LONGEST)


def environment(var: Path) -> dict[str, str]:
    """Variables a process needs, before it imports ray, to speak to our head and to write nowhere else."""
    address = running(var)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_token(var)),
        # Ray turns 127.0.0.1 into the machine's outer address, and listens there, unless this is off.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(paths.socket_folder(_folder(var), _LONGEST)),
        **({"RAY_ADDRESS": address} if address else {}),
    }


def _folder(var: Path) -> Path:
    """Below ``run/``, which is ours alone: Ray opens its own folder, with its sockets, to everybody."""
    return var / "run" / "ray"


def _record(var: Path) -> Path:
    return var / "run" / "ray.pid"


def _lock(var: Path) -> Path:
    return var / "run" / "ray.lock"


def _token(var: Path) -> Path:
    return var / "run" / "ray_token"


def _log(var: Path) -> Path:
    return var / "logs" / "ray.log"


def _make_token(var: Path) -> None:
    token = _token(var)
    if not token.exists():
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))


def _drop_old_sessions(folder: Path) -> None:
    """Ray keeps every session's folder; keep the last, whose logs somebody may still want to read."""
    sessions = sorted(path for path in folder.glob("session_2*") if path.is_dir())
    for session in sessions[:-1]:
        shutil.rmtree(session, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _head_environment(var: Path) -> dict[str, str]:
    """What the head and, through it, every worker inherits."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_WITHHELD)}
    path = os.pathsep.join(filter(None, [str(paths.PROJECT), kept.get("PYTHONPATH")]))
    # Spinning barriers of a second OpenMP thread stall for most of a second when the other core is busy.
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    ours = {
        "PYTHONPATH": path,
        "TMPDIR": str(paths.scratch_dir(var)),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    head = {name: value for name, value in environment(var).items() if name != "RAY_ADDRESS"}
    return threads | kept | ours | head


def _plasma_folder(var: Path, size: int) -> Path | None:
    """A folder for the object store where /dev/shm is too small, as it is in many containers."""
    shared = Path("/dev/shm")  # noqa: S108
    if sys.platform == "darwin" or (shared.is_dir() and shutil.disk_usage(shared).free > size):
        return None
    return _folder(var) / "plasma"


def _command(var: Path, port: int, cpus: int, object_store_bytes: int) -> list[str]:
    plasma = _plasma_folder(var, object_store_bytes)
    if plasma:
        plasma.mkdir(parents=True, exist_ok=True)
    return [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
        *("start", "--head", "--block", "--node-name=local", "--node-ip-address=127.0.0.1", f"--port={port}"),
        *(f"--num-cpus={cpus}", f"--object-store-memory={object_store_bytes}"),
        f"--temp-dir={paths.socket_folder(_folder(var), _LONGEST)}",
        *("--include-dashboard=false", "--dashboard-agent-listen-port=0", "--disable-usage-stats"),
        *("--include-log-monitor=false", "--log-color=false"),
        *([f"--plasma-directory={plasma}"] if plasma else []),
    ]


def _start(var: Path, cpus: int, object_store_bytes: int) -> str:
    _make_token(var)
    (var / "run").chmod(0o700)
    paths.make_socket_folder(_folder(var), _LONGEST)
    _drop_old_sessions(_folder(var))
    (_folder(var) / "address").unlink(missing_ok=True)
    environment_ = _head_environment(var)
    for _attempt in range(3):
        port = _free_port()
        if _comes_up(var, _command(var, port, cpus, object_store_bytes), environment_):
            address = f"127.0.0.1:{port}"
            (_folder(var) / "address").write_text(address)
            return address
        # Another process may have taken the port in between.
        processes.end(_record(var), ())
    raise RuntimeError(f"Ray did not start; end of {_log(var)}:\n{processes.tail(_log(var), 30)}")


def _comes_up(var: Path, command: list[str], environment_: Mapping[str, str]) -> bool:
    log = _log(var)
    begin = log.stat().st_size if log.exists() else 0
    head = processes.spawn(command, log, env=environment_, cwd=paths.PROJECT)
    processes.remember(_record(var), head.pid)

    def has_started() -> bool:
        with log.open("rb") as file:
            file.seek(begin)
            return _STARTED.encode() in file.read()

    processes.wait_until(lambda: has_started() or head.poll() is not None, _START_SECONDS, pause=0.05)
    return head.poll() is None and has_started()
