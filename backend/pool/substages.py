"""The life of a sub-stage, from its offer to the report that it is over.

Each write names the state it expects. Where somebody was faster it returns False or None and has changed
nothing. What a sub-stage has of its device meanwhile is in ``allotments``.
"""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import transaction
from django.db.models import F, QuerySet

from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job
from backend.jobs.states import AttemptStatus
from backend.pool.allotments import (
    Terms,
    allotments_close,
    allotments_cut,
    allotments_pass,
    device_divide,
    device_lock,
    instant,
)
from backend.pool.models import Device, SubStage
from backend.pool.states import DeviceState, SubStageStatus, substage_before
from workers.protocol import Crossed, Finished, Offer


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
    at = now
    if device is not None:
        device = device_lock(device.pk)
        if device.state != DeviceState.READY:
            return False
        at = instant(device, now)
    waiting = _expected(SubStageStatus.GRANTED, attempt_id, node)
    granted = waiting.filter(attempt__status__in=[AttemptStatus.STARTING, AttemptStatus.RUNNING]).update(
        status=SubStageStatus.GRANTED,
        device=device,
        share=share,
        slot=slot,
        reason=reason[:300],
        action_id=action_id,
        granted_at=at,
    )
    if not granted:
        return False
    if device is not None:
        pk = SubStage.objects.values_list("pk", flat=True).get(attempt_id=attempt_id, node=node)
        device_divide(device, {pk: Terms(share, speed, reason)}, at)
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
    devices = {pk: device_lock(pk) for pk in sorted(concerned)}
    if not _expected(SubStageStatus.LEAVING, attempt_id, node).update(
        status=SubStageStatus.LEAVING, moves_to=moves_to
    ):
        return False
    target.update(sequences=F("sequences") + substage.sequences)
    left = devices[substage.device_id]
    allotments_close(left, [substage], instant(left, now))
    for device in devices.values():
        device_divide(device, {}, instant(device, now))
    return True


def _target(source: SubStage, node: str) -> QuerySet[SubStage]:
    """The sub-stage into which ``source`` is merged, as long as it runs."""
    return SubStage.objects.filter(attempt=source.attempt_id, node=node, status=SubStageStatus.GRANTED)


@transaction.atomic(savepoint=False)
def substage_finish(*, attempt: Attempt, finished: Finished, now: datetime) -> SubStage | None:
    """Record when a granted sub-stage ran.

    The interval is cut to [granted, now], and to what the ledger of the device has not closed yet: no clock
    of another machine can move a bill outside the time in which the device was the job's.
    """
    substage, device = _running(attempt, finished.node)
    if substage is None:
        return None
    _finish(attempt, substage, device, finished, now)
    if device is not None:
        at = instant(device, now)
        allotments_close(device, [substage], at)
        allotments_cut(substage, substage.ended_at)
        device_divide(device, {}, at)
    return substage


@transaction.atomic(savepoint=False)
def substage_cross(*, attempt: Attempt, crossed: Crossed, now: datetime) -> SubStage | None:
    """Record that a sub-stage is over and that its successor goes on in its place, without a pause.

    From the end of the one, its allotments are the other's. Where it was told to leave, and the pipeline
    crossed before it heard of it, the order is void: the successor has the same terms from now on.
    """
    old, device = _running(attempt, crossed.finished.node)
    if old is None:
        return None
    if old.moves_to:
        merged = _target(old, old.moves_to).filter(sequences__gte=old.sequences)
        merged.update(sequences=F("sequences") - old.sequences)
        old.moves_to = ""
    _finish(attempt, old, device, crossed.finished, now)
    new = _offered(attempt, crossed.offer, now)
    new.status = SubStageStatus.GRANTED
    new.device, new.share, new.slot, new.reason = device, old.share, old.slot, old.reason
    new.action_id = f"cross:{attempt.pk}/{new.node}"
    new.granted_at = old.ended_at
    new.save(force_insert=True)
    last = None if device is None else allotments_pass(device, old, new, old.ended_at)
    if device is not None and last is not None:
        device_divide(device, {new.pk: Terms(old.share, last.speed, last.reason)}, instant(device, now))
    return new


def _running(attempt: Attempt, node: str) -> tuple[SubStage | None, Device | None]:
    """The sub-stage and its device, locked after the job: in the order in which everybody locks them."""
    found = _expected(SubStageStatus.DONE, attempt.pk, node).values_list("device_id", flat=True)
    if not found:
        return None, None
    Job.objects.select_for_update(no_key=True).only("pk").get(pk=attempt.job_id)
    device = None if found[0] is None else device_lock(found[0])
    substage = _expected(SubStageStatus.DONE, attempt.pk, node).select_for_update().first()
    return substage, device


def _finish(
    attempt: Attempt, substage: SubStage, device: Device | None, finished: Finished, now: datetime
) -> None:
    earliest = substage.granted_at
    if device is not None:
        earliest = max(earliest, device.metered_until)
    started = min(max(_utc(finished.started_at), earliest), max(now, earliest))
    substage.device = device
    substage.started_at = started
    substage.ended_at = min(max(_utc(finished.ended_at), started), max(now, earliest))
    substage.tokens = finished.tokens
    substage.forwards = finished.forwards
    substage.status = SubStageStatus.DONE
    substage.save(update_fields=["started_at", "ended_at", "tokens", "forwards", "status", "moves_to"])
    event_add(job=attempt.job, type=Event.Type.SUBSTAGE, data=substage_row(substage))


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
    devices = [device_lock(pk) for pk in sorted({s.device_id for s in lost if s.device_id is not None})]
    SubStage.objects.filter(pk__in=[s.pk for s in lost]).update(status=SubStageStatus.LOST)
    for device in devices:
        at = instant(device, now)
        allotments_close(device, [s for s in lost if s.device_id == device.pk], at)
        device_divide(device, {}, at)
    return len(lost)


def _expected(new: SubStageStatus, attempt_id: int, node: str) -> QuerySet[SubStage]:
    """The sub-stage, if it may become ``new``."""
    return SubStage.objects.filter(attempt_id=attempt_id, node=node, status__in=substage_before(new))


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
