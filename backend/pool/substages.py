"""The life of a sub-stage, from its offer to the report that it is over.

Each write names the state it expects. Where somebody was faster it returns False or None and has changed
nothing. What a sub-stage has of its device meanwhile is in ``allotments``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection, transaction
from django.db.models import F, QuerySet

from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job
from backend.pool.allotments import Company, Terms, device_lock, device_lock_under
from backend.pool.models import Device, SubStage
from backend.pool.states import BEGUN, DeviceState, SubStageStatus, substage_before
from workers.protocol import Crossed, Finished, Offer

#: Written out: see ``reads``.
GRANT = """
UPDATE pool_substage AS granted SET status = 'granted', device_id = %(device)s, share = %(share)s,
    slot = %(slot)s, reason = %(reason)s, action_id = %(action)s, granted_at = %(at)s
FROM jobs_attempt AS attempt
WHERE granted.attempt_id = %(attempt)s AND granted.node = %(node)s AND granted.status = 'ready'
    AND attempt.id = granted.attempt_id AND attempt.status IN ('starting', 'running')
RETURNING granted.*
"""
FINISH = """
UPDATE pool_substage SET status = 'done', started_at = %s, ended_at = %s, tokens = %s, forwards = %s,
    moves_to = %s
WHERE id = %s AND status IN ('granted', 'leaving')
"""


@dataclass(frozen=True, slots=True)
class Crossing:
    """``into`` goes on; ``was_leaving``: although its place was promised to others."""

    into: SubStage
    was_leaving: bool


def substage_offer(*, attempt: Attempt, offer: Offer, now: datetime) -> SubStage:
    """Write down what waits for a grant; one that needs no device has begun."""
    substage = _offered(attempt, offer, now)
    if not offer.kind.needs_device:
        substage.status = SubStageStatus.GRANTED
        substage.granted_at = now
    substage.save(force_insert=True)
    return substage


def _offered(attempt: Attempt, offer: Offer, now: datetime) -> SubStage:
    return SubStage(
        attempt=attempt, job_id=attempt.job_id, offered_at=now, **offer.model_dump(exclude={"type"})
    )


@transaction.atomic(savepoint=False)
def substage_grant(
    *,
    attempt_id: int,
    node: str,
    device: Device | None,
    share: float,
    slot: str,
    speed: float,
    reason: str,
    action_id: str,
    now: datetime,
) -> bool:
    """Let the sub-stage run; on a device it has an allotment from now on.

    Its slot has the share from now on: who is in it already gets the same. Refused where the sub-stage does
    not wait any more, its attempt stops, or the device is lost.
    """
    if device is not None:
        device = device_lock(device.pk, now)
        if device.state != DeviceState.READY:
            return False
    terms = {
        "attempt": attempt_id,
        "node": node,
        "device": None if device is None else device.pk,
        "share": share,
        "slot": slot,
        "reason": reason[:300],
        "action": action_id,
        "at": now if device is None else device.changed_at,
    }
    granted = next(iter(SubStage.objects.raw(GRANT, terms)), None)
    if granted is None:
        return False
    if device is not None:
        Company(device).divide({granted.pk: Terms(share, speed, reason)}, [granted])
    return True


@transaction.atomic(savepoint=False)
def substage_leave(*, attempt_id: int, node: str, moves_to: str, now: datetime) -> bool:
    """Tell a running sub-stage to make room, or (``moves_to``) that its sequences go to that node.

    Its allotment ends: what follows on the device may begin. Rows that move count as the target's at once.
    """
    substage = _expected(SubStageStatus.LEAVING, attempt_id, node).filter(device__isnull=False).first()
    if substage is None:
        return False
    target = _target(substage, moves_to)
    concerned = {substage.device_id, *target.values_list("device_id", flat=True)}
    devices = [device_lock(pk, now) for pk in sorted(concerned)]
    if not _expected(SubStageStatus.LEAVING, attempt_id, node).update(
        status=SubStageStatus.LEAVING, moves_to=moves_to
    ):
        return False
    target.update(sequences=F("sequences") + substage.sequences)
    for company in map(Company, devices):
        company.leave([substage])
        company.divide({})
    return True


def _target(source: SubStage, node: str) -> QuerySet[SubStage]:
    """The sub-stage into which ``source`` is merged, as long as it runs."""
    return SubStage.objects.filter(attempt=source.attempt_id, node=node, status=SubStageStatus.GRANTED)


@transaction.atomic(savepoint=False)
def substage_finish(*, attempt: Attempt, finished: Finished, now: datetime) -> SubStage | None:
    """Record when a granted sub-stage ran; call under the locks of the attempt and its job.

    The interval is cut to [granted, now], and to what the ledger of the device has not closed yet: no clock
    of another machine can move a bill outside the time in which the device was the job's.
    """
    substage, company = _running(attempt, finished.node, now)
    if substage is None or not _finish(attempt, substage, finished, now):
        return None
    if company is not None:
        company.end(substage, substage.ended_at)
        company.divide({})
    return substage


@transaction.atomic(savepoint=False)
def substage_cross(*, attempt: Attempt, crossed: Crossed, now: datetime) -> Crossing | None:
    """Record that a sub-stage is over and that its successor goes on in its place, without a pause.

    From the end of the one, its allotments are the other's. Where it was told to leave, and the pipeline
    crossed before it heard of it, the order is void: the successor has the same terms from now on. Locks as
    for ``substage_finish``.
    """
    old, company = _running(attempt, crossed.finished.node, now)
    if old is None:
        return None
    was_leaving = old.status == SubStageStatus.LEAVING
    target, old.moves_to = old.moves_to, ""
    if not _finish(attempt, old, crossed.finished, now):
        return None
    if target:
        merged = _target(old, target).filter(sequences__gte=old.sequences)
        merged.update(sequences=F("sequences") - old.sequences)
    new = _offered(attempt, crossed.offer, now)
    new.status = SubStageStatus.GRANTED
    new.device, new.share, new.slot, new.reason = old.device, old.share, old.slot, old.reason
    new.action_id = f"cross:{attempt.pk}/{new.node}"
    new.granted_at = old.ended_at
    new.save(force_insert=True)
    last = None if company is None else company.hand_over(old, new, old.ended_at)
    if company is not None and last is not None:
        company.divide({new.pk: Terms(old.share, last.speed, last.reason)}, [new])
    return Crossing(new, was_leaving)


def _running(attempt: Attempt, node: str, now: datetime) -> tuple[SubStage | None, Company | None]:
    """The sub-stage as it is under its device's lock, and who computes there."""
    device = device_lock_under(attempt.pk, node, now)
    company = None if device is None else Company(device)
    # One that was told to leave has nothing of the device any more.
    substage = company and company.find(attempt.pk, node)
    if substage is None or substage.status not in BEGUN:
        substage = _expected(SubStageStatus.DONE, attempt.pk, node).first()
    if substage is not None:
        substage.device = device
    return substage, company


