"""Short words for snapshots in tables. Memory is in GB; a device has 10, a pipeline takes 4 + 1.

``TABLE`` is an interference table of round numbers: compute-bound work slows down by 1/share, a saturated
decode loses a fifth of its speed on half a device, a tail needs a quarter of it to be nearly as fast as ever.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.apply import apply_all
from scheduler.core.interference import Character, Interference
from scheduler.core.invariants import check, check_plan
from scheduler.core.plan import plan
from scheduler.core.state import (
    ROLLOUT,
    Admit,
    Device,
    Evict,
    Kind,
    Node,
    NodeState,
    Outlook,
    Pipeline,
    Place,
    Plan,
    Policy,
    QueuedJob,
    Refusal,
    Resident,
    Segment,
    Snapshot,
    Start,
)
from scheduler.core.world import finish, offer, step_done

GB = 10**9
POLICY = Policy()

BY_SHARE = (4.0, 2.0, 4 / 3, 1.0)
TABLE = Interference(
    shares=(0.25, 0.5, 0.75, 1.0),
    alone={
        Character.PREFILL: BY_SHARE,
        Character.DECODE: (2.5, 1.25, 1.0, 1.0),
        Character.TAIL: (1.25, 1.0, 1.0, 1.0),
        Character.THIN: (1.0, 1.0, 1.0, 1.0),
        Character.LOGPROB: BY_SHARE,
        Character.UPDATE: BY_SHARE,
        Character.SYNC: (1.0, 1.0, 1.0, 1.0),
    },
    beside={(Character.SYNC, Character.SYNC): 2.0},
    saturation=128,
    source="round numbers for tests",
)
TABLES = (("cpu", TABLE),)


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


def decode(seconds: float, batch: int = 128, forward: float = 0.02, **fields) -> Segment:
    """``forward``: seconds of one decode step, half of which do not depend on the batch."""
    kind = fields.pop("kind", Kind.DECODE)
    return Segment(kind, seconds, seconds, batch, forward, forward / 2, **fields)


def tail(seconds: float, batch: int = 64, forward: float = 0.02, **fields) -> Segment:
    return decode(seconds, batch, forward, kind=Kind.TAIL, **fields)


def update(seconds: float, **fields) -> Segment:
    return Segment(fields.pop("kind", Kind.UPDATE), seconds, seconds, **fields)


def steps(*parts: Segment) -> Outlook:
    """What the parts in a row are: first what is rolled out, then what is trained."""
    rolls = [part.kind in ROLLOUT or part.kind is Kind.TOOL for part in parts]
    return Outlook(
        tuple(part for part, rolled in zip(parts, rolls, strict=True) if rolled),
        tuple(part for part, rolled in zip(parts, rolls, strict=True) if not rolled),
    )


def part_of(one: Pipeline, part: int, worker: int = 0, **fields) -> Node:
    """The offered sub-stage of the pipeline's outlook, counted through rollouts and training."""
    rollout = one.outlook.rollout
    rolls = part < len(rollout)
    segment = rollout[part] if rolls else one.outlook.train[part - len(rollout)]
    place = part if rolls else part - len(rollout)
    fields.setdefault("gang", "" if rolls else f"s{one.stepped}.t{place}")
    name = f"s{one.stepped}.w{worker}.{'' if rolls else 't'}{place}"
    return Node(
        name,
        one.id,
        one.stepped,
        worker,
        segment.kind,
        part=place,
        segment=segment,
        left=segment.seconds,
        **fields,
    )


def run_on(offered: Node, home: str, share: float = 1.0, **fields) -> Node:
    """The same sub-stage once it runs."""
    return replace(offered, state=NodeState.RUNNING, device=home, share=share, **fields)


def started(decided: Plan) -> dict[tuple[int, str], float]:
    """Share by pipeline and node."""
    return {(a.pipeline, a.node): a.share for a in decided.actions if isinstance(a, Start)}


def resident(device: str, key: str, size: float, last_used: float) -> Resident:
    return Resident(device, key, int(size * GB), last_used)


def decide(snapshot: Snapshot, policy: Policy = POLICY) -> Plan:
    """The plan, after the invariants were checked on it."""
    assert check(snapshot, policy) == []
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
