"""The engine against arithmetic done by hand, in the tiny world of ``tiny.py``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from scheduler.core.board import Board
from scheduler.core.interference import Character
from scheduler.core.plan import decide
from scheduler.core.state import POLICIES, DeviceState, Kind, Mode, Plan, Policy
from scheduler.sim.devices import H100
from scheduler.sim.engine import Stuck, simulate
from scheduler.sim.result import Interval, Result
from scheduler.sim.scenario import Outage, Scenario, SimJob
from scheduler.sim.workloads import WORKLOADS
from tests.scheduler.sim.tiny import (
    LENGTHS,
    PAIRED,
    ROLLOUT,
    STEP,
    TRAIN,
    TRAINED,
    Fixed,
    OnlyTraining,
    Tiny,
    halved,
    job,
    scenario,
)

EXCLUSIVE, GREEDY = POLICIES["exclusive"], POLICIES["greedy"]


def spans(result: Result, job: str, device: str = "d00") -> list[tuple[Kind, float, float]]:
    return [
        (i.kind, round(i.start, 9), round(i.end, 9))
        for i in result.timeline
        if i.job == job and i.device == device
    ]


def finished(result: Result) -> dict[str, float | None]:
    return {job.id: None if job.finished is None else round(job.finished, 9) for job in result.jobs}


# ---------------------------------------------------------------- alone


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_one_job_alone_takes_the_sum_of_its_parts(policy: Policy) -> None:
    result = simulate(scenario(job("a", 3)), policy, 0, nature=Tiny())

    assert result.jobs[0].step_seconds == pytest.approx((STEP,) * 3)
    assert result.tokens == 3 * sum(LENGTHS)
    assert result.throughput == pytest.approx(sum(LENGTHS) / STEP)
    assert spans(result, "a")[:6] == [
        (Kind.PREFILL, 0, 1),
        (Kind.DECODE, 1, 5),
        (Kind.TAIL, 5, 11),
        (Kind.SYNC, 11.5, 12.5),
        (Kind.UPDATE, 12.5, 16.5),
        (Kind.SYNC, 16.5, 17),
    ]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_job_that_only_trains_takes_the_sum_of_its_parts_and_runs_beside_others(policy: Policy) -> None:
    alone = simulate(scenario(job("sft", 3)), policy, 0, check=True, nature=OnlyTraining())
    assert alone.jobs[0].step_seconds == pytest.approx((TRAIN,) * 3)
    beside = simulate(
        scenario(job("sft", 3), job("a", 2, tenant=2)), policy, 0, check=True, nature=OnlyTraining()
    )
    assert None not in finished(beside).values()


def test_a_part_that_does_not_occur_is_not_offered_and_is_expected_less() -> None:
    """Two sequences never make a batch of 4."""
    fixed = Fixed(share=1.0)
    result = simulate(scenario(job("a")), PAIRED, 0, nature=Tiny(lengths=((3, 7),)), decide=fixed)

    assert [kind for kind, _, _ in spans(result, "a")][:2] == [Kind.PREFILL, Kind.TAIL]
    assert not any("decode" in node for node in fixed.offered)
    assert finished(result) == {"a": 1 + 7 + TRAIN}


def test_exclusive_jobs_take_the_sum_of_both() -> None:
    """Of the same tenant, so that the older one goes first."""
    result = simulate(scenario(job("a", 2), job("b", 2)), EXCLUSIVE, 0, check=True, nature=Tiny())

    assert finished(result) == {"a": 2 * STEP, "b": 4 * STEP}
    assert result.jobs[0].waits == ()
    assert dict(result.jobs[1].waits) == pytest.approx({"turn": 2 * STEP})


def test_jobs_with_devices_of_their_own_do_not_meet() -> None:
    result = simulate(scenario(job("a", 2), job("b", 2), devices=2), GREEDY, 0, nature=Tiny())

    assert finished(result) == {"a": 2 * STEP, "b": 2 * STEP}
    assert not result.jobs[0].waits and not result.jobs[1].waits


# ---------------------------------------------------------------- together

CROWDED = halved(
    {
        (Character.DECODE, Character.DECODE): 1.2,
        (Character.UPDATE, Character.UPDATE): 2.0,
    }
)


def test_co_running_slows_both_by_the_hidden_table() -> None:
    """In step, at half a device each (1.5): prefill 1.5, decode 4 x 1.5 x 1.2 = 7.2, tail 9, grade 0.5,
    sync 1.5, update 4 x 1.5 x 2 = 12, sync 0.75."""
    pair = scenario(job("a"), job("b", tenant=2))
    result = simulate(pair, PAIRED, 0, nature=Tiny(true=CROWDED), decide=Fixed())

    assert finished(result) == {"a": 32.45, "b": 32.45}
    assert result.used == pytest.approx(32.45 - 0.5) and result.idle == pytest.approx(0.5)
    assert [t.device_seconds for t in result.tenants] == pytest.approx([31.95 / 2] * 2)


def test_a_change_on_the_device_retimes_what_runs_there() -> None:
    """b comes 2 s later. a decodes alone from 1.5 to 3.5 (2 / 1.5 = 1.333 of 4 s done); then both decode at
    1.8: a's other 2.667 s take 4.8 and end at 8.3, when b has done 4.8 / 1.8 = 2.667 of 4 and needs
    1.333 x 1.5 = 2 s more."""
    pair = scenario(job("a"), job("b", arrival=2.0))
    result = simulate(pair, PAIRED, 0, nature=Tiny(true=CROWDED), decide=Fixed())

    decodes = {i.job: (i.start, i.end) for i in result.timeline if i.kind is Kind.DECODE}
    assert decodes["a"] == pytest.approx((1.5, 8.3))
    assert decodes["b"] == pytest.approx((3.5, 10.3))


def test_the_planner_is_not_told_the_truth() -> None:
    """It expects an update of 4 s; the true one takes 10. At 12.5 + 1.25 x 4 it is asked again."""
    slow = tuple(replace(s, seconds=10.0) if s.kind is Kind.UPDATE else s for s in TRAINED)
    fixed = Fixed(share=1.0)
    result = simulate(scenario(job("a", 2)), PAIRED, 0, nature=Tiny(trained=slow), decide=fixed)

    first, second = fixed.offered["s0.w0.update.t2"], fixed.offered["s1.w0.update.t2"]
    assert first is not None and first.seconds == 4.0
    assert second is not None and second.seconds == 10.0
    assert any(time == pytest.approx(17.5) for time in fixed.times)
    assert finished(result) == {"a": 2 * (STEP + 6)}


@pytest.mark.parametrize(("shares", "seconds"), [(True, 4 / (5 / 6)), (False, 4 * 1.5)])
def test_a_gang_moves_at_the_mean_speed_or_at_the_slowest(shares: bool, seconds: float) -> None:
    """Its worker on d00 has the whole device, the other half of d01: speeds 1 and 2/3."""
    policy = replace(PAIRED, shares=shares)
    pair = scenario(job("a", workers=2), devices=2)
    fixed = Fixed(shares={"d00": 1.0, "d01": 0.5})
    result = simulate(pair, policy, 0, nature=Tiny(), decide=fixed)

    updates = [i.end - i.start for i in result.timeline if i.kind is Kind.UPDATE]
    assert updates == pytest.approx([seconds] * 2)


# ---------------------------------------------------------------- merging


def test_a_merge_moves_every_sequence_and_loses_none() -> None:
    """Worker 0 is in its tail at 5, with 2, 4 and 6 tokens to go. Worker 1 since 3; at 5 one sequence is left
    with 8 tokens to go and 6 + 4 in its cache: 1 s to prefill. Four sequences are a decode again: 2 forwards,
    from 5 to 8; then the tail, 6 more."""
    nature = Tiny(lengths=(LENGTHS, (1, 2, 3, 4, 12)))
    fixed = Fixed(share=1.0, merge=True)
    result = simulate(scenario(job("a", workers=2), devices=2), PAIRED, 0, nature=nature, decide=fixed)

    assert result.merges == 1
    assert result.tokens == 30 + 22
    assert spans(result, "a", "d00")[:5] == [
        (Kind.PREFILL, 0, 1),
        (Kind.DECODE, 1, 5),
        (Kind.DECODE, 5, 8),
        (Kind.TAIL, 8, 14),
        (Kind.SYNC, 14.5, 15.5),
    ]
    assert spans(result, "a", "d01")[:3] == [(Kind.PREFILL, 0, 1), (Kind.DECODE, 1, 3), (Kind.TAIL, 3, 5)]


def test_a_merge_teaches_what_would_have_been_without_it() -> None:
    """The next step's tails are expected as if they had stayed: 6 s on worker 0, 10 on worker 1."""
    fixed = Fixed(share=1.0, merge=True)
    simulate(
        scenario(job("a", 2, workers=2), devices=2),
        PAIRED,
        0,
        nature=Tiny(lengths=(LENGTHS, (1, 2, 3, 4, 12))),
        decide=fixed,
    )

    tail = fixed.offered["s1.w0.tail.2"]
    assert tail is not None and tail.seconds == pytest.approx((6 + 10) / 2)


