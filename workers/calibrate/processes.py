"""The processes of a measurement: Ray actors on the device's node, which end with their driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.calibrate.bench import Bench
from workers.calibrate.measure import Measurement
from workers.calibrate.work import Effort, split
from workers.protocol import Calibration, DeviceRef


class CalibrationFailed(Exception):
    """What could not be measured, and why."""


class Actor:
    def __init__(self, device: DeviceRef, model_path: str, largest_batch: int) -> None:
        self._handle = (
            ray.remote(Bench)
            .options(
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(device.ray_node_id, soft=False),
            )
            .remote(device, model_path, largest_batch)
        )

    def ask(self, method: str, *args: object) -> Future[Any]:
        return getattr(self._handle, method).remote(*args).future()

    def end(self) -> None:
        ray.kill(self._handle)


@contextmanager
def actors(device: DeviceRef, model_path: str, effort: Effort) -> Iterator[tuple[Actor, Actor | None]]:
    """One process, and a second one where pairs can be measured."""
    largest = effort.largest_batch[device.kind]
    one = Actor(device, model_path, largest)
    other = Actor(device, model_path, largest) if split(device) else None
    try:
        yield one, other
    finally:
        for actor in (one, other):
            if actor is not None:
                actor.end()


def calibrate(
    device: DeviceRef,
    *,
    type_name: str,
    model: str,
    model_path: str,
    effort: Effort,
    say: Callable[[str], None],
) -> Calibration:
    """Measure; Ray must be connected. ``CalibrationFailed`` with a text for people."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    source = f"{type_name} with {device.threads} threads, {model}, {device.name}, {when}"
    try:
        with actors(device, model_path, effort) as (one, other):
            return Measurement(device, effort, one, other, say).run(source)
    except TimeoutError:
        raise CalibrationFailed(f"{device.name}: not done within {effort.limit_s:.0f} s") from None
    except (RayError, ValueError, OSError) as error:
        raise CalibrationFailed(f"{device.name}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """What happened in the process, without Ray's copy of its stack."""
    cause = getattr(error, "cause", None) or error
    return (
        f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else 'no more is known'}"
    )
