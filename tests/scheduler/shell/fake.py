"""A cluster whose pipelines compute nothing: the daemon's orders and reports are the real ones.

Only what would leave the process is replaced. The pipelines use the product's own ``Desk`` and ``Outbox``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scheduler.shell.cluster import PipelineGone
from workers.grants import Desk
from workers.launch import NodeSeen
from workers.outbox import Outbox
from workers.protocol import (
    CheckpointSaved,
    Ended,
    Grant,
    Launch,
    Log,
    Report,
    StepDone,
    Stop,
    SubStageKind,
)
from workers.timing import Ran

METRICS = {"reward": 0.5, "tokens": 64.0, "seconds": 0.1}


class FakePipeline:
    """Runs its steps as fast as it is granted. ``before_step(step)`` may raise, or wait."""

    def __init__(self, launch: Launch, before_step: Callable | None) -> None:
        self.launch = launch
        self.grants: list[Grant] = []
        self.dead = asyncio.Event()
        self.deaf = False
        self._before_step = before_step
        self._outbox = Outbox(launch.attempt_id)
        self._desk = Desk(self._outbox)
        self._outbox.add(Log(level="info", message="starts"))
        self._task = asyncio.create_task(self._live())

    async def reports(self, after: int) -> Sequence[Report]:
        waiting = asyncio.create_task(self._outbox.after(after, 30))
        dying = asyncio.create_task(self.dead.wait())
        await asyncio.wait({waiting, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.dead.is_set():
            waiting.cancel()
            raise PipelineGone("killed")
        return waiting.result()

    async def grant(self, grant: Grant) -> None:
        self.grants.append(grant)
        self._desk.grant(grant)

    async def stop(self, stop: Stop) -> None:
        if not self.deaf:
            self._task.cancel()

    def die(self) -> None:
        self._task.cancel()
        self.dead.set()

    async def _live(self) -> None:
        rl = self.launch.spec.rl
        try:
            for step in range(self.launch.start_step, rl.steps):
                if self._before_step is not None:
                    await self._before_step(self, step)
                await self._step(step)
                self._outbox.add(StepDone(step=step, metrics=METRICS, samples=()))
                if (step + 1) % rl.checkpoint_every == 0 or step + 1 == rl.steps:
                    self._outbox.add(self._saved(step + 1))
            self._outbox.add(Ended(outcome="succeeded"))
        except asyncio.CancelledError:
            self._outbox.add(Ended(outcome="stopped"))

    async def _step(self, step: int) -> None:
        workers = dict.fromkeys(range(self.launch.spec.rl.devices), 4)
        for kind in (SubStageKind.PREFILL, SubStageKind.DECODE, SubStageKind.GRADE, SubStageKind.UPDATE):
            async with self._desk.substages(kind, step, workers) as turns:
                for turn in turns.values():
                    began = time.time()
                    await asyncio.sleep(0)
                    turn.cover(Ran(None, began, time.time(), 16))

    def _saved(self, steps: int) -> CheckpointSaved:
        path = str(Path(self.launch.checkpoint_dir) / f"step-{steps}")
        final = steps == self.launch.spec.rl.steps
        return CheckpointSaved(step=steps, path=path, bytes=10, final=final)


class FakeCluster:
    """One node of ``cpus`` devices. ``before_step`` is asked at each step of each pipeline."""

    def __init__(self, cpus: int = 2, before_step: Callable | None = None) -> None:
        self.cpus = cpus
        self.pipelines: dict[int, FakePipeline] = {}
        self.launched: list[Launch] = []
        self.evicted: list[tuple[str, str]] = []
        self.released: list[str] = []
        self.loaded: set[tuple[str, str]] = set()
        self.over: asyncio.Queue[int] = asyncio.Queue()
        self._before_step = before_step

    async def nodes(self) -> list[NodeSeen]:
        return [NodeSeen("local", "f" * 56, "127.0.0.1", self.cpus, 0, "", 8 << 30)] if self.cpus else []

    async def start(self, order: Launch) -> FakePipeline:
        self.launched.append(order)
        self.pipelines[order.attempt_id] = FakePipeline(order, self._before_step)
        return self.pipelines[order.attempt_id]

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
