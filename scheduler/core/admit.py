"""Pass ``admit``: which queued jobs become running pipelines, and where their workers live.

Order: tenants by devices of their running pipelines per weight, then service; inside a tenant by priority and
age. A job is admitted when its tenant's limit allows and enough READY devices have memory for it beside the
pipelines already at home there; idle weights are evicted for it.

Nothing starves. The first job that must wait for memory keeps the devices that lack least: no later job and
no move goes there, so that they only empty. A job that waits for memory or quota counts against its tenant's
limit, so that the tenant's later, smaller jobs cannot slip through for ever. Pipelines whose own device is
no longer READY come before all jobs: memory for their move is set aside first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from scheduler.core import texts
from scheduler.core.crowd import Crowd
from scheduler.core.draft import Draft, ready_devices
from scheduler.core.memory import Load, Memory, Shelves, alone_bytes
from scheduler.core.order import admission_clocks, ahead_of, fair_order, later
from scheduler.core.state import (
    Admit,
    Device,
    DeviceState,
    Evict,
    Pipeline,
    Policy,
    QueuedJob,
    Refusal,
    RefusalCode,
    Snapshot,
)

#: What a job that fits the pool and its tenant's limit may wait for.
WAITING = {
    RefusalCode.NO_DEVICES: "devices",
    RefusalCode.MEMORY: "memory",
    RefusalCode.LATENCY: "devices that are less busy",
}


def admit(draft: Draft) -> Draft:
    snapshot = draft.snapshot
    tenants = {tenant.id: tenant for tenant in snapshot.tenants}
    clocks = admission_clocks(snapshot.pipelines, tenants)
    pool = Pool.of(snapshot.devices)
    rooms = _Rooms(snapshot, draft.policy)
    running: Counter[int] = Counter()
    for pipeline in snapshot.pipelines:
        running[pipeline.tenant] += pipeline.devices
    spoken_for = Counter(running)
    quota_queue: Counter[int] = Counter()

    actions: list[Admit | Evict] = []
    refusals: list[Refusal] = []
    waiting: dict[RefusalCode, list[QueuedJob]] = {code: [] for code in WAITING}
    for job in fair_order(snapshot.queue, clocks):
        limit = tenants[job.tenant].max_devices
        if (refusal := pool.hopeless(job)) is not None:
            refusals.append(refusal)
        elif limit is not None and spoken_for[job.tenant] + job.devices > limit:
            ahead = quota_queue[job.tenant]
            text = texts.over_quota(job.devices, limit, running[job.tenant], ahead)
            refusals.append(Refusal(RefusalCode.QUOTA, text, job=job.id, ahead=ahead))
            if job.devices <= limit:
                spoken_for[job.tenant] += job.devices
                quota_queue[job.tenant] += 1
        elif pool.ready_enough(job) < job.devices:
            waiting[RefusalCode.NO_DEVICES].append(job)
        elif home := rooms.take(job):
            actions += rooms.evictions(home, f"room for job {job.id}")
            actions.append(Admit(job.id, home, _reason(running[job.tenant])))
            running[job.tenant] += job.devices
            spoken_for[job.tenant] += job.devices
            clocks[job.tenant] = later(clocks[job.tenant], job.devices / tenants[job.tenant].weight)
        else:
            waiting[rooms.lacking].append(job)
            spoken_for[job.tenant] += job.devices
            quota_queue[job.tenant] += 1

    def cost(job: QueuedJob) -> float:
        return job.devices / tenants[job.tenant].weight

    for job, ahead in ahead_of(waiting[RefusalCode.NO_DEVICES], clocks, cost):
        text = texts.not_ready(job.devices, pool.ready_enough(job))
        refusals.append(Refusal(RefusalCode.NO_DEVICES, text, job=job.id, ahead=ahead))
    for code, what in WAITING.items():
        if code is not RefusalCode.NO_DEVICES:
            for job, ahead in ahead_of(waiting[code], clocks, cost):
                refusals.append(Refusal(code, texts.waiting(what, ahead), job=job.id, ahead=ahead))
    return replace(draft, kept=rooms.kept).with_actions(actions).with_refusals(refusals)


def _reason(running: int) -> str:
    if running == 0:
        return "it fits, and nothing else of its organization runs"
    return f"it fits beside its organization's jobs on {texts.count(running, 'device')}"


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory sizes of the devices, ascending: of those READY, and of all in the pool.

    A drain can be taken back and a lost device can come back, so both count for what the pool could ever
    hold: a job is told "never" only when no return would help.
    """

    ready: list[int]
    known: list[int]

    @classmethod
    def of(cls, devices: tuple[Device, ...]) -> Pool:
        return cls(
            sorted(d.memory_bytes for d in devices if d.state is DeviceState.READY),
            sorted(d.memory_bytes for d in devices),
        )

    def ready_enough(self, load: Load) -> int:
        """READY devices that could hold the load if they were empty."""
        return _at_least(self.ready, alone_bytes(load))

    def hopeless(self, job: QueuedJob) -> Refusal | None:
        """Why the job could not run even if it were alone."""
        need = alone_bytes(job)
        if not self.ready:
            return Refusal(RefusalCode.NO_DEVICES, texts.not_ready(job.devices, 0), job=job.id)
        if job.devices > len(self.known):
            text = texts.too_many_devices(job.devices, len(self.known))
            return Refusal(RefusalCode.NEVER_FITS_DEVICES, text, job=job.id)
        large_enough = _at_least(self.known, need)
        if large_enough < job.devices:
            text = texts.too_little_memory(job.devices, need, self.known[-1], large_enough)
            return Refusal(RefusalCode.NEVER_FITS_MEMORY, text, job=job.id)
        return None