# ---------------------------------------------------------------- weights that lag behind


def test_rollouts_run_ahead_of_the_weights_by_one_step() -> None:
    """Rollouts take 11, training 6, on a device each: R0 to 11, R1 to 22, R2 (after T0, at 17) to 33; so the
    updates are over at 17, 28 and 39."""
    apart = job("a", 3, layout="disaggregated", train_workers=1, mode=Mode.ONE_STEP_OFF)
    result = simulate(scenario(apart, devices=2), GREEDY, 0, nature=Tiny())

    assert result.jobs[0].step_seconds == pytest.approx((ROLLOUT + TRAIN, ROLLOUT, ROLLOUT))
    assert result.staleness == 1


@pytest.mark.parametrize(
    ("mode", "eta", "worst"), [(Mode.SYNC, 3, 0), (Mode.ASYNC, 0, 0), (Mode.ASYNC, 2, 2), (Mode.STREAM, 1, 1)]
)
def test_weights_are_never_older_than_allowed(mode: Mode, eta: int, worst: int) -> None:
    """Training is slower than rollouts here, so that these run ahead as far as they may."""
    slow = tuple(replace(s, seconds=30.0) if s.kind is Kind.UPDATE else s for s in TRAINED)
    apart = job("a", 5, layout="disaggregated", train_workers=1, mode=mode, max_staleness=eta)
    result = simulate(scenario(apart, devices=2), GREEDY, 0, nature=Tiny(trained=slow))

    assert result.staleness == worst


