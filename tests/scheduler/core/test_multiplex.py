"""Who may compute beside whom, with which part of the device, in which order, and what others are told."""

from dataclasses import replace

import pytest

from scheduler.core.board import Board
from scheduler.core.interference import Character
from scheduler.core.invariants import check, check_plan
from scheduler.core.plan import decide as decide_on
from scheduler.core.plan import plan
from scheduler.core.state import (
    POLICIES,
    Demand,
    Device,
    DeviceState,
    Kind,
    Merge,
    Mode,
    Node,
    NodeState,
    Pipeline,
    Plan,
    Policy,
    RefusalCode,
    Rehome,
    Resize,
    Shape,
    Snapshot,
    Start,
    Tenant,
    Wait,
    Yield,
)
from tests.scheduler.core.build import (
    GB,
    TABLE,
    TABLES,
    act,
    admitted,
    decide,
    decode,
    device,
    job,
    part_of,
    pipeline,
    refused,
    run_on,
    started,
    steps,
    tail,
    update,
)

GREEDY, LOOKAHEAD = POLICIES["greedy"], POLICIES["lookahead"]
PHASE, ROLLOUTS = POLICIES["phase"], POLICIES["rollout_only"]
SHARING = [policy for policy in POLICIES.values() if policy.name != "exclusive"]
#: A step of 8 s of tail and 12 s of update; what follows is a step of 100 s, so that caps are far away.
SHORT = steps(tail(8), update(12))
LONG = steps(decode(40), tail(20), update(40))
PREFILL = Kind.PREFILL


def both(count: int) -> Shape:
    return Shape(tuple(range(count)), tuple(range(count)))


def world(*pipelines: Pipeline, nodes: tuple[Node, ...] = (), **fields) -> Snapshot:
    names = sorted({name for one in pipelines for name in one.home})
    fields.setdefault("devices", tuple(device(name, 40) for name in names))
    fields.setdefault("tenants", tuple(Tenant(id) for id in sorted({p.tenant for p in pipelines} | {1})))
    fields.setdefault("now", 0.0)
    return Snapshot(pipelines=pipelines, nodes=nodes, tables=TABLES, **fields)


def shares(decided: Plan) -> dict[int, float]:
    """Share that each pipeline's only sub-stage was given or changed to."""
    return {a.pipeline: a.share for a in decided.actions if isinstance(a, Start | Resize)}


# ---------------------------------------------------------------- seats


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_a_free_device_is_given_whole(policy):
    one = pipeline(1, "d1", outlook=SHORT)
    decided = decide(world(one, nodes=(part_of(one, 0),)), policy)
    assert started(decided) == {(1, "s0.w0.0"): 1.0}
    assert decided.refusals == ()


def test_a_tail_computes_beside_an_update():
    one, other = pipeline(1, "d1", outlook=LONG), pipeline(2, "d1", outlook=LONG)
    snapshot = world(one, other, nodes=(run_on(part_of(one, 2), "d1"), part_of(other, 1)))
    # Speeds of update and tail: 1/4 + 1 at a quarter for the update, 1/2 + 1 at half, 3/4 + 4/5 at three.
    assert shares(decide(snapshot, GREEDY)) == {1: 0.75, 2: 0.25}
    even = replace(GREEDY, shares=False)
    assert shares(decide(snapshot, even)) == {1: 0.5, 2: 0.5}


@pytest.mark.parametrize(
    ("policy", "code", "text"),
    [
        (PHASE, RefusalCode.DEVICE, "as many jobs as can compute on its device at once"),
        (ROLLOUTS, RefusalCode.DEVICE, "another job's sub-stage has its device to itself"),
    ],
)
def test_the_baselines_keep_a_tail_from_computing_beside_an_update(policy, code, text):
    one, other = pipeline(1, "d1", outlook=LONG), pipeline(2, "d1", outlook=LONG)
    snapshot = world(one, other, nodes=(run_on(part_of(one, 2), "d1"), part_of(other, 1)))
    decided = decide(snapshot, policy)
    assert decided.actions == ()
    assert (refused(decided, 2).code, refused(decided, 2).text) == (code, text)


def test_rollout_only_lets_rollouts_share():
    one, other = pipeline(1, "d1", outlook=LONG), pipeline(2, "d1", outlook=LONG)
    snapshot = world(one, other, nodes=(run_on(part_of(one, 0), "d1"), part_of(other, 1)))
    assert started(decide(snapshot, ROLLOUTS))


