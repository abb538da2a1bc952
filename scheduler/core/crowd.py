"""How full devices are of work, not of bytes: what admission asks so that nobody's latency cap is missed.

A job at home on a device wants a part of its time and width (``Demand``). While the parts sum to at most 1,
jobs that interleave well keep their solo speed; beyond it everybody's step grows about in proportion. Jobs
that fuse decode in one batch: of their rollouts only the largest counts. So a newcomer is welcome while the
sum stays within the smallest latency cap of those who would live there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from scheduler.core.forecast import rolls, staleness, trains
from scheduler.core.interference import Interference, character
from scheduler.core.state import (
    OFF_DEVICE,
    Demand,
    Outlook,
    Pipeline,
    Policy,
    QueuedJob,
    Segment,
    Snapshot,
)

Load = QueuedJob | Pipeline

#: Demands are sums of fractions.
ROUNDING = 1e-9


class Crowd:
    """Demands and caps on each device."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self._fuse = policy.fuse
        self._here: dict[str, dict[int | str, tuple[Load, int]]] = defaultdict(dict)
        for pipeline in snapshot.pipelines:
            for worker, name in enumerate(pipeline.home):
                self.add(name, pipeline, worker)

    def add(self, device: str, load: Load, worker: int) -> None:
        self._here[device][load.id] = load, worker

    def excess(self, device: str, load: Load, worker: int) -> float:
        """By how much the device would be over the smallest cap with the load; 0 or less when it fits, as it
        does alone.
        """
        if not self._here[device]:
            return 0.0
        here = [*self._here[device].values(), (load, worker)]
        over = self._sum(here) - min(one.latency_cap for one, _ in here)
        return over if over > ROUNDING else 0.0

    def _sum(self, here: list[tuple[Load, int]]) -> float:
        total = 0.0
        largest: dict[str, float] = {}
        for load, worker in here:
            rollout, train = demand_of(load, worker)
            total += train
            if self._fuse and load.fusible:
                largest[load.weights_key] = max(rollout, largest.get(load.weights_key, 0.0))
            else:
                total += rollout
        return total + sum(largest.values())


def demand_of(load: Load, worker: int) -> tuple[float, float]:
    """What the worker wants of its device, for rollouts and for training, over a step of the job alone.

    Where rollouts and training overlap, a step takes as long as the longer of them.
    """
    rollout = load.demand.rollout if rolls(load, worker) else 0.0
    train = load.demand.train if trains(load, worker) else 0.0
    if staleness(load):
        parts = [sum(s.seconds for s in chain) for chain in (load.outlook.rollout, load.outlook.train)]
        stretch = sum(parts) / max(parts) if max(parts) > 0 else 1.0
        return rollout * stretch, train * stretch
    return rollout, train


def demand(outlook: Outlook, interference: Interference) -> Demand:
    """The least useful share of a device, in the mean over a step alone."""
    return Demand(
        _useful(outlook.rollout, interference) / outlook.seconds,
        _useful(outlook.train, interference) / outlook.seconds,
    )


#: A share is useful when it slows a sub-stage down by less.
USEFUL_SLOWDOWN = 1.1


def _useful(segments: Sequence[Segment], interference: Interference) -> float:
    """Sum of seconds times least useful share."""
    total = 0.0
    for segment in segments:
        if segment.kind not in OFF_DEVICE:
            alone = interference.alone[character(segment.kind, segment.batch)]
            useful = (s for s, slow in zip(interference.shares, alone, strict=True) if slow < USEFUL_SLOWDOWN)
            total += segment.seconds * next(useful)
    return total
