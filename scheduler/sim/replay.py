"""``python -m scheduler.sim replay TRACE.json``: how the jobs of a trace fare under one policy or more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from scheduler.core.state import POLICIES
from scheduler.sim.engine import simulate
from scheduler.sim.result import JobResult, Result
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.trace import EXAMPLE, read
from scheduler.sim.usage import device_seconds


@dataclass(frozen=True, slots=True)
class JobLine:
    """Seconds, dollars. ``waited`` is the time in which the job wanted something and nothing of it ran, also
    by reason; ``ran`` goes from its admission to its end. ``latency_increase``: mean step time by that of the
    job alone on the pool under ``exclusive``; None when it did no step.
    """

    id: str
    tenant: int
    state: str
    waited: float
    waited_for: dict[str, float]
    ran: float | None
    steps: int
    step_seconds: float | None
    latency_increase: float | None
    device_seconds: float
    dollars: float


@dataclass(frozen=True, slots=True)
class TenantLine:
    """``share``: its part of the device time used by all; ``due``: its part of the weights of those who used
    any.
    """

    id: int
    weight: float
    device_seconds: float
    share: float
    due: float


@dataclass(frozen=True, slots=True)
class Report:
    policy: str
    makespan: float
    tokens: int
    tokens_per_second: float
    utilization: float
    dollars: float
    jobs: tuple[JobLine, ...]
    tenants: tuple[TenantLine, ...]


# ---------------------------------------------------------------- from results to reports


def replayed(scenario: Scenario, policies: Sequence[str], seed: int) -> list[Report]:
    """Under each policy the same jobs with the same draws."""
    by_itself = {job.id: _alone(scenario, job, seed) for job in scenario.jobs}
    return [report(scenario, simulate(scenario, POLICIES[name], seed), by_itself) for name in policies]


def _alone(scenario: Scenario, job: SimJob, seed: int) -> float:
    """Seconds of the job's mean step when it has the pool to itself and nothing fails."""
    own = replace(job, arrival=0.0, cancel_at=None)
    result = simulate(replace(scenario, jobs=(own,), outages=()), POLICIES["exclusive"], seed)
    return fmean(result.jobs[0].step_seconds)


def report(scenario: Scenario, result: Result, by_itself: dict[str, float]) -> Report:
    price = scenario.profile.price_per_hour / 3600
    used = device_seconds(result.timeline, scenario.jobs)
    return Report(
        policy=result.policy,
        makespan=result.makespan,
        tokens=result.tokens,
        tokens_per_second=result.throughput,
        utilization=result.used / result.capacity,
        dollars=result.makespan * scenario.devices * price,
        jobs=tuple(_job(job, by_itself[job.id], used[job.id], price) for job in result.jobs),
        tenants=tuple(_tenants(result)),
    )


def _job(job: JobResult, by_itself: float, used: float, price: float) -> JobLine:
    step = fmean(job.step_seconds) if job.step_seconds else None
    ran = job.finished - job.admitted if job.finished is not None and job.admitted is not None else None
    return JobLine(
        id=job.id,
        tenant=job.tenant,
        state="cancelled" if job.cancelled else "finished",
        waited=sum(seconds for _, seconds in job.waits),
        waited_for=dict(job.waits),
        ran=ran,
        steps=len(job.step_seconds),
        step_seconds=step,
        latency_increase=None if step is None else step / by_itself,
        device_seconds=used,
        dollars=used * price,
    )


def _tenants(result: Result) -> Iterator[TenantLine]:
    weights = sum(tenant.weight for tenant in result.tenants if tenant.device_seconds > 0)
    for tenant in result.tenants:
        took = tenant.device_seconds
        yield TenantLine(
            tenant.id, tenant.weight, took, took / result.used, tenant.weight / weights if took > 0 else 0.0
        )


# ---------------------------------------------------------------- text


def text(scenario: Scenario, reports: Sequence[Report]) -> Iterator[str]:
    gpus = scenario.devices * scenario.profile.gpus
    yield f"{scenario.name}: {len(scenario.jobs)} jobs on {gpus} {scenario.profile.name}"
    for one in reports:
        yield from ("", one.policy, *_jobs_text(one), "", *_tenants_text(one))
    yield ""
    yield from _comparison(reports)


def _jobs_text(own: Report) -> Iterator[str]:
    yield (
        "  job               tenant  state      waited s    ran s  steps  s/step  latency"
        "   dollars  waited for"
    )
    for job in own.jobs:
        reasons = ", ".join(f"{code} {seconds:.0f} s" for code, seconds in job.waited_for.items())
        yield (
            f"  {job.id:17} {job.tenant:6}  {job.state:9} {job.waited:9.1f} {_number(job.ran, '8.1f')}"
            f" {job.steps:6} {_number(job.step_seconds, '7.1f')} {_number(job.latency_increase, '8.2f')}"
            f" {job.dollars:9.2f}  {reasons}"
        )


def _tenants_text(own: Report) -> Iterator[str]:
    yield "  tenant  weight  device-seconds   share     due"
    for tenant in own.tenants:
        yield (
            f"  {tenant.id:6} {tenant.weight:7.2f} {tenant.device_seconds:15.1f} {tenant.share:7.1%}"
            f" {tenant.due:7.1%}"
        )


def _comparison(reports: Sequence[Report]) -> Iterator[str]:
    first = reports[0]
    yield "policy        makespan s  tokens/s  by first  device time used   pool $  $/M tokens"
    for one in reports:
        by_first = _number(_ratio(one.tokens_per_second, first.tokens_per_second), "9.2f")
        dollars = _number(_ratio(1e6 * one.dollars, one.tokens), "11.2f")
        yield (
            f"{one.policy:12} {one.makespan:11.1f} {one.tokens_per_second:9.1f} {by_first}"
            f" {one.utilization:17.1%} {one.dollars:8.2f} {dollars}"
        )


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _number(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


# ---------------------------------------------------------------- the program


def policies(value: str) -> list[str]:
    names = value.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(POLICIES)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help=f"for instance {EXAMPLE.name}")
    parser.add_argument("--policy", type=policies, default=["lookahead"], metavar="P,..")
    parser.add_argument("--seed", type=int, default=0, help="of the draws of response lengths")
    parser.add_argument("--json", type=Path, metavar="F", help="write the reports to this file too")


def run(options: argparse.Namespace) -> int:
    scenario = read(options.trace)
    reports = replayed(scenario, options.policy, options.seed)
    print(*text(scenario, reports), sep="\n")
    if options.json is not None:
        content = {"trace": scenario.name, "seed": options.seed, "policies": [asdict(one) for one in reports]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0
