"""A plan becomes rows. Each action is a guarded write that names the state it expects.

An action that lost its race is dropped, and so is what depended on it; the next snapshot shows why, and the
decision is made again. What is committed comes back as orders, to be carried out after the commit. Who lives
where is here, what runs is in ``running``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from django.db import transaction

from backend.jobs.attempts import attempt_open
from backend.jobs.models import Attempt, Job
from backend.jobs.states import AttemptStatus, JobStatus, Reason
from backend.jobs.transitions import job_status_change
from backend.notify.services import JOBS, ring_many
from backend.pool.fairness import service_lift
from backend.pool.models import Device
from backend.pool.services import decision_add, placements_open, resident_evict, resident_use
from scheduler.core.state import Action, Admit, Evict, Place, Refusal, RefusalCode, Rehome, Start
from scheduler.shell.decide import Decision
from scheduler.shell.facts import Lore
from scheduler.shell.observe import World
from scheduler.shell.orders import EvictOrder, Order, launch_order
from scheduler.shell.running import LostRace, run
from scheduler.shell.touch import Touch

log = logging.getLogger(__name__)

#: Refusals that no waiting can cure while the pool is what it is.
HOPELESS = frozenset({RefusalCode.NEVER_FITS_DEVICES, RefusalCode.NEVER_FITS_MEMORY})


def commit(decision: Decision, lore: Lore, *, stimulus: str, now: datetime) -> tuple[list[Order], Touch]:
    """Write the decision; the orders that follow, and what must be decided anew since a race was lost."""
    actions = decision.plan.actions
    names = {name for action in actions for name in _device_names(action)}
    devices = {row.name: row for row in lore.pool_now().devices if row.name in names}
    orders: list[Order] = []
    lost: list[Action] = []
    for action in actions:
        match action:
            case Admit():
                streams = _streams(action, lore, decision)
                orders += _admit(action, streams, stimulus=stimulus, now=now)
            case Place():
                lore.pool = None
                if not _place(action, devices, stimulus=stimulus, now=now):
                    lost.append(action)
            case Rehome():
                if not _rehome(action, stimulus=stimulus, now=now):
                    lost.append(action)
            case Evict():
                lore.pool = None
                orders += _evict(action, devices, stimulus=stimulus, now=now)
    unplaced = {action.pipeline for action in lost if isinstance(action, Place | Rehome)}
    lost += [a for a in actions if isinstance(a, Start) and a.device is not None and a.pipeline in unplaced]
    again = Touch(pipelines=set(unplaced))
    try:
        running, upset = run(decision, lost, lore, stimulus=stimulus, now=now)
    except LostRace as error:
        log.warning("the plan is made again: %s", error)
        running, again = [], Touch(everything=True)
    else:
        again.devices |= upset
    _tell([refusal for refusal in decision.plan.refusals if _is_new(refusal, decision.world)])
    return [*orders, *running], again


def _device_names(action: Action) -> tuple[str, ...]:
    match action:
        case Place():
            return action.devices
        case Evict():
            return (action.device,)
        case _:
            return ()


def _streams(action: Admit, lore: Lore, decision: Decision) -> bool:
    pk = decision.world.jobs.get(action.job)
    facts = lore.of(pk) if pk is not None else None
    return facts is not None and facts.streams(decision.policy.stream)


def _admit(action: Admit, streams: bool, *, stimulus: str, now: datetime) -> list[Order]:
    """Open the attempt; a job whose order cannot be made fails, and keeps nobody else from being admitted."""
    try:
        return _admit_whole(action, streams, stimulus=stimulus, now=now)
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
def _admit_whole(action: Admit, streams: bool, *, stimulus: str, now: datetime) -> list[Order]:
    organization = Job.objects.values_list("organization_id", flat=True).get(public_id=action.job)
    service_lift(organization_id=organization)
    attempt = attempt_open(
        job_public_id=action.job, home=action.home, reason=action.reason, stimulus=stimulus
    )
    if attempt is None:
        return []
    attempt.profile = {"streams": streams}
    attempt.save(update_fields=["profile"])
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
def _rehome(action: Rehome, *, stimulus: str, now: datetime) -> bool:
    """Let the attempt's workers live elsewhere; they move when they are granted a device there."""
    live = Attempt.objects.filter(
        pk=action.pipeline, status__in=[AttemptStatus.STARTING, AttemptStatus.RUNNING]
    )
    if not live.update(home=list(action.home)):
        return False
    job_id = Attempt.objects.values_list("job_id", flat=True).get(pk=action.pipeline)
    decision_add(
        kind="rehome",
        reason=action.reason,
        stimulus=stimulus,
        now=now,
        job_id=job_id,
        attempt_id=action.pipeline,
    )
    return True


@transaction.atomic
def _evict(action: Evict, devices: dict[str, Device], *, stimulus: str, now: datetime) -> list[Order]:
    device = devices[action.device]
    if not resident_evict(device=device, weights_key=action.weights_key):
        return []
    decision_add(kind="evict", reason=action.reason, stimulus=stimulus, now=now, device=device)
    return [EvictOrder(action.device, action.weights_key)]


def _is_new(refusal: Refusal, world: World) -> bool:
    told = world.told.get(refusal.job or refusal.pipeline)
    return refusal.code in HOPELESS or told != (refusal.code.value, refusal.text, refusal.ahead)


@transaction.atomic
def _tell(refusals: Sequence[Refusal]) -> None:
    """Let jobs say why they wait, where that has changed.

    A job that the pool can never hold fails now, not after for ever.
    """
    if not refusals:
        return
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
