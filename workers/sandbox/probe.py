"""Which isolation holds on this machine, found out by trying to get out of it."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workers.sandbox.isolation import Isolation
from workers.sandbox.process import SandboxProcess
from workers.sandbox.replies import ReplyMissing

log = logging.getLogger(__name__)

#: Names the means that may be used, the best first; ``none`` for none.
SETTING = "JIGSAW_SANDBOX"
TIMEOUT_S = 20.0
ADVICE = "Install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap), or run Linux 6.2 or later."
ATTEMPTS = """
import os, socket

def attempts(outside, parent):
    yield "reads files", lambda: open(outside).read()
    yield "writes files", lambda: open(outside, "a")
    yield "opens sockets", lambda: socket.socket()
    yield "starts processes", lambda: os.fork() or os._exit(0)
    yield "signals others", lambda: os.kill(parent, 0)

def escapes(outside, parent):
    done = []
    for name, attempt in attempts(outside, parent):
        try:
            attempt()
        except OSError:
            continue
        done.append(name)
    return done
"""


@dataclass(frozen=True)
class Found:
    """The isolation in use, None when tenants' code is refused; ``text`` says so to the operator."""

    kind: Isolation | None
    text: str


def isolation() -> Found:
    """What keeps tenants' code apart in this process's sandboxes; tried once, and logged."""
    return found(os.environ.get(SETTING, "bubblewrap,landlock"))


@cache
def found(setting: str) -> Found:
    names = [name.strip() for name in setting.split(",") if name.strip() not in ("", "none")]
    unknown = [name for name in names if name not in set(Isolation)]
    if unknown:
        raise ValueError(f"{SETTING} names {unknown[0]!r}; known are {', '.join(Isolation)} and none")
    problems = []
    for kind in map(Isolation, names):
        problem = tried(kind)
        if problem is None:
            result = Found(kind, f"tenants' code runs under {kind}" + "".join(f" ({p})" for p in problems))
            log.info(result.text)
            return result
        problems.append(f"{kind}: {problem}")
    why = "; ".join(problems) or f"{SETTING} allows none"
    result = Found(None, f"tenants' code is refused: no isolation works on this machine ({why}). {ADVICE}")
    log.error(result.text)
    return result


@cache
def tried(kind: Isolation) -> str | None:
    """What is wrong with this isolation here; None when it holds."""
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder) / "outside"
        outside.write_text("secret")
        for path in (Path(folder), outside):
            path.chmod(0o777)  # so that it is the isolation that keeps it closed
        try:
            process = SandboxProcess(kind)
        except OSError as error:
            return str(error)
        try:
            process.greet()
            failure = process.load(ATTEMPTS, TIMEOUT_S)
            result = failure or process.call("escapes", [str(outside), os.getpid()], TIMEOUT_S)
        except ReplyMissing as missing:
            return str(missing)
        finally:
            process.kill()
    if result.error is not None:
        return result.error
    return f"a process in it {' and '.join(result.value)}" if result.value else None
