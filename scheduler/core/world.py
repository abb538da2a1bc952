"""Events of the world, as snapshots see them; the simulator and tests play them between plans."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.state import DeviceState, Node, Pipeline, QueuedJob, Snapshot


def submit(snapshot: Snapshot, job: QueuedJob) -> Snapshot:
    return replace(snapshot, queue=(*snapshot.queue, job))


def offer(snapshot: Snapshot, node: Node) -> Snapshot:
    """A sub-stage's inputs are ready."""
    return replace(snapshot, nodes=(*snapshot.nodes, node))


def finish(snapshot: Snapshot, pipeline: int, node: str) -> Snapshot:
    """A sub-stage ran to its end."""
    rest = tuple(n for n in snapshot.nodes if (n.pipeline, n.id) != (pipeline, node))
    if len(rest) == len(snapshot.nodes):
        raise ValueError(f"finish: pipeline {pipeline} has no node {node}")
    return replace(snapshot, nodes=rest)


def step_done(snapshot: Snapshot, pipeline: int, seconds: float) -> Snapshot:
    """The step is over: the devices are free again and their time is on the tenant's account."""
    done = _running(snapshot, pipeline)
    tenants = tuple(
        replace(t, service=t.service + len(done.holds) * seconds / t.weight) if t.id == done.tenant else t
        for t in snapshot.tenants
    )
    pipelines = tuple(replace(p, holds=()) if p.id == pipeline else p for p in snapshot.pipelines)
    return replace(snapshot, tenants=tenants, pipelines=pipelines)


def end(snapshot: Snapshot, pipeline: int) -> Snapshot:
    """The attempt is over, however it went. Its weights stay loaded until room is needed."""
    _running(snapshot, pipeline)
    return replace(
        snapshot,
        pipelines=tuple(p for p in snapshot.pipelines if p.id != pipeline),
        nodes=tuple(n for n in snapshot.nodes if n.pipeline != pipeline),
    )


def set_device(snapshot: Snapshot, name: str, state: DeviceState) -> Snapshot:
    """A device comes, drains or is lost; a lost one has nothing loaded any more."""
    devices = tuple(replace(d, state=state) if d.name == name else d for d in snapshot.devices)
    lost = state is DeviceState.LOST
    residents = tuple(r for r in snapshot.residents if not (lost and r.device == name))
    return replace(snapshot, devices=devices, residents=residents)


def at(snapshot: Snapshot, now: float) -> Snapshot:
    return replace(snapshot, now=now)


def _running(snapshot: Snapshot, pipeline: int) -> Pipeline:
    for candidate in snapshot.pipelines:
        if candidate.id == pipeline:
            return candidate
    raise ValueError(f"pipeline {pipeline} is not running")
