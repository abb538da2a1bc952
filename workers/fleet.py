"""A pipeline's residents: where each worker rolls out and trains, and bringing its weights there.

A worker has a trainer, with the run's state in it, and an engine, with the weights of some version; a job
that samples nothing has no engine. Both are on the device of the worker's last grant. When it is granted
another device, what does not compute at that moment moves along; what does moves with its own next grant.
Loading is on the house: it happens before the sub-stage's clock starts.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from workers.calls import call
from workers.launch import rollout_resident, trainer_resident
from workers.protocol import DeviceRef, Launch

CLOSE_LIMIT_S = 30.0
#: Beside the checkpoints, while a worker moves from one device to another.
MOVING = ".move-"


@dataclass
class Member:
    """One data-parallel worker. ``version`` is that of its engine's weights."""

    trainer: Any = None
    trains_on: str = ""
    trains: bool = False
    engine: Any = None
    rolls_on: str = ""
    rolls: bool = False
    version: int | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """``version`` counts the updates that the trainers have done; ``midway``: they have begun another."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._members = [Member() for _ in range(launch.spec.rl.devices)]
        self._entered: list[Any] = []
        self.version = launch.start_step
        self.midway = False

    @property
    def _key(self) -> str:
        return self._launch.run_key

    def sweep(self) -> None:
        """Remove what an earlier attempt left of a move that did not end."""
        for leftover in Path(self._launch.checkpoint_dir).glob(f"{MOVING}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    # ------------------------------------------------------------ where workers compute

    async def train(self, worker: int, device: DeviceRef) -> Any:
        """The worker's trainer on that device, until ``trained``."""
        member = self._members[worker]
        async with member.lock:
            await self._house_trainer(worker, device)
            if member.engine is not None and member.rolls_on != device.name and not member.rolls:
                await self._drop_engine(member)
            member.trains = True
        return member.trainer

    def trained(self, worker: int) -> None:
        self._members[worker].trains = False

    async def roll(self, worker: int, device: DeviceRef) -> Any:
        """The worker's engine on that device with the newest weights, until ``rolled``."""
        member = self._members[worker]
        async with member.lock:
            if not member.trains:
                await self._house_trainer(worker, device)
            await self._house_engine(member, device)
            member.rolls = True
            if member.version is None or member.version < self.version:
                await self._load(member, share=1.0)
        return member.engine

    def rolled(self, worker: int) -> None:
        self._members[worker].rolls = False

    async def sync(self, worker: int, device: DeviceRef, share: float) -> Any:
        """Send the trainer's weights to the worker's engine, wherever it is; returns the engine's ``Ran``."""
        member = self._members[worker]
        async with member.lock:
            if member.engine is None:
                await self._house_engine(member, device)
            return await self._load(member, share)

    # ------------------------------------------------------------ moving

    async def _house_trainer(self, worker: int, device: DeviceRef) -> None:
        member, launch = self._members[worker], self._launch
        if member.trainer is not None and member.trains_on == device.name:
            return
        trainer = trainer_resident(device, launch.weights_key, launch.model_path, launch.spec.rl.precision)
        self._entered.append(trainer)
        if member.trainer is None:
            await self._open(trainer, launch.resume_from)
        else:
            await self._move(member, trainer, worker)
        member.trainer, member.trains_on = trainer, device.name

    async def _open(self, trainer: Any, state: str | None) -> None:
        spec = self._launch.spec
        await call(trainer.open, self._key, spec.rl, spec.seed, state, self._launch.start_path)

    async def _move(self, member: Member, target: Any, worker: int) -> None:
        """Take the trainer's state to another device, and leave nothing of the run on the old one."""
        launch = self._launch
        folder = Path(launch.checkpoint_dir) / f"{MOVING}{launch.attempt}-{worker}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await call(member.trainer.export_state, self._key, str(folder), launch.spec.model)
            await self._open(target, str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self.midway:
            gradients = member.trainer.gradients.remote(self._key)
            await call(target.sum_gradients, self._key, 1.0, gradients)
        await self._leave(member.trainer)

    async def _house_engine(self, member: Member, device: DeviceRef) -> None:
        if member.engine is not None and member.rolls_on == device.name:
            return
        if member.engine is not None:
            await self._drop_engine(member)
        launch = self._launch
        engine = rollout_resident(device, launch.weights_key, launch.model_path, launch.spec.rl.precision)
        self._entered.append(engine)
        await call(engine.load)
        member.engine, member.rolls_on = engine, device.name

    async def _drop_engine(self, member: Member) -> None:
        await self._leave(member.engine)
        member.engine, member.version = None, None

    async def _leave(self, resident: Any) -> None:
        await call(resident.close, self._key, True)
        self._entered.remove(resident)

    async def _load(self, member: Member, share: float) -> Any:
        """The tensors go from process to process as a Ray object and never through the pipeline."""
        version = self.version
        tensors, scaling = member.trainer.adapter.options(num_returns=2).remote(self._key)
        if self._launch.spec.rl.tuning.type == "lora":
            ran = await call(member.engine.load_adapter, self._key, version, tensors, scaling, share)
        else:
            ran = await call(member.engine.load_full, self._key, version, tensors, share)
        member.version = version
        return ran

    # ------------------------------------------------------------ keeping

    async def save(self, step: int, state: dict[str, Any], keep: int) -> tuple[str, int, list[str]]:
        """Write a checkpoint from the first worker's trainer; all workers have the same weights."""
        launch, member = self._launch, self._members[0]
        async with member.lock:
            path, size, removed = await call(
                member.trainer.save, self._key, launch.checkpoint_dir, step, state, launch.spec.model, keep
            )
        return path, size, removed

    async def close(self) -> None:
        """Let the residents forget the run, within a limit; those that are gone have forgotten it."""
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.gather(
                    *(call(resident.close, self._key) for resident in self._entered), return_exceptions=True
                )
