"""Random legal worlds under the policies that let several pipelines compute on a device."""

from __future__ import annotations

import random
from dataclasses import replace

from scheduler.core.interference import Character, Interference
from scheduler.core.invariants import check
from scheduler.core.state import (
    POLICIES,
    Device,
    DeviceState,
    Kind,
    Mode,
    Node,
    NodeState,
    Outlook,
    Pipeline,
    Policy,
    QueuedJob,
    Resident,
    Segment,
    Shape,
    Snapshot,
)
from tests.scheduler.core.build import TABLE

LOOKAHEAD = POLICIES["lookahead"]
#: What is switched off, or allowed, to measure what it is worth.
ABLATIONS = (
    replace(LOOKAHEAD, merge=False),
    replace(LOOKAHEAD, shares=False),
    replace(LOOKAHEAD, fuse=False),
    replace(LOOKAHEAD, wait=False),
    replace(LOOKAHEAD, max_computing=3),
    replace(LOOKAHEAD, capped=False),
    replace(POLICIES["greedy"], max_computing=3, shares=False),
)
SHARING = (*(policy for policy in POLICIES.values() if policy.name != "exclusive"), *ABLATIONS)

#: A coarse one: two threads, and partners that cost something.
COARSE = Interference(
    shares=(0.5, 1.0),
    alone=dict.fromkeys(Character, (2.0, 1.0))
    | {Character.TAIL: (1.2, 1.0), Character.THIN: (1.0, 1.0), Character.SYNC: (1.0, 1.0)},
    beside={(Character.TAIL, Character.UPDATE): 1.3, (Character.UPDATE, Character.TAIL): 1.1},
    saturation=128,
    source="two threads, for tests",
)
TYPES = (("cpu", TABLE), ("two", COARSE))
WEIGHTS = {"base": 4, "large": 7, "own-1": 2, "own-2": 2}
FUSIBLE = frozenset({"base", "large"})


def random_outlook(rng: random.Random) -> Outlook:
    """A chain of rollouts, perhaps of two turns with a tool between them, then a chain of training."""
    rollout: list[Segment] = []
    for turn in range(rng.choice([1, 1, 2])):
        if turn:
            rollout.append(Segment(Kind.TOOL, rng.choice([1.0, 5.0])))
        rollout.append(Segment(Kind.PREFILL, rng.choice([0.5, 1.0]), tokens=1000))
        for kind, batch in ((Kind.DECODE, 160), (Kind.TAIL, 60), (Kind.TAIL, 20)):
            if rng.random() < 0.7:
                rollout.append(random_decode(rng, kind, batch))
    train = [Segment(Kind.GRADE, 1.0)] if rng.random() < 0.5 else []
    train.append(Segment(Kind.LOGPROB, rng.choice([1.0, 4.0]), early=rng.random() < 0.5))
    train.append(Segment(Kind.UPDATE, rng.choice([2.0, 8.0, 20.0])))
    if rng.random() < 0.5:
        train.append(Segment(Kind.SYNC, 1.0))
    return Outlook(tuple(rollout), tuple(train))


def random_decode(rng: random.Random, kind: Kind, batch: int) -> Segment:
    seconds = rng.choice([2.0, 6.0, 15.0])
    forward = rng.choice([0.01, 0.05])
    return Segment(
        kind,
        seconds,
        1.5 * seconds,
        batch=batch,
        forward_seconds=forward,
        floor_seconds=0.6 * forward,
        bandwidth=rng.choice([0.2, 0.5, 0.8]),
    )


def random_shape(rng: random.Random, devices: int) -> Shape:
    """Colocated, or rollouts and training on different devices."""
    workers = tuple(range(devices))
    apart = devices > 1 and rng.random() < 0.3
    rollout, train = (workers[:1], workers[1:]) if apart else (workers, workers)
    mode = rng.choice([Mode.SYNC, Mode.SYNC, Mode.ONE_STEP_OFF, Mode.ASYNC, Mode.STREAM])
    return Shape(rollout, train, mode, rng.choice([0, 1, 2]) if mode in (Mode.ASYNC, Mode.STREAM) else 0)


def random_work(rng: random.Random, devices: int) -> dict:
    """What a job does and where; some only train."""
    shape, outlook = random_shape(rng, devices), random_outlook(rng)
    if rng.random() < 0.15:
        train = tuple(s for s in outlook.train if s.kind in (Kind.LOGPROB, Kind.UPDATE))
        plain = tuple(replace(segment, early=False) for segment in train)
        return {"shape": Shape((), tuple(range(devices))), "outlook": Outlook((), plain)}
    return {"shape": shape, "outlook": outlook}


def random_load(rng: random.Random, most: int = 4) -> dict:
    """Fields that a queued job and a pipeline have in common."""
    key = rng.choice(list(WEIGHTS))
    devices = min(most, rng.choice([1, 1, 1, 2, 2, 3, 4]))
    return {
        "tenant": rng.randint(1, 3),
        "submitted": float(rng.randint(0, 5)),
        "devices": devices,
        "weights_key": key,
        "weights_bytes": WEIGHTS[key],
        "run_bytes": rng.randint(0, 2),
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "latency_cap": rng.choice([1.2, 1.5, 1.5, 3.0, 10.0]),
        **random_work(rng, devices),
        "fusible": key in FUSIBLE and rng.random() < 0.7,
        "kv_tokens": rng.choice([0, 0, 20_000, 200_000]),
        "peak_bytes": rng.choice([0, 0, 1, 3]),
        "overlap_bytes": rng.choice([0, 0, 2]),
    }


