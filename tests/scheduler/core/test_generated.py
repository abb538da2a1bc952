"""Generated snapshots and generated runs: the invariants hold on every plan, and plans replay exactly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.apply import apply_all
from scheduler.core.invariants import check, check_plan
from scheduler.core.plan import plan
from scheduler.core.state import (
    POLICIES as NAMED,
)
from scheduler.core.state import (
    Device,
    DeviceState,
    Kind,
    Node,
    NodeState,
    Pipeline,
    Policy,
    QueuedJob,
    RefusalCode,
    Resident,
    Snapshot,
    Tenant,
)
from scheduler.core.world import at, end, finish, offer, set_device, step_done, submit
from tests.scheduler.core.driver import Driver
from tests.scheduler.core.patience import Patience
from tests.scheduler.core.worlds import SHARING, TYPES, random_load, random_world
from tests.scheduler.core.worlds import random_devices as pool

POLICIES = st.builds(Policy, max_pipelines_per_device=st.integers(1, 4))
#: Few sizes, so that ties, shared weights and exact fits are common.
WEIGHTS = {"base": 4, "large": 7, "own-1": 2, "own-2": 2}


def random_work(rng: random.Random) -> dict:
    key = rng.choice(list(WEIGHTS))
    return {
        "tenant": rng.randint(1, 3),
        "submitted": float(rng.randint(0, 5)),
        "devices": rng.choice([1, 1, 1, 2, 2, 3, 4]),
        "weights_key": key,
        "weights_bytes": WEIGHTS[key],
        "run_bytes": rng.randint(0, 3),
        "priority": rng.choice([0, 0, 0, 1, -1]),
    }


def random_tenants(rng: random.Random) -> tuple[Tenant, ...]:
    return tuple(
        Tenant(
            i,
            weight=rng.choice([0.5, 1.0, 1.0, 3.0]),
            service=rng.choice([0.0, 0.0, 15.0, 200.0]),
            max_devices=rng.choice([None, None, None, 1, 2, 4]),
        )
        for i in (1, 2, 3)
    )


def random_devices(rng: random.Random) -> tuple[Device, ...]:
    states = rng.choice([[DeviceState.READY], [*DeviceState, DeviceState.READY, DeviceState.READY]])
    return tuple(
        Device(f"d{i}", "cpu", rng.choice([6, 8, 8, 12, 30]), rng.choice(states))
        for i in range(rng.randint(0, 6))
    )


def random_snapshot(seed: int) -> Snapshot:
    """A legal world in the middle of things; what would contradict the rest is left out."""
    rng = random.Random(seed)
    world = Snapshot(
        now=100.0,
        devices=random_devices(rng),
        tenants=random_tenants(rng),
        queue=tuple(QueuedJob(id=f"j{i}", **random_work(rng)) for i in range(rng.randint(0, 12))),
    )
    names = [device.name for device in world.devices]
    for i in range(1, rng.randint(1, 14)):
        work = random_work(rng)
        if work["devices"] > len(names):
            continue
        home = tuple(rng.sample(names, work["devices"]))
        holds = home if rng.random() < 0.4 else ()
        one = Pipeline(
            id=i, job=f"p{i}", home=home, holds=holds, step_seconds=rng.choice([1.0, 10.0]), **work
        )
        grown = replace(world, pipelines=(*world.pipelines, one))
        world = grown if check(grown) == [] else world
    for one in world.pipelines:
        world = replace(world, nodes=(*world.nodes, *random_nodes(rng, one)))
    for name in names:
        for key in rng.sample(list(WEIGHTS), rng.randint(0, 3)):
            row = Resident(name, key, WEIGHTS[key], float(rng.randint(0, 3)))
            grown = replace(world, residents=(*world.residents, row))
            world = grown if check(grown) == [] else world
    return world


def random_nodes(rng: random.Random, one: Pipeline) -> list[Node]:
    nodes = []
    for worker in range(one.devices):
        if one.holds and rng.random() < 0.5:
            running = Node(
                f"r{worker}", one.id, 1, worker, Kind.DECODE, NodeState.RUNNING, one.holds[worker], 1.0
            )
            nodes.append(running)
        if rng.random() < 0.7:
            nodes.append(Node(f"n{worker}", one.id, rng.randint(1, 2), worker, rng.choice(list(Kind))))
    return nodes


def shuffled(snapshot: Snapshot, seed: int) -> Snapshot:
    rng = random.Random(seed)

    def mixed(rows: tuple) -> tuple:
        return tuple(rng.sample(rows, len(rows)))

    return replace(
        snapshot,
        devices=mixed(snapshot.devices),
        tenants=mixed(snapshot.tenants),
        queue=mixed(snapshot.queue),
        pipelines=mixed(snapshot.pipelines),
        nodes=mixed(snapshot.nodes),
        residents=mixed(snapshot.residents),
    )


@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_every_plan_keeps_the_invariants(seed, policy):
    snapshot = random_snapshot(seed)
    assert check(snapshot) == []
    assert check_plan(snapshot, plan(snapshot, policy), policy) == []


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_the_order_of_rows_changes_no_byte_of_the_plan(seed, policy):
    snapshot = random_snapshot(seed)
    assert repr(plan(shuffled(snapshot, seed), policy)) == repr(plan(snapshot, policy))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_planning_again_right_after_a_plan_changes_nothing(seed, policy):
    """All that could be done was done. Reservations are the exception: the order has moved on."""
    snapshot = random_snapshot(seed)
    decided = plan(snapshot, policy)
    after = apply_all(snapshot, decided.actions)
    again = plan(after, policy)
    assert check_plan(after, again, policy) == []
    ready = {device.name for device in after.devices if device.state is DeviceState.READY}
    gangs = {one.id for one in after.pipelines if one.devices > 1}
    may_reserve = any(r.code is RefusalCode.MEMORY or r.pipeline in gangs for r in decided.refusals)
    if not may_reserve and all(ready.issuperset(one.home) for one in after.pipelines):
        assert again.actions == ()


def random_event(world: Snapshot, rng: random.Random, number: int) -> Snapshot:
    """One thing that may happen: work arrives, runs on, ends; a device changes."""
    choice = rng.random()
    running = [n for n in world.nodes if n.state is NodeState.RUNNING]
    holders = [p for p in world.pipelines if p.holds]
    if choice < 0.15:
        return submit(world, QueuedJob(id=f"new-{number}", **random_work(rng)))
    if choice < 0.50 and running:
        node = rng.choice(running)
        return finish(world, node.pipeline, node.id)
    if choice < 0.70 and holders:
        one = rng.choice(holders)
        for node in running:
            if node.pipeline == one.id and node.device is not None:
                world = finish(world, node.pipeline, node.id)
        world = step_done(world, one.id, rng.choice([1.0, 10.0, 30.0]))
        return end(world, one.id) if rng.random() < 0.2 else world
    if choice < 0.95 and world.pipelines:
        one = rng.choice(world.pipelines)
        worker = rng.randrange(one.devices)
        return offer(world, Node(f"e{number}", one.id, number, worker, rng.choice(list(Kind))))
    if world.devices:
        return change_device(world, rng.choice(world.devices), rng.choice(list(DeviceState)))
    return world


def change_device(world: Snapshot, device: Device, state: DeviceState) -> Snapshot:
    """The attempts that hold a lost device end with it. One that lost its memory comes back empty."""
    world = set_device(world, device.name, state)
    for one in world.pipelines:
        if state is DeviceState.LOST and device.name in one.holds:
            world = end(world, one.id)
    return world


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_every_plan_of_a_run_keeps_the_invariants_and_the_run_replays(seed, policy):
    def play() -> list[str]:
        rng = random.Random(seed)
        world = random_snapshot(seed)
        story = []
        for number in range(25):
            decided = plan(world, policy)
            assert check_plan(world, decided, policy) == []
            story.append(repr(decided))
            world = apply_all(world, decided.actions)
            world = at(random_event(world, rng, number), world.now + 1.0)
        return story

    assert play() == play()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_job_that_can_run_gets_its_turns_and_ends(seed):
    """Nobody starves: with ready devices, all jobs do three steps each in a bounded number of rounds."""
    rng = random.Random(seed)
    devices = tuple(Device(f"d{i}", "cpu", rng.choice([12, 16])) for i in range(4))
    tenants = tuple(Tenant(i, weight=rng.choice([0.5, 1.0, 3.0])) for i in (1, 2, 3))
    jobs = tuple(QueuedJob(id=f"j{i:02}", **random_work(rng)) for i in range(20))
    world = Snapshot(now=0.0, devices=devices, tenants=tenants, queue=jobs)
    steps: dict[int, int] = {}
    ended: set[str] = set()
    # One holder ends a round: at most 20 jobs x 3 steps, a round of admission, and no round without progress.
    for number in range(3 * len(jobs) + 20):
        decided = plan(world, Policy())
        assert check_plan(world, decided) == []
        world = apply_all(world, decided.actions)
        for one in [p for p in world.pipelines if p.holds][:1]:
            for node in [n for n in world.nodes if n.pipeline == one.id]:
                world = finish(world, one.id, node.id)
            world = step_done(world, one.id, rng.choice([1.0, 20.0]))
            steps[one.id] = steps.get(one.id, 0) + 1
            if steps[one.id] == 3:
                ended.add(one.job)
                world = end(world, one.id)
                del steps[one.id]
        for one in world.pipelines:
            if not one.holds and not any(n.pipeline == one.id for n in world.nodes):
                for worker in range(one.devices):
                    world = offer(world, Node(f"{number}.{worker}", one.id, number, worker, Kind.DECODE))
        if len(ended) == len(jobs):
            break
    assert ended == {job.id for job in jobs}


# ---------------------------------------------------------------- several pipelines on a device


def id_of(policy: Policy) -> str:
    off = [name for name in ("merge", "shares", "fuse", "wait", "capped") if not getattr(policy, name)]
    return f"{policy.name} {policy.max_computing} without {' '.join(off) or 'nothing'}"


@pytest.mark.parametrize("policy", SHARING, ids=id_of)
@settings(max_examples=130, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_plan_that_shares_devices_keeps_the_invariants(seed, policy):
    snapshot = random_world(seed, random_tenants(random.Random(seed)), policy)
    assert check(snapshot, policy) == []
    decided = plan(snapshot, policy)
    assert check_plan(snapshot, decided, policy) == []
    assert repr(plan(shuffled(snapshot, seed), policy)) == repr(decided)


def crowd(seed: int, policy: Policy, watch: Patience | None = None, whole: bool = False) -> Driver:
    """Up to five devices and six jobs of three tenants that all arrive at once."""
    rng = random.Random(seed)
    devices = tuple(replace(d, state=DeviceState.READY) for d in (pool(rng, policy) or pool(rng, policy)))
    driver = Driver(seed, policy, devices, random_tenants(rng), dict(TYPES), watch=watch, whole=whole)
    for number in range(6 if devices else 0):
        driver.submit(QueuedJob(id=f"j{number}", **random_load(rng, len(devices))))
    return driver


def play_out(driver: Driver) -> None:
    """To the end of all jobs that can be admitted: each event ends a sub-stage, or a wait for one."""
    sub_stages = sum(
        driver.steps * job.devices * (len(job.outlook.rollout) + len(job.outlook.train))
        for job in driver.jobs.values()
    )
    for _ in range(2 * sub_stages):
        if not driver.runs:
            return
        assert driver.advance(), f"nothing runs, and these wait: {sorted(driver.runs)}"
    assert not driver.runs


@pytest.mark.parametrize("policy", [NAMED["exclusive"], *SHARING], ids=id_of)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_decision_of_a_run_keeps_the_invariants_and_every_run_ends(seed, policy):
    """Whatever happens on the way: devices drain, are lost and come back, jobs are cancelled, predictions are
    wrong. The driver checks every decision.
    """
    driver = crowd(seed, policy)
    for _ in range(20):
        if driver.rng.random() < 0.2:
            driver.disturb()
        else:
            driver.advance()
    for name, device in sorted(driver.board.devices.items()):
        if device.state is not DeviceState.READY:
            driver.set_state(name, DeviceState.READY)
    play_out(driver)
    assert len(driver.yields) == len(set(driver.yields))  # nobody makes room twice


@pytest.mark.parametrize("policy", SHARING, ids=id_of)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_who_is_overdue_and_first_in_line_waits_only_for_those_who_computed_there_then(seed, policy):
    """The bound on waiting; see ``patience.py``."""
    patience = Patience()
    driver = crowd(seed, policy, patience, whole=True)
    play_out(driver)
    assert patience.late == []


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(SHARING))
def test_the_same_run_gives_the_same_plans(seed, policy):
    stories = []
    for _ in range(2):
        driver = crowd(seed, policy)
        for _ in range(30):
            driver.advance()
        stories.append(driver.story)
    assert stories[0] == stories[1]
