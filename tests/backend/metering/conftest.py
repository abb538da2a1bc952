"""A device at 1,000 micro-dollars a second, and sub-stages of two tenants that ran on it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backend.jobs.models import Attempt
from backend.jobs.states import JobStatus
from backend.pool.models import Allotment, Device, Node, ServiceInterval, SubStage
from backend.pool.parts import share_ppm
from backend.pool.states import SubStageStatus
from backend.tenants.models import Organization
from tests import factories

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def make_attempt(name: str, folder: Path, *, weight: float = 1.0) -> Attempt:
    """An attempt of a job of an organization of its own; the job's files lie below ``folder``."""
    organization = factories.organization(name, weight=weight)
    return factories.attempt(factories.job(organization, folder, status=JobStatus.RUNNING))


def make_device(name: str = "n/cpu0", *, price: int = 3_600_000) -> Device:
    node, _ = Node.objects.get_or_create(name="n")
    device = Device.objects.create(
        node=node,
        name=name,
        index=0,
        kind="cpu",
        type="cpu",
        threads=1,
        memory_bytes=1 << 30,
        saturation_batch=8,
        price_micro_usd_hour=price,
        metered_until=BEGIN,
    )
    ServiceInterval.objects.create(device=device, start=BEGIN)
    return device


def grant(
    attempt: Attempt,
    device: Device,
    granted: float,
    *,
    share: float = 1.0,
    step: int = 0,
    kind: str = "decode",
) -> SubStage:
    """A sub-stage that has its share, all of it, from when it was granted."""
    number = attempt.substages.count()
    substage = SubStage.objects.create(
        attempt=attempt,
        job=attempt.job,
        node=f"s{step}.{number}",
        step=step,
        worker=0,
        kind=kind,
        sequences=1,
        status=SubStageStatus.GRANTED,
        action_id=f"start:{attempt.pk}/{number}",
        device=device,
        share=share,
        offered_at=at(granted),
        granted_at=at(granted),
    )
    allot(substage, granted, share=share)
    return substage


def allot(substage: SubStage, start: float, *, share: float, part: float | None = None) -> None:
    """From ``start`` on it has this share, and pays for ``part`` of the device."""
    substage.allotments.filter(end__isnull=True).update(end=at(start))
    part_ppm = share_ppm(share if part is None else part)
    Allotment.objects.create(
        substage=substage, device=substage.device, start=at(start), share=share, part_ppm=part_ppm
    )


def finish(substage: SubStage, start: float, end: float) -> SubStage:
    substage.started_at, substage.ended_at = at(start), at(end)
    substage.status = SubStageStatus.DONE
    substage.save()
    for row in substage.allotments.filter(end__isnull=True):
        row.end = max(at(end), row.start)
        row.save()
    return substage


def ran(attempt: Attempt, device: Device, start: float, end: float, **how: object) -> SubStage:
    """A sub-stage that was granted when it started, and has reported."""
    return finish(grant(attempt, device, start, **how), start, end)


@pytest.fixture
def device(db) -> Device:
    return make_device()


@pytest.fixture
def ada(db, tmp_path) -> Attempt:
    return make_attempt("ada", tmp_path, weight=2.0)


@pytest.fixture
def bob(db, tmp_path) -> Attempt:
    return make_attempt("bob", tmp_path)


@pytest.fixture
def stranger(db, tmp_path) -> Organization:
    return make_attempt("stranger", tmp_path).job.organization
