"""What must hold of every snapshot and every plan, said a second time and plainly: scans, no indexes.

Each function returns sentences about what is wrong; an empty list is the proof that tests ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from math import inf

from scheduler.core.apply import apply
from scheduler.core.draft import ordered, wanting_turn
from scheduler.core.order import turn_clocks, turn_cost
from scheduler.core.state import (
    OFF_DEVICE,
    Action,
    Admit,
    Device,
    DeviceState,
    Evict,
    NodeState,
    Pipeline,
    Place,
    Plan,
    Policy,
    QueuedJob,
    RefusalCode,
    Snapshot,
    Start,
)

# ---------------------------------------------------------------- a snapshot


def check(snapshot: Snapshot) -> list[str]:
    """Contradictions inside a snapshot."""
    return [
        *_duplicates("device", (d.name for d in snapshot.devices)),
        *_duplicates("tenant", (t.id for t in snapshot.tenants)),
        *_duplicates("job", (j.id for j in snapshot.queue)),
        *_duplicates("pipeline", (p.id for p in snapshot.pipelines)),
        *_duplicates("node", ((n.pipeline, n.id) for n in snapshot.nodes)),
        *_duplicates("resident", ((r.device, r.weights_key) for r in snapshot.residents)),
        *_duplicates("holder of", (name for p in snapshot.pipelines for name in p.holds)),
        *_check_tenants(snapshot),
        *_check_pipelines(snapshot),
        *_check_nodes(snapshot),
        *_check_memory(snapshot),
    ]


def _duplicates(what: str, keys: Iterable[Hashable]) -> list[str]:
    return [f"more than one {what} {key}" for key, times in Counter(keys).items() if times > 1]


def _check_tenants(snapshot: Snapshot) -> list[str]:
    known = {tenant.id for tenant in snapshot.tenants}
    wrong = [f"tenant {t.id}: weight {t.weight}" for t in snapshot.tenants if not t.weight > 0]
    wrong += [f"job {j.id}: unknown tenant {j.tenant}" for j in snapshot.queue if j.tenant not in known]
    wrong += [f"pipeline {p.id}: unknown tenant" for p in snapshot.pipelines if p.tenant not in known]
    return wrong


def _check_pipelines(snapshot: Snapshot) -> list[str]:
    wrong = []
    for pipeline in snapshot.pipelines:
        if len(pipeline.home) != pipeline.devices or len(set(pipeline.home)) != pipeline.devices:
            wrong.append(f"pipeline {pipeline.id}: homes {pipeline.home} for {pipeline.devices} workers")
        if pipeline.holds not in ((), pipeline.home):
            wrong.append(f"pipeline {pipeline.id}: holds {pipeline.holds}, not all of its homes or nothing")
    return wrong


def _check_nodes(snapshot: Snapshot) -> list[str]:
    wrong = []
    pipelines = {pipeline.id: pipeline for pipeline in snapshot.pipelines}
    shares: dict[str, float] = {}
    workers: Counter[tuple[int, int]] = Counter()
    for node in snapshot.nodes:
        pipeline = pipelines.get(node.pipeline)
        if pipeline is None or not 0 <= node.worker < pipeline.devices:
            wrong.append(f"node {node.id}: no worker {node.worker} of pipeline {node.pipeline}")
            continue
        if node.kind in OFF_DEVICE or node.state is NodeState.READY:
            if node.device is not None:
                wrong.append(f"node {node.id}: on {node.device}, needs none now")
            continue
        if not pipeline.holds or node.device != pipeline.holds[node.worker]:
            wrong.append(f"node {node.id}: runs on {node.device}, which its worker does not hold")
        if node.device is not None:
            shares[node.device] = shares.get(node.device, 0.0) + node.share
        workers[node.pipeline, node.worker] += 1
    wrong += [f"device {name}: shares sum to {total}" for name, total in shares.items() if total > 1]
    wrong += [f"worker {worker}: runs {n} nodes at once" for worker, n in workers.items() if n > 1]
    return wrong


def _check_memory(snapshot: Snapshot) -> list[str]:
    wrong = []
    for device in snapshot.devices:
        used = used_bytes(snapshot, device.name)
        if used > device.memory_bytes:
            wrong.append(f"device {device.name}: {used} of {device.memory_bytes} bytes used")
    return wrong


def used_bytes(snapshot: Snapshot, device: str) -> int:
    """Weights once per key, each pipeline's own bytes, and idle residents."""
    at_home = [pipeline for pipeline in snapshot.pipelines if device in pipeline.home]
    weights: dict[str, int] = {}
    for pipeline in at_home:
        weights[pipeline.weights_key] = max(pipeline.weights_bytes, weights.get(pipeline.weights_key, 0))
    idle = sum(r.bytes for r in snapshot.residents if r.device == device and r.weights_key not in weights)
    return sum(weights.values()) + sum(pipeline.run_bytes for pipeline in at_home) + idle


