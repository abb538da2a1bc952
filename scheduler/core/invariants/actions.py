"""Why an action may not be done on a snapshot."""

from __future__ import annotations

from collections import Counter

from scheduler.core.draft import wanting_turn
from scheduler.core.invariants.caps import lags, left_of, rest_of, speeds_of
from scheduler.core.invariants.computing import ROUNDING, computing
from scheduler.core.state import (
    OFF_DEVICE,
    ROLLOUT,
    Action,
    Admit,
    DeviceState,
    Evict,
    Kind,
    Merge,
    Node,
    NodeState,
    Pipeline,
    Place,
    Policy,
    Rehome,
    Resize,
    Snapshot,
    Start,
    Wait,
    Yield,
)

#: What stops between two micro-batches; anything else would lose work.
YIELDING = frozenset({Kind.LOGPROB, Kind.UPDATE})


def illegal(snapshot: Snapshot, action: Action, policy: Policy) -> list[str]:
    reasons = [] if action.reason.strip() else ["no reason is given"]
    match action:
        case Admit():
            reasons += _admit(snapshot, action, policy)
        case Place():
            reasons += _place(snapshot, action, policy)
        case Start():
            reasons += _start(snapshot, action, policy)
        case Evict():
            reasons += _evict(snapshot, action)
        case Resize():
            reasons += _resize(snapshot, action)
        case Yield():
            reasons += _yield(snapshot, action)
        case Merge():
            reasons += _merge(snapshot, action, policy)
        case Rehome():
            reasons += _rehome(snapshot, action, policy)
        case Wait():
            reasons += _wait(snapshot, action, policy)
    return [f"{action}: {reason}" for reason in reasons]


def out_of_turn(snapshot: Snapshot, action: Evict, rest: tuple[Action, ...]) -> list[str]:
    """Idle weights used less recently than the evicted, but for those that newcomers will use.

    Pipelines that lost a home are newcomers too, wherever memory is set aside for them.
    """
    ready = _ready(snapshot)
    jobs = {a.job for a in rest if isinstance(a, Admit)}
    moved = {a.pipeline for a in rest if isinstance(a, Place | Rehome)}
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


# ---------------------------------------------------------------- who lives where


def _admit(snapshot: Snapshot, action: Admit, policy: Policy) -> list[str]:
    job = next((job for job in snapshot.queue if job.id == action.job), None)
    if job is None:
        return ["not in the queue"]
    has = sum(p.devices for p in snapshot.pipelines if p.tenant == job.tenant)
    return [
        *_not_ready(snapshot, action.home),
        *_wrong_number(action.home, job.devices),
        *_over_limit(snapshot, job.tenant, has + job.devices),
        *_crowded(snapshot, action.home, policy),
    ]


def _place(snapshot: Snapshot, action: Place, policy: Policy) -> list[str]:
    pipeline = _pipeline(snapshot, action.pipeline)
    if pipeline is None:
        return ["not running"]
    held = {name for p in snapshot.pipelines for name in p.holds}
    computes = {node.device for node in snapshot.nodes}
    has = sum(len(p.holds) for p in snapshot.pipelines if p.tenant == pipeline.tenant)
    new = tuple(name for name in action.devices if name not in pipeline.home)
    return [
        *([] if policy.name == "exclusive" else ["nobody takes turns under this policy"]),
        *([] if pipeline in wanting_turn(snapshot) else ["wants no turn"]),
        *(f"{name} is held" for name in action.devices if name in held | computes),
        *_not_ready(snapshot, action.devices),
        *_wrong_number(action.devices, pipeline.devices),
        *_over_limit(snapshot, pipeline.tenant, has + pipeline.devices),
        *_crowded(snapshot, new, policy),
    ]


def _evict(snapshot: Snapshot, action: Evict) -> list[str]:
    here = {r.weights_key for r in snapshot.residents if r.device == action.device}
    used = {p.weights_key for p in snapshot.pipelines if action.device in p.home}
    if action.weights_key not in here:
        return ["not loaded"]
    return ["in use"] if action.weights_key in used else []


def _rehome(snapshot: Snapshot, action: Rehome, policy: Policy) -> list[str]:
    pipeline = _pipeline(snapshot, action.pipeline)
    if pipeline is None:
        return ["not running"]
    new = tuple(name for name in action.home if name not in pipeline.home)
    return [
        *(f"{n.id} runs on {n.device}" for n in computing(snapshot) if n.pipeline == pipeline.id),
        *(["all its homes are ready"] if _ready(snapshot).issuperset(pipeline.home) else []),
        *_not_ready(snapshot, action.home),
        *_wrong_number(action.home, pipeline.devices),
        *_crowded(snapshot, new, policy),
    ]


def _not_ready(snapshot: Snapshot, names: tuple[str, ...]) -> list[str]:
    return [f"{name} is not ready" for name in names if name not in _ready(snapshot)]


def _wrong_number(names: tuple[str, ...], devices: int) -> list[str]:
    return [] if len(names) == devices == len(set(names)) else [f"not {devices} different devices"]


def _over_limit(snapshot: Snapshot, tenant: int, would_have: int) -> list[str]:
    limit = next(t.max_devices for t in snapshot.tenants if t.id == tenant)
    return [f"over the limit {limit}"] if limit is not None and would_have > limit else []


def _crowded(snapshot: Snapshot, names: tuple[str, ...], policy: Policy) -> list[str]:
    at_home = Counter(name for p in snapshot.pipelines for name in p.home)
    limit = policy.max_pipelines_per_device
    return [f"{limit} pipelines live on {n}" for n in names if at_home[n] >= limit]


# ---------------------------------------------------------------- what runs