def test_what_gains_nothing_waits():
    """Two updates go at half their speed each, whatever the split."""
    one, other = pipeline(1, "d1", outlook=LONG), pipeline(2, "d1", outlook=LONG)
    decided = decide(world(one, other, nodes=(run_on(part_of(one, 2), "d1"), part_of(other, 2))), GREEDY)
    assert decided.actions == ()
    assert refused(decided, 2).text == "to compute beside what runs on its device would gain nothing"


def test_three_compute_at_once_only_where_the_policy_says_so():
    rows = [pipeline(i, "d1", outlook=LONG) for i in (1, 2, 3)]
    nodes = (
        run_on(part_of(rows[0], 1), "d1", 0.5),
        run_on(part_of(rows[1], 1), "d1", 0.5),
        part_of(rows[2], 2),
    )
    snapshot = world(*rows, nodes=nodes)
    assert refused(decide(snapshot, replace(GREEDY, max_computing=2)), 3).code is RefusalCode.DEVICE
    # Tails at a quarter and the update at half: 0.8 + 0.8 + 0.5 = 2.1; any other split 1 + 0.8 + 0.25 = 2.05.
    decided = decide(snapshot, GREEDY)
    assert shares(decided) == {1: 0.25, 2: 0.25, 3: 0.5}


def test_those_who_give_come_before_those_who_get():
    """Half done, the plan must not have promised more than the device has."""
    rows = [pipeline(i, "d1", outlook=LONG) for i in (1, 2)]
    nodes = (run_on(part_of(rows[0], 2), "d1", 0.25), run_on(part_of(rows[1], 1), "d1", 0.75))
    snapshot = world(*rows, nodes=nodes)
    decided = decide(snapshot, GREEDY)
    assert [(a.pipeline, a.share) for a in decided.actions if isinstance(a, Resize)] == [(2, 0.25), (1, 0.75)]


def test_who_is_alone_gets_what_others_left():
    one = pipeline(1, "d1", outlook=LONG)
    decided = decide(world(one, nodes=(run_on(part_of(one, 1), "d1", 0.25),)), GREEDY)
    assert shares(decided) == {1: 1.0}


# ---------------------------------------------------------------- fusing


def lora(id: int, **fields) -> Pipeline:
    return pipeline(id, "d1", fusible=True, outlook=steps(decode(20), tail(10), update(10)), **fields)


def test_rollouts_over_one_base_decode_in_one_batch():
    one, other = lora(1), lora(2)
    snapshot = world(one, other, nodes=(run_on(part_of(one, 1), "d1"), part_of(other, 1)))
    decided = decide(snapshot, replace(GREEDY, max_computing=1))
    assert started(decided) == {(2, "s0.w0.1"): 1.0}  # the slot has the device, its members share it
    assert decided.actions[0].reason == "joins the batch that its base model decodes there"


def test_without_fusing_they_are_neighbours_that_need_two_residents():
    one, other = lora(1), lora(2)
    snapshot = world(one, other, nodes=(run_on(part_of(one, 1), "d1"), part_of(other, 1)))
    decided = decide(snapshot, replace(GREEDY, fuse=False))
    assert refused(decided, 2).text == "its resident on the device computes for another job"


def test_jobs_over_different_bases_do_not_fuse():
    one, other = lora(1), lora(2, key="other")
    snapshot = world(one, other, nodes=(run_on(part_of(one, 1), "d1"), part_of(other, 1)))
    assert shares(decide(snapshot, GREEDY)) == {1: 0.5, 2: 0.5}


def test_who_joins_a_batch_resizes_it_with_its_neighbour():
    """Two tails become one batch that saturates the device; the update beside it gives way."""
    batch = replace(tail(20), floor_seconds=0.018)
    rows = [replace(lora(id), outlook=steps(batch, update(10))) for id in (1, 2)]
    third = pipeline(3, "d1", key="own", outlook=LONG)
    nodes = (run_on(part_of(rows[0], 0), "d1", 0.25), run_on(part_of(third, 2), "d1", 0.75))
    decided = decide(world(*rows, third, nodes=(*nodes, part_of(rows[1], 0))), GREEDY)
    # 64 + 64 sequences are a DECODE. Batch and update: 0.4 + 0.75 at a quarter for the batch, 0.8 + 0.5 at
    # half, 1 + 0.25 at three. (Before: 0.8 + 0.75 = 1.55; now each of two at 10/11 of 0.8, and 0.5: 1.95.)
    assert shares(decided) == {1: 0.5, 2: 0.5, 3: 0.5}


