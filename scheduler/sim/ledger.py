"""Who had which part of which device from when to when, and who waited for one.

Used and idle time are counted apart, each from what was on the device, so that their sum can be checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.core.state import Kind
from scheduler.sim.result import Interval

#: By which the parts of a device may exceed it: rounding.
ROUNDING = 1e-9


class Broken(AssertionError):
    """The simulation did something that cannot be."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A sub-stage on a device. ``share`` is its slot's, ``part`` what it has of it: members of a slot
    divide it.
    """

    key: tuple[int, str]
    job: str
    tenant: int
    kind: Kind
    share: float
    part: float
    batch: int


@dataclass(slots=True)
class _Row:
    """A device since ``since``; ``began`` says since when each occupant is unchanged."""

    since: float = 0.0
    lost: bool = False
    occupants: tuple[Occupant, ...] = ()
    began: dict[Occupant, float] | None = None


class Ledger:
    def __init__(self, devices: Iterable[str], tenants: Iterable[int]) -> None:
        self._rows = {name: _Row() for name in devices}
        self.received: dict[int, float] = dict.fromkeys(tenants, 0.0)
        self.idle = 0.0
        self.lost = 0.0
        self.timeline: list[Interval] = []
        self.backlogged: dict[int, list[tuple[float, float]]] = {tenant: [] for tenant in self.received}
        self._backlog_since: dict[int, float] = {}
        self.waits: dict[str, dict[str, float]] = defaultdict(dict)
        self._waiting: dict[str, tuple[str, float]] = {}

    @property
    def used(self) -> float:
        return sum(self.received.values())

    # ------------------------------------------------------------ devices

    def occupy(self, device: str, now: float, occupants: Iterable[Occupant], lost: bool = False) -> None:
        """From now on these are on the device. Raises ``Broken`` when they are more than fits."""
        row = self._rows[device]
        self._accrue(row, now)
        row.occupants, row.lost = tuple(occupants), lost
        total = sum(occupant.part for occupant in row.occupants)
        if total > 1 + ROUNDING:
            raise Broken(f"{device}: shares sum to {total} at {now}")
        if lost and row.occupants:
            raise Broken(f"{device}: {row.occupants} while it is lost")
        before = row.began or {}
        for occupant, start in before.items():
            if occupant not in row.occupants and now > start:
                self.timeline.append(_interval(device, start, now, occupant))
        row.began = {occupant: before.get(occupant, now) for occupant in row.occupants}

    def close(self, now: float) -> None:
        for device, row in self._rows.items():
            self.occupy(device, now, (), row.lost)
        for tenant in list(self._backlog_since):
            self.backlog(tenant, now, False)
        for job in list(self._waiting):
            self.wait(job, now, None)

    def received_by(self, now: float) -> Mapping[int, float]:
        for row in self._rows.values():
            self._accrue(row, now)
        return self.received

    def _accrue(self, row: _Row, now: float) -> None:
        seconds = now - row.since
        row.since = now
        if row.lost:
            self.lost += seconds
            return
        free = 1.0
        for occupant in row.occupants:
            self.received[occupant.tenant] += occupant.part * seconds
            free -= occupant.part
        self.idle += free * seconds

    # ------------------------------------------------------------ waiting

    def backlog(self, tenant: int, now: float, waits: bool) -> None:
        """Whether something of the tenant waits for a device from now on."""
        if waits:
            self._backlog_since.setdefault(tenant, now)
            return
        since = self._backlog_since.pop(tenant, now)
        if now > since:
            self.backlogged[tenant].append((since, now))

    def wait(self, job: str, now: float, code: str | None) -> None:
        """Why nothing of the job runs from now on; None when something does, or nothing wants to."""
        known, since = self._waiting.get(job, (None, now))
        if known == code:
            return
        if known is not None:
            self.waits[job][known] = self.waits[job].get(known, 0.0) + now - since
            del self._waiting[job]
        if code is not None:
            self._waiting[job] = code, now


def _interval(device: str, start: float, end: float, who: Occupant) -> Interval:
    return Interval(device, start, end, who.key[0], who.job, who.tenant, who.kind, who.share, who.batch)
