"""The scheduler daemon: observe, plan, commit, drive; woken by doorbells and by reports.

    doorbell (LISTEN) ─┐
    reports ───────────┼─► wake ─► tick (one database thread): observe ─► decide ─► commit ─► orders ─► drive
    nodes changed ─────┤
    a time has come ───┘

One task decides; one task per attempt follows its pipeline and applies what it reports. Both use the
database through one thread, so that no two passes of this process interleave. Nothing polls the database, and
a decision looks only at what was touched: all at the start, when nodes change and when the doorbell rings.

A failure is either one attempt's, and then that attempt is lost and says why, or the daemon's own (the
database is gone, Ray does not answer), and then the daemon ends: whoever starts it anew makes it find the
detached pipelines by name and send open orders again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connection, transaction

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus
from backend.pool import reads, selectors
from backend.pool.models import Device, Node, SubStage
from backend.pool.services import node_gone
from backend.pool.states import DeviceState
from scheduler.core.state import Policy
from scheduler.shell.alarm import Alarm, next_alarm, next_retry
from scheduler.shell.calibration import pool_look
from scheduler.shell.cluster import Cluster, ClusterSilent, PipelineGone, PipelineLink
from scheduler.shell.commit import commit
from scheduler.shell.decide import decide, multiplexes
from scheduler.shell.facts import Lore
from scheduler.shell.leader import Leadership
from scheduler.shell.observe import observe
from scheduler.shell.orders import (
    EvictOrder,
    LaunchOrder,
    Order,
    PipelineOrder,
    StopOrder,
    launch_order,
    open_orders,
    run_key,
    stop_order,
)
from scheduler.shell.reports import News, attempt_lost, holds_close, reports_apply, stopping_leave
from scheduler.shell.touch import EVERYTHING, Touch
from workers.launch import NodeSeen
from workers.protocol import Ended, Failure, FailureKind, Report

log = logging.getLogger(__name__)

NODES_EVERY_S = 5.0
#: A pipeline that is not heard of for so long is taken for dead.
SILENT_LIMIT_S = 180.0
SILENT_PAUSE_S = 1.0
#: Longer than a pipeline takes to let its residents go (``workers.fleet.CLOSE_LIMIT_S``).
STOP_LIMIT_S = 60.0
#: A report that met a broken connection or a deadlock is applied again so often, then the daemon ends.
DATABASE_TRIES = 3

T = TypeVar("T")


class Daemon:
    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self._cluster = cluster
        self._policy = policy
        self._links: dict[int, PipelineLink] = {}
        self._followers: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[int] = set()
        self._tasks: asyncio.TaskGroup
        self._lore = Lore()
        self._woken = asyncio.Event()
        self._stimuli: list[str] = []
        self._touch = Touch()
        self._retry_at: datetime | None = None
        self._alarm: tuple[asyncio.TimerHandle, Alarm] | None = None
        self._nodes: list[NodeSeen] | None = None

    async def run(self, leadership: Leadership, ready: Callable[[], None]) -> None:
        """Lead until cancelled, or until the daemon itself fails. Pipelines go on without it."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._look_at_nodes()
            await self._recover()
            ready()
            self.wake("start", EVERYTHING)
            self._tasks.create_task(self._listen(leadership))
            self._tasks.create_task(self._watch_nodes())
            self._tasks.create_task(self._decide())

    def wake(self, stimulus: str, touch: Touch) -> None:
        if stimulus not in self._stimuli:
            self._stimuli.append(stimulus)
        self._touch.add(touch)
        self._woken.set()

    async def _listen(self, leadership: Leadership) -> None:
        async for why in leadership.rings():
            self.wake(why, EVERYTHING)
        raise ConnectionError("the database connection that holds the leader's lock is gone")

    async def _decide(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            stimuli, self._stimuli = self._stimuli, []
            touch, self._touch = self._touch, Touch()
            orders, again, alarm = await _in_database(self._tick, ", ".join(stimuli), touch)
            for order in orders:
                await self._drive(order)
            if again:
                self.wake("a race was lost", again)
            self._set_alarm(alarm)

    def _tick(self, stimulus: str, touch: Touch) -> tuple[list[Order], Touch, Alarm | None]:
        """One decision: what is to be done, what must be decided again, and when the next is due."""
        now = datetime.now(UTC)
        if touch.everything:
            self._lore.refresh()
        queue = touch.everything or touch.admission or not multiplexes(self._policy)
        if queue:
            self._retry_at = next_retry(now)
        attempts = reads.live_attempts()
        stopping = [attempt for attempt in attempts if attempt.status == AttemptStatus.STOPPING]
        stopping_leave(stopping, now)
        world = observe(now, lore=self._lore, attempts=attempts, queue=queue)
        decision = decide(world, self._policy, touch)
        orders, again = commit(decision, self._lore, stimulus=stimulus, now=now)
        return [*map(stop_order, stopping), *orders], again, next_alarm(decision, self._retry_at, now)

    def _set_alarm(self, alarm: Alarm | None) -> None:
        loop = asyncio.get_running_loop()
        if self._alarm is not None:
            timer, due = self._alarm
            timer.cancel()
            if timer.when() <= loop.time():
                self._ring(due)
        self._alarm = None if alarm is None else (loop.call_later(alarm.in_s, self._ring, alarm), alarm)

    def _ring(self, alarm: Alarm) -> None:
        self._alarm = None
        self.wake(alarm.why, alarm.touch)

    # ------------------------------------------------------------ drive

    async def _drive(self, order: Order) -> None:
        match order:
            case LaunchOrder(launch=launch):
                self._follow(launch.attempt_id, await self._cluster.start(launch))
            case PipelineOrder(attempt_id=attempt_id):
                if attempt_id in self._links:
                    self._tasks.create_task(self._tell(order, self._links[attempt_id]))
            case StopOrder(attempt_id=attempt_id) if attempt_id not in self._stopping:
                self._stopping.add(attempt_id)
                self._tasks.create_task(self._stop(order))
            case EvictOrder(device=device, weights_key=weights_key):
                await self._cluster.evict(device, weights_key)

    async def _tell(self, order: PipelineOrder, link: PipelineLink) -> None:
        """A pipeline that is gone is noticed by its follower; an order that was lost is sent again by it."""
        with suppress(PipelineGone, ClusterSilent):
            await link.order(order.order)

    async def _stop(self, order: StopOrder) -> None:
        """Ask the pipeline to stop; kill it when it does not."""
        follower = self._followers.get(order.attempt_id)
        if follower is None:
            return
        with suppress(PipelineGone, ClusterSilent):
            await self._links[order.attempt_id].stop(order.stop)
        _, pending = await asyncio.wait({follower}, timeout=STOP_LIMIT_S)
        if pending:
            log.warning("pipeline of attempt %s does not stop; killing it", order.attempt_id)
            await self._cluster.kill(order.attempt_id)

    # ------------------------------------------------------------ reports

    def _follow(self, attempt_id: int, link: PipelineLink) -> None:
        if attempt_id not in self._followers:
            self._links[attempt_id] = link
            self._followers[attempt_id] = self._tasks.create_task(self._follow_to_the_end(attempt_id, link))

    async def _follow_to_the_end(self, attempt_id: int, link: PipelineLink) -> None:
        try:
            failure = await self._hear(attempt_id, link)
            if failure is None:
                await self._cluster.kill(attempt_id)
            else:
                await self._lose(attempt_id, failure)
        finally:
            self._links.pop(attempt_id, None)
            self._followers.pop(attempt_id, None)
            self._stopping.discard(attempt_id)
        self.wake(f"attempt {attempt_id} over", EVERYTHING)

    async def _hear(self, attempt_id: int, link: PipelineLink) -> Failure | None:
        """Apply reports until the attempt is over by its own word (None), or is lost."""
        after = await _in_database(_last_report, attempt_id)
        heard = asyncio.get_running_loop().time()
        while True:
            try:
                reports = await link.reports(after)
            except PipelineGone as error:
                return Failure(kind=FailureKind.WORKER_LOST, message=f"the pipeline: {error}")
            except ClusterSilent as error:
                if asyncio.get_running_loop().time() - heard > SILENT_LIMIT_S:
                    return Failure(kind=FailureKind.WORKER_LOST, message=f"the pipeline: {error}")
                await asyncio.sleep(SILENT_PAUSE_S)
                continue
            heard = asyncio.get_running_loop().time()
            if not reports:
                for order in await _in_database(open_orders, attempt_id):
                    await self._drive(order)
                continue
            news = await _in_database(_apply, reports, self._lore)
            if isinstance(news, Failure):
                return news
            after = reports[-1].seq
            if news.touch:
                self.wake(f"report {attempt_id}/{after}", news.touch)
            for order in news.orders:
                await self._drive(order)
            if isinstance(reports[-1].body, Ended):
                return None

    async def _lose(self, attempt_id: int, failure: Failure) -> None:
        """Close an attempt that says nothing more, then end its process and what residents compute for it."""
        attempt = await _in_database(_close_lost, attempt_id, failure)
        await self._cluster.kill(attempt_id)
        for device in await _in_database(_devices_used, attempt):
            await self._cluster.release(device, attempt.job.weights_key, run_key(attempt))

    # ------------------------------------------------------------ start and nodes

    async def _recover(self) -> None:
        """Find what an earlier daemon left running, and do what it may not have done."""
        await _in_database(holds_close)
        for device, weights_key in await self._cluster.residents() - await _in_database(_known_residents):
            await self._cluster.evict(device, weights_key)
        for attempt in await _in_database(_live_attempts):
            link = await self._cluster.find(attempt.pk)
            if link is not None:
                self._follow(attempt.pk, link)
            elif attempt.status == AttemptStatus.STARTING:
                await self._launch_again(attempt)
            else:
                gone = "the pipeline was gone when the scheduler started"
                await self._lose(attempt.pk, Failure(kind=FailureKind.WORKER_LOST, message=gone))
        for order in await _in_database(open_orders):
            await self._drive(order)

    async def _launch_again(self, attempt: Attempt) -> None:
        try:
            order = await _in_database(launch_order, attempt)
        except ValueError as error:
            await self._lose(attempt.pk, unexpected(error, f"attempt {attempt.pk} cannot be launched"))
        else:
            await self._drive(order)

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(NODES_EVERY_S)
            await self._look_at_nodes()

    async def _look_at_nodes(self) -> None:
        """Keep the pool's rows true; an attempt that held a device of a lost node is lost with it."""
        nodes = await self._cluster.nodes()
        if nodes == self._nodes:
            return
        bereft = await _in_database(_register, nodes)
        self._nodes = nodes
        for attempt_id in bereft:
            failure = Failure(kind=FailureKind.WORKER_LOST, message="a node of the pool is gone")
            await self._lose(attempt_id, failure)
        self.wake("nodes changed", EVERYTHING)


def unexpected(error: Exception, what: str) -> Failure:
    """Our own fault: the log gets the error, the customer a number to ask about."""
    number = uuid.uuid4().hex[:12]
    log.error("%s (error %s)", what, number, exc_info=error)
    return Failure(kind=FailureKind.INTERNAL, message=f"error {number}")


async def _in_database(work: Callable[..., T], *args: object) -> T:
    """Run ORM work in the process's one database thread."""
    return await sync_to_async(work, thread_sensitive=True)(*args)


def _last_report(attempt_id: int) -> int:
    return Attempt.objects.values_list("report_seq", flat=True).get(pk=attempt_id)


def _apply(reports: Sequence[Report], lore: Lore) -> News | Failure:
    """Apply reports that came together; a failure when one cannot be, and it is not the database's."""
    for tries_left in reversed(range(DATABASE_TRIES)):
        try:
            return reports_apply(reports, lore) or News()
        except (OperationalError, InterfaceError):
            connection.close()
            if not tries_left:
                raise
        except (DatabaseError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            if len(reports) > 1:
                return _apply_singly(reports, lore)
            what = f"report {reports[0].attempt_id}/{reports[0].seq} cannot be applied"
            return unexpected(error, what)
    raise AssertionError("the last try raises or returns")


def _apply_singly(reports: Sequence[Report], lore: Lore) -> News | Failure:
    """What came before the one that cannot be applied still counts."""
    touch, orders = Touch(), list[PipelineOrder]()
    for report in reports:
        news = _apply([report], lore)
        if isinstance(news, Failure):
            return news
        touch.add(news.touch)
        orders += news.orders
    return News(touch, orders)


def _close_lost(attempt_id: int, failure: Failure) -> Attempt:
    attempt_lost(attempt_id=attempt_id, failure=failure, stimulus=f"attempt {attempt_id} gone")
    return Attempt.objects.select_related("job").get(pk=attempt_id)


def _devices_used(attempt: Attempt) -> list[str]:
    """Where something of the attempt may be loaded: its homes, and those that it had before."""
    ran = SubStage.objects.filter(attempt=attempt, device__isnull=False).order_by("device__name")
    return sorted({*attempt.home, *ran.values_list("device__name", flat=True).distinct()})


def _bereft() -> set[int]:
    """Attempts that lost a device: one that they hold or compute on, or where their states lie between two
    sub-stages.
    """
    lost = set(Device.objects.filter(state=DeviceState.LOST).values_list("name", flat=True))
    bereft = set(selectors.attempts_on_lost_devices().values_list("pk", flat=True))
    if lost:
        at_home = [a for a in selectors.live_attempts() if not lost.isdisjoint(a.home)]
        began = SubStage.objects.filter(attempt__in=[a.pk for a in at_home], device__name__in=lost)
        bereft.update(began.values_list("attempt_id", flat=True).distinct())
    return bereft


def _live_attempts() -> list[Attempt]:
    return list(selectors.live_attempts())


def _known_residents() -> set[tuple[str, str]]:
    return {(row.device.name, row.weights_key) for row in selectors.residents()}


@transaction.atomic
def _register(nodes: list[NodeSeen]) -> list[int]:
    """Write what the cluster looks like now; ids of the attempts that held what is gone."""
    now = datetime.now(UTC)
    pool_look(nodes, now)
    for row in Node.objects.filter(alive=True).exclude(name__in=[node.name for node in nodes]):
        node_gone(node=row)
    return sorted(_bereft())
