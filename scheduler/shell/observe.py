"""Rows in, snapshot out: everything a decision may see. What changes meanwhile, the commit notices.

Sub-stages that were told to leave compute nothing any more in a planner's eyes, though the pipeline has not
said so yet; an attempt that stops keeps its memory and offers nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import F, Sum

from backend.jobs.models import Attempt, Job
from backend.jobs.states import AttemptStatus
from backend.pool import reads, selectors
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.states import SubStageStatus
from scheduler.core import state
from scheduler.core.board import OVERDUE
from scheduler.core.profile import LEAST, Profile
from scheduler.shell import priors
from scheduler.shell.calibrated import type_name
from scheduler.shell.facts import NOWHERE, Facts, Ground, Lore, demand_of
from scheduler.shell.profiles import ROLLING, solo_seconds

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Running:
    """What a row says of a sub-stage that runs on a device: its allotment as it is now."""

    pk: int
    share: float
    speed: float
    reason: str
    done: float
    since: datetime


@dataclass(frozen=True)
class World:
    """``jobs`` are the keys of those in the queue, ``rows`` those of the offered sub-stages; ``running`` are
    the sub-stages that have an allotment, ``profiles`` what was seen of each pipeline, ``told`` why a job (by
    its public id) or a pipeline waits: code, text, how many are ahead.
    """

    snapshot: state.Snapshot
    jobs: Mapping[str, int]
    rows: Mapping[Key, int]
    running: Mapping[Key, Running]
    profiles: Mapping[int, Profile]
    told: Mapping[str | int | None, tuple[str, str, int]]


def observe(
    now: datetime,
    *,
    lore: Lore | None = None,
    attempts: Sequence[Attempt] | None = None,
    queue: bool = True,
) -> World:
    """``attempts`` are the live ones as they are to be seen: of those that stop, nothing runs any more.
    Without ``queue``, as if no job waited to be admitted.
    """
    lore = lore or _fresh()
    jobs = list(selectors.queued_jobs(now)) if queue else []
    if attempts is None:
        attempts = reads.live_attempts()
    pool = lore.pool_now(anew=queue)
    devices = pool.devices
    grounds = _grounds(lore, devices, attempts)
    lore.learn([*(job.pk for job in jobs), *(attempt.job_id for attempt in attempts)])
    lore.profiles(attempts, grounds)
    holds: dict[int, dict[int, str]] = defaultdict(dict)
    for placement in pool.placements:
        holds[placement.attempt_id][placement.worker] = placement.device.name
    live = {attempt.pk: attempt for attempt in attempts}
    leaving = {name for key, held in holds.items() if key not in live for name in held.values()}
    rows = reads.open_substages([pk for pk, attempt in live.items() if not _stops(attempt)])
    names = {device.pk: device.name for device in devices}
    running = _running(rows)
    default = _ground(lore, devices)
    snapshot = state.Snapshot(
        now=now.timestamp(),
        devices=tuple(_device(row, leaving) for row in devices),
        tenants=_tenants({j.organization_id for j in jobs} | {a.job.organization_id for a in attempts}),
        queue=tuple(_queued(job, lore, default) for job in jobs),
        pipelines=tuple(
            _pipeline(a, holds[a.pk], None if _stops(a) else lore, grounds[a.pk], now) for a in attempts
        ),
        nodes=tuple(_nodes(rows, running, names, lore)),
        residents=tuple(
            state.Resident(row.device.name, row.weights_key, row.bytes, row.last_used_at.timestamp())
            for row in pool.residents
        ),
        tables=tuple(sorted(lore.calibrated.tables.items())),
        waits=tuple((a.pk, a.wait_until.timestamp()) for a in attempts if a.wait_until and not _stops(a)),
    )
    at_home = Counter(name for attempt in attempts for name in attempt.home)
    lore.shared = frozenset(name for name, count in at_home.items() if count > 1)
    if queue:
        lore.forget([*(job.pk for job in jobs), *(a.job_id for a in attempts)], live)
    profiles = {pk: lore.profile(pk)[1] for pk in live}
    told = {a.pk: _words(a.job) for a in attempts} | {j.public_id: _words(j) for j in jobs}
    return World(
        snapshot,
        {j.public_id: j.pk for j in jobs},
        {_key(row): row.pk for row in rows},
        running,
        profiles,
        told,
    )


def _fresh() -> Lore:
    lore = Lore()
    lore.refresh()
    return lore


def _stops(attempt: Attempt) -> bool:
    return attempt.status == AttemptStatus.STOPPING


def _words(job: Job) -> tuple[str, str, int]:
    return job.wait_code, job.wait_text, job.ahead


def _key(row: SubStage) -> Key:
    return row.attempt_id, f"{row.attempt_id}/{row.node}"


# ---------------------------------------------------------------- devices, tenants, jobs


def _grounds(lore: Lore, devices: Sequence[Device], attempts: Iterable[Attempt]) -> dict[int, Ground]:
    """Where each attempt computes: on its first home."""
    by_name = {device.name: lore.ground(device) for device in devices}
    default = _ground(lore, devices)
    return {a.pk: by_name.get(a.home[0], default) if a.home else default for a in attempts}


def _ground(lore: Lore, devices: Sequence[Device]) -> Ground:
    """Where a job is expected to compute that has no home: on the type of which there are most."""
    if not devices:
        return NOWHERE
    count = Counter(type_name(device) for device in devices)
    return lore.ground(max(devices, key=lambda device: (count[type_name(device)], device.name)))


def _device(row: Device, leaving: set[str]) -> state.Device:
    """A device still held by an attempt that is over gets nothing new, like one that drains."""
    now = state.DeviceState(row.state)
    if now is state.DeviceState.READY and (row.draining or row.name in leaving):
        now = state.DeviceState.DRAINING
    return state.Device(name=row.name, type=type_name(row), memory_bytes=row.memory_bytes, state=now)


def _tenants(ids: set[int]) -> tuple[state.Tenant, ...]:
    return tuple(
        state.Tenant(row.pk, row.weight, row.service, row.max_devices) for row in reads.organizations(ids)
    )


def _queued(job: Job, lore: Lore, ground: Ground) -> state.QueuedJob:
    queued = state.QueuedJob(
        id=job.public_id,
        tenant=job.organization_id,
        submitted=job.created_at.timestamp(),
        devices=job.devices,
        weights_key=job.weights_key,
        weights_bytes=job.weights_bytes,
        run_bytes=job.run_bytes,
        priority=job.priority,
        latency_cap=settings.LATENCY_CAP,
    )
    facts = lore.of(job.pk)
    if facts is None:
        return queued
    outlook = lore.prior(job.pk, ground, False)
    return replace(queued, **_expected(facts, ground, outlook, False))


def _pipeline(
    attempt: Attempt, held: dict[int, str], lore: Lore | None, ground: Ground, now: datetime
) -> state.Pipeline:
    """Without ``lore``, one that does nothing any more."""
    job = attempt.job
    pipeline = state.Pipeline(
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
        latency_cap=settings.LATENCY_CAP,
        step_began=(attempt.step_began_at or now).timestamp(),
        stepped=job.steps_done,
    )
    facts = lore.of(job.pk) if lore is not None else None
    if facts is None or lore is None:
        return pipeline
    streams, profile = lore.profile(attempt.pk)
    outlook = profile.outlook()
    return replace(pipeline, **_expected(facts, ground, outlook, streams))


def _expected(facts: Facts, ground: Ground, outlook: state.Outlook, streams: bool) -> dict[str, Any]:
    """What policies that multiplex read of a job, waiting or running."""
    return {
        "demand": demand_of(outlook, ground.table, facts.fusible),
        "shape": priors.shape(facts.spec, streams),
        "outlook": outlook,
        "fusible": facts.fusible,
        "kv_tokens": facts.kv_tokens,
        "kv_bytes": facts.kv_bytes,
    }


# ---------------------------------------------------------------- sub-stages


def _running(rows: Sequence[SubStage]) -> dict[Key, Running]:
    granted = [row for row in rows if row.status == SubStageStatus.GRANTED and row.device_id is not None]
    allotments: dict[int, list[Allotment]] = defaultdict(list)
    for one in reads.allotments([row.pk for row in granted]):
        allotments[one.substage_id].append(one)
    found = {}
    for row in granted:
        own = allotments[row.pk]
        if own and own[-1].end is None:
            now = own[-1]
            found[_key(row)] = Running(row.pk, now.share, now.speed, now.reason, solo_seconds(own), now.start)
    return found


def _nodes(
    rows: Sequence[SubStage], running: Mapping[Key, Running], names: Mapping[int, str], lore: Lore
) -> Iterable[state.Node]:
    spent = _spent(rows, lore)
    rolling = {(row.attempt_id, row.step) for row in rows if state.Kind(row.kind) in ROLLING}
    for row in rows:
        if row.kind == state.Kind.GRADE and (row.attempt_id, row.step) in rolling:
            continue  # grades that come in beside the step's rollouts do not say that these are over
        known = running.get(_key(row))
        granted = row.status == SubStageStatus.GRANTED
        segment = _segment(row, lore.profile(row.attempt_id)[1], spent)
        left = segment.seconds * row.left if segment is not None else 0.0
        yield state.Node(
            id=f"{row.attempt_id}/{row.node}",
            pipeline=row.attempt_id,
            step=row.step,
            worker=row.worker,
            kind=state.Kind(row.kind),
            state=state.NodeState.RUNNING if granted else state.NodeState.READY,
            device=names.get(row.device_id) if granted else None,
            share=(row.share or 0.0) if granted else 0.0,
            gang=row.gang,
            part=row.part,
            segment=segment,
            left=max(0.0, left - known.done) if known is not None else left,
            since=(known.since if known is not None else row.granted_at or row.offered_at).timestamp(),
            tokens=row.cached_tokens,
            yielded=row.yielded,
        )


def _segment(row: SubStage, profile: Profile, spent: Mapping[Key, float]) -> state.Segment | None:
    """What is predicted of it; None for a part that its chain does not have."""
    rolls = state.Kind(row.kind) in ROLLING
    parts = profile.rollout if rolls else profile.train
    if row.part >= len(parts) or parts[row.part].prior.kind.value != row.kind:
        return None
    segment = profile.predicted("rollout" if rolls else "train", row.part, row.sequences)
    before = spent.get(_key(row), 0.0)
    if before:
        seconds = max(segment.seconds - before, OVERDUE * segment.seconds, LEAST)
        segment = replace(segment, seconds=seconds, late_seconds=max(seconds, segment.late_seconds - before))
    return replace(segment, early=row.early)


def _spent(rows: Sequence[SubStage], lore: Lore) -> dict[Key, float]:
    """Where parts come again: seconds that the step has spent in each part so far."""
    again = [row for row in rows if _comes_again(row, lore) and state.Kind(row.kind) in ROLLING]
    if not again:
        return {}
    sums = (
        SubStage.objects.filter(
            attempt__in={row.attempt_id for row in again},
            step__in={row.step for row in again},
            status=SubStageStatus.DONE,
        )
        .values_list("attempt_id", "step", "worker", "part", "kind")
        .annotate(spent=Sum(F("ended_at") - F("started_at")))
    )
    known = {tuple(values): spent for *values, spent in sums}
    found = {}
    for row in again:
        spent = known.get((row.attempt_id, row.step, row.worker, row.part, row.kind))
        if spent is not None:
            found[_key(row)] = spent.total_seconds()
    return found


def _comes_again(row: SubStage, lore: Lore) -> bool:
    """In environments a step rolls out in turns, with dynamic sampling in rounds."""
    facts = lore.of(row.job_id)
    if facts is None:
        return False
    return facts.spec.environment is not None or (facts.spec.rl.sampling_rounds or 1) > 1