# ---------------------------------------------------------------- an action


def illegal(snapshot: Snapshot, action: Action, policy: Policy) -> list[str]:
    """Why the action may not be done on this snapshot."""
    match action:
        case Admit():
            return _illegal_admit(snapshot, action, policy)
        case Place():
            return _illegal_place(snapshot, action, policy)
        case Start():
            return _illegal_start(snapshot, action)
        case Evict():
            return _illegal_evict(snapshot, action)
        case _:
            return []


def _illegal_admit(snapshot: Snapshot, action: Admit, policy: Policy) -> list[str]:
    job = next((job for job in snapshot.queue if job.id == action.job), None)
    if job is None:
        return [f"{action}: not in the queue"]
    has = sum(p.devices for p in snapshot.pipelines if p.tenant == job.tenant)
    return [
        *_not_ready(snapshot, action.home, action),
        *_wrong_number(action.home, job.devices, action),
        *_over_limit(snapshot, job.tenant, has + job.devices, action),
        *_crowded(snapshot, action.home, policy, action),
    ]


def _illegal_place(snapshot: Snapshot, action: Place, policy: Policy) -> list[str]:
    pipeline = next((p for p in snapshot.pipelines if p.id == action.pipeline), None)
    if pipeline is None:
        return [f"{action}: not running"]
    held = {name for p in snapshot.pipelines for name in p.holds}
    computing = {node.device for node in snapshot.nodes}
    has = sum(len(p.holds) for p in snapshot.pipelines if p.tenant == pipeline.tenant)
    new = tuple(name for name in action.devices if name not in pipeline.home)
    wrong = [f"{action}: {name} is held" for name in action.devices if name in held | computing]
    if pipeline not in wanting_turn(snapshot):
        wrong.append(f"{action}: wants no turn")
    return [
        *wrong,
        *_not_ready(snapshot, action.devices, action),
        *_wrong_number(action.devices, pipeline.devices, action),
        *_over_limit(snapshot, pipeline.tenant, has + pipeline.devices, action),
        *_crowded(snapshot, new, policy, action),
    ]


def _illegal_start(snapshot: Snapshot, action: Start) -> list[str]:
    key = action.pipeline, action.node
    node = next((n for n in snapshot.nodes if (n.pipeline, n.id) == key), None)
    pipeline = next((p for p in snapshot.pipelines if p.id == action.pipeline), None)
    if node is None or pipeline is None or node.state is not NodeState.READY:
        return [f"{action}: not ready"]
    wrong = [] if 0 < action.share <= 1 else [f"{action}: share"]
    if node.kind in OFF_DEVICE:
        return wrong + ([f"{action}: needs no device"] if action.device is not None else [])
    if not pipeline.holds or pipeline.holds[node.worker] != action.device:
        wrong.append(f"{action}: its worker does not hold the device")
    lost = {d.name for d in snapshot.devices if d.state is DeviceState.LOST}
    if action.device in lost:
        wrong.append(f"{action}: the device is lost")
    return wrong


def _illegal_evict(snapshot: Snapshot, action: Evict) -> list[str]:
    here = [r for r in snapshot.residents if r.device == action.device]
    used = {p.weights_key for p in snapshot.pipelines if action.device in p.home}
    resident = next((r for r in here if r.weights_key == action.weights_key), None)
    if resident is None:
        return [f"{action}: not loaded"]
    if resident.weights_key in used:
        return [f"{action}: in use"]
    return []


def _not_ready(snapshot: Snapshot, names: tuple[str, ...], action: Action) -> list[str]:
    ready = {d.name for d in snapshot.devices if d.state is DeviceState.READY}
    return [f"{action}: {name} is not ready" for name in names if name not in ready]


def _wrong_number(names: tuple[str, ...], devices: int, action: Action) -> list[str]:
    whole = len(names) == devices == len(set(names))
    return [] if whole else [f"{action}: not {devices} different devices"]


def _over_limit(snapshot: Snapshot, tenant: int, would_have: int, action: Action) -> list[str]:
    limit = next(t.max_devices for t in snapshot.tenants if t.id == tenant)
    return [f"{action}: over the limit {limit}"] if limit is not None and would_have > limit else []