def _start(snapshot: Snapshot, action: Start, policy: Policy) -> list[str]:
    node = _node(snapshot, action.pipeline, action.node)
    pipeline = _pipeline(snapshot, action.pipeline)
    if node is None or pipeline is None or node.state is not NodeState.READY:
        return ["not ready"]
    wrong = _no_share(action.share)
    if node.kind in OFF_DEVICE:
        return wrong + (["needs no device"] if action.device is not None else [])
    where = pipeline.holds if policy.name == "exclusive" else pipeline.home
    if action.device not in where[node.worker : node.worker + 1]:
        wrong.append("its worker does not hold the device" if where is pipeline.holds else "not its home")
    if action.device in {d.name for d in snapshot.devices if d.state is DeviceState.LOST}:
        wrong.append("the device is lost")
    drained = action.device in {d.name for d in snapshot.devices if d.state is DeviceState.DRAINING}
    if policy.name != "exclusive" and drained and not lags(pipeline) and begins_step(pipeline, node):
        wrong.append("no new step begins on a drained device")
    if policy.name != "exclusive" and action.device not in {d.name for d in snapshot.devices}:
        wrong.append("the device is gone")
    return wrong


def begins_step(pipeline: Pipeline, node: Node) -> bool:
    """Whether no earlier part of the worker's rollouts occurs, or of a job that only trains."""
    if pipeline.outlook.train and not pipeline.outlook.rollout:
        before = pipeline.outlook.train[: node.part]
        return not node.yielded and not any(segment.seconds > 0 for segment in before)
    before = pipeline.outlook.rollout[: node.part]
    return node.kind in ROLLOUT and not any(segment.seconds > 0 for segment in before)


def _resize(snapshot: Snapshot, action: Resize) -> list[str]:
    node = _running(snapshot, action.pipeline, action.node)
    if node is None:
        return ["does not run on a device"]
    return _no_share(action.share) + (["changes nothing"] if node.share == action.share else [])


def _yield(snapshot: Snapshot, action: Yield) -> list[str]:
    node = _running(snapshot, action.pipeline, action.node)
    if node is None:
        return ["does not run on a device"]
    return [
        *([] if node.kind in YIELDING else [f"a {node.kind} has no yield points"]),
        *(["it made room once already"] if node.yielded else []),
    ]


def _merge(snapshot: Snapshot, action: Merge, policy: Policy) -> list[str]:
    ids = (action.target, *action.sources)
    found = [_running(snapshot, action.pipeline, id) for id in ids]
    tails = [node for node in found if node is not None and node.kind is Kind.TAIL]
    if len(tails) < len(ids) or not action.sources or len(set(ids)) < len(ids):
        return ["not all are different running tails"]
    wrong = [] if policy.merge else ["the policy does not merge"]
    if len({node.step for node in tails}) > 1:
        wrong.append("tails of different steps")
    batch = sum(node.segment.batch for node in tails if node.segment is not None)
    saturation = _saturation(snapshot, tails[0].device or "")
    if batch >= saturation:
        wrong.append(f"{batch} sequences in one batch, {saturation} saturate the device")
    # A cache that may grow is bounded by the device's memory, which ``rows`` counts after the action.
    pipeline = _pipeline(snapshot, action.pipeline)
    speeds = speeds_of(snapshot, policy)
    grown = sum(node.tokens + _to_come(node, left_of(snapshot, node, speeds)) for node in tails)
    if pipeline is not None and not pipeline.kv_bytes and 0 < pipeline.kv_tokens < grown:
        wrong.append(f"{grown} tokens of {pipeline.kv_tokens}")
    return wrong


def _to_come(node: Node, left: float) -> int:
    """Tokens that a batch samples in so many solo seconds, if no sequence ends before."""
    segment = node.segment
    if segment is None or not segment.forward_seconds:
        return 0
    return int(segment.batch * min(left, node.left) / segment.forward_seconds)


def _saturation(snapshot: Snapshot, name: str) -> float:
    type = next((d.type for d in snapshot.devices if d.name == name), None)
    return next((table.saturation for known, table in snapshot.tables if known == type), 0)


def _wait(snapshot: Snapshot, action: Wait, policy: Policy) -> list[str]:
    pipeline = _pipeline(snapshot, action.pipeline)
    offered = [
        node
        for node in snapshot.nodes
        if node.pipeline == action.pipeline and node.state is NodeState.READY and node.kind not in OFF_DEVICE
    ]
    if pipeline is None or not offered:
        return ["offers nothing that could wait"]
    speeds = speeds_of(snapshot, policy)
    shortest = min(left_of(snapshot, node, speeds) + rest_of(pipeline, node) for node in offered)
    cap = pipeline.latency_cap * pipeline.outlook.seconds
    return [
        *([] if policy.wait else ["the policy does not wait"]),
        *([] if action.until >= snapshot.now else ["until a time that is over"]),
        *([] if action.until - pipeline.step_began + shortest <= cap + ROUNDING else ["beyond its cap"]),
    ]


# ---------------------------------------------------------------- rows


def _no_share(share: float) -> list[str]:
    return [] if 0 < share <= 1 + ROUNDING else [f"share {share}"]


def _ready(snapshot: Snapshot) -> set[str]:
    return {d.name for d in snapshot.devices if d.state is DeviceState.READY}


def _pipeline(snapshot: Snapshot, id: int) -> Pipeline | None:
    return next((p for p in snapshot.pipelines if p.id == id), None)


def _node(snapshot: Snapshot, pipeline: int, id: str) -> Node | None:
    return next((n for n in snapshot.nodes if (n.pipeline, n.id) == (pipeline, id)), None)


def _running(snapshot: Snapshot, pipeline: int, id: str) -> Node | None:
    return next((n for n in computing(snapshot) if (n.pipeline, n.id) == (pipeline, id)), None)
