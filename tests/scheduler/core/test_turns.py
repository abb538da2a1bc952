"""Who gets devices for a step, which ones, and in what order over many steps."""

from collections import Counter
from dataclasses import replace

import pytest

from scheduler.core.plan import plan
from scheduler.core.state import DeviceState, Kind, NodeState, RefusalCode, Snapshot, Tenant
from scheduler.core.world import at, end, offer, set_device
from tests.scheduler.core.build import (
    POLICY,
    act,
    complete,
    decide,
    device,
    evicted,
    job,
    node,
    pipeline,
    placed,
    refused,
    resident,
    want,
)

ONE = (Tenant(1),)
TWO = (Tenant(1), Tenant(2))


def world(*pipelines, devices="d1", tenants=ONE, **fields) -> Snapshot:
    """Every pipeline without a turn wants one."""
    return want(
        Snapshot(
            now=0,
            devices=tuple(device(name) for name in devices.split()),
            tenants=tenants,
            pipelines=pipelines,
            **fields,
        )
    )


def run(snapshot: Snapshot, turns: int, seconds: float = 10.0) -> list[int]:
    """Let the longest-held pipeline finish its step, again and again; the pipelines in order of turns."""
    order: list[int] = []
    running: list[int] = []
    while len(order) < turns:
        snapshot = want(snapshot)
        decided = decide(snapshot)
        order += placed(decided)
        running += placed(decided)
        snapshot = complete(act(snapshot, decided), running.pop(0), seconds)
        snapshot = at(snapshot, snapshot.now + seconds)
    return order


# ---------------------------------------------------------------- whose turn


@pytest.mark.parametrize(("weight", "share"), [(1.0, 1 / 2), (2.0, 2 / 3), (3.0, 3 / 4)])
@pytest.mark.parametrize("seconds", [1.0, 10.0, 100.0])
def test_two_tenants_share_one_device_by_weight(weight, share, seconds):
    """At every moment each tenant is within one turn of its share, whatever step length was expected."""
    snapshot = world(
        pipeline(1, "d1", tenant=1), pipeline(2, "d1", tenant=2), tenants=(Tenant(1, weight), Tenant(2))
    )
    order = run(snapshot, 60, seconds)
    for turns in range(1, 61):
        assert abs(order[:turns].count(1) - share * turns) <= 1


def test_equal_tenants_alternate():
    snapshot = world(pipeline(1, "d1", tenant=1), pipeline(2, "d1", tenant=2), tenants=TWO)
    assert run(snapshot, 6) == [1, 2, 1, 2, 1, 2]


def test_ten_pipelines_of_one_tenant_do_not_take_all_devices_before_the_one_of_another():
    snapshot = world(
        *(pipeline(i, f"d{(i - 1) % 2 + 1}", tenant=1, run=0.5) for i in range(1, 11)),
        pipeline(11, "d2", tenant=2, run=0.5),
        devices="d1 d2",
        tenants=TWO,
    )
    decided = decide(snapshot)
    assert placed(decided) == {1: "d1", 11: "d2"}
    # In line behind them: the tenants' times are equal now, and each turn raises one.
    assert refused(decided, 2).text == "waiting for its turn: next in line"
    assert refused(decided, 3).text == "waiting for its turn: 1 job ahead"
    assert refused(decided, 10).text == "waiting for its turn: 8 jobs ahead"


def test_a_turn_under_way_counts_before_it_is_over():
    """Both have received nothing, but tenant 1 has a turn: the next is tenant 2's."""
    snapshot = world(
        pipeline(1, "d1", tenant=1, holds=True),
        pipeline(2, "d2", tenant=1),
        pipeline(3, "d2", tenant=2),
        devices="d1 d2",
        tenants=TWO,
    )
    assert placed(decide(snapshot)) == {3: "d2"}


def test_inside_a_tenant_priority_then_age_then_id():
    def first(*pipelines):
        return next(iter(placed(decide(world(*pipelines)))))

    assert first(pipeline(1, "d1"), pipeline(2, "d1", priority=1)) == 2
    assert first(pipeline(1, "d1", submitted=9.0), pipeline(2, "d1", submitted=3.0)) == 2
    assert first(pipeline(1, "d1", submitted=3.0), pipeline(2, "d1", submitted=3.0)) == 1