def _crowded(snapshot: Snapshot, names: tuple[str, ...], policy: Policy, action: Action) -> list[str]:
    at_home = Counter(name for p in snapshot.pipelines for name in p.home)
    limit = policy.max_pipelines_per_device
    return [f"{action}: {limit} pipelines live on {n}" for n in names if at_home[n] >= limit]


# ---------------------------------------------------------------- a plan


def screen(snapshot: Snapshot, plan: Plan, policy: Policy) -> tuple[Plan, list[str]]:
    """The plan without the actions that may not be done after those before them, and why each was left out.

    What a daemon asks before it writes: one wrong action must stop neither the others nor the refusals.
    """
    after = ordered(snapshot)
    kept: list[Action] = []
    wrong: list[str] = []
    for action in plan.actions:
        reasons = illegal(after, action, policy)
        if reasons:
            wrong += reasons
        else:
            after = apply(after, action)
            kept.append(action)
    return Plan(tuple(kept), plan.refusals), wrong


def check_plan(snapshot: Snapshot, plan: Plan, policy: Policy | None = None) -> list[str]:
    """What is wrong with the plan, or with the world it leads to and was not wrong before."""
    policy = policy or Policy()
    after = snapshot = ordered(snapshot)
    before = set(check(snapshot))
    wrong: list[str] = []
    for position, action in enumerate(plan.actions):
        reasons = illegal(after, action, policy)
        if isinstance(action, Evict):
            reasons += _out_of_turn(after, action, plan.actions[position:])
        wrong += reasons
        if reasons:
            return wrong
        after = apply(after, action)
        # An eviction or a move makes room for what follows, so memory is judged after every single action.
        wrong += [problem for problem in check(after) if problem not in before]
    wrong += _unanswered(snapshot, plan)
    wrong += _idle_while_wanted(snapshot, after, plan, policy)
    wrong += _overtaken(snapshot, plan, policy)
    wrong += _not_started(after)
    return wrong


def _out_of_turn(snapshot: Snapshot, action: Evict, rest: tuple[Action, ...]) -> list[str]:
    """Idle weights used less recently than the evicted, but for those that newcomers will use.

    Pipelines that lost a home are newcomers too, wherever memory is set aside for them.
    """
    ready = {d.name for d in snapshot.devices if d.state is DeviceState.READY}
    jobs = {a.job for a in rest if isinstance(a, Admit)}
    moved = {a.pipeline for a in rest if isinstance(a, Place)}
    in_use = {p.weights_key for p in snapshot.pipelines if action.device in p.home}
    in_use |= {j.weights_key for j in snapshot.queue if j.id in jobs}
    in_use |= {p.weights_key for p in snapshot.pipelines if p.id in moved or not ready.issuperset(p.home)}
    idle = {
        r.weights_key: r.last_used
        for r in snapshot.residents
        if r.device == action.device and r.weights_key not in in_use - {action.weights_key}
    }
    older = [key for key, used in idle.items() if used < idle[action.weights_key]]
    return [f"{action}: {key} was used less recently" for key in older]


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
    """A ready node is left only where its worker is busy or has no live device."""
    lost = {d.name for d in after.devices if d.state is DeviceState.LOST}
    busy = {
        (n.pipeline, n.worker)
        for n in after.nodes
        if n.state is NodeState.RUNNING and n.kind not in OFF_DEVICE
    }
    pipelines = {p.id: p for p in after.pipelines}
    wrong = []
    for node in after.nodes:
        if node.state is not NodeState.READY:
            continue
        holds = pipelines[node.pipeline].holds
        able = bool(holds) and holds[node.worker] not in lost and (node.pipeline, node.worker) not in busy
        if node.kind in OFF_DEVICE or able:
            wrong.append(f"node {node.id} of pipeline {node.pipeline} could start")
    return wrong


def _fits(snapshot: Snapshot, device: Device, load: Pipeline | QueuedJob, policy: Policy) -> bool:
    """Whether the load could come to live on the device beside those at home there."""
    at_home = [p for p in snapshot.pipelines if device.name in p.home]
    weights = {load.weights_key: load.weights_bytes}
    for p in at_home:
        weights[p.weights_key] = max(p.weights_bytes, weights.get(p.weights_key, 0))
    used = sum(weights.values()) + sum(p.run_bytes for p in at_home) + load.run_bytes
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