# ---------------------------------------------------------------- gangs


def test_a_gang_starts_whole_or_not_at_all():
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=LONG)
    busy = pipeline(2, "d2", outlook=LONG)
    offered = (part_of(gang, 2, 0), part_of(gang, 2, 1))
    blocked = decide(world(gang, busy, nodes=(*offered, run_on(part_of(busy, 2), "d2"))), GREEDY)
    assert blocked.actions == ()
    assert refused(blocked, 1).code is RefusalCode.DEVICE
    assert len(started(decide(world(gang, busy, nodes=offered), GREEDY))) == 2


def test_rollouts_start_each_on_its_own():
    one, busy = pipeline(1, "d1 d2", shape=both(2), outlook=LONG), pipeline(2, "d2", outlook=LONG)
    prefill = replace(part_of(one, 0, 1), kind=PREFILL, segment=update(40, kind=PREFILL))
    nodes = (part_of(one, 0, 0), prefill, run_on(part_of(busy, 2), "d2"))
    assert list(started(decide(world(one, busy, nodes=nodes), GREEDY))) == [(1, "s0.w0.0")]


def test_nobody_takes_the_devices_of_the_first_gang_in_line_unless_it_leaves_room():
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=LONG, priority=1)
    busy, third = pipeline(2, "d2", outlook=LONG), pipeline(3, "d1", outlook=LONG)
    waiting = (part_of(gang, 2, 0), part_of(gang, 2, 1), run_on(part_of(busy, 2), "d2"))
    decided = decide(world(gang, busy, third, nodes=(*waiting, part_of(third, 2))), GREEDY)
    assert started(decided) == {}
    assert refused(decided, 3).text == "another job is first in line for its device"
    # An update could still start beside a tail: 1.55 together.
    decided = decide(world(gang, busy, third, nodes=(*waiting, part_of(third, 1))), GREEDY)
    assert list(started(decided)) == [(3, "s0.w0.1")]


def test_a_gang_that_lacks_a_device_keeps_nobody_out():
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=LONG, priority=1)
    third = pipeline(3, "d1", outlook=LONG)
    devices = (device("d1", 40), device("d2", 40, state=DeviceState.LOST))
    nodes = (part_of(gang, 2, 0), part_of(gang, 2, 1), part_of(third, 2))
    decided = decide(world(gang, third, devices=devices, nodes=nodes), GREEDY)
    assert list(started(decided)) == [(3, "s0.w0.t0")]
    assert refused(decided, 1).code is RefusalCode.NO_DEVICES


# ---------------------------------------------------------------- latency


def capped(cap: float, began: float, **fields) -> tuple[Snapshot, Pipeline]:
    """An update of 12 s, the last of a step of 20, alone on its device; a tail that would take a quarter."""
    one = pipeline(1, "d1", outlook=SHORT, latency_cap=cap, step_began=began, **fields)
    other = pipeline(2, "d1", outlook=LONG)
    return world(one, other, nodes=(run_on(part_of(one, 1), "d1"), part_of(other, 1))), one


@pytest.mark.parametrize(("cap", "starts"), [(1.26, True), (1.24, False)])
def test_a_neighbour_comes_only_while_the_cap_is_kept(cap, starts):
    """At three quarters 12 s take 16; with 9 s behind it the step takes 25 s, 1.25 times 20."""
    snapshot, _ = capped(cap, began=-9.0)
    decided = decide(snapshot, GREEDY)
    assert bool(started(decided)) is starts
    if not starts:
        assert refused(decided, 2).code is RefusalCode.LATENCY
        assert refused(decided, 2).text == "a neighbour on its device would miss its latency cap"


def test_steps_that_overlap_have_no_cap():
    snapshot, _ = capped(1.0, began=-9.0, shape=Shape((0,), (0,), Mode.ONE_STEP_OFF))
    assert started(decide(snapshot, GREEDY))


def test_a_gang_is_judged_by_all_its_workers():
    """On d1 an update is slowed already; a tail on d2 would slow the gang further, beyond its cap."""
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=SHORT, latency_cap=1.0, step_began=-8.0)
    rows = (gang, pipeline(2, "d1", outlook=LONG), pipeline(3, "d2", outlook=LONG))
    nodes = (
        run_on(part_of(gang, 1, 0), "d1", 0.5),
        run_on(part_of(gang, 1, 1), "d2"),
        run_on(part_of(rows[1], 1), "d1", 0.5),
        part_of(rows[2], 1),
    )
    # Now (1/2 + 1) / 2 = 3/4; with the tail (1/2 + 3/4) / 2 = 5/8, although d2 alone would go at 3/4.
    decided = decide(world(*rows, nodes=nodes), GREEDY)
    assert refused(decided, 3).code is RefusalCode.LATENCY