def test_tenants_crowded_on_one_device_are_not_held_below_their_share():
    """Three tenants live on d1, one on d2. Fair is half a device each, so d2 must not stay with the one."""
    tenants = tuple(Tenant(i) for i in (1, 2, 3, 4))
    snapshot = world(
        *(pipeline(i, "d1", tenant=i) for i in (1, 2, 3)),
        pipeline(4, "d2", tenant=4),
        devices="d1 d2",
        tenants=tenants,
    )
    turns = Counter(run(snapshot, 80))
    assert max(turns.values()) - min(turns.values()) <= 2


def test_state_does_not_move_while_everybody_is_at_home_and_fairly_served():
    snapshot = world(
        pipeline(1, "d1", tenant=1),
        pipeline(2, "d2", tenant=2),
        pipeline(3, "d1", tenant=2),
        pipeline(4, "d2", tenant=1),
        devices="d1 d2",
        tenants=TWO,
    )
    homes = {p.id: p.home for p in snapshot.pipelines}
    running: list[int] = []
    for _ in range(40):
        snapshot = want(snapshot)
        decided = decide(snapshot)
        running += placed(decided)
        snapshot = complete(act(snapshot, decided), running.pop(0))
        assert {p.id: p.home for p in snapshot.pipelines} == homes


def test_grading_needs_no_turn():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"),),
        tenants=ONE,
        pipelines=(pipeline(1, "d1"),),
        nodes=(node(1, kind=Kind.GRADE),),
    )
    decided = decide(snapshot)
    assert placed(decided) == {}
    assert [(a.node, a.device) for a in decided.actions] == [("s0.w0.grade", None)]


# ---------------------------------------------------------------- which devices


def test_a_free_device_is_used_by_moving_when_home_is_busy():
    snapshot = world(pipeline(1, "d1", holds=True), pipeline(2, "d1"), devices="d1 d2")
    decided = decide(snapshot)
    assert placed(decided) == {2: "d2"}
    assert act(snapshot, decided).pipelines[1].home == ("d2",)


def test_a_device_wanted_at_home_is_left_to_those_at_home():
    snapshot = world(
        pipeline(1, "d1", holds=True), pipeline(2, "d1"), pipeline(3, "d2"), devices="d1 d2", tenants=ONE
    )
    decided = decide(snapshot)
    assert placed(decided) == {3: "d2"}
    assert refused(decided, 2).text == "waiting for its turn: next in line"


def test_a_tenant_more_than_a_turn_behind_takes_a_device_that_is_wanted_at_home():
    def decided(lead):
        return decide(
            world(
                pipeline(1, "d1", tenant=3, holds=True),
                pipeline(2, "d1", tenant=1),
                pipeline(3, "d2", tenant=2, step_seconds=10.0),
                devices="d1 d2",
                tenants=(Tenant(1, service=100.0), Tenant(2, service=100.0 + lead), Tenant(3)),
            )
        )

    assert placed(decided(9.0)) == {3: "d2"}
    assert placed(decided(10.0)) == {2: "d2"}


def test_a_move_needs_memory_and_evicts_idle_weights():
    tight = world(
        pipeline(1, "d1", holds=True),
        pipeline(2, "d1"),
        pipeline(3, "d2", key="own", weights=8),
        devices="d1 d2",
    )
    tight = replace(tight, nodes=tuple(n for n in tight.nodes if n.pipeline != 3))
    assert refused(decide(tight), 2).code is RefusalCode.TURN

    filled = world(
        pipeline(1, "d1", holds=True),
        pipeline(2, "d1"),
        devices="d1 d2",
        residents=(resident("d2", "old", 4, 1), resident("d2", "older", 4, 0)),
    )
    decided = decide(filled)
    assert (placed(decided), evicted(decided)) == ({2: "d2"}, ["older@d2"])


@pytest.mark.parametrize("state", [DeviceState.DRAINING, DeviceState.LOST])
def test_pipelines_leave_devices_that_are_not_ready(state):
    snapshot = set_device(world(pipeline(1, "d1"), devices="d1 d2"), "d1", state)
    assert placed(decide(snapshot)) == {1: "d2"}


@pytest.mark.parametrize("state", [DeviceState.DRAINING, DeviceState.LOST])
def test_nothing_is_placed_when_no_device_is_ready(state):
    refusal = refused(decide(set_device(world(pipeline(1, "d1")), "d1", state)), 1)
    assert (refusal.code, refusal.text) == (RefusalCode.NO_DEVICES, "no device is ready")


def test_a_pipeline_that_must_leave_waits_for_memory_and_says_so():
    snapshot = world(pipeline(1, "d1"), pipeline(2, "d2", key="own", weights=8), devices="d1 d2")
    refusal = refused(decide(set_device(snapshot, "d1", DeviceState.DRAINING)), 1)
    assert (refusal.code, refusal.text) == (RefusalCode.MEMORY, "waiting for memory: next in line")


