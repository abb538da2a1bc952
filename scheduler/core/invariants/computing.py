"""Who computes where: what no device, worker or gang may do, by policy."""

from __future__ import annotations

from collections import Counter, defaultdict

from scheduler.core.state import ROLLOUT, Node, NodeState, Pipeline, Policy, Snapshot

#: Shares are sums of floats.
ROUNDING = 1e-6

#: The resident that runs a sub-stage.
Slot = tuple[str, str]


def contradictions(snapshot: Snapshot, policy: Policy) -> list[str]:
    """Of a snapshot, and of one between two actions of a plan."""
    if policy.name == "exclusive":
        return _outside_of_turns(snapshot)
    wrong = [*_away_from_home(snapshot), *_busy_workers(snapshot)]
    for device in sorted({node.device for node in computing(snapshot) if node.device is not None}):
        wrong += _overfull(snapshot, device, policy)
    return wrong


def unsettled(snapshot: Snapshot, policy: Policy) -> list[str]:
    """What may be so while a plan is carried out, and not once it is."""
    return [*_torn_gangs(snapshot), *([] if policy.name == "exclusive" else _uneven_slots(snapshot))]


def computing(snapshot: Snapshot) -> list[Node]:
    return [n for n in snapshot.nodes if n.state is NodeState.RUNNING and n.device is not None]


def slot_of(snapshot: Snapshot, node: Node) -> Slot:
    """LoRA jobs over one base roll out on one resident; whatever else is a resident of its pipeline."""
    pipeline = next(p for p in snapshot.pipelines if p.id == node.pipeline)
    if node.kind in ROLLOUT and pipeline.fusible:
        return "fused rollouts", pipeline.weights_key
    return ("rollouts" if node.kind in ROLLOUT else "training"), f"{pipeline.id}"


def slots_on(snapshot: Snapshot, device: str) -> dict[Slot, list[Node]]:
    slots: dict[Slot, list[Node]] = {}
    for node in computing(snapshot):
        if node.device == device:
            slots.setdefault(slot_of(snapshot, node), []).append(node)
    return slots


def _outside_of_turns(snapshot: Snapshot) -> list[str]:
    """Policy ``exclusive``: only who holds a device computes there, one sub-stage of a worker at a time."""
    holds = {pipeline.id: pipeline.holds for pipeline in snapshot.pipelines}
    shares: dict[str, float] = defaultdict(float)
    workers: Counter[tuple[int, int]] = Counter()
    wrong = []
    for node in computing(snapshot):
        held = holds.get(node.pipeline, ())
        if not 0 <= node.worker < len(held) or node.device != held[node.worker]:
            wrong.append(f"node {node.id}: runs on {node.device}, which its worker does not hold")
        shares[node.device or ""] += node.share
        workers[node.pipeline, node.worker] += 1
    wrong += [f"device {name}: shares sum to {total}" for name, total in shares.items() if total > 1]
    wrong += [f"worker {worker}: runs {n} nodes at once" for worker, n in workers.items() if n > 1]
    return wrong


def _away_from_home(snapshot: Snapshot) -> list[str]:
    homes = {pipeline.id: pipeline.home for pipeline in snapshot.pipelines}
    return [
        f"node {node.id} of pipeline {node.pipeline}: runs on {node.device}, not at its worker's home"
        for node in computing(snapshot)
        if node.device not in homes.get(node.pipeline, ())[node.worker : node.worker + 1]
    ]


def _busy_workers(snapshot: Snapshot) -> list[str]:
    """A worker's rollout resident runs one sub-stage of the pipeline, and so does its trainer."""
    running = Counter((n.pipeline, n.worker, n.kind in ROLLOUT) for n in computing(snapshot))
    return [
        f"worker {worker} of pipeline {pipeline}: {times} {'rollouts' if rolls else 'trainings'} at once"
        for (pipeline, worker, rolls), times in running.items()
        if times > 1
    ]


def _overfull(snapshot: Snapshot, device: str, policy: Policy) -> list[str]:
    slots = slots_on(snapshot, device)
    kinds = {node.kind for members in slots.values() for node in members}
    total = sum(max(node.share for node in members) for members in slots.values())
    wrong = []
    if total > 1 + ROUNDING:
        wrong.append(f"device {device}: shares sum to {total}")
    if len(slots) > 1 and device not in _with_table(snapshot):
        wrong.append(f"device {device}: {len(slots)} residents compute at once, without a table")
    if len(slots) > policy.max_computing:
        wrong.append(f"device {device}: {len(slots)} residents compute at once")
    if len(slots) > 1 and not kinds <= policy.corun:
        wrong.append(f"device {device}: {sorted(kinds - policy.corun)} beside others")
    for slot, members in slots.items():
        if len(members) > 1 and not (policy.fuse and slot[0] == "fused rollouts"):
            wrong.append(f"device {device}: {len(members)} sub-stages on resident {slot}, which do not fuse")
    return wrong


def _with_table(snapshot: Snapshot) -> set[str]:
    tables = dict(snapshot.tables)
    return {device.name for device in snapshot.devices if device.type in tables}


def _torn_gangs(snapshot: Snapshot) -> list[str]:
    states: dict[tuple[int, str], set[NodeState]] = defaultdict(set)
    for node in snapshot.nodes:
        if node.gang:
            states[node.pipeline, node.gang].add(node.state)
    return [
        f"gang {gang} of pipeline {id}: not whole" for (id, gang), seen in states.items() if len(seen) > 1
    ]


def _uneven_slots(snapshot: Snapshot) -> list[str]:
    wrong = []
    for device in sorted({node.device or "" for node in computing(snapshot)}):
        for slot, members in slots_on(snapshot, device).items():
            shares = sorted(node.share for node in members)
            if shares[-1] - shares[0] > ROUNDING:
                wrong.append(f"device {device}: resident {slot} has shares {shares}")
    return wrong


def pipeline_of(snapshot: Snapshot, id: int) -> Pipeline:
    return next(p for p in snapshot.pipelines if p.id == id)