def test_the_best_split_is_not_taken_from_who_would_miss_its_cap():
    """Both have half. Three quarters for the update were best, but the tail must not slow down."""
    one = pipeline(1, "d1", outlook=SHORT, latency_cap=1.0)
    other = pipeline(2, "d1", outlook=LONG)
    nodes = (run_on(part_of(one, 0), "d1", 0.5), run_on(part_of(other, 2), "d1", 0.5))
    assert decide(world(one, other, nodes=nodes), GREEDY).actions == ()
    relaxed = replace(one, latency_cap=1.2)
    assert shares(decide(world(relaxed, other, nodes=nodes), GREEDY)) == {1: 0.25, 2: 0.75}


# ---------------------------------------------------------------- order


def first_of(
    *pipelines: Pipeline, tenants: tuple[Tenant, ...] = (Tenant(1), Tenant(2)), **since: float
) -> int:
    """Who gets the free device of those that all want to train on it."""
    offered = tuple(part_of(p, 2, since=since.get(f"p{p.id}", 0.0)) for p in pipelines)
    decided = decide(world(*pipelines, nodes=offered, tenants=tenants, now=10.0), PHASE)
    ((id, _),) = started(decided)
    return id


def test_the_tenant_that_received_less_comes_first():
    rows = pipeline(1, "d1", tenant=1, outlook=LONG), pipeline(2, "d1", tenant=2, outlook=LONG)
    assert first_of(*rows, tenants=(Tenant(1, service=500.0), Tenant(2, service=100.0))) == 2
    assert first_of(*rows, tenants=(Tenant(1, service=100.0), Tenant(2, service=500.0))) == 1


def test_tenants_are_compared_by_what_they_received_and_not_by_their_turns():
    """150 s are one of its turns of 100 s, 60 s are six of 10 s; and yet 60 is less."""
    rows = (
        pipeline(1, "d1", tenant=1, outlook=LONG),
        pipeline(2, "d1", tenant=2, outlook=steps(decode(4), tail(2), update(4))),
    )
    assert first_of(*rows, tenants=(Tenant(1, service=150.0), Tenant(2, service=60.0))) == 2


def test_inside_a_tenant_priority_then_patience_then_the_shortest_way_to_go():
    one, other = pipeline(1, "d1", outlook=LONG), pipeline(2, "d1", outlook=LONG)
    assert first_of(one, replace(other, priority=1)) == 2
    shorter = replace(other, outlook=steps(decode(40), tail(20), update(20)))
    assert first_of(one, shorter) == 2
    assert first_of(one, shorter, p1=-95.0) == 1  # it has waited longer than a step


def test_a_limit_bounds_devices_under_every_policy():
    snapshot = world(
        devices=(device("d1", 40), device("d2", 40)),
        tenants=(Tenant(1, max_devices=1),),
        queue=(job("a", outlook=LONG), job("b", submitted=1.0, outlook=LONG)),
    )
    for policy in SHARING:
        decided = decide(snapshot, policy)
        assert list(admitted(decided)) == ["a"]
        assert refused(decided, "b").code is RefusalCode.QUOTA


# ---------------------------------------------------------------- admission by demand


def test_a_device_takes_jobs_while_their_demand_is_within_the_smallest_cap():
    wants = {"demand": Demand(rollout=0.5, train=0.25), "outlook": LONG, "latency_cap": 1.5}
    snapshot = world(
        devices=(device("d1", 40),), queue=tuple(job(f"j{i}", submitted=i, **wants) for i in range(3))
    )
    decided = decide(snapshot, GREEDY)
    assert list(admitted(decided)) == ["j0", "j1"]  # 0.75, 1.5, and 2.25 would be over
    assert refused(decided, "j2").code is RefusalCode.LATENCY
    assert list(admitted(decide(snapshot, ROLLOUTS))) == ["j0", "j1"]  # two live on a device there
    fused = [replace(one, fusible=True) for one in snapshot.queue]
    # In one batch only the largest of the rollouts counts: 0.5 + 3 * 0.25 = 1.25.
    assert len(admitted(decide(replace(snapshot, queue=tuple(fused)), GREEDY))) == 3


