"""What a simulation found. Equal scenarios, policies and seeds give equal results, wall times apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.state import Kind

#: Steps of a tenant over which its share is looked at: single ones are too few to be divided evenly.
FAIR_STEPS = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """A sub-stage had ``share`` of a device. ``batch`` is the number of sequences when it began."""

    device: str
    start: float
    end: float
    pipeline: int
    job: str
    tenant: int
    kind: Kind
    share: float
    batch: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """``step_seconds`` are counted from admission, then from step to step. ``waits`` are the seconds in
    which nothing of it ran although something was offered, by the code of the refusal (``chosen``: it
    waited on purpose). ``staleness`` is the most updates by which weights lagged behind when they rolled a
    step out.
    """

    id: str
    tenant: int
    arrival: float
    admitted: float | None
    finished: float | None
    cancelled: bool
    step_seconds: tuple[float, ...]
    tokens: int
    waits: tuple[tuple[str, float], ...]
    attempts: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Sample:
    """At the end of one of a tenant's steps: the device-seconds that each tenant has received so far."""

    time: float
    received: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """``FAIR_STEPS`` steps of a tenant. ``received`` and ``due`` are device-seconds: what it got, and its
    weight's part of what all got that received anything. ``backlogged`` seconds it had something that
    waited for a device.
    """

    start: float
    end: float
    received: float
    due: float
    backlogged: float


@dataclass(frozen=True, slots=True)
class TenantResult:
    """``backlogged``: intervals in which something of it waited for a device."""

    id: int
    weight: float
    device_seconds: float
    backlogged: tuple[tuple[float, float], ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class KindError:
    """How wrong predictions of a kind were: mean of |seen - predicted| / predicted over ``count``
    sub-stages.
    """

    kind: Kind
    count: int
    error: float


@dataclass(frozen=True)
class Result:
    """``capacity``, ``used`` and ``idle`` are device-seconds of devices that were not lost, from 0 to the
    end.
    """

    scenario: str
    policy: str
    seed: int
    jobs: tuple[JobResult, ...]
    tenants: tuple[TenantResult, ...]
    timeline: tuple[Interval, ...]
    makespan: float
    capacity: float
    used: float
    idle: float
    decisions: int
    merges: int
    waits: int
    resizes: int
    yields: int
    prediction: tuple[KindError, ...]
    decision_seconds: float = field(compare=False, default=0.0)

    @property
    def tokens(self) -> int:
        """Response tokens of the steps that were completed."""
        return sum(job.tokens for job in self.jobs)

    @property
    def throughput(self) -> float:
        """Response tokens per second, from the first arrival to the end of the last job."""
        return self.tokens / self.makespan if self.makespan > 0 else 0.0

    @property
    def staleness(self) -> int:
        return max((job.staleness for job in self.jobs), default=0)

    def windows(self, tenant: int, steps: int = FAIR_STEPS) -> tuple[Window, ...]:
        """The tenant's time cut after every so many of its own steps; what remains is left out."""
        own = next(t for t in self.tenants if t.id == tenant)
        cuts = own.samples[steps - 1 :: steps]
        before = (Sample(0.0, ()), *cuts)
        return tuple(self._window(own, *pair) for pair in zip(before, cuts, strict=False))

    def _window(self, own: TenantResult, first: Sample, last: Sample) -> Window:
        earlier = dict(first.received)
        received = {tenant: total - earlier.get(tenant, 0.0) for tenant, total in last.received}
        weights = {t.id: t.weight for t in self.tenants if received[t.id] > 0}
        due = sum(received.values()) * own.weight / sum({**weights, own.id: own.weight}.values())
        backlogged = sum(
            max(0.0, min(end, last.time) - max(start, first.time)) for start, end in own.backlogged
        )
        return Window(first.time, last.time, received[own.id], due, backlogged)