# ---------------------------------------------------------------- what happens to jobs and devices


def test_an_outage_loses_one_step_only() -> None:
    """d00 is lost at 20, 3 s into the second step; that step is done again on d01: 20 + 2 x 17 = 54."""
    lost = scenario(job("a", 3), devices=2, outages=(Outage("d00", 20.0, 100.0),))
    result = simulate(lost, EXCLUSIVE, 0, check=True, nature=Tiny())

    assert finished(result) == {"a": 54.0}
    assert result.jobs[0].attempts == 2
    assert result.jobs[0].step_seconds == pytest.approx((STEP, 3 + STEP, STEP))
    assert result.tokens == 3 * sum(LENGTHS)
    assert result.capacity == pytest.approx(54 + 20)


def test_a_device_comes_back() -> None:
    lost = scenario(job("a", 2), outages=(Outage("d00", 20.0, 30.0),))
    result = simulate(lost, EXCLUSIVE, 0, check=True, nature=Tiny())

    assert finished(result) == {"a": 30 + STEP}
    assert dict(result.jobs[0].waits) == pytest.approx({"no_devices": 10.0})
    assert result.capacity == pytest.approx(30 + STEP - 10)


def test_a_cancelled_job_frees_its_device() -> None:
    two = scenario(job("a", 5, cancel_at=5.0), job("b", arrival=1.0))
    result = simulate(two, EXCLUSIVE, 0, check=True, nature=Tiny())

    assert finished(result) == {"a": None, "b": 5 + STEP}
    assert result.jobs[0].cancelled and result.jobs[0].tokens == 0


def test_a_queued_job_can_be_cancelled() -> None:
    two = scenario(job("a"), job("b", arrival=1.0, workers=2, cancel_at=5.0))
    result = simulate(two, EXCLUSIVE, 0, check=True, nature=Tiny())

    assert finished(result) == {"a": STEP, "b": None}
    assert result.jobs[1].admitted is None


def test_a_job_that_can_never_run_is_named() -> None:
    with pytest.raises(Stuck, match=r"wide after 0 steps.*never_fits_devices"):
        simulate(scenario(job("wide", workers=2)), EXCLUSIVE, 0, nature=Tiny())


