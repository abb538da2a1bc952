"""Pipelines leave devices that are drained, between two steps."""

from __future__ import annotations

import pytest

from scheduler.core.state import (
    POLICIES,
    DeviceState,
    Evict,
    Mode,
    Pipeline,
    Plan,
    RefusalCode,
    Rehome,
    Shape,
    Snapshot,
    Tenant,
)
from tests.scheduler.core.build import (
    TABLES,
    decide,
    device,
    job,
    part_of,
    pipeline,
    refused,
    resident,
    run_on,
    started,
    steps,
    tail,
    update,
)
from tests.scheduler.core.driver import Driver

SHARING = [policy for policy in POLICIES.values() if policy.name != "exclusive"]
LOOKAHEAD = POLICIES["lookahead"]
STEP = steps(tail(8), tail(4, batch=16), update(12))
DRAINING = DeviceState.DRAINING


def world(*pipelines: Pipeline, nodes=(), devices=(), **fields) -> Snapshot:
    return Snapshot(
        now=0.0,
        devices=devices or (device("d1", 40, state=DRAINING), device("d2", 40), device("d3", 40)),
        tenants=(Tenant(1),),
        pipelines=pipelines,
        nodes=nodes,
        tables=TABLES,
        **fields,
    )


def moves(decided: Plan) -> dict[int, str]:
    return {a.pipeline: " ".join(a.home) for a in decided.actions if isinstance(a, Rehome)}


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_a_step_begins_on_another_device_than_the_drained_one(policy):
    one = pipeline(1, "d1", outlook=STEP)
    decided = decide(world(one, nodes=(part_of(one, 0),)), policy)
    assert moves(decided) == {1: "d2"}
    assert decided.actions[0].reason == "1 worker moved: no step begins on their devices"
    assert started(decided) == {(1, "s0.w0.0"): 1.0}


def test_only_the_workers_move_that_lost_their_home():
    one = pipeline(1, "d2 d1", shape=Shape((0, 1), (0, 1)), outlook=STEP)
    decided = decide(world(one, nodes=(part_of(one, 0, 0), part_of(one, 0, 1))), LOOKAHEAD)
    assert moves(decided) == {1: "d2 d3"}
    assert len(started(decided)) == 2


def test_a_pipeline_that_only_trains_there_moves_as_well():
    one = pipeline(1, "d2 d1", shape=Shape((0,), (1,)), outlook=STEP)
    assert moves(decide(world(one, nodes=(part_of(one, 0),)), LOOKAHEAD)) == {1: "d2 d3"}


def test_what_a_step_has_begun_goes_on_where_it_is():
    one = pipeline(1, "d1", outlook=STEP)
    for part in (1, 2):
        decided = decide(world(one, nodes=(part_of(one, part),)), LOOKAHEAD)
        assert moves(decided) == {}
        assert len(started(decided)) == 1
    two = pipeline(1, "d2 d1", shape=Shape((0, 1), (0, 1)), outlook=STEP)
    nodes = (run_on(part_of(two, 0, 0), "d2"), part_of(two, 0, 1))
    decided = decide(world(two, nodes=nodes), LOOKAHEAD)
    assert decided.actions == ()
    assert refused(decided, 1).text == "its device is drained: no new step begins there"


def test_steps_that_overlap_go_on_where_nothing_is_ready():
    """Between two of their steps there may be no moment at which nothing of them runs."""
    ahead = pipeline(1, "d1", outlook=STEP, shape=Shape((0,), (0,), Mode.ONE_STEP_OFF))
    alone = (device("d1", 40, state=DRAINING),)
    decided = decide(world(ahead, nodes=(part_of(ahead, 0),), devices=alone), LOOKAHEAD)
    assert started(decided) == {(1, "s0.w0.0"): 1.0}


def test_without_memory_elsewhere_nothing_of_the_step_begins():
    one = pipeline(1, "d2 d1", shape=Shape((0, 1), (0, 1)), outlook=STEP)
    devices = (device("d1", 40, state=DRAINING), device("d2", 40), device("d3", 4))
    nodes = (part_of(one, 0, 0), part_of(one, 0, 1))
    decided = decide(world(one, nodes=nodes, devices=devices), LOOKAHEAD)
    assert decided.actions == ()
    assert refused(decided, 1).code is RefusalCode.NO_DEVICES
    expected = "needs 1 other device for its next step, none that is ready has memory for it"
    assert refused(decided, 1).text == expected


def test_idle_weights_give_way():
    one = pipeline(1, "d1", outlook=STEP)
    devices = (device("d1", 40, state=DRAINING), device("d2", 8))
    residents = (resident("d2", "old", 6, 1.0),)
    decided = decide(world(one, nodes=(part_of(one, 0),), devices=devices, residents=residents), LOOKAHEAD)
    assert [type(a) for a in decided.actions[:2]] == [Evict, Rehome]


def test_in_a_run_the_drained_device_empties_and_all_jobs_end():
    devices = tuple(device(name, 40) for name in ("d1", "d2", "d3"))
    driver = Driver(0, LOOKAHEAD, devices, (Tenant(1),), dict(TABLES), steps=3)
    for number in range(3):
        driver.submit(job(f"j{number}", outlook=STEP, shape=Shape((0,), (0,)), key=f"k{number}"))
    driver.advance()
    driver.set_state("d1", DRAINING)
    while driver.runs and driver.board.at_home["d1"]:
        assert driver.advance()
    assert driver.runs  # it left, and its job was not over
    while driver.runs:
        assert driver.advance()
    assert set(driver.ended) == {"j0", "j1", "j2"}
