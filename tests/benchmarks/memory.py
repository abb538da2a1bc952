"""How much memory a family of processes holds at its peak, shared pages counted once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

EVERY_S = 0.5
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


class Peak:
    """Samples the sum of the processes' proportional set sizes while the block runs."""

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.megabytes = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self.megabytes = max(self.megabytes, sum(map(held, self._processes())) / 1024)


def held(pid: int) -> int:
    """Kilobytes; 0 of a process that is gone."""
    try:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