def test_a_job_that_wants_more_than_its_cap_is_admitted_where_it_is_alone():
    """Balanced rollouts and training that overlap want the device twice."""
    wants = {"demand": Demand(rollout=0.5, train=0.5), "outlook": steps(decode(10), update(10))}
    asynchronous = job("1", shape=Shape((0,), (0,), Mode.ASYNC, 2), **wants)
    snapshot = world(devices=(device("d1", 40),), queue=(asynchronous,))
    assert admitted(decide(snapshot, GREEDY)) == {"1": "d1"}


def test_a_job_and_a_pipeline_of_the_same_name_are_two():
    wants = {"demand": Demand(rollout=0.5, train=0.5), "outlook": LONG, "latency_cap": 1.5}
    snapshot = world(pipeline(1, "d1", **wants), queue=(job("1", **wants),))
    assert refused(decide(snapshot, GREEDY), "1").code is RefusalCode.LATENCY


# ---------------------------------------------------------------- what must not be done


def broken(snapshot: Snapshot, *actions, policy: Policy = LOOKAHEAD) -> str:
    return "; ".join(check_plan(snapshot, Plan(actions), policy))


def two_tails(**fields) -> tuple[Snapshot, Pipeline]:
    one = pipeline(1, "d1 d2", shape=both(2), outlook=LONG, **fields)
    nodes = (run_on(part_of(one, 1, 0, tokens=100), "d1"), run_on(part_of(one, 1, 1, tokens=100), "d2"))
    return world(one, nodes=nodes), one


def test_the_invariants_see_what_the_passes_must_not_do():
    """Each illegal action is named: the checks can fail."""
    one = pipeline(1, "d1", outlook=LONG)
    other = pipeline(2, "d1", outlook=LONG)
    running, offered = run_on(part_of(one, 2), "d1"), part_of(other, 1)
    snapshot = world(one, other, nodes=(running, offered))
    start = Start(offered.id, 2, "d1", 0.5, "test")
    assert "shares sum to 1.5" in broken(snapshot, start)
    assert "2 residents compute at once" in broken(snapshot, start, policy=PHASE)
    assert "beside others" in broken(snapshot, start, policy=ROLLOUTS)
    assert "no reason" in broken(snapshot, replace(start, reason=" "))
    assert "share 0" in broken(snapshot, replace(start, share=0.0))
    assert "not its home" in broken(snapshot, replace(start, device="d9"))
    assert "changes nothing" in broken(snapshot, Resize(running.id, 1, 1.0, "test"))
    assert "has no yield points" in broken(
        replace(snapshot, nodes=(replace(running, kind=Kind.TAIL), offered)), Yield(running.id, 1, "test")
    )
    yielded = replace(snapshot, nodes=(replace(running, yielded=True), offered))
    assert "made room once" in broken(yielded, Yield(running.id, 1, "test"))
    assert "runs on d1" in broken(snapshot, Rehome(1, ("d1",), "test"))
    assert "all its homes are ready" in broken(snapshot, Rehome(2, ("d1",), "test"))
    assert "a time that is over" in broken(snapshot, Wait(2, -1.0, "test"))
    assert "beyond its cap" in broken(snapshot, Wait(2, 100.0, "test"))
    assert "does not wait" in broken(snapshot, Wait(2, 10.0, "test"), policy=GREEDY)
    assert "got no start" in broken(snapshot)
    late = replace(one, latency_cap=1.0, step_began=-60.0)
    halved = (Resize(running.id, 1, 0.5, "test"), replace(start, share=0.5))
    assert "the cap is 100.00" in broken(replace(snapshot, pipelines=(late, other)), *halved)


def test_the_invariants_see_idle_devices_and_torn_gangs():
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=LONG)
    offered = (part_of(gang, 2, 0), part_of(gang, 2, 1))
    torn = broken(world(gang, nodes=offered), Start(offered[0].id, 1, "d1", 1.0, "test"))
    assert "gang s0.t0 of pipeline 1: not whole" in torn
    single = pipeline(2, "d1", outlook=LONG)
    assert "pipeline 2 waits though d1 is idle" in broken(world(single, nodes=(part_of(single, 2),)))


def test_the_invariants_see_a_gang_that_is_overtaken():
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=LONG, priority=1)
    busy, third = pipeline(2, "d2", outlook=LONG), pipeline(3, "d1", outlook=LONG)
    mine = part_of(third, 2)
    nodes = (part_of(gang, 2, 0), part_of(gang, 2, 1), run_on(part_of(busy, 2), "d2"), mine)
    snapshot = world(gang, busy, third, nodes=nodes)
    assert "pipeline 3 overtook 1 on d1" in broken(snapshot, Start(mine.id, 3, "d1", 1.0, "test"))


