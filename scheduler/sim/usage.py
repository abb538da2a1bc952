"""Which job had how much of which device, from the timeline of a simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from scheduler.core.rates import Slot, slot_of
from scheduler.sim.result import Interval
from scheduler.sim.scenario import SimJob


@dataclass(frozen=True, slots=True)
class Piece:
    """From ``start`` to ``end`` the interval's job had the device from ``bottom`` to ``bottom + height`` (of
    1): what shares it at the same time is stacked. Jobs that decode in one batch divide its part.
    """

    interval: Interval
    start: float
    end: float
    bottom: float
    height: float


def device_seconds(timeline: Iterable[Interval], jobs: Iterable[SimJob]) -> dict[str, float]:
    """Of each job."""
    known = tuple(jobs)
    found = dict.fromkeys((job.id for job in known), 0.0)
    for piece in pieces(timeline, known):
        found[piece.interval.job] += (piece.end - piece.start) * piece.height
    return found


def pieces(timeline: Iterable[Interval], jobs: Iterable[SimJob]) -> Iterator[Piece]:
    """Device by device; pieces of an interval that are alike follow each other as one."""
    known = {job.id: job for job in jobs}
    by_device: dict[str, list[Interval]] = defaultdict(list)
    for interval in timeline:
        by_device[interval.device].append(interval)
    for device in sorted(by_device):
        yield from _joined(_on_one(by_device[device], known))


def _on_one(intervals: list[Interval], jobs: Mapping[str, SimJob]) -> Iterator[Piece]:
    """Between two moments at which something begins or ends nothing changes."""
    begins = sorted(intervals, key=lambda interval: interval.start)
    moments = sorted({moment for i in intervals for moment in (i.start, i.end)})
    running: list[Interval] = []
    begun = 0
    for now, until in pairwise(moments):
        running = [interval for interval in running if interval.end > now]
        while begun < len(begins) and begins[begun].start <= now:
            running.append(begins[begun])
            begun += 1
        yield from _stacked(running, jobs, now, until)


def _stacked(
    running: list[Interval], jobs: Mapping[str, SimJob], now: float, until: float
) -> Iterator[Piece]:
    slots = {id(interval): _slot(interval, jobs) for interval in running}
    members = Counter(slots.values())
    bottom = 0.0
    for interval in sorted(running, key=lambda i: (i.tenant, i.job, i.kind)):
        height = interval.share / members[slots[id(interval)]]
        yield Piece(interval, now, until, bottom, height)
        bottom += height


def _slot(interval: Interval, jobs: Mapping[str, SimJob]) -> Slot:
    workload = jobs[interval.job].workload
    return slot_of(interval.pipeline, workload.model, workload.lora, interval.kind)


def _joined(own: Iterable[Piece]) -> Iterator[Piece]:
    open_pieces: dict[int, Piece] = {}
    for piece in own:
        before = open_pieces.get(id(piece.interval))
        alike = before is not None and (before.end, before.bottom, before.height) == (
            piece.start,
            piece.bottom,
            piece.height,
        )
        if before is not None and not alike:
            yield before
        start = before.start if before is not None and alike else piece.start
        open_pieces[id(piece.interval)] = Piece(piece.interval, start, piece.end, piece.bottom, piece.height)
    yield from open_pieces.values()
