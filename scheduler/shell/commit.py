"""A plan becomes rows. Each action is a guarded write that names the state it expects.

An action that lost its race is dropped, and so is what depended on it; the next snapshot shows why, and the
decision is made again. What is committed comes back as orders, to be carried out after the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from django.db import transaction

from backend.jobs.attempts import attempt_open
from backend.jobs.models import Attempt, Job
from backend.jobs.states import JobStatus, Reason
from backend.jobs.transitions import job_status_change
from backend.notify.services import JOBS, ring_many
from backend.pool.fairness import service_lift
from backend.pool.models import Device, SubStage
from backend.pool.services import (
    decision_add,
    placements_open,
    resident_evict,
    resident_use,
    substage_grant,
)
from scheduler.core.state import Admit, Evict, Place, Plan, Refusal, RefusalCode, Start
from scheduler.shell.orders import EvictOrder, Order, grant_order, launch_order

log = logging.getLogger(__name__)

#: Refusals that no waiting can cure while the pool is what it is.
HOPELESS = frozenset({RefusalCode.NEVER_FITS_DEVICES, RefusalCode.NEVER_FITS_MEMORY})


def commit(plan: Plan, *, stimulus: str, now: datetime) -> list[Order]:
    names = {name for action in plan.actions for name in _device_names(action)}
    devices = {row.name: row for row in Device.objects.select_related("node").filter(name__in=names)}
    orders: list[Order] = []
    lost_turn: set[int] = set()
    for action in plan.actions:
        match action:
            case Admit():
                orders += _admit(action, stimulus=stimulus, now=now)
            case Place():
                if not _place(action, devices, stimulus=stimulus, now=now):
                    lost_turn.add(action.pipeline)
            case Start():
                if action.device is None or action.pipeline not in lost_turn:
                    orders += _start(action, devices, now=now)
            case Evict():
                orders += _evict(action, devices, stimulus=stimulus, now=now)
    _tell(plan.refusals)
    return orders


def _device_names(action: Admit | Place | Start | Evict) -> tuple[str, ...]:
    match action:
        case Place():
            return action.devices
        case Start() | Evict():
            return (action.device,) if action.device else ()
        case Admit():
            return ()


def _admit(action: Admit, *, stimulus: str, now: datetime) -> list[Order]:
    """Open the attempt; a job whose order cannot be made fails, and keeps nobody else from being admitted."""
    try:
        return _admit_whole(action, stimulus=stimulus, now=now)
    except ValueError as error:
        log.exception("job %s cannot be launched", action.job)
        job = Job.objects.filter(public_id=action.job, status=JobStatus.QUEUED).first()
        if job is not None:
            job_status_change(
                job=job,
                new=JobStatus.FAILED,
                reason=Reason.INTERNAL,
                actor="scheduler",
                detail=f"the job's stored settings are not understood ({type(error).__name__})",
                stimulus=stimulus,
            )
        return []


@transaction.atomic
def _admit_whole(action: Admit, *, stimulus: str, now: datetime) -> list[Order]:
    organization = Job.objects.values_list("organization_id", flat=True).get(public_id=action.job)
    service_lift(organization_id=organization)
    attempt = attempt_open(
        job_public_id=action.job, home=action.home, reason=action.reason, stimulus=stimulus
    )
    if attempt is None:
        return []
    decision_add(
        kind="admit",
        reason=action.reason,
        stimulus=stimulus,
        now=now,
        job_id=attempt.job_id,
        attempt_id=attempt.pk,
    )
    return [launch_order(attempt)]


@transaction.atomic
def _place(action: Place, devices: dict[str, Device], *, stimulus: str, now: datetime) -> bool:
    attempt = Attempt.objects.select_related("job").get(pk=action.pipeline)
    chosen = [devices[name] for name in action.devices]
    if not placements_open(attempt=attempt, devices=chosen, reason=action.reason, now=now):
        return False
    job = attempt.job
    for device in chosen:
        resident_use(device=device, weights_key=job.weights_key, weights_bytes=job.weights_bytes, now=now)
        decision_add(
            kind="place",
            reason=action.reason,
            stimulus=stimulus,
            now=now,
            job_id=job.pk,
            attempt_id=attempt.pk,
            device=device,
        )
    Job.objects.filter(pk=job.pk).exclude(wait_code="").update(wait_code="", wait_text="", ahead=0)
    return True


@transaction.atomic
def _start(action: Start, devices: dict[str, Device], *, now: datetime) -> list[Order]:
    node = action.node.split("/", 1)[1]
    granted = substage_grant(
        attempt_id=action.pipeline,
        node=node,
        device=devices[action.device] if action.device else None,
        share=action.share,
        action_id=f"start:{action.node}",
        now=now,
    )
    if not granted:
        return []
    row = SubStage.objects.select_related("device__node").get(attempt_id=action.pipeline, node=node)
    return [grant_order(row)]


@transaction.atomic
def _evict(action: Evict, devices: dict[str, Device], *, stimulus: str, now: datetime) -> list[Order]:
    device = devices[action.device]
    if not resident_evict(device=device, weights_key=action.weights_key):
        return []
    decision_add(kind="evict", reason=action.reason, stimulus=stimulus, now=now, device=device)
    return [EvictOrder(action.device, action.weights_key)]


@transaction.atomic
def _tell(refusals: Sequence[Refusal]) -> None:
    """Let jobs say why they wait, where that has changed.

    A job that the pool can never hold fails now, not after for ever.
    """
    waiting = _waiting_jobs(refusals)
    changed = []
    for refusal in refusals:
        job = waiting.get(refusal.job or refusal.pipeline)
        if job is None:
            continue
        if refusal.code in HOPELESS:
            _fail_hopeless(job, refusal)
            continue
        said = {"wait_code": refusal.code.value, "wait_text": refusal.text, "ahead": refusal.ahead}
        if any(getattr(job, name) != value for name, value in said.items()):
            for name, value in said.items():
                setattr(job, name, value)
            changed.append(job)
    Job.objects.bulk_update(changed, ["wait_code", "wait_text", "ahead"], batch_size=500)
    ring_many(JOBS, [{"org": job.organization_id, "job": job.pk} for job in changed])


def _waiting_jobs(refusals: Sequence[Refusal]) -> dict[str | int | None, Job]:
    """The jobs refused, locked, by public id for those in the queue and by attempt for those that run."""
    ids = [refusal.job for refusal in refusals if refusal.job is not None]
    attempts = [refusal.pipeline for refusal in refusals if refusal.pipeline is not None]
    locked = Job.objects.defer("spec", "metadata").select_for_update(no_key=True)
    queued = locked.filter(public_id__in=ids, status=JobStatus.QUEUED).order_by("pk")
    found: dict[str | int | None, Job] = {job.public_id: job for job in queued}
    pairs = dict(Attempt.objects.filter(pk__in=attempts).values_list("job_id", "pk"))
    running = locked.filter(pk__in=pairs, status=JobStatus.RUNNING).order_by("pk")
    return found | {pairs[job.pk]: job for job in running}


def _fail_hopeless(job: Job, refusal: Refusal) -> None:
    job_status_change(
        job=job, new=JobStatus.FAILED, reason=Reason.NEVER_FITS, actor="scheduler", detail=refusal.text
    )
