"""What can happen at a time that is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.sim.attempt import Task
from scheduler.sim.scenario import Outage, SimJob


@dataclass(frozen=True, slots=True)
class Arrive:
    job: SimJob


@dataclass(frozen=True, slots=True)
class Cancel:
    job: SimJob


@dataclass(frozen=True, slots=True)
class Lose:
    outage: Outage


@dataclass(frozen=True, slots=True)
class Return:
    outage: Outage


@dataclass(frozen=True, slots=True)
class Due:
    """The task is over, unless its version is another by then."""

    task: Task
    version: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """The task takes a quarter longer than predicted."""

    task: Task
    version: int


@dataclass(frozen=True, slots=True)
class Remind:
    """A pipeline waited until now."""

    pipeline: int


Event = Arrive | Cancel | Lose | Return | Due | Overdue | Remind
