"""Reports that wait to be fetched: numbered from 1, kept until a later one is asked for."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from workers.protocol import Body, Report


class Outbox:
    """Delivery is at least once and in order; the reader drops what it has seen (same ``seq``)."""

    def __init__(self, attempt_id: int) -> None:
        self._attempt_id = attempt_id
        self._kept: deque[Report] = deque()
        self._last = 0
        self._added = asyncio.Event()

    def add(self, *bodies: Body) -> None:
        now = time.time()
        for body in bodies:
            self._last += 1
            self._kept.append(Report(attempt_id=self._attempt_id, seq=self._last, at=now, body=body))
        self._added.set()

    async def after(self, seq: int, wait_s: float) -> list[Report]:
        """Reports above ``seq``, waiting up to ``wait_s`` seconds for one; those up to it are dropped."""
        while self._kept and self._kept[0].seq <= seq:
            self._kept.popleft()
        if not self._kept:
            self._added.clear()
            try:
                await asyncio.wait_for(self._added.wait(), wait_s)
            except TimeoutError:
                return []
        return list(self._kept)
