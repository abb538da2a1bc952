"""Writing the pool's facts: nodes and devices, holds, residents, decisions. Sub-stages are in ``substages``.

Each write names the state it expects. Where somebody was faster it returns False and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus
from backend.notify.services import SCHEDULER, ring
from backend.pool.fairness import held_seconds, service_add
from backend.pool.models import Decision, Device, Node, Placement, Resident, ServiceInterval, SubStage
from backend.pool.states import DeviceState, SubStageStatus


@dataclass(frozen=True)
class DeviceSeen:
    """A device as a node of the cluster announces it."""

    index: int
    kind: str
    type: str
    threads: int
    memory_bytes: int
    saturation_batch: int


@transaction.atomic(savepoint=False)
def node_seen(
    *, name: str, ray_node_id: str, address: str, devices: Iterable[DeviceSeen], now: datetime
) -> Node:
    """Register a live node and its devices; a device that was lost comes back into service.

    Devices of the node that it no longer announces are lost. Prices are set when a device is first seen, and
    stay: an hour that is in the books must not change its price.

    A node that comes back with another Ray id has been restarted: nothing is loaded on it any more, and it
    was out of service meanwhile.
    """
    restarted = Node.objects.filter(name=name).exclude(ray_node_id=ray_node_id).exists()
    node, _ = Node.objects.update_or_create(
        name=name,
        defaults={"ray_node_id": ray_node_id, "address": address, "alive": True, "seen_at": now},
    )
    if restarted:
        Resident.objects.filter(device__node=node).delete()
    names = [_device_seen(node, seen, restarted=restarted, now=now) for seen in devices]
    _devices_lose(node.devices.exclude(name__in=names), now)
    return node


def _device_seen(node: Node, seen: DeviceSeen, *, restarted: bool, now: datetime) -> str:
    described = {
        "kind": seen.kind,
        "type": seen.type,
        "threads": seen.threads,
        "memory_bytes": seen.memory_bytes,
        "saturation_batch": seen.saturation_batch,
    }
    device, created = Device.objects.select_for_update(no_key=True).get_or_create(
        name=f"{node.name}/{seen.kind}{seen.index}",
        defaults={
            **described,
            "node": node,
            "index": seen.index,
            "price_micro_usd_hour": settings.DEVICE_PRICE_MICRO_USD_PER_HOUR[seen.kind],
            "metered_until": now,
        },
    )
    if created:
        ServiceInterval.objects.create(device=device, start=now)
        return device.name
    Device.objects.filter(pk=device.pk).update(**described)
    if restarted or device.state == DeviceState.LOST:
        _service_renew(device, now)
        Device.objects.filter(pk=device.pk, state=DeviceState.LOST).update(
            state=DeviceState.READY, lost_at=None
        )
    return device.name


def _service_renew(device: Device, now: datetime) -> None:
    """The device was away: end its service at the last sign of it, and let a new one begin.

    Signs are the last reading of its meter and the last sub-stage that finished there. Call under the
    device's lock, so that no reading goes on meanwhile.
    """
    last = ServiceInterval.objects.get(device=device, end__isnull=True)
    finished = SubStage.objects.filter(device=device, metered=False, status=SubStageStatus.DONE)
    signs = [last.start, device.metered_until, *finished.values_list("ended_at", flat=True)]
    last.end = max(signs)
    last.save(update_fields=["end"])
    ServiceInterval.objects.create(device=device, start=max(now, last.end))


@transaction.atomic(savepoint=False)
def node_gone(*, node: Node) -> None:
    """The node left the cluster: its devices take no work, and what was loaded on them is gone."""
    Node.objects.filter(pk=node.pk).update(alive=False)
    _devices_lose(node.devices.all(), timezone.now())


def _devices_lose(devices: QuerySet[Device], now: datetime) -> None:
    Resident.objects.filter(device__in=devices).delete()
    devices.exclude(state=DeviceState.LOST).update(state=DeviceState.LOST, lost_at=now)


def device_drain(name: str) -> bool:
    """Let no new work begin on the device; False where it drains already. LookupError: no such device."""
    return _draining_set(name, draining=True)


def device_return(name: str) -> bool:
    """Take a device that drains back into use; False where it is in use. LookupError: no such device."""
    return _draining_set(name, draining=False)


@transaction.atomic(savepoint=False)
def _draining_set(name: str, *, draining: bool) -> bool:
    device = Device.objects.filter(name=name)
    if not device.exists():
        raise LookupError(f"the pool has no device {name!r}")
    changed = bool(device.exclude(draining=draining).update(draining=draining))
    if changed:
        ring(SCHEDULER, why=f"{name} {'drains' if draining else 'is back'}")
    return changed


def placements_open(*, attempt: Attempt, devices: Sequence[Device], reason: str, now: datetime) -> bool:
    """Give worker ``w`` of the attempt ``devices[w]``: all of them, or none.

    None when the attempt stops or is over, when a device is not READY, or when one is taken.
    """
    try:
        with transaction.atomic():
            if not _lock_for_hold(attempt, devices):
                return False
            Placement.objects.bulk_create(
                Placement(attempt=attempt, device=device, worker=worker, reason=reason[:300], opened_at=now)
                for worker, device in enumerate(devices)
            )
            Attempt.objects.filter(pk=attempt.pk).update(home=[device.name for device in devices])
    except IntegrityError:
        return False
    return True


def _lock_for_hold(attempt: Attempt, devices: Sequence[Device]) -> bool:
    """Lock the attempt, then the devices in order: nobody ends the one or loses the others meanwhile."""
    live = Attempt.objects.filter(pk=attempt.pk, status__in=[AttemptStatus.STARTING, AttemptStatus.RUNNING])
    if not live.select_for_update(no_key=True):
        return False
    ready = Device.objects.filter(pk__in=[device.pk for device in devices], state=DeviceState.READY)
    return len(ready.select_for_update(no_key=True).order_by("pk")) == len(devices)


@transaction.atomic(savepoint=False)
def placements_close(*, attempt: Attempt, now: datetime) -> None:
    """Free the attempt's devices, charge the turn, and remember how long it took: so long may the next."""
    held = Placement.objects.filter(attempt=attempt, closed_at__isnull=True)
    seconds = [_held_seconds(placement, now) for placement in held]
    if not seconds:
        return
    held.update(closed_at=now)
    Attempt.objects.filter(pk=attempt.pk).update(step_seconds=max(seconds))
    service_add(attempt=attempt, device_seconds=sum(seconds))


def _held_seconds(placement: Placement, now: datetime) -> float:
    services = ServiceInterval.objects.filter(device=placement.device_id, start__lte=now)
    reach = Q(end__isnull=True) | Q(end__gt=placement.opened_at)
    return held_seconds(services.filter(reach), placement.opened_at, now)


def resident_use(*, device: Device, weights_key: str, weights_bytes: int, now: datetime) -> None:
    Resident.objects.update_or_create(
        device=device, weights_key=weights_key, defaults={"bytes": weights_bytes, "last_used_at": now}
    )


def resident_evict(*, device: Device, weights_key: str) -> bool:
    deleted, _ = Resident.objects.filter(device=device, weights_key=weights_key).delete()
    return bool(deleted)


def decision_add(
    *,
    kind: str,
    reason: str,
    stimulus: str,
    now: datetime,
    job_id: int | None = None,
    attempt_id: int | None = None,
    device: Device | None = None,
) -> None:
    Decision.objects.create(
        at=now,
        stimulus=stimulus[:100],
        kind=kind,
        job_id=job_id,
        attempt_id=attempt_id,
        device=device,
        reason=reason[:300],
    )
