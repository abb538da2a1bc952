"""A cluster whose pipelines compute nothing: the daemon's orders and reports are the real ones.

Only what would leave the process is replaced. The pipelines use the product's own ``Desk`` and ``Outbox``, go
through the chains of ``workers.chain`` and do what orders ask: make room, merge, change shares.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from django.conf import settings

from scheduler.shell.cluster import PipelineGone
from workers.chain import rollout_part, train_chain
from workers.grants import Desk, Gang, Lease
from workers.launch import NodeSeen
from workers.outbox import Outbox
from workers.protocol import (
    CheckpointSaved,
    Ended,
    Grant,
    Launch,
    Log,
    Merge,
    Offer,
    Order,
    Report,
    Resize,
    StepDone,
    Stop,
    SubStageKind,
    Yield,
)

METRICS = {"reward": 0.5, "tokens": 64.0, "seconds": 0.1}
#: What each step reports of a worker: prefill, decode from 16 sequences up, two tails, early update, grade,
#: update, sync. Where nothing streams it is one less.
SUBSTAGES = 8
SATURATION = 16


class FakePipeline:
    """Runs its steps as fast as it is granted. ``before_step(pipeline, step)``, and in the middle of each
    sub-stage on a device ``during(pipeline, offer)``, may raise, or wait.
    """

    def __init__(self, launch: Launch, before_step: Callable | None, during: Callable | None) -> None:
        self.launch = launch
        self.orders: list[Order] = []
        self.dead = asyncio.Event()
        self.deaf = False
        self.steps = 0
        self._before_step, self._during = before_step, during
        self._outbox = Outbox(launch.attempt_id)
        self._desk = Desk(self._outbox, launch.run_key)
        self._rolling: dict[Lease, asyncio.Task[None]] = {}
        self._outbox.add(Log(level="info", message="starts"))
        self._task = asyncio.create_task(self._live())

    @property
    def grants(self) -> list[Grant]:
        return [order for order in self.orders if isinstance(order, Grant)]

    async def reports(self, after: int) -> Sequence[Report]:
        waiting = asyncio.create_task(self._outbox.after(after, 30))
        dying = asyncio.create_task(self.dead.wait())
        await asyncio.wait({waiting, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.dead.is_set():
            waiting.cancel()
            raise PipelineGone("killed")
        return waiting.result()

    async def order(self, order: Order) -> None:
        self.orders.append(order)
        match order:
            case Grant():
                self._desk.grant(order)
            case Resize():
                await self._desk.resize(order)
            case Yield():
                await self._desk.make_room(order)
            case Merge():
                self._merge(order)

    async def stop(self, stop: Stop) -> None:
        if not self.deaf:
            self._task.cancel()

    def die(self) -> None:
        self._task.cancel()
        self.dead.set()

    def _merge(self, order: Merge) -> None:
        """The sources stop; the target goes on."""
        if self._desk.find(order.target) is None:
            return
        for node in order.sources:
            lease = self._desk.find(node)
            if lease in self._rolling:
                self._rolling.pop(lease).cancel()

    # ------------------------------------------------------------ steps

    async def _live(self) -> None:
        rl = self.launch.spec.rl
        try:
            for step in range(self.launch.start_step, rl.steps):
                if self._before_step is not None:
                    await self._before_step(self, step)
                await self._step(step)
                self.steps = step + 1
                self._outbox.add(StepDone(step=step, metrics=METRICS, samples=()))
                if (step + 1) % rl.checkpoint_every == 0 or step + 1 == rl.steps:
                    self._outbox.add(self._saved(step + 1))
            self._outbox.add(Ended(outcome="succeeded"))
        except asyncio.CancelledError:
            self._desk.close()
            self._outbox.add(Ended(outcome="stopped"))

    async def _step(self, step: int) -> None:
        workers = range(self.launch.spec.rl.devices)
        rl = self.launch.spec.rl
        each = rl.prompts_per_step * rl.samples_per_group // len(workers)
        if not rl.method.rolls_out:
            await self._train_parts(step, each, None)
            return
        thin = asyncio.Event()
        rollouts = [asyncio.create_task(self._roll_out(step, worker, each, thin)) for worker in workers]
        early = asyncio.create_task(self._early(step, each, thin)) if self.launch.streams else None
        try:
            await asyncio.gather(*rollouts)
            gang = await early if early is not None else None
        finally:
            for task in (*rollouts, *([early] if early else [])):
                task.cancel()
        chain = train_chain(self.launch.spec, self.launch.streams)
        for worker in workers:
            grade = self._desk.begin(
                SubStageKind.GRADE, step, worker, each, part=chain.index(SubStageKind.GRADE)
            )
            self._count(grade)
            self._desk.finish(grade)
        await self._train_parts(step, each, gang)

    async def _train_parts(self, step: int, each: int, gang: Gang | None) -> None:
        counts = dict.fromkeys(range(self.launch.spec.rl.devices), each)
        for part, kind in enumerate(train_chain(self.launch.spec, self.launch.streams)):
            if kind is SubStageKind.GRADE or (self.launch.streams and part == 0):
                continue
            if gang is None:
                gang = await self._desk.gang(kind, step, counts, part=part)
            else:
                gang = await self._desk.cross_gang(gang, kind, counts, part=part)
            await self._train(gang)
        self._desk.finish(*gang.values())

    async def _roll_out(self, step: int, worker: int, sequences: int, thin: asyncio.Event) -> None:
        lease = await self._desk.offer(SubStageKind.PREFILL, step, worker, sequences, part=0)
        going = asyncio.create_task(self._decode(lease, sequences, thin))
        self._rolling[lease] = going
        try:
            await asyncio.wait({going})
        finally:
            going.cancel()
        if not going.cancelled():
            going.result()
        self._rolling.pop(lease, None)
        self._desk.finish(lease)

    async def _decode(self, lease: Lease, sequences: int, thin: asyncio.Event) -> None:
        await self._compute(lease)
        for running in (sequences, SATURATION - 1, 7):
            part = rollout_part(running, SATURATION)
            kind = SubStageKind.DECODE if part == 1 else SubStageKind.TAIL
            self._desk.cross(lease, kind, running, part=part, cached_tokens=running * 10)
            if running < 8:
                thin.set()
            await self._compute(lease)

    async def _early(self, step: int, each: int, thin: asyncio.Event) -> Gang | None:
        """Trains on finished groups once a last tail runs; what is left is offered as the step's update."""
        await thin.wait()
        counts = dict.fromkeys(range(self.launch.spec.rl.devices), each)
        gang = await self._desk.gang(SubStageKind.UPDATE, step, counts, part=0, early=True)
        await self._train(gang)
        if any(lease.leaving for lease in gang.values()):
            self._desk.finish(*gang.values())
            left = dict.fromkeys(counts, 0.5)
            gang = await self._desk.gang(
                SubStageKind.UPDATE, step, counts, part=0, early=True, yielded=True, left=left
            )
            await self._train(gang)
        self._desk.finish(*gang.values())
        return None

    async def _train(self, gang: Gang) -> None:
        for lease in gang.values():
            await self._compute(lease)

    async def _compute(self, lease: Lease) -> None:
        began = time.time()
        lease.begin()
        if self._during is not None:
            await self._during(self, lease.offer)
        await asyncio.sleep(0)
        lease.count(began, time.time(), 16, 2)

    def _count(self, lease: Lease) -> None:
        lease.count(time.time(), time.time(), 16)

    def _saved(self, steps: int) -> CheckpointSaved:
        path = str(Path(self.launch.checkpoint_dir) / f"step-{steps}")
        final = steps == self.launch.spec.rl.steps
        return CheckpointSaved(step=steps, path=path, bytes=10, final=final)


