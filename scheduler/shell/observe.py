"""Rows in, snapshot out: everything a decision may see, read in one transaction."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

from django.db import transaction
from django.db.models import Min

from backend.jobs.models import Attempt, Job
from backend.jobs.states import AttemptStatus
from backend.pool import selectors
from backend.pool.models import Device, SubStage
from backend.pool.states import SubStageStatus
from backend.tenants.models import Organization
from scheduler.core import state


@transaction.atomic
def observe(now: datetime) -> state.Snapshot:
    queued = list(selectors.queued_jobs(now))
    attempts = [a for a in selectors.live_attempts() if a.status != AttemptStatus.STOPPING]
    holds: dict[int, dict[int, str]] = defaultdict(dict)
    occupied: set[str] = set()
    for placement in selectors.open_placements():
        holds[placement.attempt_id][placement.worker] = placement.device.name
        occupied.add(placement.device.name)
    running = {attempt.pk for attempt in attempts}
    leaving = {name for key, held in holds.items() if key not in running for name in held.values()}
    return state.Snapshot(
        now=now.timestamp(),
        devices=tuple(_device(row, leaving) for row in selectors.devices()),
        tenants=_tenants(
            {*(job.organization_id for job in queued), *(a.job.organization_id for a in attempts)}
        ),
        queue=tuple(_queued(job) for job in queued),
        pipelines=tuple(_pipeline(attempt, holds[attempt.pk]) for attempt in attempts),
        nodes=tuple(_node(row) for row in selectors.open_substages() if row.attempt_id in running),
        residents=tuple(
            state.Resident(row.device.name, row.weights_key, row.bytes, row.last_used_at.timestamp())
            for row in selectors.residents()
        ),
    )


def _device(row: Device, leaving: set[str]) -> state.Device:
    """A device still held by an attempt that is stopping gets nothing new, like one that drains."""
    now = state.DeviceState(row.state)
    if row.name in leaving and now is state.DeviceState.READY:
        now = state.DeviceState.DRAINING
    return state.Device(name=row.name, type=row.type, memory_bytes=row.memory_bytes, state=now)


def _tenants(ids: set[int]) -> tuple[state.Tenant, ...]:
    rows = Organization.objects.filter(pk__in=ids).order_by("pk")
    return tuple(state.Tenant(row.pk, row.weight, row.service, row.max_devices) for row in rows)


def _queued(job: Job) -> state.QueuedJob:
    return state.QueuedJob(
        id=job.public_id,
        tenant=job.organization_id,
        submitted=job.created_at.timestamp(),
        devices=job.devices,
        weights_key=job.weights_key,
        weights_bytes=job.weights_bytes,
        run_bytes=job.run_bytes,
        priority=job.priority,
    )


def _pipeline(attempt: Attempt, held: dict[int, str]) -> state.Pipeline:
    job = attempt.job
    return state.Pipeline(
        id=attempt.pk,
        job=job.public_id,
        tenant=job.organization_id,
        submitted=job.created_at.timestamp(),
        devices=job.devices,
        weights_key=job.weights_key,
        weights_bytes=job.weights_bytes,
        run_bytes=job.run_bytes,
        home=tuple(attempt.home),
        holds=tuple(held[worker] for worker in sorted(held)),
        priority=job.priority,
        step_seconds=attempt.step_seconds,
    )


def _node(row: SubStage) -> state.Node:
    granted = row.status == SubStageStatus.GRANTED
    return state.Node(
        id=f"{row.attempt_id}/{row.node}",
        pipeline=row.attempt_id,
        step=row.step,
        worker=row.worker,
        kind=state.Kind(row.kind),
        state=state.NodeState.RUNNING if granted else state.NodeState.READY,
        device=row.device.name if granted and row.device else None,
        share=(row.share or 0.0) if granted else 0.0,
    )


def next_retry(now: datetime) -> float | None:
    """Seconds until the first job that waits to be tried again may be; None when there is none."""
    first = selectors.held_back_jobs(now).aggregate(first=Min("retry_at"))["first"]
    return None if first is None else max(0.0, (first - now).total_seconds())
