"""What is simulated: a pool, the jobs that come to it, and what happens to both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from scheduler.core.state import Mode, Shape
from scheduler.sim.devices import DeviceProfile
from scheduler.sim.workloads import Workload

Layout = Literal["colocated", "disaggregated"]


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job that arrives at second ``arrival`` and wants ``steps`` updates.

    ``workers`` roll out. Colocated, the same ones train; disaggregated, ``train_workers`` more do. Its draws
    depend on ``id``, so that the same job meets the same responses under every policy.
    """

    id: str
    tenant: int
    arrival: float
    workload: Workload
    steps: int
    workers: int = 1
    train_workers: int = 0
    layout: Layout = "colocated"
    mode: Mode = Mode.SYNC
    max_staleness: int = 0
    latency_cap: float = 1.5
    priority: int = 0
    cancel_at: float | None = None

    def __post_init__(self) -> None:
        _require(self.id, "steps", self.steps, self.steps >= 1)
        _require(self.id, "workers", self.workers, self.workers >= 1)
        _require(self.id, "arrival", self.arrival, self.arrival >= 0)
        _require(self.id, "max_staleness", self.max_staleness, self.max_staleness >= 0)
        _require(self.id, "latency_cap", self.latency_cap, self.latency_cap >= 1)
        _require(
            self.id, "cancel_at", self.cancel_at, self.cancel_at is None or self.cancel_at >= self.arrival
        )
        apart = self.layout == "disaggregated"
        _require(self.id, "train_workers", self.train_workers, (self.train_workers >= 1) == apart)

    @property
    def devices(self) -> int:
        return self.workers + self.train_workers

    @property
    def shape(self) -> Shape:
        """Rollout workers come first."""
        rollout = tuple(range(self.workers))
        apart = tuple(range(self.workers, self.devices))
        return Shape(rollout, apart or rollout, self.mode, self.max_staleness)


@dataclass(frozen=True, slots=True)
class Outage:
    """The device is lost from ``at`` to ``until``."""

    device: str
    at: float
    until: float

    def __post_init__(self) -> None:
        _require(f"outage of {self.device}", "until", self.until, self.until > self.at >= 0)


@dataclass(frozen=True)
class Scenario:
    """``devices`` counts schedulable groups of ``profile``, named ``d00``, ``d01``, ...

    ``weights`` are those of tenants where they are not 1. ``beside`` multiplies all co-run factors, those
    that are planned with and those that are true.
    """

    name: str
    profile: DeviceProfile
    devices: int
    jobs: tuple[SimJob, ...]
    weights: Mapping[int, float] = field(default_factory=dict)
    quotas: Mapping[int, int] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()
    beside: float = 1.0

    def __post_init__(self) -> None:
        _require(self.name, "devices", self.devices, self.devices >= 1)
        _require(self.name, "beside", self.beside, self.beside > 0)
        twice = [job for job, times in Counter(job.id for job in self.jobs).items() if times > 1]
        _require(self.name, "jobs", twice, not twice)
        unknown = [outage.device for outage in self.outages if outage.device not in self.device_names]
        _require(self.name, "outages", unknown, not unknown)
        for tenant, weight in self.weights.items():
            _require(self.name, f"weights[{tenant}]", weight, weight > 0)
        for tenant, limit in self.quotas.items():
            _require(self.name, f"quotas[{tenant}]", limit, limit >= 0)

    @property
    def device_names(self) -> tuple[str, ...]:
        digits = max(2, len(str(self.devices - 1)))
        return tuple(f"d{place:0{digits}}" for place in range(self.devices))

    @property
    def tenants(self) -> tuple[int, ...]:
        return tuple(sorted({*self.weights, *self.quotas, *(job.tenant for job in self.jobs)}))


def streamed(scenario: Scenario) -> Scenario:
    """The scenario when synchronous jobs train on finished groups while their last sequences roll out."""
    jobs = tuple(
        replace(job, mode=Mode.STREAM, max_staleness=0) if job.mode is Mode.SYNC else job
        for job in scenario.jobs
    )
    return replace(scenario, jobs=jobs)


def _require(owner: str, name: str, value: object, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{owner}: {name} is {value!r}")
