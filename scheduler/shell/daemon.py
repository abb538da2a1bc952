"""The scheduler daemon: observe, plan, commit, drive; woken by doorbells and by reports.

    doorbell (LISTEN) ─┐
    reports ───────────┼─► wake ─► tick (one database thread): observe ─► plan ─► commit ─► orders ─► drive
    nodes changed ─────┘

One task decides; one task per attempt follows its pipeline and applies what it reports. Both use the
database through one thread, so that no two passes of this process interleave. Nothing polls the database.
A daemon that starts anew finds detached pipelines by name and sends open grants again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import transaction

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus
from backend.pool import selectors
from backend.pool.models import Node
from backend.pool.services import node_gone, node_seen
from backend.pool.states import SubStageStatus
from scheduler.core.invariants import check_plan
from scheduler.core.plan import plan
from scheduler.core.state import Policy
from scheduler.shell.cluster import Cluster, PipelineGone, PipelineLink
from scheduler.shell.commit import commit
from scheduler.shell.inventory import devices_of
from scheduler.shell.leader import Leadership
from scheduler.shell.observe import observe
from scheduler.shell.orders import (
    EvictOrder,
    GrantOrder,
    LaunchOrder,
    Order,
    StopOrder,
    grant_order,
    launch_order,
    run_key,
    stop_order,
)
from scheduler.shell.reports import attempt_lost, report_apply
from workers.launch import NodeSeen
from workers.protocol import Ended, Failure, FailureKind

log = logging.getLogger(__name__)

NODES_EVERY_S = 5.0
#: A pipeline answers every half minute even when it has nothing to say.
SILENT_LIMIT_S = 180.0
STOP_LIMIT_S = 30.0

T = TypeVar("T")


class Daemon:
    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self._cluster = cluster
        self._policy = policy
        self._links: dict[int, PipelineLink] = {}
        self._followers: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[int] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._stimulus = "start"
        self._nodes: list[NodeSeen] | None = None

    async def run(self, leadership: Leadership, ready: Callable[[], None]) -> None:
        """Lead until cancelled. Pipelines go on without the daemon."""
        await self._look_at_nodes()
        await self._recover()
        ready()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(leadership))
                group.create_task(self._watch_nodes())
                group.create_task(self._decide())
        finally:
            for task in [*self._followers.values(), *self._chores]:
                task.cancel()

    def wake(self, stimulus: str) -> None:
        self._stimulus = stimulus
        self._woken.set()

    async def _listen(self, leadership: Leadership) -> None:
        async for why in leadership.rings():
            self.wake(why)
        raise ConnectionError("the database connection that holds the leader's lock is gone")

    async def _decide(self) -> None:
        self._woken.set()
        while True:
            await self._woken.wait()
            self._woken.clear()
            for order in await _in_database(self._tick, self._stimulus):
                self._drive(order)

    def _tick(self, stimulus: str) -> list[Order]:
        now = datetime.now(UTC)
        snapshot = observe(now)
        decided = plan(snapshot, self._policy)
        broken = check_plan(snapshot, decided)
        if broken:
            log.error("plan not carried out, it breaks: %s; snapshot: %r", broken, snapshot)
            return []
        orders = commit(decided, stimulus=stimulus, now=now)
        stopping = selectors.live_attempts().filter(status=AttemptStatus.STOPPING)
        return orders + [stop_order(attempt) for attempt in stopping]

    # ------------------------------------------------------------ drive

    def _drive(self, order: Order) -> None:
        match order:
            case LaunchOrder(launch=launch):
                self._follow(launch.attempt_id, self._cluster.start(launch))
            case GrantOrder(attempt_id=attempt_id, grant=grant):
                if attempt_id in self._links:
                    self._chore(_unless_gone(self._links[attempt_id].grant(grant)))
            case StopOrder(attempt_id=attempt_id) if attempt_id not in self._stopping:
                self._stopping.add(attempt_id)
                self._chore(self._stop(order))
            case EvictOrder(device=device, weights_key=weights_key):
                self._cluster.evict(device, weights_key)

    def _chore(self, work) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an order failed", exc_info=task.exception())

    async def _stop(self, order: StopOrder) -> None:
        """Ask the pipeline to stop; kill it when it does not."""
        follower = self._followers.get(order.attempt_id)
        if follower is None:
            return
        link = self._links[order.attempt_id]
        with suppress(TimeoutError, PipelineGone):
            await asyncio.wait_for(link.stop(order.stop), STOP_LIMIT_S)
        _, pending = await asyncio.wait({follower}, timeout=STOP_LIMIT_S)
        if pending:
            log.warning("pipeline of attempt %s does not stop; killing it", order.attempt_id)
            self._cluster.kill(order.attempt_id)

    # ------------------------------------------------------------ reports

    def _follow(self, attempt_id: int, link: PipelineLink) -> None:
        if attempt_id in self._followers:
            return
        self._links[attempt_id] = link
        task = asyncio.create_task(self._follow_until_over(attempt_id, link))
        self._followers[attempt_id] = task
        task.add_done_callback(lambda done: self._forget(attempt_id, done))

    def _forget(self, attempt_id: int, task: asyncio.Task[None]) -> None:
        self._links.pop(attempt_id, None)
        self._followers.pop(attempt_id, None)
        self._stopping.discard(attempt_id)
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt %s is no longer followed", attempt_id, exc_info=task.exception())
            self._chore(
                self._lose(attempt_id, Failure(kind=FailureKind.INTERNAL, message=str(task.exception())))
            )
        self.wake(f"attempt {attempt_id} over")

    async def _follow_until_over(self, attempt_id: int, link: PipelineLink) -> None:
        after = await _in_database(_last_report, attempt_id)
        over = False
        while not over:
            try:
                reports = await asyncio.wait_for(link.reports(after), SILENT_LIMIT_S)
            except PipelineGone as error:
                message = f"the pipeline's process died: {error}"
                await self._lose(attempt_id, Failure(kind=FailureKind.WORKER_LOST, message=message))
                return
            except TimeoutError:
                message = f"the pipeline gave no sign of life for {SILENT_LIMIT_S:.0f} s"
                await self._lose(attempt_id, Failure(kind=FailureKind.WORKER_LOST, message=message))
                return
            for report in reports:
                await _in_database(report_apply, report)
                after = report.seq
                over = over or isinstance(report.body, Ended)
            if reports:
                self.wake(f"report {attempt_id}/{after}")
        self._cluster.kill(attempt_id)

    async def _lose(self, attempt_id: int, failure: Failure) -> None:
        """Close an attempt whose pipeline is gone, and stop what residents still compute for it."""
        self._cluster.kill(attempt_id)
        attempt = await _in_database(_close_lost, attempt_id, failure)
        for device in attempt.home:
            self._cluster.release(device, attempt.job.weights_key, run_key(attempt))
        self.wake(f"attempt {attempt_id} lost")

    # ------------------------------------------------------------ start and nodes

    async def _recover(self) -> None:
        """Find what an earlier daemon left running, and send what it may not have sent."""
        for attempt in await _in_database(_live_attempts):
            link = self._cluster.find(attempt.pk)
            if link is not None:
                self._follow(attempt.pk, link)
            elif attempt.status == AttemptStatus.STARTING:
                order = await _in_database(launch_order, attempt)
                self._drive(order)
            else:
                gone = "the pipeline was gone when the scheduler started"
                await self._lose(attempt.pk, Failure(kind=FailureKind.WORKER_LOST, message=gone))
        for order in await _in_database(_open_grants):
            self._drive(order)

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(NODES_EVERY_S)
            await self._look_at_nodes()

    async def _look_at_nodes(self) -> None:
        nodes = await asyncio.to_thread(self._cluster.nodes)
        if nodes != self._nodes:
            await _in_database(_register, nodes)
            self._nodes = nodes
            self.wake("nodes changed")


async def _in_database(work: Callable[..., T], *args: object) -> T:
    """Run ORM work in the process's one database thread."""
    return await sync_to_async(work, thread_sensitive=True)(*args)


