"""A pipeline's residents: which device each worker is on, and bringing its weights there.

The rollout engine of a device gets a run's weights when its version is behind; the trainer's state (adapter,
optimizer) moves when the scheduler grants another device than before. Loading is on the house: it happens
before the sub-stage's clock starts.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from workers.grants import call
from workers.launch import rollout_resident, trainer_resident
from workers.protocol import DeviceRef, Launch

CLOSE_LIMIT_S = 30.0


@dataclass
class Member:
    """One data-parallel worker: its trainer and engine, and the weights version that the engine has."""

    device: DeviceRef | None = None
    trainer: Any = None
    rollouts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)


class Fleet:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._members = [Member() for _ in range(launch.spec.rl.devices)]

    @property
    def _key(self) -> str:
        return self._launch.run_key

    async def trainer(self, worker: int, device: DeviceRef) -> Any:
        """The worker's trainer on that device, with the run's state in it."""
        member = self._members[worker]
        if member.device is not None and member.device.name == device.name:
            return member.trainer
        launch, rl = self._launch, self._launch.spec.rl
        trainer = trainer_resident(device, launch.weights_key, launch.model_path, rl.precision)
        if member.trainer is None:
            await call(trainer.open, self._key, rl, launch.spec.seed, launch.resume_from)
        else:
            await self._move(member, trainer, worker)
        member.device, member.trainer = device, trainer
        return trainer

    async def _move(self, member: Member, target: Any, worker: int) -> None:
        launch = self._launch
        folder = Path(launch.checkpoint_dir) / f".move-{launch.attempt}-{worker}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await call(member.trainer.export_state, self._key, str(folder), launch.spec.model)
            await call(target.open, self._key, launch.spec.rl, launch.spec.seed, str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        await call(member.trainer.close, self._key)

    async def rollout(self, worker: int, device: DeviceRef, version: int) -> Any:
        """The worker's engine on that device, with the weights of ``version``."""
        member = self._members[worker]
        if member.versions.get(device.name) != version:
            await self.sync(worker, device, version, share=1.0)
        return member.rollouts[device.name]

    async def sync(self, worker: int, device: DeviceRef, version: int, share: float) -> Any:
        """Send the trainer's weights to the engine as ``version``; returns the engine's ``Ran``.

        The tensors go from process to process as a Ray object and never through the pipeline.
        """
        member, launch = self._members[worker], self._launch
        trainer = await self.trainer(worker, device)
        if device.name not in member.rollouts:
            engine = rollout_resident(device, launch.weights_key, launch.model_path, launch.spec.rl.precision)
            await call(engine.load)
            member.rollouts[device.name] = engine
        engine = member.rollouts[device.name]
        tensors, scaling = trainer.adapter.options(num_returns=2).remote(self._key)
        if launch.spec.rl.tuning.type == "lora":
            ran = await call(engine.load_adapter, self._key, version, tensors, scaling, share)
        else:
            ran = await call(engine.load_full, self._key, version, tensors, share)
        member.versions[device.name] = version
        return ran

    async def save(self, step: int, state: dict[str, Any], keep: int) -> tuple[str, int, list[str]]:
        """Write a checkpoint from the first worker's trainer; all workers have the same weights."""
        launch, trainer = self._launch, self._members[0].trainer
        return await call(
            trainer.save, self._key, launch.checkpoint_dir, step, state, launch.spec.model, keep
        )

    async def close(self) -> None:
        """Let the residents forget the run, within a limit; those that are gone have forgotten it."""
        residents = [m.trainer for m in self._members if m.trainer is not None]
        residents += [engine for m in self._members for engine in m.rollouts.values()]
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.gather(
                    *(call(resident.close, self._key) for resident in residents), return_exceptions=True
                )
