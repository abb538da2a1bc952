"""Shares between tenants of equal weight, over windows of 20 of a tenant's steps, in calibrated worlds."""

from __future__ import annotations

import pytest

from scheduler.core.state import POLICIES
from scheduler.sim.devices import H100
from scheduler.sim.engine import simulate
from scheduler.sim.result import FAIR_STEPS, Result, Window
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.workloads import WORKLOADS

#: How far from its share a tenant may be.
FAIR = 0.1


def run(policy: str, *jobs: tuple[int, str, int]) -> Result:
    """Jobs (tenant, workload, steps) on two devices; their caps keep nobody out."""
    own = tuple(
        SimJob(f"job-{place}", tenant, 0.0, WORKLOADS[workload], steps, 2, latency_cap=8.0)
        for place, (tenant, workload, steps) in enumerate(jobs)
    )
    return simulate(Scenario("fairness", H100, 2, own), POLICIES[policy], seed=0)


def shares(result: Result, tenant: int) -> list[float]:
    """Of what was due to it, in the windows in which every tenant still had work."""
    end = min(max(j.finished or 0.0 for j in result.jobs if j.tenant == t.id) for t in result.tenants)
    windows: list[Window] = [w for w in result.windows(tenant) if w.end <= end]
    assert windows
    return [w.received / w.due for w in windows]


def waited(result: Result, tenant: int) -> float:
    """The part of the time in which something of it waited for a device."""
    own = next(t for t in result.tenants if t.id == tenant)
    return sum(end - start for start, end in own.backlogged) / result.makespan


@pytest.mark.parametrize("policy", ["exclusive", "greedy", "lookahead"])
def test_alike_tenants_get_alike(policy: str) -> None:
    steps = FAIR_STEPS + 1
    result = run(policy, (1, "gsm8k-qwen3-4b", steps), (2, "gsm8k-qwen3-4b", steps))
    for tenant in (1, 2):
        assert shares(result, tenant) == pytest.approx([1.0] * len(shares(result, tenant)), abs=FAIR)


@pytest.mark.parametrize("policy", ["exclusive", "lookahead"])
def test_short_and_long_steps_get_alike(policy: str) -> None:
    result = run(policy, (1, "gsm8k-qwen3-4b", 60), (2, "math-qwen3-4b-instruct", 30))
    for tenant in (1, 2):
        assert shares(result, tenant) == pytest.approx([1.0] * len(shares(result, tenant)), abs=FAIR)


def test_many_jobs_do_not_starve_anothers_one() -> None:
    """One synchronous job cannot use half of the devices. It waits for them seldom; those who always wait get
    no less than their share.
    """
    many = ((1, "gsm8k-qwen3-4b", 22),) * 3
    result = run("lookahead", *many, (2, "gsm8k-qwen3-4b", 25))
    assert waited(result, 2) < 0.25
    assert min(shares(result, 1)) > 1 - FAIR
    # Whole devices in turn: then a job that always wants one gets its half.
    turns = run("exclusive", *many, (2, "gsm8k-qwen3-4b", 25))
    assert shares(turns, 2) == pytest.approx([1.0] * len(shares(turns, 2)), abs=FAIR)
