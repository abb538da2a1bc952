"""What must hold of a plan of the policy ``exclusive``: turns are answered, fair, and leave nothing idle."""

from __future__ import annotations

from collections import Counter
from math import inf

from scheduler.core.apply import apply
from scheduler.core.draft import wanting_turn
from scheduler.core.invariants.computing import computing
from scheduler.core.order import turn_clocks, turn_cost
from scheduler.core.state import (
    OFF_DEVICE,
    Admit,
    Device,
    DeviceState,
    Node,
    NodeState,
    Pipeline,
    Place,
    Plan,
    Policy,
    QueuedJob,
    RefusalCode,
    Snapshot,
)


def broken(before: Snapshot, after: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    return [
        *_unanswered(before, plan),
        *_idle_while_wanted(before, after, plan, policy),
        *_overtaken(before, plan, policy),
        *_not_started(after),
    ]


def _unanswered(snapshot: Snapshot, plan: Plan) -> list[str]:
    """Every queued job and every pipeline that wants a turn gets exactly one answer; nobody else gets any."""
    jobs = Counter(a.job for a in plan.actions if isinstance(a, Admit))
    jobs.update(r.job for r in plan.refusals if r.job is not None)
    turns = Counter(a.pipeline for a in plan.actions if isinstance(a, Place))
    turns.update(r.pipeline for r in plan.refusals if r.pipeline is not None)
    wrong = []
    if jobs != Counter(job.id for job in snapshot.queue):
        wrong.append(f"answers to jobs: {dict(jobs)}")
    if turns != Counter(pipeline.id for pipeline in wanting_turn(snapshot)):
        wrong.append(f"answers to pipelines: {dict(turns)}")
    return wrong


def _not_started(after: Snapshot) -> list[str]:
    """A ready node is left only where it, or one of its gang, has a busy worker or no live device."""
    lost = {d.name for d in after.devices if d.state is DeviceState.LOST}
    busy = {(n.pipeline, n.worker) for n in computing(after)}
    holds = {p.id: p.holds for p in after.pipelines}
    units: dict[tuple[int, str], list[Node]] = {}
    for node in after.nodes:
        if node.state is NodeState.READY:
            units.setdefault((node.pipeline, node.gang or node.id), []).append(node)
    return [
        f"node {unit[0].id} of pipeline {unit[0].pipeline} could start"
        for unit in units.values()
        if unit[0].kind in OFF_DEVICE
        or all(
            holds[n.pipeline]
            and holds[n.pipeline][n.worker] not in lost
            and (n.pipeline, n.worker) not in busy
            for n in unit
        )
    ]


def _fits(snapshot: Snapshot, device: Device, load: Pipeline | QueuedJob, policy: Policy) -> bool:
    """Whether the load could come to live on the device beside those at home there."""
    at_home = [p for p in snapshot.pipelines if device.name in p.home]
    weights = {load.weights_key: load.weights_bytes}
    for p in at_home:
        weights[p.weights_key] = max(p.weights_bytes, weights.get(p.weights_key, 0))
    peak = max(p.peak_bytes for p in (*at_home, load))
    used = sum(weights.values()) + sum(p.run_bytes for p in (*at_home, load)) + peak
    return used <= device.memory_bytes and len(at_home) < policy.max_pipelines_per_device


def _refused(snapshot: Snapshot, plan: Plan, *codes: RefusalCode) -> list[Pipeline]:
    pipelines = {p.id: p for p in snapshot.pipelines}
    return [pipelines[r.pipeline] for r in plan.refusals if r.pipeline is not None and r.code in codes]


def _idle_while_wanted(snapshot: Snapshot, after: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    """No free READY device is left that a waiting single-device pipeline could use.

    A reservation is the exception: a waiting gang of n reserves at most n - 1 devices, and the first job that
    waits for memory keeps others from moving to at most as many devices as it needs.
    """
    held = {name for p in after.pipelines for name in p.holds}
    computing = {node.device for node in snapshot.nodes}
    free = [d for d in after.devices if d.state is DeviceState.READY and d.name not in held | computing]
    waiting = _refused(snapshot, plan, RefusalCode.TURN, RefusalCode.MEMORY, RefusalCode.NO_DEVICES)
    gangs = [p.devices - 1 for p in waiting if p.devices > 1]
    by_id = {job.id: job for job in snapshot.queue}
    kept = [by_id[r.job].devices for r in plan.refusals if r.code is RefusalCode.MEMORY and r.job is not None]
    ready = {d.name for d in snapshot.devices if d.state is DeviceState.READY}
    kept += [p.devices for p in snapshot.pipelines if not ready.issuperset(p.home)]
    wrong = []
    for p in waiting:
        at_home = [d for d in free if d.name in p.home]
        elsewhere = [d for d in free if d.name not in p.home and _fits(after, d, p, policy)]
        if p.devices > 1:
            if len(at_home) == p.devices and not [g for g in waiting if g.devices > 1 and g is not p]:
                wrong.append(f"pipeline {p.id} waits though all its homes are free")
            continue
        if len(at_home) > max(gangs, default=0):
            wrong.append(f"pipeline {p.id} waits though its home is free")
        if len(elsewhere) > max(gangs, default=0) + max(kept, default=0):
            names = [d.name for d in elsewhere]
            wrong.append(f"pipeline {p.id} waits though {names} are free")
    return wrong


def _overtaken(snapshot: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    """Nobody behind a waiting single-device pipeline got a device that was the waiting one's to take.

    Its to take are its home, and a device it could move to that nobody at home waits for or whose waiting
    pipelines at home are a turn of theirs ahead of it in virtual time.
    """
    tenants = {tenant.id: tenant for tenant in snapshot.tenants}
    clocks = {tenant: clock[0] for tenant, clock in turn_clocks(snapshot.pipelines, tenants).items()}
    over_quota = {r.pipeline for r in plan.refusals if r.code is RefusalCode.QUOTA}
    wanting = [p for p in wanting_turn(snapshot) if p.id not in over_quota]
    yield_at = {
        d.name: min(
            (clocks[p.tenant] - turn_cost(p, tenants) for p in wanting if d.name in p.home), default=inf
        )
        for d in snapshot.devices
    }
    # A tenant's time only rises while turns are given, so one who is ahead at the end was ahead all along.
    end = dict(clocks)
    for action in plan.actions:
        if isinstance(action, Place):
            placed = next(p for p in snapshot.pipelines if p.id == action.pipeline)
            end[placed.tenant] += turn_cost(placed, tenants)
    waiting = [p for p in _refused(snapshot, plan, RefusalCode.TURN) if p.devices == 1]
    keeps_memory = any(r.code is RefusalCode.MEMORY for r in plan.refusals)
    ready = {d.name: d for d in snapshot.devices if d.state is DeviceState.READY}
    homeless = any(not ready.keys() >= set(p.home) for p in snapshot.pipelines)
    wrong = []
    world = snapshot
    for action in plan.actions:
        if isinstance(action, Place):
            placed = next(p for p in snapshot.pipelines if p.id == action.pipeline)
            for p in waiting:
                if not _ahead(p, placed, end, clocks):
                    continue
                for name in action.devices:
                    may_move = end[p.tenant] <= yield_at[name] and not keeps_memory and not homeless
                    if name in p.home or (may_move and _fits(world, ready[name], p, policy)):
                        wrong.append(f"pipeline {placed.id} overtook {p.id} on {name}")
            clocks[placed.tenant] += turn_cost(placed, tenants)
        world = apply(world, action)
    return wrong


def _ahead(p: Pipeline, other: Pipeline, end: dict[int, float], now: dict[int, float]) -> bool:
    """Whether ``p`` comes before ``other``, whose tenant's time is ``now`` before its turn is charged."""
    if p.tenant == other.tenant:
        return (-p.priority, p.submitted, p.id) < (-other.priority, other.submitted, other.id)
    return (end[p.tenant], p.tenant) < (now[other.tenant], other.tenant)