def test_idle_time_is_not_saved_up() -> None:
    """Tenant 2 comes at step 10 of tenant 1's job: from then on they take turns, one step each. Were its
    service still 0, it would get its five steps in a row."""
    two = scenario(job("a", 20), job("b", 5, tenant=2, arrival=10 * STEP - 1))
    result = simulate(two, EXCLUSIVE, 0, nature=Tiny())

    starts = sorted((i.start, i.job) for i in result.timeline if i.kind is Kind.PREFILL)
    assert "".join(name for _, name in starts)[10:20] in ("abababababa"[:10], "babababababa"[:10])


# ---------------------------------------------------------------- accounts


def measured(steps: int = 4) -> Scenario:
    """Two kinds of work, with tools and merges, two tenants, three devices."""
    math, search = WORKLOADS["math-qwen3-4b"], WORKLOADS["search128-qwen3-4b"]
    jobs = (
        SimJob("a", 1, 0.0, math, steps, workers=2),
        SimJob("b", 2, 20.0, search, steps, workers=2),
        SimJob("c", 2, 40.0, search, steps, workers=1, cancel_at=200.0),
    )
    return Scenario("measured", H100, 3, jobs, outages=(Outage("d02", 100.0, 150.0),))


def device_seconds(timeline: Iterable[Interval]) -> float:
    return sum(i.share * (i.end - i.start) for i in timeline)


@pytest.mark.parametrize("name", ["exclusive", "rollout_only", "greedy"])
def test_used_and_idle_make_up_the_capacity(name: str) -> None:
    """No two share a slot here, so that the intervals alone must give what tenants were charged."""
    result = simulate(measured(), POLICIES[name], 1, check=True)

    end = max(j.finished or 0.0 for j in result.jobs)
    assert result.used + result.idle == pytest.approx(3 * end - 50, rel=1e-9)
    assert device_seconds(result.timeline) == pytest.approx(result.used, rel=1e-9)
    assert sum(t.device_seconds for t in result.tenants) == pytest.approx(result.used, rel=1e-9)


@pytest.mark.parametrize("name", ["exclusive", "greedy"])
def test_the_same_run_gives_the_same_result(name: str) -> None:
    policy = POLICIES[name]
    assert simulate(measured(), policy, 7) == simulate(measured(), policy, 7)
    assert simulate(measured(), policy, 7) != simulate(measured(), policy, 8)


def test_the_same_job_meets_the_same_responses_under_every_policy() -> None:
    pair = replace(measured(), jobs=measured().jobs[:2], outages=())
    tokens = {simulate(pair, policy, 3).tokens for policy in (EXCLUSIVE, POLICIES["phase"], GREEDY)}
    assert len(tokens) == 1


def test_windows_say_what_each_got_of_its_share() -> None:
    """Tenant 1 has twice the weight, so that it gets two steps of three while both wait. Each step is 16.5 s
    of the device (the grade needs none)."""
    two = scenario(job("a", 20), job("b", 10, tenant=2), weights={1: 2.0})
    nature = Tiny()
    result = simulate(two, EXCLUSIVE, 0, nature=nature)

    first, *_ = result.windows(1, steps=4)
    assert first.received == pytest.approx(4 * 16.5)
    assert first.due == pytest.approx((4 + 2) * 16.5 * 2 / 3, rel=0.2)
    assert first.backlogged == pytest.approx(2 * STEP, abs=STEP)


def test_a_job_moves_from_a_drained_device_when_its_step_is_over() -> None:
    def drained(board: Board, policy: Policy) -> Plan:
        """As an operator who drains the first device in the middle of the first step."""
        device = board.devices["d00"]
        if board.now >= ROLLOUT and device.state is DeviceState.READY:
            board.set_device(replace(device, state=DeviceState.DRAINING))
        return decide(board, policy)

    result = simulate(scenario(job("a", 2), devices=2), GREEDY, 0, nature=Tiny(), decide=drained)

    assert max(end for _, _, end in spans(result, "a", "d00")) == STEP
    assert min(start for _, start, _ in spans(result, "a", "d01")) == STEP
    assert finished(result) == {"a": 2 * STEP}
