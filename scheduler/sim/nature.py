"""Where a simulation's truth comes from, and what a planner is told of a job before its first step."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Protocol

from scheduler.core.interference import Interference
from scheduler.core.state import Mode, QueuedJob
from scheduler.sim.devices import DeviceProfile, Footprint, footprint, scaled
from scheduler.sim.models import ModelCost
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.truth import StepTruth, draw, grouped, hidden, step_tokens
from scheduler.sim.workloads import Workload, demand, outlook


class Nature(Protocol):
    """``peak`` is one GPU's memory bandwidth in bytes/s, ``table`` what is believed of co-running."""

    device_type: str
    memory_bytes: int
    peak: float
    table: Interference

    def hidden(self, seed: int) -> Interference:
        """What co-running really costs."""

    def queued(self, job: SimJob) -> QueuedJob:
        """The job as the planner meets it."""

    def draw(self, job: SimJob, step: int, seed: int) -> StepTruth: ...


class Measured:
    """The calibrated workloads and devices."""

    def __init__(self, scenario: Scenario) -> None:
        profile = scenario.profile
        self._profile: DeviceProfile = profile
        self.device_type = profile.name
        self.memory_bytes = profile.memory_bytes
        self.peak = profile.bandwidth
        self.table = scaled(profile.interference, scenario.beside)

    def hidden(self, seed: int) -> Interference:
        return hidden(self.table, seed)

    def queued(self, job: SimJob) -> QueuedJob:
        workload, stream = job.workload, job.mode is Mode.STREAM
        cost = self._profile.cost(workload.model, workload.lora)
        expected = outlook(workload, self._profile, job.workers, self._train_gpus(job), stream)
        cached = kv_tokens(workload, job.workers)
        needs = memory(job, cost, cached)
        return QueuedJob(
            id=job.id,
            tenant=job.tenant,
            submitted=job.arrival,
            devices=job.devices,
            weights_key=workload.model if workload.lora else job.id,
            weights_bytes=needs.weights_bytes,
            run_bytes=needs.run_bytes,
            priority=job.priority,
            demand=demand(expected, self.table),
            latency_cap=job.latency_cap,
            shape=job.shape,
            outlook=expected,
            fusible=workload.lora,
            kv_tokens=cached,
        )

    def draw(self, job: SimJob, step: int, seed: int) -> StepTruth:
        stream = job.mode is Mode.STREAM
        gpus = self._train_gpus(job)
        return draw(job.workload, self._profile, job.workers, gpus, seed, job.id, step, stream)

    def _train_gpus(self, job: SimJob) -> int:
        return len(job.shape.train_workers) * self._profile.gpus


def memory(job: SimJob, cost: ModelCost, cached: int) -> Footprint:
    """Bytes on each of the job's devices: what the fullest of them needs at once.

    Synchronous and colocated jobs were measured with offload: the cache is gone while they train, and
    gradients, masters and moments are on the host while they roll out. Disaggregated, no device has both
    either. But rollouts that overlap training on the same device need both.
    """
    cache = cached * cost.architecture.kv_bytes_per_token
    trained = footprint(cost, len(job.shape.train_workers), 0)
    if job.layout == "disaggregated":
        return replace(
            trained, weights_bytes=cost.architecture.weights_bytes, run_bytes=max(cache, trained.run_bytes)
        )
    if job.mode is Mode.SYNC:
        return replace(trained, run_bytes=max(cache, trained.run_bytes))
    return replace(trained, run_bytes=cache + trained.run_bytes)


def kv_tokens(workload: Workload, workers: int) -> int:
    """Room for the sequences of a worker when all have their expected final length at once: more than they
    need as long as they end at different times.
    """
    return round(fmean(step_tokens(workload, [g]) for g in grouped(workload)) * workload.prompts / workers)
