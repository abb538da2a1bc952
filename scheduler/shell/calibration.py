"""Measuring the pool's devices: which may be measured, with which model, and what becomes of the result.

    pool_look ─► one_of_each_type, or device_named ─► held (nothing runs) ─► measure ─► calibration_store

A measurement needs the device to itself. While a scheduler leads, the device is drained for that time; at the
start of an embedded set-up nobody leads yet, and nothing can come in between.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from django.conf import settings
from django.db import transaction

from backend.catalog.models import BaseModel
from backend.notify.services import SCHEDULER, ring
from backend.pool.models import Device, DeviceCalibration, Placement, SubStage
from backend.pool.services import DeviceSeen, device_drain, device_return, node_seen
from backend.pool.states import DeviceState, SubStageStatus
from scheduler.shell.inventory import devices_of
from workers.launch import NodeSeen
from workers.protocol import Calibration

#: The model that an embedded set-up measures with, if it is on disk.
BUILT_IN = "SmolLM2-135M-Instruct"
#: What waited for processors for a larger share of its time is measured again at the next start.
MOST_DISTURBED = 0.1
#: How often it is looked whether a device has become free.
LOOK_EVERY_S = 1.0

Type = tuple[str, int]


class NotMeasurable(Exception):
    """Why a device cannot be measured now, for people."""


# ---------------------------------------------------------------- what there is


@transaction.atomic
def pool_look(nodes: Iterable[NodeSeen], now: datetime) -> None:
    """Write down the nodes and devices that the cluster has now."""
    for node in nodes:
        seen = devices_of(
            node,
            threads_per_device=settings.CPU_DEVICE_THREADS,
            gpu_memory_bytes=settings.GPU_MEMORY_BYTES,
        )
        node_seen(
            name=node.name,
            ray_node_id=node.ray_node_id,
            address=node.address,
            devices=as_measured(seen),
            now=now,
        )


def as_measured(devices: Iterable[DeviceSeen]) -> list[DeviceSeen]:
    """With the saturation batch that was last measured for their type, where one was."""
    rows = DeviceCalibration.objects.order_by("measured_at", "pk")
    known = {(row.device_type, row.threads): row.values["saturation_batch"] for row in rows}
    return [
        replace(device, saturation_batch=known.get((device.type, device.threads), device.saturation_batch))
        for device in devices
    ]


def model_named(name: str | None) -> BaseModel:
    """A model of the service, by default the built-in one, else the smallest. ``NotMeasurable`` if none is
    on disk.
    """
    models = [model for model in BaseModel.objects.filter(organization=None) if Path(model.path).is_dir()]
    if name is not None:
        models = [model for model in models if model.name == name]
    if not models:
        which = "no model of the service" if name is None else f"no model {name} of the service"
        raise NotMeasurable(f"{which} is on disk")
    return min(models, key=lambda model: (model.name != BUILT_IN, model.parameters, model.name))


def device_named(name: str) -> Device:
    device = Device.objects.select_related("node").filter(name=name).first()
    if device is None:
        raise NotMeasurable(f"there is no device {name}")
    return device


def one_of_each_type(*, without: Collection[Type] = ()) -> list[Device]:
    """A device of each type, a free one where there is one; of the types in ``without`` none."""
    devices = Device.objects.select_related("node").filter(state=DeviceState.READY).order_by("name")
    wanted = [device for device in devices if type_of(device) not in without]
    chosen: dict[Type, Device] = {}
    for device in sorted(wanted, key=lambda device: bool(jobs_on(device))):
        chosen.setdefault(type_of(device), device)
    return list(chosen.values())


def measured_types() -> set[Type]:
    """Types of which something is known that other programs did not disturb."""
    rows = DeviceCalibration.objects.all()
    return {(row.device_type, row.threads) for row in rows if calm(row.values.get("disturbed"))}


def calm(disturbed: float | None) -> bool:
    """What nobody knows of is taken for calm: it would not be known the next time either."""
    return disturbed is None or disturbed <= MOST_DISTURBED


def all_measured() -> bool:
    """Whether all devices that are written down are of measured types, and as they are set up today.

    Needs no cluster: most starts have nothing to measure, and shall not wait for it.
    """
    known = measured_types()
    devices = list(Device.objects.all())
    return bool(devices) and all(
        type_of(device) in known and (device.kind != "cpu" or device.threads == settings.CPU_DEVICE_THREADS)
        for device in devices
    )


def type_of(device: Device) -> Type:
    return device.type, device.threads


# ---------------------------------------------------------------- a device to oneself


@contextmanager
def held(device: Device, *, drain: bool, wait_s: float, force: bool) -> Iterator[None]:
    """Wait until what runs on the device is over; with ``drain``, let nothing new begin meanwhile.

    ``NotMeasurable`` when the device is lost, or when something still runs after ``wait_s`` and not
    ``force``.
    """
    drains = drain and device_drain(device.name)
    try:
        _wait_until_free(device, wait_s=wait_s, force=force)
        yield
    finally:
        if drains:
            device_return(device.name)


def jobs_on(device: Device) -> list[str]:
    """Jobs that compute on the device, or hold it for themselves."""
    placed = Placement.objects.filter(device=device, closed_at__isnull=True)
    running = SubStage.objects.filter(
        device=device, status__in=[SubStageStatus.GRANTED, SubStageStatus.LEAVING]
    )
    return sorted(
        {
            *placed.values_list("attempt__job__public_id", flat=True),
            *running.values_list("job__public_id", flat=True),
        }
    )


def _wait_until_free(device: Device, *, wait_s: float, force: bool) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        if not Device.objects.filter(pk=device.pk, state=DeviceState.READY, node__alive=True).exists():
            raise NotMeasurable(f"{device.name} is lost")
        jobs = jobs_on(device)
        if force or not jobs:
            return
        if time.monotonic() >= deadline:
            raise NotMeasurable(f"{device.name} computes for {', '.join(jobs)}")
        time.sleep(LOOK_EVERY_S)


# ---------------------------------------------------------------- the result


@transaction.atomic
def calibration_store(*, device: Device, model: str, values: Calibration, now: datetime) -> DeviceCalibration:
    """Keep what was measured for the device's type, in place of what was known of it with that model."""
    type, threads = type_of(device)
    row, _ = DeviceCalibration.objects.update_or_create(
        device_type=type,
        threads=threads,
        base_model=model,
        defaults={"values": values.model_dump(mode="json"), "measured_at": now},
    )
    Device.objects.filter(type=type, threads=threads).update(saturation_batch=values.saturation_batch)
    ring(SCHEDULER, why=f"calibration of {type}")
    return row
