"""Keeps a list of programs running: start in order, wait until ready, restart, stop in reverse order.

    waiting ──start──► starting ──ready──► ready
       ▲                  │ exited            │ exited
       └──── back-off ◄───┴───────────────────┘      (at most RESTARTS within WINDOW, then the whole fails)

Every program runs in a session of its own, so that a terminal's Ctrl-C reaches only us and we decide the
order; its output goes line by line to ``var/logs/<name>.log`` and, prefixed, to the console. Its pid and
start time stand in ``var/run/<name>.pid`` for whoever has to clean up if we are killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import TextIO

from infra.embedded import processes

RESTARTS = 5
WINDOW = 120.0
FIRST_PAUSE = 0.5
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class StartFailed(Exception):
    """A program did not become ready, or could not be kept up."""


class Stopped(Exception):
    """A stop was asked for while something was being waited for."""


@dataclass(frozen=True)
class Program:
    """``ready_line``: a line of its output that contains this; ``ready_check``: asked until it is true."""

    name: str
    command: Sequence[str]
    ready_line: str | None = None
    ready_check: Callable[[], bool] | None = None
    ready_seconds: float = 60.0
    stop_seconds: float = 8.0


class Console:
    """Prefixed lines from several threads onto one stream, coloured on a terminal only."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._colour = bool(stream and stream.isatty() and "NO_COLOR" not in os.environ)
        self._names: dict[str, int] = {}

    def line(self, name: str, text: str) -> None:
        if self._stream is None:
            return
        prefix = f"{name:<10}│ "
        with self._lock:
            if self._colour:
                colour = _COLOURS[self._names.setdefault(name, len(self._names)) % len(_COLOURS)]
                prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
            # A console that went away (a closed pipe or terminal) is no reason to stop serving.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"{prefix}{text}\n")
                self._stream.flush()


@dataclass
class _Child:
    program: Program
    kept: bool
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None
    said_ready: bool = False
    start_at: float | None = None
    starts: deque[float] = field(default_factory=deque)


