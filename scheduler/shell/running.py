"""What starts, changes, makes room and moves on devices: one plan's, written in one transaction.

The attempts concerned are locked first, and what the plan read is compared with what is there. An action that
lost its race is dropped, and with it what depended on it: all that starts or grows on its device, and the
rest of a gang that would no longer be whole. What is written never gives away more than a whole device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isclose

from django.db import transaction

from backend.jobs.models import Attempt, Job
from backend.pool import reads
from backend.pool.allotments import Terms, device_allot
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.services import decision_add, resident_use
from backend.pool.states import DeviceState, SubStageStatus
from backend.pool.substages import substage_grant, substage_leave
from scheduler.core.board import Board
from scheduler.core.rates import slot_of
from scheduler.core.state import (
    Action,
    Kind,
    Merge,
    Resize,
    Start,
    Wait,
    Yield,
)
from scheduler.shell.decide import Decision
from scheduler.shell.facts import Lore
from scheduler.shell.observe import Key
from scheduler.shell.orders import PipelineOrder, grant_order, leave_order, resize_orders

Run = Start | Resize | Yield | Merge | Wait

#: Speeds that differ by less are not worth a new row.
SAME_SPEED = 0.02
#: Who uses weights is written down no more often than this.
USED_EVERY = timedelta(seconds=10)
#: Why a job waits that waits on purpose.
CHOSEN = "chosen"
ROUNDING = 1e-6


class LostRace(Exception):
    """Somebody was faster where nobody should be; nothing of the plan is written."""


@transaction.atomic
def run(
    decision: Decision, dropped: Collection[Action], lore: Lore, *, stimulus: str, now: datetime
) -> tuple[list[PipelineOrder], set[str]]:
    """Write what runs; the orders that follow, and the devices on which an action was lost. ``dropped`` were
    before. Raises ``LostRace``.
    """
    wanted = [action for action in decision.plan.actions if isinstance(action, Run)]
    there = _There(wanted, decision, lore)
    lost = there.losing(wanted, dropped)
    if lost or dropped:
        decision = decision.without([*lost, *dropped])
    actions = [action for action in decision.plan.actions if isinstance(action, Run)]
    there.allot(decision, actions, now)
    granted = there.grant(decision, actions, now)
    leavers = [leaver for action in actions for leaver in there.leave(action, stimulus, now)]
    there.settle_merges(decision, actions, now)
    there.wait(actions, stimulus, now)
    resized = {there.pk(a.pipeline, a.node) for a in actions if isinstance(a, Resize)}
    resized -= {substage.pk for substage in granted}
    resizes = resize_orders(resized) if resized else []
    orders = [*map(leave_order, leavers), *resizes, *map(grant_order, granted)]
    return orders, {name for action in lost for name in there.devices(action)}


def survivors(
    actions: Sequence[Run], lost: set[int], devices: Mapping[Key, str], gangs: Mapping[Key, str]
) -> set[int]:
    """Places of the actions to be dropped when those in ``lost`` are: what starts or grows on the same
    devices, and who would start with one of those.
    """
    while True:
        upset = {name for place in lost for name in _devices(actions[place], devices)}
        broken = {_gang(actions[place], gangs) for place in lost if isinstance(actions[place], Start)}
        more = {
            place
            for place, action in enumerate(actions)
            if isinstance(action, Start | Resize)
            and (not upset.isdisjoint(_devices(action, devices)) or _gang(action, gangs) in broken)
        }
        if more <= lost:
            return lost
        lost = lost | more


def _gang(action: Run, gangs: Mapping[Key, str]) -> tuple[int, str] | Key:
    """What starts as a whole: the node alone where it has no gang."""
    if not isinstance(action, Start):
        return action.pipeline, ""
    gang = gangs.get((action.pipeline, action.node), "")
    return action.pipeline, gang or action.node


def _devices(action: Run, devices: Mapping[Key, str]) -> set[str]:
    if isinstance(action, Start):
        return {action.device} if action.device is not None else set()
    return {devices[key] for key in _keys(action) if key in devices}


def _keys(action: Run) -> list[Key]:
    match action:
        case Start() | Resize() | Yield():
            return [(action.pipeline, action.node)]
        case Merge():
            return [(action.pipeline, node) for node in (action.target, *action.sources)]
        case Wait():
            return []


class _There:
    """The rows that the actions are about, locked by their attempts."""

    def __init__(self, actions: Sequence[Run], decision: Decision, lore: Lore) -> None:
        self._world = decision.world
        self._lore = lore
        ids = {action.pipeline for action in actions}
        self._attempts = {attempt.pk: attempt for attempt in reads.running_attempts_locked(ids)}
        self._rows = reads.substages([self._world.rows[key] for action in actions for key in _keys(action)])
        self._devices = {device.name: device for device in lore.pool_now().devices}
        self._by_key = {device.pk: device for device in self._devices.values()}
        names = {a.device for a in actions if isinstance(a, Start) and a.device is not None}
        lost = Device.objects.filter(name__in=names, state=DeviceState.LOST) if names else ()
        self._lost = {device.name for device in lost}
        nodes = self._world.snapshot.nodes
        self._places = {(n.pipeline, n.id): n.device for n in nodes if n.device is not None}
        self._starting = {(a.pipeline, a.node): a.device for a in actions if isinstance(a, Start)}
        self._places |= {key: name for key, name in self._starting.items() if name is not None}
        self._gangs = {(n.pipeline, n.id): n.gang for n in nodes if n.gang}

    def pk(self, pipeline: int, node: str) -> int:
        return self._world.rows[pipeline, node]

    def devices(self, action: Run) -> set[str]:
        return _devices(action, self._places)

    def losing(self, actions: Sequence[Run], dropped: Collection[Action]) -> list[Run]:
        """Those that cannot be done any more."""
        lost = {place for place, a in enumerate(actions) if a in dropped or not self._possible(a)}
        gone = survivors(actions, lost, self._places, self._gangs) if lost else lost
        return [actions[place] for place in sorted(gone)]

    def _possible(self, action: Run) -> bool:
        if action.pipeline not in self._attempts:
            return False
        there = self._devices.keys() - self._lost
        if isinstance(action, Start) and action.device is not None and action.device not in there:
            return False
        return all(self._as_seen(key) for key in _keys(action))

    def _as_seen(self, key: Key) -> bool:
        """Whether it still runs, or waits if this plan starts it."""
        row = self._rows.get(self._world.rows[key])
        expected = SubStageStatus.READY if key in self._starting else SubStageStatus.GRANTED
        return row is not None and row.status == expected

    # ------------------------------------------------------------ who goes

    def leave(self, action: Run, stimulus: str, now: datetime) -> list[SubStage]:
        if isinstance(action, Yield):
            return [self._leave(action, action.node, "", stimulus, now)]
        if isinstance(action, Merge):
            target = self._rows[self.pk(action.pipeline, action.target)].node
            return [self._leave(action, source, target, stimulus, now) for source in action.sources]
        return []

    def _leave(
        self, action: Yield | Merge, node: str, moves_to: str, stimulus: str, now: datetime
    ) -> SubStage:
        row = self._rows[self.pk(action.pipeline, node)]
        if not substage_leave(attempt_id=row.attempt_id, node=row.node, moves_to=moves_to, now=now):
            raise LostRace(f"{row.node} of attempt {row.attempt_id} changed meanwhile")
        row.moves_to = moves_to
        decision_add(
            kind="merge" if moves_to else "yield",
            reason=action.reason,
            stimulus=stimulus,
            now=now,
            job_id=row.job_id,
            attempt_id=row.attempt_id,
            device=self._by_key.get(row.device_id),
        )
        return row

    def settle_merges(self, decision: Decision, actions: Sequence[Run], now: datetime) -> None:
        """Let the targets' rows say what is left once all sequences are there."""
        for action in actions:
            if not isinstance(action, Merge):
                continue
            merged = decision.after.nodes[action.pipeline][action.target]
            known = self._world.running.get((action.pipeline, action.target))
            row = self._rows[self.pk(action.pipeline, action.target)]
            if merged.segment is None or known is None:
                continue
            profile = self._world.profiles[action.pipeline]
            whole = profile.predicted("rollout", row.part, merged.segment.batch).seconds
            done = known.done + max(0.0, (now - known.since).total_seconds()) * known.speed
            SubStage.objects.filter(pk=row.pk).update(
                left=(merged.left + done) / whole, cached_tokens=merged.tokens
            )

    # ------------------------------------------------------------ who stays and who comes

    def allot(self, decision: Decision, actions: Sequence[Run], now: datetime) -> None:
        """New shares and speeds of those who run on, before anybody new begins."""
        reasons = {(a.pipeline, a.node): a.reason for a in actions if isinstance(a, Resize)}
        for name in sorted(self._concerned(decision.after, decision.devices, actions)):
            terms: dict[int, Terms] = {}
            for key, node in decision.after.running.get(name, {}).items():
                known = self._world.running.get(key)
                if known is None:
                    continue
                speed = decision.after.speed.get(key, 1.0)
                same = isclose(speed, known.speed, rel_tol=SAME_SPEED)
                if abs(node.share - known.share) > ROUNDING or not same:
                    terms[known.pk] = Terms(node.share, speed, reasons.get(key, known.reason))
            if terms:
                device_allot(device_id=self._devices[name].pk, terms=terms, now=now)

    def _concerned(self, after: Board, looked_at: Collection[str], actions: Sequence[Run]) -> set[str]:
        """Devices where somebody's speed may be new: those looked at, and where the rest of a gang is."""
        names = set(looked_at) | {name for a in actions for name in _devices(a, self._places)}
        mates = {
            after.nodes[pipeline][id].device
            for name in names
            for key in after.running.get(name, ())
            for pipeline, id in after.gang(key)
        }
        return (names | {name for name in mates if name is not None}) & self._devices.keys()

    def grant(self, decision: Decision, actions: Sequence[Run], now: datetime) -> list[SubStage]:
        starts = [action for action in actions if isinstance(action, Start)]
        for action in starts:
            self._grant(action, decision, now)
        if not starts:
            return []
        ids = {action.pipeline for action in starts}
        waited = ids & {id for id, _ in self._world.snapshot.waits}
        if waited:
            Attempt.objects.filter(pk__in=waited).update(wait_until=None)
        said = [self._attempts[id].job_id for id in ids if self._world.told[id][0]]
        if said:
            Job.objects.filter(pk__in=said).update(wait_code="", wait_text="", ahead=0)
        rows = [self._rows[self.pk(action.pipeline, action.node)] for action in starts]
        return [row for row in rows if row.device is not None]

    def _grant(self, action: Start, decision: Decision, now: datetime) -> None:
        row = self._rows[self.pk(action.pipeline, action.node)]
        # Changed, or gone to another, by what follows in the same plan.
        node = decision.after.nodes[action.pipeline].get(action.node)
        pipeline = decision.after.pipelines[action.pipeline]
        device = self._devices[action.device] if action.device is not None else None
        share = node.share if node is not None and device is not None else action.share
        action_id = f"start:{action.node}"
        granted = substage_grant(
            attempt_id=row.attempt_id,
            node=row.node,
            device=device,
            share=share,
            slot=":".join(slot_of(pipeline.id, pipeline.weights_key, pipeline.fusible, Kind(row.kind))),
            speed=decision.after.speed.get((action.pipeline, action.node), 1.0),
            reason=action.reason,
            action_id=action_id,
            now=now,
        )
        if not granted:
            raise LostRace(f"{row.node} of attempt {row.attempt_id} changed meanwhile")
        row.device, row.share, row.action_id = device, share, action_id
        if device is not None:
            self._use(device, self._attempts[action.pipeline].job, now)

    def _use(self, device: Device, job: Job, now: datetime) -> None:
        """Its weights get loaded there; once they are, the row is kept fresh enough to tell who is idle."""
        before = now - USED_EVERY
        for resident in self._world.snapshot.residents:
            if (resident.device, resident.weights_key) == (device.name, job.weights_key):
                if datetime.fromtimestamp(resident.last_used, UTC) >= before:
                    return
                break
        resident_use(device=device, weights_key=job.weights_key, weights_bytes=job.weights_bytes, now=now)
        self._lore.pool = None

    def wait(self, actions: Sequence[Run], stimulus: str, now: datetime) -> None:
        for action in actions:
            if not isinstance(action, Wait):
                continue
            attempt = self._attempts[action.pipeline]
            until = datetime.fromtimestamp(action.until, UTC)
            Attempt.objects.filter(pk=attempt.pk).update(wait_until=until)
            Job.objects.filter(pk=attempt.job_id).update(wait_code=CHOSEN, wait_text=action.reason[:300])
            decision_add(
                kind="wait",
                reason=action.reason,
                stimulus=stimulus,
                now=now,
                job_id=attempt.job_id,
                attempt_id=attempt.pk,
            )


def rebalance(device: Device, now: datetime) -> list[int]:
    """Cut the shares on a device in proportion where they add up to more than the whole; whose changed.

    Who was told to leave may have crossed into its next sub-stage before it heard of it, and goes on beside
    those that took its place.
    """
    rows = Allotment.objects.filter(device=device, end__isnull=True).select_related("substage")
    shares = {one.substage.slot or str(one.substage_id): one.share for one in rows}
    total = sum(shares.values())
    if total <= 1 + ROUNDING:
        return []
    reason = "another went on before it heard that it should make room"
    terms = {one.substage_id: Terms(one.share / total, one.speed / total, reason) for one in rows}
    device_allot(device_id=device.pk, terms=terms, now=now)
    return list(terms)
