"""Where a simulation's truth comes from, and what a planner is told of a job before its first step."""

from __future__ import annotations

from typing import Protocol

from scheduler.core.crowd import demand
from scheduler.core.interference import Interference
from scheduler.core.state import Mode, QueuedJob
from scheduler.sim.devices import DeviceProfile, scaled
from scheduler.sim.memory import kv_tokens, memory
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.truth import StepTruth, draw, hidden
from scheduler.sim.workloads import outlook


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
        needs = memory(job, cost)
        return QueuedJob(
            id=job.id,
            tenant=job.tenant,
            submitted=job.arrival,
            devices=job.devices,
            weights_key=workload.model if workload.lora else job.id,
            weights_bytes=needs.weights_bytes,
            run_bytes=needs.run_bytes,
            peak_bytes=needs.peak_bytes,
            overlap_bytes=needs.overlap_bytes,
            priority=job.priority,
            demand=demand(expected, self.table),
            latency_cap=job.latency_cap,
            shape=job.shape,
            outlook=expected,
            fusible=workload.lora,
            kv_tokens=kv_tokens(workload, job.workers),
            kv_bytes=cost.architecture.kv_bytes_per_token,
        )

    def draw(self, job: SimJob, step: int, seed: int) -> StepTruth:
        stream = job.mode is Mode.STREAM
        gpus = self._train_gpus(job)
        return draw(job.workload, self._profile, job.workers, gpus, seed, job.id, step, stream)

    def _train_gpus(self, job: SimJob) -> int:
        return len(job.shape.train_workers) * self._profile.gpus
