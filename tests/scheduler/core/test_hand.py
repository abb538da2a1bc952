"""Small worlds whose best schedule was worked out by hand, played to their end with the speeds predicted.

The table is ``TABLE`` of ``build.py``; where another is used it says so. Everything begins at 0.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.board import Board
from scheduler.core.interference import Character, Interference
from scheduler.core.plan import decide
from scheduler.core.state import (
    POLICIES,
    Kind,
    Outlook,
    Policy,
    QueuedJob,
    Segment,
    Shape,
    Snapshot,
    Start,
    Tenant,
)
from tests.scheduler.core.build import (
    TABLE,
    TABLES,
    decode,
    device,
    job,
    part_of,
    pipeline,
    steps,
    tail,
    update,
)
from tests.scheduler.core.driver import Driver

EXCLUSIVE, GREEDY, LOOKAHEAD = POLICIES["exclusive"], POLICIES["greedy"], POLICIES["lookahead"]
PHASE = POLICIES["phase"]


def prefill(seconds: float) -> Segment:
    return Segment(Kind.PREFILL, seconds, seconds)


def tool(seconds: float) -> Segment:
    return Segment(Kind.TOOL, seconds, seconds)


def on(devices: int, id: str, outlook: Outlook, **fields) -> QueuedJob:
    workers = tuple(range(devices))
    fields.setdefault("latency_cap", 10.0)
    fields.setdefault("key", id)
    return job(id, devices=devices, shape=Shape(workers, workers), outlook=outlook, **fields)


def play(policy: Policy, jobs: list[QueuedJob], devices: int = 1, many: int = 1, table=TABLE) -> Driver:
    """All jobs come at once and do so many steps; when each ended is in ``ended``."""
    names = tuple(device(f"d{i}", 100) for i in range(1, devices + 1))
    tenants = tuple(Tenant(id) for id in sorted({one.tenant for one in jobs}))
    driver = Driver(0, policy, names, tenants, {"cpu": table}, steps=many)
    for one in jobs:
        driver.submit(one)
    while driver.advance():
        pass
    return driver


# ---------------------------------------------------------------- the best interleaving


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [(EXCLUSIVE, 30.0, 60.0), (PHASE, 30.0, 40.0), (GREEDY, 30.0, 40.0), (LOOKAHEAD, 30.0, 40.0)],
    ids=lambda value: getattr(value, "name", value),
)
def test_one_computes_while_the_other_waits_for_its_tool(policy, first, second):
    """Compute-bound work gains nothing side by side, so 40 s of it take at least 40 s on one device.

    a  prefill 0-10 │ tool   10-20 │ update 20-30 │
    b               │ prefill 10-20 │ tool  20-30 │ update 30-40
    """
    outlook = steps(prefill(10), tool(10), update(10))
    driver = play(policy, [on(1, "a", outlook), on(1, "b", outlook, submitted=1.0)])
    assert driver.ended == {"a": pytest.approx(first), "b": pytest.approx(second)}


def test_a_tail_fills_what_an_update_leaves():
    """Alone on a quarter a tail goes at 4/5, an update on three at 3/4.

    a updates for 12 s; b's tail comes beside it at once: after 10 s it has done 8, the update 7.5. b's own
    update would gain nothing; a's last 4.5 s run alone to 14.5, then b's 6 to 20.5. One after the other: 26.
    """
    jobs = [on(1, "a", steps(update(12))), on(1, "b", steps(tail(8), update(6)), submitted=1.0)]
    assert play(GREEDY, jobs).ended == pytest.approx({"a": 14.5, "b": 20.5})
    assert play(EXCLUSIVE, jobs).ended == pytest.approx({"a": 12.0, "b": 26.0})


# ---------------------------------------------------------------- greedy loses to waiting

#: Here a prefill goes at 5/8 on half a device, so that two of them gain a quarter side by side.
SOFT = Interference(
    TABLE.shares,
    {**TABLE.alone, Character.PREFILL: (4.0, 1.6, 4 / 3, 1.0)},
    TABLE.beside,
    TABLE.saturation,
    TABLE.source,
)


def test_to_wait_for_a_tool_call_beats_to_start_at_once():
    """Side by side two prefills end at 16, both tools at 26, and then both updates need the device: 36, 46.
    Who waits 10 s for the other's tool call ends at 40, the other at 30.
    """
    outlook = steps(prefill(10), tool(10), update(10))
    jobs = [on(1, "a", outlook), on(1, "b", outlook, submitted=1.0)]
    assert play(GREEDY, jobs, table=SOFT).ended == pytest.approx({"a": 36.0, "b": 46.0})
    driver = play(LOOKAHEAD, jobs, table=SOFT)
    assert driver.ended == pytest.approx({"a": 30.0, "b": 40.0})
    assert sum("Wait(" in decided for decided in driver.story) == 1
    without = play(replace(LOOKAHEAD, wait=False), jobs, table=SOFT)
    assert max(without.ended.values()) >= 46.0 - 1e-6


# ---------------------------------------------------------------- merging


def tails(floor: float) -> Outlook:
    """A tail of 10 s in 500 forwards, of which ``floor`` does not depend on the batch."""
    return steps(replace(tail(10, batch=40, forward=0.02), floor_seconds=floor), update(10))


@pytest.mark.parametrize(
    ("floor", "kv_tokens", "merges"),
    [
        # Together a forward takes 0.02 + 0.002: 500 of them 11 s. Two devices lose 1 s each; a quarter of
        # 10 s, which is what a tail needs of its device, gets free: 2.5 s.
        (0.018, 0, True),
        # 0.02 + 0.003: 11.5 s. Two devices lose 1.5 s each, more than gets free.
        (0.017, 0, False),
        # Each batch has 400 tokens and may add 40 * 500 more: 40,800 do not fit.
        (0.018, 40_799, False),
        (0.018, 40_800, True),
    ],
)
def test_tails_are_merged_where_that_frees_more_than_it_costs(floor, kv_tokens, merges):
    jobs = [on(2, "a", tails(floor), kv_tokens=kv_tokens), on(1, "b", steps(update(30)), submitted=1.0)]
    driver = play(GREEDY, jobs, devices=2)
    assert any("Merge(" in decided for decided in driver.story) is merges


def test_nobody_merges_for_a_device_that_nobody_else_wants():
    driver = play(GREEDY, [on(2, "a", tails(0.018))], devices=2)
    assert driver.ended == pytest.approx({"a": 20.0})


# ---------------------------------------------------------------- a gang gets its devices


@pytest.mark.parametrize("policy", [PHASE, GREEDY, LOOKAHEAD], ids=lambda policy: policy.name)
def test_a_gang_that_waits_gets_its_devices_when_the_last_is_free(policy):
    """One trains on d1 to 10, one on d2 to 6; a fourth wants d2 after the gang. From 6 on d2 is kept."""
    whole, far = Shape((0, 1), (0, 1)), 10.0
    rows = {
        1: pipeline(1, "d1", outlook=steps(update(10)), latency_cap=far),
        2: pipeline(2, "d2", outlook=steps(update(6)), latency_cap=far),
        3: pipeline(3, "d1 d2", outlook=steps(update(8)), latency_cap=far, shape=whole, priority=1),
        4: pipeline(4, "d2", outlook=steps(update(20)), latency_cap=far),
    }
    board = Board.of(
        Snapshot(
            now=0.0,
            devices=(device("d1", 100), device("d2", 100)),
            tenants=(Tenant(1),),
            pipelines=tuple(rows.values()),
            tables=TABLES,
        )
    )

    def offer(id: int, *workers: int) -> list[str]:
        nodes = [part_of(rows[id], 0, worker) for worker in workers]
        for node in nodes:
            board.offer(node)
        return [a.node for a in decide(board, policy).actions if isinstance(a, Start)]

    def finish(id: int, at: float) -> list[int]:
        board.tick(at)
        board.finish(id, "s0.w0.t0")
        return [a.pipeline for a in decide(board, policy).actions if isinstance(a, Start)]

    assert offer(1, 0)
    assert offer(2, 0)
    assert offer(3, 0, 1) == offer(4, 0) == []
    assert finish(2, 6.0) == []
    assert finish(1, 10.0) == [3, 3]


# ---------------------------------------------------------------- fusing


def test_two_adapters_decode_in_one_batch():
    """A forward of 0.02 s, half of it fixed, takes 0.03 for both: each goes at 2/3, 20 s of decode take 30.

    Then their updates one after the other. Side by side in two engines they would go at 4/5 of 20 s, but each
    on half of the device: 25 s; fused needs one engine, and the other half serves whoever else is there.
    """
    jobs = [
        on(1, name, steps(decode(20, batch=64), update(5)), submitted=at, key="base", fusible=True)
        for at, name in enumerate("ab")
    ]
    driver = play(replace(GREEDY, max_computing=1), jobs)
    assert driver.ended == pytest.approx({"a": 35.0, "b": 40.0})
    assert play(replace(GREEDY, max_computing=1, fuse=False), jobs).ended == pytest.approx(
        {"a": 25.0, "b": 50.0}
    )


# ---------------------------------------------------------------- caps and shares


@pytest.mark.parametrize(("cap", "at_once"), [(1.30, 3), (1.20, 2)])
def test_a_third_is_kept_out_by_a_cap(cap, at_once):
    """Two tails of 10 s do not slow each other down. A third, an update, leaves each a quarter: 12.5 s."""
    policy = replace(GREEDY, max_computing=3)
    jobs = [
        on(1, name, steps(tail(10), update(1e-6)), latency_cap=cap, submitted=at)
        for at, name in enumerate("ab")
    ]
    driver = Driver(0, policy, (device("d1", 100),), (Tenant(1),), {"cpu": TABLE}, steps=1)
    for one in (*jobs, on(1, "c", steps(update(40)), submitted=2.0)):
        driver.submit(one)
    assert len(driver.board.running["d1"]) == at_once


def best_split(table: Interference, who: tuple[Character, ...]) -> tuple[float, ...]:
    return table.best(who, (1.0,) * len(who))[0]


def test_the_split_is_that_with_the_largest_sum_of_speeds():
    """By hand, for update / partner at 1/4, 1/2 and 3/4 for the update."""
    update, thin, decoding = Character.UPDATE, Character.THIN, Character.DECODE
    # A thin tail does not slow down at all: 0.25 + 1, 0.5 + 1, 0.75 + 1.
    assert best_split(TABLE, (update, thin)) == (0.75, 0.25)
    # A saturated decode: 0.25 + 1, 0.5 + 0.8, 0.75 + 0.4.
    assert best_split(TABLE, (update, decoding)) == (0.5, 0.5)
    # Among three, thin tails take a quarter each: 1 + 1 + 0.5; else 1 + 1 + 0.25.
    assert best_split(TABLE, (thin, update, thin)) == (0.25, 0.5, 0.25)


# ---------------------------------------------------------------- who is served first


def test_tenants_get_equal_parts_of_a_device_whatever_they_bring():
    """One tenant has three jobs, the other one; all want the device alone. In 120 s each gets 60."""
    outlook = steps(prefill(2), update(8))
    jobs = [on(1, f"a{i}", outlook, tenant=1, submitted=i) for i in range(3)]
    driver = Driver(0, LOOKAHEAD, (device("d1", 100),), (Tenant(1), Tenant(2)), {"cpu": TABLE}, steps=20)
    for one in (*jobs, on(1, "b", outlook, tenant=2, submitted=9.0)):
        driver.submit(one)
    while driver.board.now < 120.0:
        assert driver.advance()
    served = [driver.board.tenants[id].service for id in (1, 2)]
    assert served == [pytest.approx(60, abs=10), pytest.approx(60, abs=10)]


def test_a_weight_of_two_gets_two_thirds():
    outlook = steps(prefill(2), update(8))
    tenants = (Tenant(1, weight=2.0), Tenant(2))
    driver = Driver(0, LOOKAHEAD, (device("d1", 100),), tenants, {"cpu": TABLE}, steps=40)
    for id in (1, 2):
        for number in range(2):
            driver.submit(on(1, f"{id}-{number}", outlook, tenant=id, submitted=number))
    while driver.board.now < 240.0:
        assert driver.advance()
    received = [driver.board.tenants[id].service * driver.board.tenants[id].weight for id in (1, 2)]
    assert received == [pytest.approx(160, abs=20), pytest.approx(80, abs=20)]


def test_priorities_order_the_jobs_of_one_tenant():
    outlook = steps(prefill(2), update(8))
    jobs = [on(1, "low", outlook), on(1, "high", outlook, priority=1, submitted=1.0)]
    driver = Driver(0, PHASE, (device("d1", 100),), (Tenant(1),), {"cpu": TABLE}, steps=3)
    for one in jobs:
        driver.submit(one)
    while driver.advance():
        pass
    assert list(driver.ended) == ["high", "low"]
    # "low" begins first, for it is there first: 2 s. From then on "high" is always ready: 3 steps of 10 s.
    assert driver.ended["high"] == pytest.approx(32.0)
    assert driver.ended["low"] == pytest.approx(60.0)


def test_a_limit_lets_one_job_after_the_other_in():
    outlook = steps(prefill(2), update(8))
    driver = Driver(
        0,
        LOOKAHEAD,
        (device("d1", 100), device("d2", 100)),
        (Tenant(1, max_devices=1),),
        {"cpu": TABLE},
        steps=1,
    )
    for name in "ab":
        driver.submit(on(1, name, outlook))
    while driver.advance():
        pass
    assert driver.ended == pytest.approx({"a": 10.0, "b": 20.0})