async def _unless_gone(call) -> None:
    """A pipeline that is gone is noticed by its follower."""
    with suppress(PipelineGone):
        await call


def _last_report(attempt_id: int) -> int:
    return Attempt.objects.values_list("report_seq", flat=True).get(pk=attempt_id)


def _close_lost(attempt_id: int, failure: Failure) -> Attempt:
    attempt_lost(attempt_id=attempt_id, failure=failure, stimulus=f"attempt {attempt_id} gone")
    return Attempt.objects.select_related("job").get(pk=attempt_id)


def _live_attempts() -> list[Attempt]:
    return list(selectors.live_attempts())


def _open_grants() -> list[Order]:
    granted = selectors.open_substages().filter(status=SubStageStatus.GRANTED)
    return [grant_order(row) for row in granted]


@transaction.atomic
def _register(nodes: list[NodeSeen]) -> None:
    now = datetime.now(UTC)
    for node in nodes:
        node_seen(
            name=node.name,
            ray_node_id=node.ray_node_id,
            address=node.address,
            devices=devices_of(
                node,
                threads_per_device=settings.CPU_DEVICE_THREADS,
                gpu_memory_bytes=settings.GPU_MEMORY_BYTES,
            ),
            now=now,
        )
    for row in Node.objects.filter(alive=True).exclude(name__in=[node.name for node in nodes]):
        node_gone(node=row)
