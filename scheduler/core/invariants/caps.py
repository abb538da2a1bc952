"""Latency caps: how long the steps of those who compute will have taken, before a plan and after it."""

from __future__ import annotations

from collections import defaultdict

from scheduler.core.invariants.computing import ROUNDING, computing, pipeline_of, slot_of
from scheduler.core.rates import Running, gang_speed, speeds
from scheduler.core.state import (
    ROLLOUT,
    Merge,
    Mode,
    Node,
    NodeState,
    Pipeline,
    Plan,
    Policy,
    Snapshot,
    Start,
)

#: A pipeline that is late anyway may become later by this part with each newcomer, and when all are resized.
LATER = 1.02
#: A prediction that ran out leaves so much of the whole.
OVERDUE = 0.25

Key = tuple[int, str]


def broken(before: Snapshot, after: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    """Steps of synchronous pipelines that miss their cap by a start, a resize or a merge, and would not
    without. A merged batch is held against the last of the tails that it was.
    """
    if not policy.capped:
        return []
    then, now = projected(after, policy), projected(before, policy)
    tails_of: dict[Key, list[Key]] = {}
    for merge in (action for action in plan.actions if isinstance(action, Merge)):
        tails_of[merge.pipeline, merge.target] = [
            (merge.pipeline, id) for id in (merge.target, *merge.sources)
        ]
    wrong = []
    for key in sorted(then):
        tails = tails_of.get(key, [key])
        if not now.keys() >= set(tails):  # started in this plan
            continue
        earlier = max(now[tail] for tail in tails)
        cap = pipeline_of(after, key[0]).latency_cap * pipeline_of(after, key[0]).outlook.seconds
        patience = LATER ** (1 + _newcomers(before, after, key, tails, plan))
        if then[key] > cap + ROUNDING and then[key] > patience * earlier + ROUNDING:
            wrong.append(
                f"pipeline {key[0]}: {then[key]:.2f} s instead of {earlier:.2f}, the cap is {cap:.2f}"
            )
    return wrong


def projected(snapshot: Snapshot, policy: Policy) -> dict[Key, float]:
    """For what computes for synchronous pipelines: seconds their step will have taken, if it goes on like
    this and the rest of the step runs alone.
    """
    pace = speeds_of(snapshot, policy)
    found = {}
    for node in computing(snapshot):
        pipeline, key = pipeline_of(snapshot, node.pipeline), (node.pipeline, node.id)
        if key in pace and pipeline.outlook.seconds and not lags(pipeline):
            ahead = left_of(snapshot, node, pace) / pace[key] + rest_of(pipeline, node)
            found[key] = snapshot.now - pipeline.step_began + ahead
    return found


def speeds_of(snapshot: Snapshot, policy: Policy) -> dict[Key, float]:
    """Solo seconds per second of everything that computes on a device with a table."""
    types = {device.name: device.type for device in snapshot.devices}
    tables = dict(snapshot.tables)
    on: dict[str, list[Running]] = defaultdict(list)
    for node in computing(snapshot):
        if node.segment is not None and node.device is not None:
            slot = slot_of(snapshot, node)
            on[node.device].append(Running((node.pipeline, node.id), slot, node.segment, node.share))
    alone: dict[Key, float] = {}
    for name, running in on.items():
        if types.get(name) in tables:
            alone |= speeds(running, tables[types[name]])  # type: ignore[arg-type]
    return {key: _with_gang(snapshot, key, alone, policy) for key in alone}


def _with_gang(snapshot: Snapshot, key: Key, alone: dict[Key, float], policy: Policy) -> float:
    node = next(n for n in snapshot.nodes if (n.pipeline, n.id) == key)
    mates = [n for n in snapshot.nodes if node.gang and (n.pipeline, n.gang) == (node.pipeline, node.gang)]
    return gang_speed([alone.get((n.pipeline, n.id), 1.0) for n in mates or [node]], policy.shares)


def left_of(snapshot: Snapshot, node: Node, pace: dict[Key, float]) -> float:
    """Solo seconds that are left of the node now."""
    if node.state is not NodeState.RUNNING or node.segment is None:
        return node.left or (node.segment.seconds if node.segment else 0.0)
    done = (snapshot.now - node.since) * pace.get((node.pipeline, node.id), 1.0)
    return node.left - done if node.left > done else OVERDUE * node.segment.seconds


def rest_of(pipeline: Pipeline, node: Node) -> float:
    """Solo seconds of the step after the node."""
    rollout, train = pipeline.outlook.rollout, pipeline.outlook.train
    after = (*rollout[node.part + 1 :], *train) if node.kind in ROLLOUT else train[node.part + 1 :]
    return sum(segment.seconds for segment in after)


def lags(pipeline: Pipeline) -> bool:
    """Whether its rollouts may be ahead of the update: then no single step has a length of its own."""
    shape = pipeline.shape
    if shape is None or shape.mode is Mode.SYNC:
        return False
    return shape.mode is Mode.ONE_STEP_OFF or shape.max_staleness > 0


def _newcomers(before: Snapshot, after: Snapshot, key: Key, tails: list[Key], plan: Plan) -> int:
    """How many were started, or had others' sequences moved to them, where the node, or its gang, or what it
    was merged of, computes.
    """
    own = next(n for n in after.nodes if (n.pipeline, n.id) == key)
    mates = [n for n in after.nodes if own.gang and (n.pipeline, n.gang) == (own.pipeline, own.gang)]
    on = {n.device for n in (own, *mates)}
    on |= {n.device for n in before.nodes if (n.pipeline, n.id) in tails and n.device is not None}
    where = {(n.pipeline, n.id): n.device for n in after.nodes}
    starts = [a.device for a in plan.actions if isinstance(a, Start) and a.device is not None]
    merged = [where.get((a.pipeline, a.target)) for a in plan.actions if isinstance(a, Merge)]
    return sum(name in on for name in (*starts, *merged))