def test_the_invariants_see_a_batch_that_is_too_large():
    snapshot, one = two_tails()
    merge = Merge(1, ("s0.w1.1",), "s0.w0.1", "test")
    assert "128 sequences in one batch, 128 saturate" in broken(snapshot, merge)
    small = replace(snapshot, nodes=tuple(replace(n, segment=tail(20, batch=20)) for n in snapshot.nodes))
    assert "sequences" not in broken(small, merge)
    # 100 tokens each, and 20 sequences for 20 / 0.02 forwards: 2 * 20,100.
    assert "40200 tokens of 40199" in broken(
        replace(small, pipelines=(replace(one, kv_tokens=40_199),)), merge
    )
    assert "tokens of" not in broken(replace(small, pipelines=(replace(one, kv_tokens=40_200),)), merge)
    assert "running tails" in broken(snapshot, replace(merge, sources=()))
    assert "running tails" in broken(snapshot, replace(merge, sources=("s0.w0.1",)))
    other_step = replace(small, nodes=(small.nodes[0], replace(small.nodes[1], step=1)))
    assert "different steps" in broken(other_step, merge)
    assert "does not merge" in broken(small, merge, policy=replace(LOOKAHEAD, merge=False))


def test_the_same_plan_from_a_board_that_remembers():
    """Rows in another order, or applied one by one, give the same plan."""
    rows = [pipeline(i, "d1 d2", shape=both(2), outlook=LONG, tenant=1 + i % 2) for i in (1, 2, 3)]
    nodes = tuple(part_of(one, 0, worker) for one in rows for worker in (0, 1))
    snapshot = world(*rows, nodes=nodes)
    mixed = replace(snapshot, pipelines=tuple(reversed(rows)), nodes=nodes[::-1])
    for policy in SHARING:
        assert repr(plan(snapshot, policy)) == repr(plan(mixed, policy))
    after = act(snapshot, plan(snapshot, GREEDY))
    assert any(node.state is NodeState.RUNNING for node in after.nodes)


# ---------------------------------------------------------------- caps when batches are merged


def merging(cap: float, neighbour: float) -> Snapshot:
    """Two tails of 20 s, then 10 s of training. In one batch a forward takes 0.022 s, so the step takes 32 s.
    The neighbour needs 0.4 of the memory's bandwidth, a tail 0.5, both tails 0.75: it slows down by 1.15, its
    step takes 8 * 1.15 + 12 = 21.2 s instead of 20.
    """
    batch = replace(tail(20, batch=20), floor_seconds=0.018, bandwidth=0.5)
    one = pipeline(1, "d1 d2", shape=both(2), outlook=steps(batch, update(10)), latency_cap=cap)
    beside = steps(replace(tail(8), bandwidth=0.4), update(12))
    other, third = pipeline(2, "d1", outlook=beside, latency_cap=neighbour), pipeline(3, "d2", outlook=LONG)
    nodes = (
        run_on(part_of(one, 0, 0), "d1", 0.5),
        run_on(part_of(one, 0, 1), "d2"),
        run_on(part_of(other, 0), "d1", 0.5),
    )
    return world(one, other, third, nodes=nodes)


@pytest.mark.parametrize(
    ("cap", "neighbour", "merges"),
    [(1.5, 1.2, True), (1.0, 1.2, False), (1.5, 1.0, False)],
)
def test_tails_are_merged_only_while_all_caps_are_kept(cap, neighbour, merges):
    decided = decide(merging(cap, neighbour), GREEDY)
    assert any(isinstance(action, Merge) for action in decided.actions) is merges
    uncapped = decide(merging(cap, neighbour), replace(GREEDY, capped=False))
    assert any(isinstance(action, Merge) for action in uncapped.actions)


def test_the_invariants_see_a_merge_that_makes_somebody_late():
    merge = Merge(1, ("s0.w1.0",), "s0.w0.0", "test")
    assert "pipeline 2: 21.20 s instead of 20.00, the cap is 20.00" in broken(merging(1.5, 1.0), merge)
    # 1.15 times 22 s and 10 s.
    assert "pipeline 1: 35.30 s instead of 30.00, the cap is 30.00" in broken(merging(1.0, 1.5), merge)
    assert "the cap" not in broken(merging(1.5, 1.2), merge)


