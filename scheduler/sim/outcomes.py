"""Running many simulations, each once, on all cores: equal runs give equal outcomes in whatever order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler.sim.comparisons import EXCLUSIVE, LOOKAHEAD, Comparison, Variant
from scheduler.sim.devices import DeviceProfile
from scheduler.sim.engine import simulate
from scheduler.sim.result import JobResult
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.truth import grouped, step_tokens
from scheduler.sim.workloads import Workload

#: (name of the scenario, factor of co-run factors, label of the policy, seed)
Key = tuple[str, float, str, int]


@dataclass(frozen=True)
class Run:
    scenario: Scenario
    variant: Variant
    seed: int

    @property
    def key(self) -> Key:
        """Where nothing ever computes beside another, co-run factors are all the same."""
        alone = self.variant.policy.max_computing == 1
        return self.scenario.name, 1.0 if alone else self.scenario.beside, self.variant.label, self.seed


@dataclass(frozen=True, slots=True)
class Outcome:
    """``tokens_per_second`` of all jobs over the makespan; ``step_seconds``: mean length of each job's steps;
    ``utilization``: part of the device time in which a sub-stage had the device; ``mfu``: model FLOPs by the
    peak; ``tokens_per_dollar`` at the price of the devices for the makespan.
    """

    tokens_per_second: float
    step_seconds: tuple[float, ...]
    utilization: float
    mfu: float
    tokens_per_dollar: float


def outcome(run: Run) -> Outcome:
    scenario = run.scenario
    result = simulate(scenario, run.variant.policy, run.seed)
    dollars = result.makespan / 3600 * scenario.profile.price_per_hour * scenario.devices
    return Outcome(
        tokens_per_second=result.throughput,
        step_seconds=tuple(fmean(job.step_seconds) for job in result.jobs),
        utilization=result.used / result.capacity,
        mfu=model_flops(scenario, result.jobs) / (peak_flops(scenario) * result.makespan),
        tokens_per_dollar=result.tokens / dollars,
    )


def peak_flops(scenario: Scenario) -> float:
    """Per second, of all devices."""
    return scenario.profile.flops * scenario.profile.gpus * scenario.devices


def model_flops(scenario: Scenario, jobs: Iterable[JobResult]) -> float:
    """Of all steps done: 2 FLOPs by parameter and token in the rollout and in each of two passes for
    log-probs, 6 in the update (4 where only adapters are trained). Attention is not counted.
    """
    workloads = {job.id: job.workload for job in scenario.jobs}
    return sum(len(job.step_seconds) * _step_flops(workloads[job.id], scenario.profile) for job in jobs)


def _step_flops(workload: Workload, profile: DeviceProfile) -> float:
    tokens = fmean(step_tokens(workload, [group]) for group in grouped(workload)) * workload.prompts
    parameters = profile.cost(workload.model).architecture.parameters
    return (10 if workload.lora else 12) * parameters * tokens


# ---------------------------------------------------------------- which ones

#: The co-run factors are not public: by how much all of them are scaled.
SENSITIVITY = (0.75, 1.25)


def scaled(comparison: Comparison, factor: float) -> Scenario:
    return replace(comparison.scenario, beside=factor)


def alone(scenario: Scenario, job: SimJob) -> Scenario:
    """The job by itself on the same devices."""
    return replace(scenario, name=f"{scenario.name}: {job.id} alone", jobs=(replace(job, arrival=0.0),))


def needed(comparisons: Iterable[Comparison], seeds: int, sensitivity: bool) -> Iterator[Run]:
    """All runs that the comparisons need, some more than once; co-run factors are scaled for the planner."""
    for comparison in comparisons:
        for seed in range(seeds):
            yield Run(comparison.scenario, comparison.policy, seed)
            yield Run(comparison.scenario, comparison.baseline, seed)
            for job in comparison.scenario.jobs:
                yield Run(alone(comparison.scenario, job), EXCLUSIVE, seed)
        if sensitivity and comparison.policy == LOOKAHEAD and comparison.group != "ablation":
            for factor in SENSITIVITY:
                yield Run(scaled(comparison, factor), comparison.policy, 0)
                yield Run(scaled(comparison, factor), comparison.baseline, 0)


def run_all(runs: Iterable[Run], progress: Callable[[int, int], None]) -> Mapping[Key, Outcome]:
    """Each run once; the long ones (many jobs and devices) first, so that no core waits at the end."""
    unique = {run.key: run for run in runs}
    order = sorted(unique, key=lambda key: _effort(unique[key]), reverse=True)
    found: dict[Key, Outcome] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(outcome, unique[key]): key for key in order}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            progress(len(found), len(unique))
    return found


def _effort(run: Run) -> float:
    steps = sum(job.steps * job.devices for job in run.scenario.jobs)
    return steps * (4.0 if run.variant.policy.lookahead else 1.0)
