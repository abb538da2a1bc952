"""Work of many runs on few threads: of one run one piece at a time, in the order asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")


class Lanes:
    """A lane of waiting work per key. A lane whose piece is done goes behind the others."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="compute")
        self._lock = Lock()
        self._lanes: dict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = {}

    def run(self, key: str, work: Callable[[], T]) -> T:
        """Wait until it has run; what it raises is raised here."""
        done: Future[T] = Future()
        with self._lock:
            lane = self._lanes.setdefault(key, deque())
            lane.append((work, done))
            if len(lane) == 1:
                self._threads.submit(self._first, key)
        return done.result()

    def _first(self, key: str) -> None:
        work, done = self._lanes[key][0]
        try:
            result = work()
        except BaseException as error:
            self._next(key)
            done.set_exception(error)
        else:
            self._next(key)
            done.set_result(result)

    def _next(self, key: str) -> None:
        with self._lock:
            lane = self._lanes[key]
            lane.popleft()
            if lane:
                self._threads.submit(self._first, key)
            else:
                del self._lanes[key]
