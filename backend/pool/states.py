"""States of devices and of sub-stages, with a sentence per edge."""

from __future__ import annotations

from enum import StrEnum


class DeviceState(StrEnum):
    READY = "ready"
    LOST = "lost"


class SubStageStatus(StrEnum):
    READY = "ready"
    GRANTED = "granted"
    LEAVING = "leaving"
    DONE = "done"
    LOST = "lost"


#: Those that have begun, and have not reported their end.
BEGUN = (SubStageStatus.GRANTED, SubStageStatus.LEAVING)

SUBSTAGE_EDGES: dict[tuple[SubStageStatus, SubStageStatus], str] = {
    (SubStageStatus.READY, SubStageStatus.GRANTED): "The scheduler gave it a share of a device.",
    (SubStageStatus.READY, SubStageStatus.LOST): "Its attempt ended before it was granted.",
    (SubStageStatus.GRANTED, SubStageStatus.LEAVING): "It was told to make room, or its sequences to move.",
    (SubStageStatus.LEAVING, SubStageStatus.DONE): "The pipeline reported when it stopped.",
    (SubStageStatus.LEAVING, SubStageStatus.LOST): "Its attempt ended before it had stopped.",
    (SubStageStatus.GRANTED, SubStageStatus.DONE): "The pipeline reported when it started and ended.",
    (SubStageStatus.GRANTED, SubStageStatus.LOST): "Its attempt ended while it ran.",
}


def substage_before(new: SubStageStatus) -> list[SubStageStatus]:
    """The statuses from which a sub-stage may become ``new``."""
    return [old for old, following in SUBSTAGE_EDGES if following is new]
