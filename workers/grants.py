"""A pipeline's desk: it offers sub-stages, waits for their grants, and says when they ran.

    lease = await desk.offer(SubStageKind.PREFILL, step, worker, sequences)     waits for the grant
    await lease.run(resident.method, ...)
    desk.cross(lease, SubStageKind.DECODE, ...)                                 goes on, on the same grant
    desk.finish(lease)

A lease is a sub-stage from its offer on. Crossing a boundary turns it into the next of its chain: orders that
still name the one before are carried out on what it has become; those for what is over are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayError

from workers.calls import Stuck, call, together
from workers.outbox import Outbox
from workers.protocol import Crossed, DeviceRef, Finished, Grant, Offer, Resize, SubStageKind, Yield
from workers.timing import Ran

T = TypeVar("T")

#: Kinds that make room between two micro-batches.
YIELDING = frozenset({SubStageKind.LOGPROB, SubStageKind.UPDATE})


class Lease:
    """A sub-stage, where it runs and with which share, and what ran.

    ``leaving``: its device is promised to others, so that it must end here and cross no boundary.
    ``resident`` computes for it.
    """

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.share = 1.0
        self.leaving = False
        self.resident: Any = None
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._device: DeviceRef | None = None
        self._clear()

    def _clear(self) -> None:
        self._began: float | None = None
        self._started: float | None = None
        self._ended: float | None = None
        self._tokens = self._forwards = 0

    @property
    def node(self) -> str:
        return self.offer.node

    @property
    def device(self) -> DeviceRef:
        if self._device is None:
            raise RuntimeError(f"{self.node} has no device")
        return self._device

    @property
    def on_device(self) -> bool:
        return self._device is not None

    def take(self, grant: Grant) -> None:
        self._device, self.share = grant.device, grant.share
        self.granted.set_result(None)

    def begin(self) -> None:
        """Computing is asked for from now on."""
        if self._began is None:
            self._began = time.time()

    async def run(self, method: Any, *args: Any) -> Any:
        """Call a resident's method, which gets the share as ``share`` and returns a ``Ran``."""
        self.begin()
        return self.cover(await call(method, *args, share=self.share))

    def cover(self, ran: Ran[T]) -> T:
        """Count the interval in: a sub-stage of several calls lasts from the first to the last."""
        self.count(ran.started_at, ran.ended_at, ran.tokens)
        return ran.value

    def count(self, started_at: float, ended_at: float, tokens: int, forwards: int = 0) -> None:
        self._started = started_at if self._started is None else min(self._started, started_at)
        self._ended = ended_at if self._ended is None else max(self._ended, ended_at)
        self._tokens += tokens
        self._forwards += forwards

    def become(self, offer: Offer) -> Finished:
        """Go over into the next sub-stage; the report of the one that is over."""
        finished = self.finished()
        self.offer = offer
        self._clear()
        self._began = finished.ended_at
        return finished

    def finished(self) -> Finished:
        """The report: of what was counted, else of the time since it began; of no length if it never did."""
        now = time.time()
        if self._started is not None and self._ended is not None:
            return self._report(self._started, self._ended)
        return self._report(now if self._began is None else min(self._began, now), now)

    def cut_short(self) -> Finished | None:
        """The report of one that was cancelled or failed: what was computed until then was computed."""
        begun = self._began if self._started is None else self._started
        return None if begun is None else self._report(begun, max(begun, time.time()))

    def _report(self, started_at: float, ended_at: float) -> Finished:
        return Finished(
            node=self.node,
            started_at=started_at,
            ended_at=ended_at,
            tokens=self._tokens,
            forwards=self._forwards,
        )


#: Leases of the workers of a gang, by worker.
Gang = dict[int, Lease]