def test_a_step_under_way_goes_on_on_a_draining_device_but_not_on_a_lost_one():
    snapshot = want(Snapshot(now=0, devices=(device("d1"),), tenants=ONE, pipelines=(pipeline(1, "d1"),)))
    snapshot = replace(
        act(snapshot, decide(snapshot)),
        nodes=(node(1, kind=Kind.DECODE),),
    )
    draining = decide(set_device(snapshot, "d1", DeviceState.DRAINING))
    assert [(a.node, a.device) for a in draining.actions] == [("s0.w0.decode", "d1")]
    assert decide(set_device(snapshot, "d1", DeviceState.LOST)).actions == ()


def test_quota_is_a_ceiling_on_held_devices():
    snapshot = world(
        pipeline(1, "d1", holds=True),
        pipeline(2, "d2"),
        pipeline(3, "d3"),
        devices="d1 d2 d3",
        tenants=(Tenant(1, max_devices=1),),
    )
    decided = decide(snapshot)
    assert placed(decided) == {}
    assert refused(decided, 2).text == "your organization's limit of 1 device is in use"
    assert refused(decided, 3).text == "your organization's limit of 1 device is taken: 1 of its jobs ahead"


def test_a_gang_over_quota_is_not_overtaken_by_smaller_ones_of_its_tenant():
    snapshot = world(
        pipeline(1, "d1", holds=True),
        pipeline(2, "d2 d3"),
        pipeline(3, "d4"),
        devices="d1 d2 d3 d4",
        tenants=(Tenant(1, max_devices=2),),
    )
    decided = decide(snapshot)
    assert placed(decided) == {}
    assert refused(decided, 2).text == "needs 2 devices, your organization's limit of 2 leaves 1"
    assert refused(decided, 3).code is RefusalCode.QUOTA
    assert placed(decide(complete(snapshot, 1))) == {2: "d2 d3"}


def test_a_device_on_which_something_still_computes_is_not_free():
    """A holder's row may be gone before its sub-stage is: nobody gets the device until that has ended."""
    snapshot = world(pipeline(1, "d1"), pipeline(2, "d1"))
    left_over = node(1, kind=Kind.UPDATE, state=NodeState.RUNNING, device="d1", share=1.0)
    assert placed(plan(replace(snapshot, nodes=(*snapshot.nodes, left_over)), POLICY)) == {}


def test_what_a_waiting_gang_cannot_use_is_open_to_all():
    snapshot = world(
        pipeline(1, "d1 d2 d4", submitted=0.0),
        pipeline(2, "d3", holds=True),
        pipeline(3, "d3"),
        devices="d1 d2 d3 d4",
    )
    snapshot = set_device(set_device(snapshot, "d2", DeviceState.LOST), "d4", DeviceState.LOST)
    assert placed(decide(snapshot)) == {3: "d1"}


def test_memory_that_a_move_leaves_behind_is_free_again():
    """Pipeline 3 must leave d3. Once pipeline 2 went to d2 it could live on d1: it waits for a turn only."""
    snapshot = world(
        pipeline(1, "d1", holds=True),
        pipeline(2, "d1", key="own-2"),
        pipeline(3, "d3", key="own-3"),
        devices="d1 d2 d3",
    )
    devices = (device("d1", 10), device("d2", 5), device("d3", 10, state=DeviceState.LOST))
    decided = decide(replace(snapshot, devices=devices))
    assert placed(decided) == {2: "d2"}
    assert refused(decided, 3).code is RefusalCode.TURN


def test_no_move_goes_to_a_device_whose_memory_is_kept_for_a_waiting_job():
    snapshot = world(
        pipeline(1, "d1", holds=True),
        pipeline(2, "d1"),
        pipeline(3, "d2", run=3),
        devices="d1 d2",
        queue=(job("large", key="own", weights=9),),
    )
    snapshot = replace(snapshot, nodes=tuple(n for n in snapshot.nodes if n.pipeline != 3))
    # d1 lacks 6 GB and d2 7, so d1 is kept and pipeline 2 may go to d2 ...
    assert placed(decide(snapshot)) == {2: "d2"}
    # ... and when d2 lacks less, it is kept and pipeline 2 stays.
    lighter = tuple(replace(p, run_bytes=0) if p.id == 3 else p for p in snapshot.pipelines)
    assert placed(decide(replace(snapshot, pipelines=lighter))) == {}


# ---------------------------------------------------------------- gangs


