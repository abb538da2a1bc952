"""How long compute threads wanted a processor and had none, which is what other programs cost a measurement.

Linux counts it for every thread (``/proc/<pid>/task/<tid>/schedstat``: nanoseconds on a processor,
nanoseconds runnable but waiting, time slices). Elsewhere nothing is known. What a host takes from a virtual
machine, and what is lost in caches that are shared, is not in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

TASKS = Path("/proc/self/task")
NANO = 1e-9
#: A thread computes when it runs at least for this part of the time of the busiest one.
COMPUTES = 0.1

#: By thread: nanoseconds that it ran, and that it waited.
Counts = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """Seconds that a piece of work took, and those of them that its threads waited; None: not known."""

    seconds: float
    waited: float | None

    @property
    def disturbed(self) -> float:
        """Share of the time that was waited, as far as is known."""
        return (self.waited or 0.0) / self.seconds if self.seconds else 0.0

    @property
    def undisturbed(self) -> float:
        """Seconds that it would have taken with its processors to itself."""
        return self.seconds - (self.waited or 0.0)

    def per(self, parts: float) -> Piece:
        return Piece(self.seconds / parts, None if self.waited is None else self.waited / parts)


def counts() -> Counts | None:
    """Of all threads of this process so far; None where the system does not count."""
    # The kernel brings a thread's own number up to date only when it is asked for its time.
    time.thread_time_ns()
    found: dict[str, tuple[int, int]] = {}
    try:
        if not _numbers(TASKS / str(threading.get_native_id()))[2]:
            return None
        threads = list(TASKS.iterdir())
    except OSError:
        return None
    for thread in threads:
        try:
            ran, waited, _ = _numbers(thread)
        except OSError:  # it ended meanwhile
            continue
        found[thread.name] = ran, waited
    return found


def waited(before: Counts | None, after: Counts | None, seconds: float) -> float | None:
    """Those of the ``seconds`` between two looks in which a compute thread waited; None: not known.

    Threads of one operation wait for each other, so each one's waiting holds up all; when several waited is
    not known, and taken for chance. Never is it so much that less were left than the busiest thread ran.
    Threads that hardly ran do no part of the work.

    >>> before, after = {"1": (0, 0)}, {"1": (300_000_000, 500_000_000), "2": (200_000_000, 200_000_000)}
    >>> waited(before, after | {"3": (1_000, 300_000_000)}, 1.0)
    0.6
    """
    if before is None or after is None:
        return None
    spent = []
    for thread, (ran, waiting) in after.items():
        ran_before, waiting_before = before.get(thread, (0, 0))
        spent.append(((ran - ran_before) * NANO, (waiting - waiting_before) * NANO))
    most = max(ran for ran, _ in spent)
    # What a thread waited earlier is counted when it gets its processor, so it can be more than all.
    shares = [min(1.0, waiting / seconds) for ran, waiting in spent if COMPUTES * most <= ran]
    some = seconds * (1 - prod(1 - share for share in shares))
    return max(0.0, min(some, seconds - most))


def _numbers(thread: Path) -> tuple[int, int, int]:
    ran, waiting, slices = map(int, (thread / "schedstat").read_text().split())
    return ran, waiting, slices
