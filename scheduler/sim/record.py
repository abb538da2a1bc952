"""What is known of a job over all its attempts."""

from __future__ import annotations

from scheduler.core.state import QueuedJob, Refusal
from scheduler.sim.result import JobResult
from scheduler.sim.scenario import SimJob


class Record:
    """Steps that are over are kept when a device is lost. ``refusal`` is the last answer while it waits."""

    def __init__(self, job: SimJob, queued: QueuedJob) -> None:
        self.job, self.queued = job, queued
        self.admitted: float | None = None
        self.finished: float | None = None
        self.cancelled = False
        self.step_ends: list[float] = []
        self.tokens = 0
        self.attempts = 0
        self.staleness = 0
        self.refusal: Refusal | None = None

    @property
    def open(self) -> bool:
        return self.finished is None and not self.cancelled

    def result(self, waits: dict[str, float]) -> JobResult:
        job = self.job
        begins = [self.admitted or 0.0, *self.step_ends]
        return JobResult(
            id=job.id,
            tenant=job.tenant,
            arrival=job.arrival,
            admitted=self.admitted,
            finished=self.finished,
            cancelled=self.cancelled,
            step_seconds=tuple(end - begin for begin, end in zip(begins, self.step_ends, strict=False)),
            tokens=self.tokens,
            waits=tuple(sorted(waits.items())),
            attempts=self.attempts,
            staleness=self.staleness,
        )