def test_a_policy_without_caps_refuses_nobody_for_them():
    snapshot, _ = capped(1.24, began=-9.0)
    assert started(decide(snapshot, replace(GREEDY, capped=False)))


# ---------------------------------------------------------------- devices that nobody measured


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_without_a_table_one_sub_stage_computes_at_a_time(policy):
    one, other = pipeline(1, "d1 d2", shape=both(2), outlook=LONG), pipeline(2, "d1", outlook=LONG)
    new = (Device("d1", "new", 40 * GB), Device("d2", "new", 40 * GB))
    nodes = (run_on(part_of(one, 1, 0), "d1", 0.5), run_on(part_of(one, 1, 1), "d2"), part_of(other, 2))
    decided = decide(world(one, other, devices=new, nodes=nodes), policy)
    assert refused(decided, 2).code is RefusalCode.DEVICE
    assert shares(decided) == {1: 1.0}  # who is alone has all of it
    alone = decide(world(one, other, devices=new, nodes=(part_of(other, 2),)), policy)
    assert started(alone) == {(2, "s0.w0.t0"): 1.0}
    start = Start("s0.w0.t0", 2, "d1", 0.5, "test")
    assert "without a table" in broken(world(one, other, devices=new, nodes=nodes), start)


def test_what_nothing_is_predicted_of_is_refused():
    one = pipeline(1, "d1", outlook=LONG)
    decided = plan(world(one, nodes=(Node("n", 1, 0, 0, Kind.DECODE),)), LOOKAHEAD)
    assert decided.actions == ()
    assert refused(decided, 1).text == "nothing is known of its next sub-stage"


# ---------------------------------------------------------------- making room, waiting, memory, the line


def test_who_made_room_does_not_start_again_in_the_same_plan():
    """Half a second of it would be short enough to start beside the long update."""
    early = steps(tail(30), replace(update(2, kind=Kind.LOGPROB), early=True), update(20))
    one = pipeline(1, "d1 d2", shape=Shape((1,), (0,), Mode.STREAM), outlook=early, latency_cap=10.0)
    other = pipeline(2, "d1", outlook=steps(tail(10), update(40)), latency_cap=10.0)
    logprob = replace(run_on(part_of(one, 1), "d1"), left=0.5)
    snapshot = world(one, other, nodes=(logprob, run_on(part_of(one, 0, 1), "d2"), part_of(other, 1)))
    decided = decide(snapshot, GREEDY)
    assert [type(action) for action in decided.actions] == [Yield, Start]
    assert started(decided) == {(2, "s0.w0.t0"): 1.0}
    again = Start(logprob.id, 1, "d1", 0.25, "test")
    wrong = broken(snapshot, *decided.actions, again)
    assert "node s0.w0.t0 of pipeline 1 yields and starts again" in wrong


def test_what_else_a_pipeline_starts_does_not_end_its_wait():
    """Two prefills side by side gain a little now and lose at their tools; on d2 a tail starts."""
    prefill, tool = update(10, kind=Kind.PREFILL), update(10, kind=Kind.TOOL)
    soft = replace(TABLE, alone={**TABLE.alone, Character.PREFILL: (4.0, 1.6, 4 / 3, 1.0)})
    outlook = steps(prefill, tool, tail(1), update(10))
    a = pipeline(1, "d1", outlook=outlook, latency_cap=10.0)
    b = pipeline(2, "d1 d2", outlook=outlook, latency_cap=10.0, shape=both(2))
    nodes = (run_on(part_of(a, 0), "d1"), part_of(b, 0, since=-50.0), part_of(b, 2, 1))
    board = Board.of(replace(world(a, b, nodes=nodes), tables=(("cpu", soft),)))
    board.touch_all()
    decided = decide_on(board, LOOKAHEAD)
    assert {type(action) for action in decided.actions} == {Wait, Start}
    (wait,) = (action for action in decided.actions if isinstance(action, Wait))
    assert board.waits == {2: wait.until}


def test_training_holds_its_memory_from_part_to_part():
    """4 GB of weights, twice 1 GB, and 3 GB for either's training: 9 GB for one, 12 GB for both."""
    trained = steps(tail(10), update(4, kind=Kind.LOGPROB), update(20))
    one, other = (pipeline(id, "d1", outlook=trained, peak_bytes=3 * GB) for id in (1, 2))
    nodes = (part_of(one, 2), part_of(other, 2))
    row = "device d1: 12000000000 of 11000000000 bytes used"
    assert row in check(world(one, other, nodes=nodes, devices=(device("d1", 11),)), GREEDY)
    waiting = world(one, other, nodes=(part_of(one, 2), part_of(other, 1)), devices=(device("d1", 11),))
    assert check(waiting, GREEDY) == []
    decided = decide(waiting, PHASE)
    assert (list(started(decided)), refused(decided, 2).code) == ([(1, "s0.w0.t1")], RefusalCode.MEMORY)