def _finish(attempt: Attempt, substage: SubStage, finished: Finished, now: datetime) -> bool:
    """False where somebody else has, meanwhile."""
    device, earliest = substage.device, substage.granted_at
    if device is not None:
        earliest = max(earliest, device.metered_until)
    started = min(max(_utc(finished.started_at), earliest), max(now, earliest))
    substage.started_at = started
    substage.ended_at = min(max(_utc(finished.ended_at), started), max(now, earliest))
    substage.tokens, substage.forwards = finished.tokens, finished.forwards
    substage.status = SubStageStatus.DONE
    changes = [
        started,
        substage.ended_at,
        substage.tokens,
        substage.forwards,
        substage.moves_to,
        substage.pk,
    ]
    with connection.cursor() as cursor:
        cursor.execute(FINISH, changes)
        if not cursor.rowcount:
            return False
    event_add(job=attempt.job, type=Event.Type.SUBSTAGE, data=substage_row(substage))
    return True


def substage_row(substage: SubStage) -> dict[str, object]:
    """What a timeline shows of a sub-stage."""
    return {
        "node": substage.node,
        "kind": substage.kind,
        "step": substage.step,
        "worker": substage.worker,
        "device": substage.device.name if substage.device else None,
        "share": substage.share,
        "started_at": substage.started_at.timestamp(),
        "ended_at": substage.ended_at.timestamp(),
        "tokens": substage.tokens,
        "moves_to": substage.moves_to,
    }


@transaction.atomic(savepoint=False)
def substages_lose(*, attempt: Attempt, now: datetime) -> int:
    """The attempt is over: what it had offered or begun will not be reported, and frees its devices."""
    Job.objects.select_for_update(no_key=True).only("pk").get(pk=attempt.job_id)
    lost = list(
        SubStage.objects.filter(attempt=attempt, status__in=substage_before(SubStageStatus.LOST)).order_by(
            "pk"
        )
    )
    used = sorted({s.device_id for s in lost if s.device_id is not None})
    companies = [Company(device_lock(pk, now)) for pk in used]
    SubStage.objects.filter(pk__in=[s.pk for s in lost]).update(status=SubStageStatus.LOST)
    for company in companies:
        company.leave(lost)
        company.divide({})
    return len(lost)


def _expected(new: SubStageStatus, attempt_id: int, node: str) -> QuerySet[SubStage]:
    """The sub-stage, if it may become ``new``."""
    return SubStage.objects.filter(attempt_id=attempt_id, node=node, status__in=substage_before(new))


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
