"""A pipeline's desk: it offers sub-stages, waits for their grants, and says when they ran.

    async with desk.substages(SubStageKind.DECODE, step, {worker: sequences}) as turns:
        result = await turns[worker].run(resident.decode, ...)

Leaving the block reports each sub-stage as finished, also when it fails or the run is cancelled in the
middle: what was computed until then was computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from workers.outbox import Outbox
from workers.protocol import DeviceRef, Finished, Grant, Offer, SubStageKind
from workers.timing import Ran

T = TypeVar("T")

#: Longest time one call to a resident may take; past it the attempt fails and says so.
CALL_LIMIT_S = 3600.0


class Stuck(Exception):
    """A call to a resident took longer than any sub-stage may."""


class Turn:
    """A granted sub-stage: where it runs, with which share, and what ran."""

    def __init__(self, node: str, grant: Grant) -> None:
        self.node = node
        self.share = grant.share
        self._device = grant.device
        self._began: float | None = None
        self._started: float | None = None
        self._ended: float | None = None
        self._tokens = 0

    @property
    def device(self) -> DeviceRef:
        if self._device is None:
            raise RuntimeError(f"{self.node} was granted without a device")
        return self._device

    async def run(self, method: Any, *args: Any) -> Any:
        """Call a resident's method, which gets the share as ``share`` and returns a ``Ran``."""
        if self._began is None:
            self._began = time.time()
        return self.cover(await call(method, *args, share=self.share))

    def cover(self, ran: Ran[T]) -> T:
        """Count the interval in: a sub-stage of several calls lasts from the first to the last."""
        self._started = ran.started_at if self._started is None else min(self._started, ran.started_at)
        self._ended = ran.ended_at if self._ended is None else max(self._ended, ran.ended_at)
        self._tokens += ran.tokens
        return ran.value

    def finished(self, *, cut_short: bool) -> Finished | None:
        """The report, or None when nothing was computed."""
        if cut_short and self._began is not None:
            started = self._started or self._began
            return Finished(node=self.node, started_at=started, ended_at=time.time(), tokens=self._tokens)
        if self._started is None or self._ended is None:
            return None
        return Finished(node=self.node, started_at=self._started, ended_at=self._ended, tokens=self._tokens)


class Desk:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._waiting: dict[str, asyncio.Future[Grant]] = {}
        self._offered = 0

    def grant(self, grant: Grant) -> None:
        """Accept a grant; a repeated one, or one for a sub-stage that is over, changes nothing."""
        future = self._waiting.pop(grant.node, None)
        if future is not None and not future.done():
            future.set_result(grant)

    @asynccontextmanager
    async def substages(
        self, kind: SubStageKind, step: int, sequences: Mapping[int, int]
    ) -> AsyncIterator[dict[int, Turn]]:
        """Offer one sub-stage per worker, wait until all are granted, report them finished on leaving."""
        offers = {worker: self._offer(kind, step, worker, count) for worker, count in sequences.items()}
        grants = await asyncio.gather(*(future for _, future in offers.values()))
        turns = {
            worker: Turn(node, grant)
            for (worker, (node, _)), grant in zip(offers.items(), grants, strict=True)
        }
        try:
            yield turns
        except BaseException:
            self._report(turns, cut_short=True)
            raise
        self._report(turns, cut_short=False)

    def _offer(
        self, kind: SubStageKind, step: int, worker: int, sequences: int
    ) -> tuple[str, asyncio.Future[Grant]]:
        self._offered += 1
        node = f"s{step}.w{worker}.{kind}.{self._offered}"
        self._waiting[node] = asyncio.get_running_loop().create_future()
        self._outbox.add(Offer(node=node, step=step, worker=worker, kind=kind, sequences=sequences))
        return node, self._waiting[node]

    def _report(self, turns: Mapping[int, Turn], *, cut_short: bool) -> None:
        reports = (turn.finished(cut_short=cut_short) for turn in turns.values())
        self._outbox.add(*(report for report in reports if report is not None))


async def call(method: Any, *args: Any, **named: Any) -> Any:
    """Await an actor's method, within the limit."""
    try:
        return await asyncio.wait_for(_await(method.remote(*args, **named)), CALL_LIMIT_S)
    except TimeoutError:
        raise Stuck(f"one sub-stage ran for more than {CALL_LIMIT_S / 60:.0f} minutes") from None


async def _await(reference: Any) -> Any:
    return await reference


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Await all; when one fails, or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
