"""A cluster in mid-work for the operators' page: two tenants on two devices, written row by row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

from backend.jobs.models import Attempt, Job
from backend.pool.models import Allotment, Decision, Device, SubStage
from backend.pool.states import SubStageStatus
from backend.tenants.models import Organization
from tests import factories
from tests.frontend import stage

_nodes = count(1)


@dataclass
class Scene:
    """``at`` is now; everything is told in seconds before it."""

    at: datetime
    devices: list[Device]
    jobs: list[Job]
    attempts: list[Attempt]


def before(now: datetime, seconds: float) -> datetime:
    return now - timedelta(seconds=seconds)


def cluster(tenants: list[Organization], folder: Path, at: datetime, devices: int = 2) -> Scene:
    """One running job for each tenant; the devices have been in service for ten minutes."""
    pool = stage.devices(devices, before(at, 600))
    names = ("lighthouse", "sums", "riddles", "haiku")
    jobs = [
        factories.job(of, folder, name=names[n % len(names)], status="running")
        for n, of in enumerate(tenants)
    ]
    return Scene(at, pool, jobs, [factories.attempt(job) for job in jobs])


def substage(
    scene: Scene,
    job: int,
    device: int,
    kind: str,
    turns: list[tuple[float, float | None, float]],
    **fields: Any,
) -> SubStage:
    """A sub-stage with its allotments: (began, ended, part), in seconds before now; None: it still runs."""
    begin, end = turns[0][0], turns[-1][1]
    share = fields.pop("share", None)
    said = {
        "node": f"n{next(_nodes)}",
        "step": 3,
        "worker": 0,
        "sequences": 8,
        "reason": "its home, and free",
        "status": SubStageStatus.GRANTED if end is None else SubStageStatus.DONE,
        "offered_at": before(scene.at, begin),
        "granted_at": before(scene.at, begin),
        "started_at": before(scene.at, begin),
        "ended_at": None if end is None else before(scene.at, end),
        "share": share or turns[0][2],
        **fields,
    }
    of = SubStage.objects.create(
        attempt=scene.attempts[job], job=scene.jobs[job], device=scene.devices[device], kind=kind, **said
    )
    for began, ended, part in turns:
        Allotment.objects.create(
            substage=of,
            device=scene.devices[device],
            start=before(scene.at, began),
            end=None if ended is None else before(scene.at, ended),
            share=share or part,
            part_ppm=round(part * 1_000_000),
            reason=said["reason"],
        )
    return of


def decision(
    scene: Scene, job: int | None, kind: str, seconds: float, reason: str, device: int | None
) -> Decision:
    return Decision.objects.create(
        at=before(scene.at, seconds),
        kind=kind,
        reason=reason,
        job=None if job is None else scene.jobs[job],
        attempt=None if job is None else scene.attempts[job],
        device=None if device is None else scene.devices[device],
    )