def _at_least(ascending: list[int], least: int) -> int:
    return len(ascending) - bisect_left(ascending, least)


class _Rooms:
    """Memory of the READY devices while homes are given; ``kept`` fills when the first load must wait."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self._memory = Memory(snapshot, policy.max_pipelines_per_device)
        self._crowd = Crowd(snapshot, policy) if policy.capped else None
        self._ready = ready_devices(snapshot)
        self._shelves = Shelves(self._memory, self._ready)
        self.kept: frozenset[str] = frozenset()
        #: What the first load that must wait waits for; those behind it wait for the same.
        self.lacking = RefusalCode.MEMORY
        ready = set(self._ready)
        for pipeline in snapshot.pipelines:
            homeless = pipeline.devices - sum(name in ready for name in pipeline.home)
            if homeless:
                self._take(pipeline, homeless, own=frozenset(pipeline.home))

    def take(self, job: QueuedJob) -> tuple[str, ...]:
        """Homes for all workers of the job, or none."""
        return self._take(job, job.devices, own=frozenset())

    def _take(self, load: QueuedJob | Pipeline, devices: int, own: frozenset[str]) -> tuple[str, ...]:
        fitting = (n for n in self._shelves.candidates(load) if n not in own and self._welcome(n, load))
        chosen = tuple(islice(fitting, devices))
        if len(chosen) < devices:
            self._keep(load, devices, own)
            return ()
        for worker, name in enumerate(chosen):
            self._memory.add(name, load)
            self._shelves.put(name)
            if self._crowd is not None:
                self._crowd.add(name, load, worker)
        return chosen

    def _welcome(self, name: str, load: QueuedJob | Pipeline) -> bool:
        """Whether nobody would miss a latency cap, whichever of its workers came."""
        return self._crowding(name, load) <= 0

    def _crowding(self, name: str, load: QueuedJob | Pipeline) -> float:
        if self._crowd is None:
            return 0.0
        return max(self._crowd.excess(name, load, worker) for worker in range(load.devices))

    def _keep(self, load: QueuedJob | Pipeline, devices: int, own: frozenset[str]) -> None:
        """Keep the devices that lack least for the first load that must wait."""
        if self.kept:
            return
        with_memory = sum(1 for name in islice(self._shelves.candidates(load), devices + len(own)))
        self.lacking = RefusalCode.LATENCY if with_memory >= devices else RefusalCode.MEMORY
        need = alone_bytes(load)
        large = [n for n in self._ready if n not in own and self._memory.capacity[n] >= need]
        large.sort(key=lambda n: (self._memory.shortage(n, load), max(0.0, self._crowding(n, load)), n))
        self.kept = frozenset(large[:devices])
        for name in self.kept:
            self._shelves.take(name)

    def evictions(self, home: tuple[str, ...], reason: str) -> Iterator[Evict]:
        for name in home:
            for resident in self._memory.evict(name):
                yield Evict(name, resident.weights_key, f"idle since {resident.last_used:g}; {reason}")