class Supervisor:
    """Not started again once stopped. ``stop`` may be called from any thread and more than once."""

    def __init__(
        self,
        var: Path,
        env: Mapping[str, str],
        cwd: Path,
        console: Console,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.var = var
        self.first_pause = first_pause
        self.env = dict(env)
        self.cwd = cwd
        self.console = console
        self.failure: str | None = None
        self.stopping = threading.Event()
        self.hurry = threading.Event()
        self._children: list[_Child] = []
        self._lock = threading.RLock()
        self._watcher: threading.Thread | None = None

    # ------------------------------------------------------------ start

    def run(self, name: str, command: Sequence[str], seconds: float) -> None:
        """Run a program to its end; StartFailed with its last words if it exits other than 0."""
        child = _Child(Program(name, command), kept=False)
        with self._lock:
            self._children.append(child)
            self._spawn(child)
        process = child.process
        assert process is not None
        ended = self._wait(lambda: process.poll() is not None, seconds)
        self._end(child)
        with self._lock:
            self._children.remove(child)
        if not ended:
            raise StartFailed(f"{name} did not end within {seconds:.0f} seconds; see {self._log(child)}")
        if process.returncode != 0:
            raise StartFailed(f"{name} failed:\n{processes.tail(self._log(child), 20)}")

    def start(self, program: Program) -> None:
        """Start a program and keep it up from now on; returns at once."""
        child = _Child(program, kept=True)
        with self._lock:
            if self.stopping.is_set():
                raise Stopped
            self._children.append(child)
            self._spawn(child)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
                self._watcher.start()

    def wait_ready(self, name: str) -> None:
        """Wait until the program is ready; StartFailed if it is not in time, Stopped if asked to stop."""
        child = self._child(name)
        if not self._wait(lambda: self._is_ready(child), child.program.ready_seconds):
            raise StartFailed(
                f"{name} was not ready within {child.program.ready_seconds:.0f} seconds:\n"
                f"{processes.tail(self._log(child), 20)}"
            )
        self.console.line("up", f"{name} is ready")

    def wait(self) -> None:
        """Sleep until a stop is asked for; StartFailed if a program could not be kept up."""
        while not self.stopping.wait(1.0):
            pass
        if self.failure:
            raise StartFailed(self.failure)

    def fail(self, reason: str) -> None:
        """Ask for a stop because something cannot be kept up."""
        with self._lock:
            self.failure = self.failure or reason
        self.console.line("up", reason)
        self.stopping.set()

    def restart(self, name: str, patience: float = 3.0) -> None:
        """End a program; the watcher starts it again. Does nothing if it was never started."""
        with self._lock:
            for child in self._children:
                if child.program.name == name:
                    processes.end(self._record(child), ((SIGTERM, patience),))

    # ------------------------------------------------------------ stop

    def stop(self) -> None:
        """End every program, the last started first, each with its patience, then by force."""
        self.stopping.set()
        with self._lock:
            watcher, self._watcher = self._watcher, None
        if watcher and watcher is not threading.current_thread():
            watcher.join(timeout=30)
        while True:
            with self._lock:
                if not self._children:
                    return
                child = self._children.pop()
            self.console.line("up", f"stopping {child.program.name}")
            try:
                self._end(child)
            except RuntimeError as error:
                self.console.line("up", str(error))

    # ------------------------------------------------------------ inside

    def _child(self, name: str) -> _Child:
        with self._lock:
            return next(child for child in self._children if child.program.name == name)

    def _log(self, child: _Child) -> Path:
        return self.var / "logs" / f"{child.program.name}.log"

    def _record(self, child: _Child) -> Path:
        return self.var / "run" / f"{child.program.name}.pid"

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition came true in time. A stop or a failure meanwhile raises."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.failure:
                raise StartFailed(self.failure)
            if self.stopping.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                return False
            self.stopping.wait(0.05)
        return True

    def _is_ready(self, child: _Child) -> bool:
        with self._lock:
            if child.process is None or child.process.poll() is not None:
                return False
            said_ready = child.said_ready
        program = child.program
        if program.ready_line is not None and not said_ready:
            return False
        return program.ready_check is None or program.ready_check()

    def _spawn(self, child: _Child) -> None:
        """Start it; its record is written before anything else can happen to us."""
        log = self._log(child)
        log.parent.mkdir(parents=True, exist_ok=True)
        child.said_ready = False
        child.start_at = None
        child.starts.append(time.monotonic())
        child.process = subprocess.Popen(
            child.program.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=self.env,
            cwd=self.cwd,
        )
        processes.remember(self._record(child), child.process.pid)
        child.reader = threading.Thread(
            target=self._read, args=(child, child.process, log), name=child.program.name, daemon=True
        )
        child.reader.start()

    def _read(self, child: _Child, process: subprocess.Popen[bytes], log: Path) -> None:
        ready_line = child.program.ready_line
        assert process.stdout is not None
        with log.open("ab") as file, process.stdout as output:
            for raw in output:
                file.write(raw)
                file.flush()
                text = raw.decode(errors="replace").rstrip("\r\n")
                if ready_line is not None and ready_line in text and child.process is process:
                    child.said_ready = True
                self.console.line(child.program.name, text)

    def _end(self, child: _Child) -> None:
        patience = 0.0 if self.hurry.is_set() else child.program.stop_seconds
        processes.end(self._record(child), ((SIGTERM, patience),) if patience else ())
        if child.process is not None:
            child.process.wait(timeout=10)
        if child.reader is not None:
            child.reader.join(timeout=2)

    def _watch(self) -> None:
        while not self.stopping.wait(0.2):
            with self._lock:
                for child in self._children:
                    if self.stopping.is_set():
                        return
                    self._tend(child)

    def _tend(self, child: _Child) -> None:
        """Notice a death and plan the restart; carry out one that is due."""
        process = child.process
        now = time.monotonic()
        if child.start_at is not None and now >= child.start_at:
            self._spawn(child)
        elif child.start_at is None and process is not None and (code := process.poll()) is not None:
            if not child.kept:
                return
            # What it started itself must not outlive it.
            processes.end(self._record(child), ())
            while child.starts and child.starts[0] < now - WINDOW:
                child.starts.popleft()
            name, how = child.program.name, _how(code)
            if len(child.starts) > RESTARTS:
                self.fail(
                    f"{name} {how} {len(child.starts)} times within {WINDOW:.0f} seconds; see its log "
                    f"{self._log(child)}:\n{processes.tail(self._log(child))}"
                )
                return
            pause = self.first_pause * 2 ** (len(child.starts) - 1)
            self.console.line("up", f"{name} {how}; starting it again in {pause:.1f} s")
            child.start_at = now + pause


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
