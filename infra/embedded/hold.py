"""One holder per ``var/``: a lock that the kernel drops when we die, and a guard that then cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from infra.embedded import paths, processes, sweep
from infra.embedded.supervisor import StartFailed

# The guard of a killed holder needs this long at most before the folder is free again.
_GUARD_SECONDS = 30.0


class AlreadyRunning(StartFailed):
    """Another process holds this ``var/``."""


def start_guard(var: Path) -> subprocess.Popen[bytes]:
    """Start the process that stops what runs in ``var/`` once we are dead; see ``guard``."""
    return subprocess.Popen(
        [sys.executable, "-m", "infra.embedded.guard", str(var)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd=paths.PROJECT,
    )


def dismiss_guard(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()
    guard.communicate(timeout=10)


class Hold:
    """``take`` the folder or raise AlreadyRunning; ``release`` it when nothing runs in it any more."""

    def __init__(self, var: Path) -> None:
        self._var = var
        self._lock: IO[str] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def take(self) -> None:
        """Lock the folder, end the programs that an earlier, killed holder left, set the guard."""
        self._lock = self._locked()
        processes.remember(sweep.up_record(self._var), os.getpid())
        sweep.programs(self._var)
        self._guard = start_guard(self._var)

    def release(self) -> None:
        if self._guard is not None:
            dismiss_guard(self._guard)
            self._guard = None
        if self._lock is not None:
            sweep.up_record(self._var).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _locked(self) -> IO[str]:
        path = sweep.up_lock(self._var)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.open("a")

        def is_ours() -> bool:
            if processes.try_lock(lock.fileno()):
                return True
            if pid := processes.recall(sweep.up_record(self._var)):
                raise AlreadyRunning(
                    f"already running in {self._var} (process {pid}); stop it with `python manage.py down`"
                )
            return False

        try:
            if processes.wait_until(is_ours, _GUARD_SECONDS, pause=0.1):
                return lock
            raise AlreadyRunning(f"another process has held {path} for {_GUARD_SECONDS:.0f} seconds")
        except AlreadyRunning:
            lock.close()
            raise
