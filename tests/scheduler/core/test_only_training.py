"""Jobs that roll out nothing: their steps begin with training, and are forecast step after step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.board import Board
from scheduler.core.forecast import Forecast, Question
from scheduler.core.seats import begins_step
from scheduler.core.state import (
    POLICIES,
    DeviceState,
    Kind,
    Mode,
    Outlook,
    Pipeline,
    QueuedJob,
    RefusalCode,
    Rehome,
    Shape,
    Snapshot,
    Tenant,
)
from tests.scheduler.core.build import (
    TABLES,
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
from tests.scheduler.core.driver import Driver

LOOKAHEAD = POLICIES["lookahead"]
SHARING = [policy for policy in POLICIES.values() if policy.name != "exclusive"]
#: Log-probs of 4 s, then an update of 6 s.
STEP = steps(update(4, kind=Kind.LOGPROB), update(6))
DRAINING = device("d1", 40, state=DeviceState.DRAINING)


def student(id: int, home: str, **fields) -> Pipeline:
    workers = tuple(range(len(home.split())))
    return pipeline(id, home, outlook=STEP, shape=Shape((), workers, Mode.SYNC), **fields)


ONE = (device("d1", 40),)


def world(*pipelines: Pipeline, nodes=(), devices=ONE) -> Snapshot:
    tenants = (Tenant(1), Tenant(2))
    return Snapshot(
        now=0.0, devices=devices, tenants=tenants, pipelines=pipelines, nodes=nodes, tables=TABLES
    )


def work(snapshot: Snapshot, horizon: float) -> float:
    return Forecast(Board.of(snapshot), LOOKAHEAD, ["d1"], Question()).run(horizon)


@pytest.mark.parametrize("open_part", [None, 0, 1])
def test_alone_it_works_all_the_time_step_after_step(open_part):
    one = student(1, "d1")
    nodes = () if open_part is None else (part_of(one, open_part),)
    assert work(world(one, nodes=nodes), 35.0) == pytest.approx(35)


def test_beside_a_tail_both_are_worked_on():
    """At 1/4 and 3/4 the tail does 0.8 of a second in a second and what trains 0.75, through both parts."""
    one, other = student(1, "d1"), pipeline(2, "d1", tenant=2, outlook=steps(tail(100), update(6)))
    snapshot = world(one, other, nodes=(part_of(one, 0), run_on(part_of(other, 0), "d1")))
    assert work(snapshot, 12.0) == pytest.approx(12 * (0.8 + 0.75))


def test_only_its_first_part_begins_a_step_and_not_what_made_room():
    one = student(1, "d1")
    first, second = part_of(one, 0), part_of(one, 1)
    assert begins_step(one, first)
    assert not begins_step(one, second)
    assert not begins_step(one, replace(first, yielded=True))
    skips = replace(one, outlook=Outlook(train=(update(0, kind=Kind.LOGPROB), update(6))))
    assert begins_step(skips, part_of(skips, 1))
    other = pipeline(2, "d1", outlook=steps(decode(4), update(6)))
    assert not begins_step(other, part_of(other, 1))


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_it_leaves_a_drained_device_between_two_steps(policy):
    one = student(1, "d1 d2")
    devices = (DRAINING, device("d2", 40), device("d3", 40))
    nodes = (part_of(one, 0, 0), part_of(one, 0, 1))
    decided = decide(world(one, nodes=nodes, devices=devices), policy)
    assert [a.home for a in decided.actions if isinstance(a, Rehome)] == [("d3", "d2")]
    assert len(started(decided)) == 2


def test_with_no_other_device_it_begins_no_step_and_ends_the_one_it_has_begun():
    one = student(1, "d1")
    stays = decide(world(one, nodes=(part_of(one, 0),), devices=(DRAINING,)), LOOKAHEAD)
    assert refused(stays, 1).code is RefusalCode.NO_DEVICES
    for node in (part_of(one, 1), part_of(one, 0, yielded=True)):
        assert len(started(decide(world(one, nodes=(node,), devices=(DRAINING,)), LOOKAHEAD))) == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_jobs_that_only_train_and_jobs_that_roll_out_all_end(policy):
    """Two tenants, two devices, four jobs; every decision is checked."""
    driver = Driver(1, policy, (device("d1", 40), device("d2", 40)), (Tenant(1), Tenant(2)), dict(TABLES))
    rolls = steps(decode(8), tail(4), update(6))
    wanted: list[QueuedJob] = [
        job("a", 1, 1, outlook=STEP, shape=Shape((), (0,))),
        job("b", 2, 1, outlook=rolls, shape=Shape((0,), (0,))),
        job("c", 2, 2, outlook=STEP, shape=Shape((), (0, 1))),
        job("d", 1, 2, outlook=rolls, shape=Shape((0, 1), (0, 1))),
    ]
    for one in wanted:
        driver.submit(one)
    while driver.runs:
        assert driver.advance()
    assert driver.ended.keys() == {"a", "b", "c", "d"}