def test_rollouts_begin_beside_their_own_training_only_where_memory_holds_both():
    """4 + 1 GB, 3 GB while it trains, 2 GB more while it also rolls out: 10 GB."""
    one = pipeline(
        1,
        "d1",
        outlook=steps(tail(10), update(20)),
        peak_bytes=3 * GB,
        overlap_bytes=2 * GB,
        shape=Shape((0,), (0,), Mode.ONE_STEP_OFF),
    )
    nodes = (run_on(part_of(one, 1), "d1"), replace(part_of(one, 0), id="s1.w0.0", step=1))
    decided = decide(world(one, nodes=nodes, devices=(device("d1", 9),)), GREEDY)
    assert refused(decided, 1).code is RefusalCode.MEMORY
    assert started(decide(world(one, nodes=nodes, devices=(device("d1", 10),)), GREEDY))


def test_newcomers_leave_the_memory_of_those_who_train_now():
    """12 GB as above, and 1 GB for the newcomer."""
    trained = steps(tail(10), update(20))
    one, other = (pipeline(id, "d1", outlook=trained, peak_bytes=3 * GB) for id in (1, 2))
    nodes = (run_on(part_of(one, 1), "d1", 0.5), run_on(part_of(other, 1), "d1", 0.5))
    for size, here in ((12, []), (13, ["a"])):
        full = world(one, other, nodes=nodes, devices=(device("d1", size),), queue=(job("a"),))
        assert list(admitted(decide(full, GREEDY))) == here


def test_nobody_overtakes_on_a_device_that_only_it_was_asked_for():
    """Something happens on d3. The third could start on d1, where a gang is first in line."""
    gang = pipeline(1, "d1 d2", shape=both(2), outlook=LONG, priority=1)
    busy, third = pipeline(2, "d2", outlook=LONG), pipeline(3, "d1 d3", shape=Shape((), (0,)), outlook=LONG)
    nodes = (part_of(gang, 2, 0), part_of(gang, 2, 1), run_on(part_of(busy, 2), "d2"), part_of(third, 2))
    board = Board.of(world(gang, busy, third, nodes=nodes))
    board.touched = {"d3"}
    decided = decide_on(board, GREEDY)
    assert started(decided) == {}
    assert refused(decided, 3).text == "another job is first in line for its device"


def test_a_gang_that_is_not_first_and_lacks_memory_keeps_nobody_out():
    """On d2 the first gang's training has begun, and there is no memory for the second's besides."""
    trained = steps(tail(10), update(4, kind=Kind.LOGPROB), update(20))
    fields = {"shape": both(2), "outlook": trained, "peak_bytes": 3 * GB}
    first = pipeline(1, "d1 d2", priority=1, **fields)
    second, third = pipeline(2, "d2 d3", **fields), pipeline(3, "d3", outlook=LONG, priority=-1)
    busy = pipeline(4, "d1", outlook=LONG)
    nodes = [part_of(first, 2, worker) for worker in (0, 1)] + [part_of(second, 1, w) for w in (0, 1)]
    nodes += [part_of(third, 2), run_on(part_of(busy, 2), "d1")]
    devices = (device("d1", 40), device("d2", 11), device("d3", 40))
    decided = decide(world(first, second, third, busy, nodes=tuple(nodes), devices=devices), GREEDY)
    assert list(started(decided)) == [(3, "s0.w0.t0")]
    assert refused(decided, 2).code is RefusalCode.MEMORY


def test_to_be_asked_for_others_does_not_end_a_wait():
    waiting = pipeline(1, "d1", outlook=LONG)
    third = pipeline(3, "d1 d3", shape=Shape((), (0,)), outlook=LONG)
    nodes = (part_of(waiting, 2), part_of(third, 2))
    board = Board.of(world(waiting, third, nodes=nodes, waits=((1, 5.0),)))
    board.touched = {"d3"}
    assert decide_on(board, LOOKAHEAD).actions == ()
    assert board.waits == {1: 5.0}
    board.tick(5.0)
    board.touched = {"d1"}
    assert started(decide_on(board, LOOKAHEAD))