def test_a_gang_is_placed_whole_or_not_at_all_and_reserves_meanwhile():
    snapshot = world(
        pipeline(1, "d2", holds=True),
        pipeline(2, "d1 d2", submitted=0.0),
        pipeline(3, "d1", submitted=5.0),
        devices="d1 d2",
    )
    decided = decide(snapshot)
    assert placed(decided) == {}
    assert refused(decided, 3).text == "waiting for its turn: 1 job ahead"
    assert placed(decide(complete(snapshot, 1))) == {2: "d1 d2"}


def test_a_gang_of_four_among_singles_is_served_within_one_step_of_each_holder():
    snapshot = world(
        *(pipeline(i, f"d{i}", tenant=1) for i in (1, 2, 3, 4)),
        pipeline(5, "d1 d2 d3 d4", tenant=2),
        devices="d1 d2 d3 d4",
        tenants=(Tenant(1), Tenant(2, service=1000.0)),
    )
    decided = decide(snapshot)  # tenant 1 is far behind, so its singles go first
    assert placed(decided) == {1: "d1", 2: "d2", 3: "d3", 4: "d4"}
    snapshot = act(snapshot, decided)
    # Now the gang is first in order; the singles end one by one and want the next step at once.
    snapshot = replace(snapshot, tenants=(Tenant(1, service=5000.0), Tenant(2, service=1000.0)))
    for finished in (3, 1, 4):
        snapshot = want(complete(snapshot, finished), step=1)
        decided = decide(snapshot)
        assert placed(decided) == {}
        assert refused(decided, 5).text == "waiting for its turn: next in line"
    assert placed(decide(want(complete(snapshot, 2), step=1))) == {5: "d1 d2 d3 d4"}


def test_a_gang_and_singles_share_device_seconds():
    """A gang's turn costs two devices, so a tenant of singles gets two turns for each of the gang's."""
    snapshot = world(
        pipeline(1, "d1 d2", tenant=1),
        pipeline(2, "d1", tenant=2),
        pipeline(3, "d2", tenant=2),
        devices="d1 d2",
        tenants=TWO,
    )
    order = Counter(run(snapshot, 60))
    assert abs(2 * order[1] - order[2] - order[3]) <= 2


def test_only_the_workers_without_a_free_home_move():
    snapshot = world(pipeline(1, "d2", holds=True), pipeline(2, "d1 d2 d3"), devices="d1 d2 d3 d4")
    assert placed(decide(snapshot)) == {2: "d1 d4 d3"}


def test_a_gang_that_cannot_be_placed_for_want_of_devices_reserves_nothing():
    snapshot = world(pipeline(1, "d1 d2", submitted=0.0), pipeline(2, "d1", submitted=1.0), devices="d1 d2")
    decided = decide(set_device(snapshot, "d2", DeviceState.LOST))
    assert placed(decided) == {2: "d1"}
    assert refused(decided, 1).text == "needs 2 devices, only 1 that can hold it is ready"


# ---------------------------------------------------------------- start


def test_a_worker_runs_one_thing_at_a_time_and_the_earlier_step_first():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"), device("d2")),
        tenants=ONE,
        pipelines=(pipeline(1, "d1 d2", holds=True),),
        nodes=(
            node(1, 0, Kind.PREFILL, step=4, state=NodeState.RUNNING, device="d1", share=1.0),
            node(1, 0, Kind.DECODE, step=4),
            node(1, 1, Kind.LOGPROB, step=5),
            node(1, 1, Kind.UPDATE, step=4),
            node(1, 1, Kind.GRADE, step=4),
        ),
    )
    starts = [(a.node, a.device, a.share) for a in decide(snapshot).actions]
    assert starts == [("s4.w1.grade", None, 1.0), ("s4.w1.update", "d2", 1.0)]


def test_the_whole_life_of_a_job():
    """Queue, admit, offer, place and start in one plan, finish, step done, end: the device is free again."""
    snapshot = Snapshot(now=0, devices=(device("d1"),), tenants=ONE, queue=(job("j"),))
    snapshot = act(snapshot, decide(snapshot))
    snapshot = offer(snapshot, node(1))
    decided = decide(snapshot)
    assert [type(a).__name__ for a in decided.actions] == ["Place", "Start"]
    snapshot = complete(act(snapshot, decided), 1, seconds=7.0)
    assert snapshot.tenants == (Tenant(1, service=7.0),)
    snapshot = end(snapshot, 1)
    assert (snapshot.pipelines, snapshot.nodes) == ((), ())
    assert decide(snapshot).actions == ()
    assert [r.weights_key for r in snapshot.residents] == ["base"]
