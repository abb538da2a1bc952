"""Virtual time: what happens next, in an order that depends on nothing but what was said before."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

Event = TypeVar("Event")

#: Seconds within which events count as simultaneous: far below anything that is modelled.
MOMENT = 1e-9


class Clock(Generic[Event]):
    """Events of one time come in the order in which they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._entered = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, time: float, event: Event) -> None:
        """A time that is past counts as now."""
        heappush(self._heap, (max(time, self.now), self._entered, event))
        self._entered += 1

    def next(self) -> Event:
        time, _, event = heappop(self._heap)
        self.now = max(self.now, time)
        return event

    @property
    def moment_goes_on(self) -> bool:
        """Whether the next event is simultaneous with the last."""
        return bool(self._heap) and self._heap[0][0] <= self.now + MOMENT
