"""What the next decision must look at."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Touch:
    """What a decision must look at: devices, the pipelines that offer something new or waited until now, and
    the queue (``admission``), or all of it (``everything``).
    """

    devices: set[str] = field(default_factory=set)
    pipelines: set[int] = field(default_factory=set)
    admission: bool = False
    everything: bool = False

    def add(self, other: Touch) -> None:
        self.devices |= other.devices
        self.pipelines |= other.pipelines
        self.admission |= other.admission
        self.everything |= other.everything

    def __bool__(self) -> bool:
        return bool(self.devices or self.pipelines or self.admission or self.everything)


EVERYTHING = Touch(everything=True)