def random_devices(rng: random.Random, policy: Policy) -> tuple[Device, ...]:
    states = rng.choice([[DeviceState.READY], [*DeviceState, DeviceState.READY, DeviceState.READY]])
    type = rng.choice(["cpu", "cpu", "two"]) if policy.max_computing < 3 else "cpu"
    # Of the last nobody measured a table.
    types = rng.choice([[type], [type, type, "new"]])
    return tuple(
        Device(f"d{i}", rng.choice(types), rng.choice([8, 12, 20, 30]), rng.choice(states))
        for i in range(rng.randint(0, 5))
    )


def random_world(seed: int, tenants: tuple, policy: Policy) -> Snapshot:
    """A world in the middle of things; what would contradict the rest, or the policy, is left out."""
    rng = random.Random(seed)
    world = Snapshot(
        now=100.0,
        devices=random_devices(rng, policy),
        tenants=tenants,
        queue=tuple(QueuedJob(id=f"j{i}", **random_load(rng)) for i in range(rng.randint(0, 4))),
        tables=TYPES,
    )
    names = [device.name for device in world.devices]
    for id in range(1, rng.randint(1, 9)):
        load = random_load(rng)
        if load["devices"] > len(names):
            continue
        home = tuple(rng.sample(names, load["devices"]))
        began = world.now - rng.choice([0.0, 5.0, 40.0, 80.0])
        one = Pipeline(id=id, job=f"p{id}", home=home, step_began=began, stepped=rng.randint(0, 2), **load)
        world = _if_legal(replace(world, pipelines=(*world.pipelines, one)), world, policy)
    for one in world.pipelines:
        for unit in random_units(rng, one):
            grown = replace(world, nodes=(*world.nodes, *_begun(rng, world, one, unit, policy)))
            fallback = replace(world, nodes=(*world.nodes, *unit))
            world = _if_legal(grown, _if_legal(fallback, world, policy), policy)
    for name in names:
        for key in rng.sample(list(WEIGHTS), rng.randint(0, 2)):
            row = Resident(name, key, WEIGHTS[key], float(rng.randint(0, 3)))
            world = _if_legal(replace(world, residents=(*world.residents, row)), world, policy)
    return world


def _if_legal(grown: Snapshot, else_this: Snapshot, policy: Policy) -> Snapshot:
    return grown if check(grown, policy) == [] else else_this


def random_units(rng: random.Random, one: Pipeline) -> list[tuple[Node, ...]]:
    """What a pipeline may have open: rollouts of its workers in different parts, or a part of training; both
    when its rollouts may be ahead.
    """
    if one.shape is None:
        return []
    ahead = one.shape.mode not in (Mode.SYNC, Mode.STREAM)
    choice = rng.random()
    units: list[tuple[Node, ...]] = []
    if choice < 0.55 or (ahead and choice < 0.8):
        step = one.stepped + rng.randint(0, 1) * ahead
        for worker in one.shape.rollout_workers:
            if rng.random() < 0.8:
                part = rng.randrange(len(one.outlook.rollout))
                units.append((_open(rng, one, worker, step, part, one.outlook.rollout[part]),))
    if not units or (ahead and choice > 0.4):
        part = rng.randrange(len(one.outlook.train))
        segment = one.outlook.train[part]
        if segment.kind is Kind.GRADE:
            units.append((_open(rng, one, one.shape.train_workers[0], one.stepped, part, segment),))
        else:
            gang = f"s{one.stepped}.t{part}"
            first = _open(rng, one, one.shape.train_workers[0], one.stepped, part, segment, gang)
            units.append(tuple(_of_worker(first, worker) for worker in one.shape.train_workers))
    return units


def _open(
    rng: random.Random, one: Pipeline, worker: int, step: int, part: int, segment: Segment, gang: str = ""
) -> Node:
    return Node(
        id=f"s{step}.w{worker}.{segment.kind}.{'t' if gang else ''}{part}",
        pipeline=one.id,
        step=step,
        worker=worker,
        kind=segment.kind,
        gang=gang,
        part=part,
        segment=segment,
        left=segment.seconds * rng.choice([1.0, 1.0, 0.5, 0.01]),
        since=100.0 - rng.choice([0.0, 1.0, 30.0]),
        tokens=rng.choice([0, 1000, 50_000]),
        yielded=rng.random() < 0.1,
    )


def _of_worker(mate: Node, worker: int) -> Node:
    """The node of another worker of the gang: gangs split their work, so that all end at once."""
    name = mate.id.replace(f".w{mate.worker}.", f".w{worker}.")
    return replace(mate, id=name, worker=worker)


def _begun(
    rng: random.Random, world: Snapshot, one: Pipeline, unit: tuple[Node, ...], policy: Policy
) -> tuple[Node, ...]:
    """The nodes as they run, on what is left of their devices; or as they wait."""
    lost = {device.name for device in world.devices if device.state is DeviceState.LOST}
    if rng.random() < 0.4 or any(one.home[node.worker] in lost for node in unit):
        return unit
    share = rng.choice([0.25, 0.5, 0.5, 0.75, 1.0]) if policy.max_computing > 1 else 1.0
    off = unit[0].kind in (Kind.TOOL, Kind.GRADE)
    return tuple(
        replace(
            node,
            state=NodeState.RUNNING,
            device=None if off else one.home[node.worker],
            share=1.0 if off else share,
            left=node.left or node.segment.seconds,
        )
        for node in unit
    )