class Gate:
    """Stops pipelines in the middle of the sub-stages that ``where(pipeline, offer)`` names, until ``go``."""

    def __init__(self, where: Callable[[FakePipeline, Offer], bool]) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.inside: list[Offer] = []
        self._where = where

    async def __call__(self, pipeline: FakePipeline, offer: Offer) -> None:
        if self._where(pipeline, offer):
            self.inside.append(offer)
            self.reached.set()
            await self.go.wait()


class FakeCluster:
    """One node of ``cpus`` CPU devices. ``before_step`` is asked at each step of each pipeline."""

    def __init__(
        self, cpus: int = 2, before_step: Callable | None = None, during: Callable | None = None
    ) -> None:
        self.cpus = cpus
        self.pipelines: dict[int, FakePipeline] = {}
        self.ran: list[FakePipeline] = []
        self.launched: list[Launch] = []
        self.evicted: list[tuple[str, str]] = []
        self.released: list[str] = []
        self.loaded: set[tuple[str, str]] = set()
        self.over: asyncio.Queue[int] = asyncio.Queue()
        self._before_step, self._during = before_step, during

    async def nodes(self) -> list[NodeSeen]:
        threads = self.cpus * settings.CPU_DEVICE_THREADS
        return [NodeSeen("local", "f" * 56, "127.0.0.1", threads, 0, "", 8 << 30)] if self.cpus else []

    async def start(self, order: Launch) -> FakePipeline:
        self.launched.append(order)
        pipeline = FakePipeline(order, self._before_step, self._during)
        self.pipelines[order.attempt_id] = pipeline
        self.ran.append(pipeline)
        return pipeline

    async def find(self, attempt_id: int) -> FakePipeline | None:
        return self.pipelines.get(attempt_id)

    async def kill(self, attempt_id: int) -> None:
        """The daemon's last word on an attempt: it is over, or its pipeline must be."""
        pipeline = self.pipelines.pop(attempt_id, None)
        if pipeline is not None:
            pipeline.die()
            self.over.put_nowait(attempt_id)

    async def residents(self) -> set[tuple[str, str]]:
        return set(self.loaded)

    async def evict(self, device: str, weights_key: str) -> None:
        self.evicted.append((device, weights_key))
        self.loaded.discard((device, weights_key))

    async def release(self, device: str, weights_key: str, run_key: str) -> None:
        self.released.append(run_key)
