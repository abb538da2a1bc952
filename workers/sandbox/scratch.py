"""Scratch folders of children whose files lie on the machine's own disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "sandbox-"


class Scratch:
    """A folder of the caller's alone, locked for as long as the caller lives; ``remove`` takes it away."""

    def __init__(self, root: Path | None):
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # else another one's sweep was quicker
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(root: Path | None) -> None:
    """Remove the folders of processes that are gone."""
    for folder in Path(root or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # e.g. it is another user's, or locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
