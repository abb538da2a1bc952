"""A pipeline's residents: which device each worker is on, and bringing its weights there.

The rollout engine of a device gets a run's weights when its version is behind; the trainer's state (adapter,
optimizer) moves when the scheduler grants another device than before. Loading is on the house: it happens
before the sub-stage's clock starts.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from workers.grants import call
from workers.launch import rollout_resident, trainer_resident
from workers.protocol import DeviceRef, Launch

CLOSE_LIMIT_S = 30.0
#: Beside the checkpoints, while a worker moves from one device to another.
MOVING = ".move-"


@dataclass
class Member:
    """One data-parallel worker: its trainer, its engine, and the weights version that the engine has."""

    device: DeviceRef | None = None
    trainer: Any = None
    engine: Any = None
    version: int | None = None


class Fleet:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._members = [Member() for _ in range(launch.spec.rl.devices)]
        self._entered: list[Any] = []

    @property
    def _key(self) -> str:
        return self._launch.run_key

    def sweep(self) -> None:
        """Remove what an earlier attempt left of a move that did not end."""
        for leftover in Path(self._launch.checkpoint_dir).glob(f"{MOVING}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    async def trainer(self, worker: int, device: DeviceRef) -> Any:
        """The worker's trainer on that device, with the run's state in it."""
        member = self._members[worker]
        if member.device is not None and member.device.name == device.name:
            return member.trainer
        launch, rl = self._launch, self._launch.spec.rl
        trainer = trainer_resident(device, launch.weights_key, launch.model_path, rl.precision)
        self._entered.append(trainer)
        if member.trainer is None:
            await call(trainer.open, self._key, rl, launch.spec.seed, launch.resume_from)
        else:
            await self._move(member, trainer, worker)
        self._members[worker] = Member(device, trainer)
        return trainer

    async def _move(self, member: Member, target: Any, worker: int) -> None:
        """Take the trainer's state to another device, and leave nothing of the run on the old one."""
        launch = self._launch
        folder = Path(launch.checkpoint_dir) / f"{MOVING}{launch.attempt}-{worker}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await call(member.trainer.export_state, self._key, str(folder), launch.spec.model)
            await call(target.open, self._key, launch.spec.rl, launch.spec.seed, str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for resident in (member.trainer, member.engine):
            if resident is not None:
                await call(resident.close, self._key, True)
                self._entered.remove(resident)

    async def rollout(self, worker: int, device: DeviceRef, version: int) -> Any:
        """The worker's engine on that device, with the weights of ``version``."""
        await self.trainer(worker, device)
        if self._members[worker].version != version:
            await self.sync(worker, device, version, share=1.0)
        return self._members[worker].engine

    async def sync(self, worker: int, device: DeviceRef, version: int, share: float) -> Any:
        """Send the trainer's weights to the engine as ``version``; returns the engine's ``Ran``.

        The tensors go from process to process as a Ray object and never through the pipeline.
        """
        launch, trainer = self._launch, await self.trainer(worker, device)
        member = self._members[worker]
        if member.engine is None:
            rl = launch.spec.rl
            engine = rollout_resident(device, launch.weights_key, launch.model_path, rl.precision)
            self._entered.append(engine)
            await call(engine.load)
            member.engine = engine
        tensors, scaling = trainer.adapter.options(num_returns=2).remote(self._key)
        if launch.spec.rl.tuning.type == "lora":
            ran = await call(member.engine.load_adapter, self._key, version, tensors, scaling, share)
        else:
            ran = await call(member.engine.load_full, self._key, version, tensors, share)
        member.version = version
        return ran

    async def save(self, step: int, state: dict[str, Any], keep: int) -> tuple[str, int, list[str]]:
        """Write a checkpoint from the first worker's trainer; all workers have the same weights."""
        launch, trainer = self._launch, self._members[0].trainer
        return await call(
            trainer.save, self._key, launch.checkpoint_dir, step, state, launch.spec.model, keep
        )

    async def close(self) -> None:
        """Let the residents forget the run, within a limit; those that are gone have forgotten it."""
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.gather(
                    *(call(resident.close, self._key) for resident in self._entered), return_exceptions=True
                )
