"""Short words for snapshots in tables. Memory is in GB; a device has 10, a pipeline takes 4 + 1."""

from __future__ import annotations

from scheduler.core.apply import apply_all
from scheduler.core.invariants import check, check_plan
from scheduler.core.plan import plan
from scheduler.core.state import (
    Admit,
    Device,
    Evict,
    Kind,
    Node,
    Pipeline,
    Place,
    Plan,
    Policy,
    QueuedJob,
    Refusal,
    Resident,
    Snapshot,
)
from scheduler.core.world import finish, offer, step_done

GB = 10**9
POLICY = Policy()


def device(name: str, memory: float = 10, **fields) -> Device:
    return Device(name, "cpu", int(memory * GB), **fields)


def job(
    id: str, tenant: int = 1, devices: int = 1, key: str = "base", weights=4, run=1, **fields
) -> QueuedJob:
    fields.setdefault("submitted", 0.0)
    return QueuedJob(
        id=id,
        tenant=tenant,
        devices=devices,
        weights_key=key,
        weights_bytes=int(weights * GB),
        run_bytes=int(run * GB),
        **fields,
    )


def pipeline(id: int, home: str, tenant: int = 1, key: str = "base", weights=4, run=1, **fields) -> Pipeline:
    """``home`` lists its devices, separated by spaces; ``holds=True`` means that it has its turn."""
    homes = tuple(home.split())
    fields["holds"] = homes if fields.pop("holds", False) else ()
    fields.setdefault("submitted", float(id))
    return Pipeline(
        id=id,
        job=f"job-{id}",
        tenant=tenant,
        devices=len(homes),
        weights_key=key,
        weights_bytes=int(weights * GB),
        run_bytes=int(run * GB),
        home=homes,
        **fields,
    )


def node(pipeline: int, worker: int = 0, kind: Kind = Kind.PREFILL, step: int = 0, **fields) -> Node:
    return Node(f"s{step}.w{worker}.{kind}", pipeline, step, worker, kind, **fields)


def resident(device: str, key: str, size: float, last_used: float) -> Resident:
    return Resident(device, key, int(size * GB), last_used)


def decide(snapshot: Snapshot, policy: Policy = POLICY) -> Plan:
    """The plan, after the invariants were checked on it."""
    assert check(snapshot) == []
    decided = plan(snapshot, policy)
    assert check_plan(snapshot, decided, policy) == []
    return decided


def admitted(decided: Plan) -> dict[str, str]:
    return {a.job: " ".join(a.home) for a in decided.actions if isinstance(a, Admit)}


def placed(decided: Plan) -> dict[int, str]:
    return {a.pipeline: " ".join(a.devices) for a in decided.actions if isinstance(a, Place)}


def evicted(decided: Plan) -> list[str]:
    return [f"{a.weights_key}@{a.device}" for a in decided.actions if isinstance(a, Evict)]


def refused(decided: Plan, subject: str | int) -> Refusal:
    (found,) = (r for r in decided.refusals if subject in (r.job, r.pipeline))
    return found


def act(snapshot: Snapshot, decided: Plan) -> Snapshot:
    return apply_all(snapshot, decided.actions)


def want(snapshot: Snapshot, step: int = 0) -> Snapshot:
    """Every pipeline that has nothing offered and holds nothing offers a step's first node per worker."""
    offering = {n.pipeline for n in snapshot.nodes}
    for p in snapshot.pipelines:
        if p.id not in offering and not p.holds:
            for worker in range(p.devices):
                snapshot = offer(snapshot, node(p.id, worker, step=step))
    return snapshot


def complete(snapshot: Snapshot, pipeline: int, seconds: float = 10.0) -> Snapshot:
    """The pipeline's running nodes and its step end."""
    for n in snapshot.nodes:
        if n.pipeline == pipeline and n.device is not None:
            snapshot = finish(snapshot, pipeline, n.id)
    return step_done(snapshot, pipeline, seconds)
