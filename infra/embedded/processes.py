"""Who is running, remembered across processes, and how to end it with everything it started.

A pid alone names nobody: it may belong to another process by the time it is read back. A record is therefore
the pid *and* the time that process started. What belongs to a process is its session (every service starts
its own, and members keep it even when their parent dies) together with all descendants.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int = field(compare=False)
    session: int = field(compare=False)
    started: str


def _from_proc(pid: int) -> Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may hold blanks and parentheses itself.
    state, parent, _group, session, *rest = stat.rpartition(")")[2].split()
    if state in "ZX":
        return None
    return Process(pid, int(parent), int(session), rest[15])


def _from_ps(arguments: list[str]) -> list[Process]:
    columns = "pid=,ppid=,pgid=,state=,lstart="
    answer = subprocess.run(["ps", *arguments, "-o", columns], capture_output=True, text=True, timeout=10)
    found = []
    for line in answer.stdout.splitlines():
        pid, parent, group, state, *started = line.split()
        if not state.startswith("Z"):
            # macOS shows no session ids; the group is the nearest it has.
            found.append(Process(int(pid), int(parent), int(group), " ".join(started)))
    return found


def look_up(pid: int) -> Process | None:
    """The live process with this pid; a zombie counts as gone."""
    if _HAS_PROC:
        return _from_proc(pid)
    return next(iter(_from_ps(["-p", str(pid)])), None)


def everyone() -> list[Process]:
    if not _HAS_PROC:
        return _from_ps(["-ax"])
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    return [process for pid in pids if (process := _from_proc(pid))]


def command_line(pid: int) -> str:
    """The command as it was started, arguments joined by blanks; empty if it is gone."""
    if _HAS_PROC:
        try:
            return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    answer = subprocess.run(
        ["ps", "-p", str(pid), "-o", "command="], capture_output=True, text=True, timeout=10
    )
    return answer.stdout


def family(root: int) -> set[Process]:
    """The process, its session and all descendants: those that are alive now."""
    processes = everyone()
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    members = {process for process in processes if root in (process.session, process.pid)}
    pending = list(members)
    while pending:
        for child in children.get(pending.pop().pid, ()):
            if child not in members:
                members.add(child)
                pending.append(child)
    return members


def remember(record: Path, pid: int, **facts: str | int) -> None:
    """Write who runs; readers see the whole record or none."""
    process = look_up(pid)
    started = process.started if process else ""
    record.parent.mkdir(parents=True, exist_ok=True)
    fresh = record.with_name(f"{record.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"pid": pid, "started": started, **facts}))
    fresh.replace(record)


def read(record: Path) -> dict[str, str | int] | None:
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "pid" in found else None


def recall(record: Path) -> int | None:
    """The recorded pid if that very process still runs."""
    found = read(record)
    if found is None:
        return None
    process = look_up(int(found["pid"]))
    return process.pid if process and process.started == found["started"] else None


def survivors(record: Path) -> set[Process]:
    """What still runs of the recorded process, even if only its session outlived it."""
    found = read(record)
    if found is None:
        return set()
    leader = look_up(int(found["pid"]))
    if leader and leader.started != found["started"]:
        return set()
    return family(int(found["pid"]))


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Whether the condition came true within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ask_to_end(record: Path, number: signal.Signals, seconds: float) -> bool:
    """Send one signal to the recorded process alone; whether it ended within the time."""
    pid = recall(record)
    if pid is not None:
        _send({pid}, number)
    return wait_until(lambda: recall(record) is None, seconds)


def end(record: Path, polite: Sequence[tuple[signal.Signals, float]] = ((signal.SIGTERM, 5.0),)) -> None:
    """Stop a recorded process and all it started: each polite signal with its patience, then SIGKILL.

    Polite signals go to the process itself, which knows best how to end its children; SIGKILL goes to
    whoever is left of its family, again and again until nobody is.
    """
    found = read(record)
    if found is None:
        return
    root = int(found["pid"])
    # A descendant in a session of its own is found through its parent only while that one lives: remember
    # everyone seen from the first moment on.
    seen = survivors(record)

    def is_gone() -> bool:
        _reap(root)
        return recall(record) is None

    for number, seconds in polite:
        if is_gone():
            break
        _send({root}, number)
        wait_until(is_gone, seconds)

    def nobody_left() -> bool:
        _reap(root)
        seen.update(survivors(record))
        seen.intersection_update(everyone())
        _send({process.pid for process in seen}, signal.SIGKILL)
        return not seen

    if not wait_until(nobody_left, 10.0):
        raise RuntimeError(f"processes {sorted(process.pid for process in seen)} of {record} do not end")
    record.unlink(missing_ok=True)


def spawn(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, without a terminal, its output appended to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [os.fspath(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            cwd=cwd,
        )


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it if we die. TimeoutError if others keep it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if not wait_until(lambda: try_lock(file.fileno()), seconds):
            raise TimeoutError(f"another process has held {path} for {seconds:.0f} seconds")
        yield


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