@dataclass
class Waiting:
    """How long something waited for a device while nothing had one."""

    offered: int = 0
    running: int = 0
    seconds: float = 0.0
    since: float = 0.0

    def change(self, offered: int, running: int) -> None:
        now = time.monotonic()
        if self.offered and not self.running:
            self.seconds += now - self.since
        self.since = now
        self.offered += offered
        self.running += running

    def take(self) -> float:
        """The seconds since they were taken last."""
        self.change(0, 0)
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Desk:
    def __init__(self, outbox: Outbox, run_key: str) -> None:
        self._outbox = outbox
        self._run_key = run_key
        self._leases: dict[str, Lease] = {}
        self._offered = 0
        self.waiting = Waiting()

    # ------------------------------------------------------------ orders

    def grant(self, grant: Grant) -> None:
        """Accept a grant; a repeated one, or one for a sub-stage that is over, changes nothing."""
        lease = self._leases.get(grant.node)
        if lease is not None and not lease.granted.done():
            self.waiting.change(-1, +1)
            lease.take(grant)

    async def resize(self, order: Resize) -> None:
        """The share holds for what computes now and for what is called later."""
        lease = self._leases.get(order.node)
        if lease is None or not lease.on_device:
            return
        lease.share = order.share
        if lease.resident is not None:
            with suppress(RayError, Stuck):  # whoever computes there notices by itself
                await call(lease.resident.resize, self._run_key, order.share)

    async def make_room(self, order: Yield) -> None:
        """Let the whole gang stop at the next micro-batch."""
        lease = self._leases.get(order.node)
        if lease is None or not lease.on_device or lease.offer.kind not in YIELDING or lease.leaving:
            return
        gang = [other for other in self._open() if other.offer.gang == lease.offer.gang]
        for member in gang:
            member.leaving = True
        residents = [member.resident for member in gang if member.resident is not None]
        with suppress(RayError, Stuck):
            await together(*(call(resident.make_room, self._run_key) for resident in residents))

    def find(self, node: str) -> Lease | None:
        """The lease of a sub-stage that is not over, or of what it has crossed into."""
        return self._leases.get(node)

    # ------------------------------------------------------------ offers and reports

    async def offer(
        self, kind: SubStageKind, step: int, worker: int, sequences: int, *, part: int, **more: Any
    ) -> Lease:
        """Offer a sub-stage and wait for its device."""
        lease = self._put(self._next(kind, step, worker, sequences, part=part, **more))
        await lease.granted
        return lease

    async def gang(
        self,
        kind: SubStageKind,
        step: int,
        sequences: Mapping[int, int],
        *,
        part: int,
        left: Mapping[int, float] | None = None,
        **more: Any,
    ) -> Gang:
        """Offer a sub-stage for each worker and wait until all have their devices."""
        name = self._gang_name(kind, step)
        leases = {
            worker: self._put(
                self._next(
                    kind,
                    step,
                    worker,
                    count,
                    part=part,
                    gang=name,
                    left=1.0 if left is None else left[worker],
                    **more,
                )
            )
            for worker, count in sequences.items()
        }
        await asyncio.gather(*(lease.granted for lease in leases.values()))
        return leases

    def begin(self, kind: SubStageKind, step: int, worker: int, sequences: int, *, part: int) -> Lease:
        """A sub-stage that needs no device: it runs as soon as it is told."""
        lease = Lease(self._next(kind, step, worker, sequences, part=part))
        lease.begin()
        self._leases[lease.node] = lease
        self._outbox.add(lease.offer)
        return lease

    def cross(self, lease: Lease, kind: SubStageKind, sequences: int, *, part: int, **more: Any) -> None:
        """Go over into the next sub-stage of the chain, on the same grant."""
        offer = self._next(kind, lease.offer.step, lease.offer.worker, sequences, part=part, **more)
        self._leases[offer.node] = lease
        self._outbox.add(Crossed(finished=lease.become(offer), offer=offer))

    async def cross_gang(
        self, gang: Gang, kind: SubStageKind, sequences: Mapping[int, int], *, part: int
    ) -> Gang:
        """The same for all workers; when they must leave their devices, the next waits for a grant."""
        step = next(iter(gang.values())).offer.step
        if any(lease.leaving for lease in gang.values()):
            self.finish(*gang.values())
            return await self.gang(kind, step, sequences, part=part)
        name = self._gang_name(kind, step)
        for worker, lease in gang.items():
            self.cross(lease, kind, sequences[worker], part=part, gang=name)
        return gang

    def finish(self, *leases: Lease) -> None:
        for lease in leases:
            self._drop(lease)
            self._outbox.add(lease.finished())

    def close(self) -> None:
        """Report what still runs: the attempt ends in the middle of it."""
        for lease in self._open():
            self._drop(lease)
            report = lease.cut_short()
            if report is not None:
                self._outbox.add(report)

    def _next(self, kind: SubStageKind, step: int, worker: int, sequences: int, **more: Any) -> Offer:
        self._offered += 1
        node = f"s{step}.w{worker}.{kind}.{self._offered}"
        return Offer(node=node, step=step, worker=worker, kind=kind, sequences=sequences, **more)

    def _gang_name(self, kind: SubStageKind, step: int) -> str:
        return f"s{step}.{kind}.{self._offered + 1}"

    def _put(self, offer: Offer) -> Lease:
        lease = Lease(offer)
        self._leases[lease.node] = lease
        self.waiting.change(+1, 0)
        self._outbox.add(offer)
        return lease

    def _open(self) -> list[Lease]:
        return list(dict.fromkeys(self._leases.values()))

    def _drop(self, lease: Lease) -> None:
        if lease.on_device:
            self.waiting.change(0, -1)
        for node in [node for node, other in self._leases.items() if other is lease]:
            del self._leases[node]
