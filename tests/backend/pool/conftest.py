from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from django.db import transaction

from backend.jobs.models import Attempt, Job
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.substages import (
    substage_cross,
    substage_finish,
    substage_grant,
    substage_leave,
    substage_offer,
)
from tests.backend.metering.conftest import BEGIN, ada, at, bob, device
from workers.protocol import Crossed, Finished, Offer, SubStageKind

__all__ = ["ada", "bob", "device"]


def offer(
    attempt: Attempt, node: str, now: float, *, rows: int = 4, kind: str = "tail", step: int = 0
) -> SubStage:
    return substage_offer(attempt=attempt, offer=offered(node, rows=rows, kind=kind, step=step), now=at(now))


def offered(node: str, *, rows: int = 4, kind: str = "tail", step: int = 0, part: int = 0) -> Offer:
    return Offer(node=node, step=step, worker=0, kind=SubStageKind(kind), sequences=rows, part=part)


def start(
    attempt: Attempt,
    device: Device,
    node: str,
    now: float,
    *,
    share: float = 1.0,
    slot: str = "",
    rows: int = 4,
    **how: object,
) -> SubStage:
    """Offer a sub-stage and grant it at once."""
    offer(attempt, node, now, rows=rows, **how)
    granted = substage_grant(
        attempt_id=attempt.pk,
        node=node,
        device=device,
        share=share,
        slot=slot,
        speed=1.0,
        reason="it was its turn",
        action_id=f"start:{attempt.pk}/{node}",
        now=at(now),
    )
    assert granted
    return attempt.substages.get(node=node)


def over(
    attempt: Attempt, node: str, begun: float, ended: float, now: float | None = None
) -> SubStage | None:
    """It reports at ``now``, or as it ends."""
    report = finished(node, begun, ended)
    with reporting(attempt):
        return substage_finish(attempt=attempt, finished=report, now=at(ended if now is None else now))


def crosses(
    attempt: Attempt,
    node: str,
    begun: float,
    ended: float,
    into: str,
    *,
    rows: int = 4,
    now: float | None = None,
) -> SubStage | None:
    crossed = Crossed(finished=finished(node, begun, ended), offer=offered(into, rows=rows))
    with reporting(attempt):
        crossing = substage_cross(attempt=attempt, crossed=crossed, now=at(ended if now is None else now))
    return crossing and crossing.into


@contextmanager
def reporting(attempt: Attempt) -> Iterator[None]:
    """As under ``attempt_fence``."""
    with transaction.atomic():
        Job.objects.select_for_update(no_key=True).get(pk=attempt.job_id)
        yield


def leaves(attempt: Attempt, node: str, now: float, moves_to: str = "") -> bool:
    return substage_leave(attempt_id=attempt.pk, node=node, moves_to=moves_to, now=at(now))


def finished(node: str, begun: float, ended: float) -> Finished:
    return Finished(
        node=node, started_at=at(begun).timestamp(), ended_at=at(ended).timestamp(), tokens=8, forwards=2
    )


def had(substage: SubStage | None) -> list[tuple[float, float | None, int]]:
    """Seconds from and to, and parts per thousand of the device."""
    assert substage is not None
    rows = Allotment.objects.filter(substage=substage).order_by("start")
    return [(seconds(row.start), row.end and seconds(row.end), row.part_ppm // 1000) for row in rows]


def seconds(when) -> float:
    return (when - BEGIN) / timedelta(seconds=1)
