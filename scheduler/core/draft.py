"""The plan while it is made, and small questions that every pass asks of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.core.apply import apply_all
from scheduler.core.state import (
    OFF_DEVICE,
    Action,
    DeviceState,
    NodeState,
    Pipeline,
    Policy,
    Refusal,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class Draft:
    """``snapshot`` is the world after ``actions``. Nothing new comes to live on the devices in ``kept``:
    their memory is kept for the first job that waits for it."""

    snapshot: Snapshot
    policy: Policy
    actions: tuple[Action, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    kept: frozenset[str] = frozenset()

    def with_actions(self, actions: Iterable[Action]) -> Draft:
        actions = tuple(actions)
        return replace(self, snapshot=apply_all(self.snapshot, actions), actions=(*self.actions, *actions))

    def with_refusals(self, refusals: Iterable[Refusal]) -> Draft:
        return replace(self, refusals=(*self.refusals, *refusals))


def ordered(snapshot: Snapshot) -> Snapshot:
    """The same snapshot with every table sorted by key, so that no decision hangs on the order of rows."""
    return replace(
        snapshot,
        devices=tuple(sorted(snapshot.devices, key=lambda d: d.name)),
        tenants=tuple(sorted(snapshot.tenants, key=lambda t: t.id)),
        queue=tuple(sorted(snapshot.queue, key=lambda j: j.id)),
        pipelines=tuple(sorted(snapshot.pipelines, key=lambda p: p.id)),
        nodes=tuple(sorted(snapshot.nodes, key=lambda n: (n.pipeline, n.id))),
        residents=tuple(sorted(snapshot.residents, key=lambda r: (r.device, r.weights_key))),
    )


def ready_devices(snapshot: Snapshot) -> list[str]:
    return [device.name for device in snapshot.devices if device.state is DeviceState.READY]


def wanting_turn(snapshot: Snapshot) -> list[Pipeline]:
    """Pipelines that hold nothing and have a sub-stage ready that needs a device."""
    offering = {
        node.pipeline
        for node in snapshot.nodes
        if node.state is NodeState.READY and node.kind not in OFF_DEVICE
    }
    return [p for p in snapshot.pipelines if not p.holds and p.id in offering]


def occupied_devices(snapshot: Snapshot) -> set[str]:
    """Devices that somebody holds or that still compute."""
    held = {name for pipeline in snapshot.pipelines for name in pipeline.holds}
    return held | {node.device for node in snapshot.nodes if node.device is not None}
