"""The daemon on real rows and a cluster that computes nothing: from a queued job to its bill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from asgiref.sync import sync_to_async
from django.db import connections

from backend.jobs import attempts
from backend.jobs.models import Attempt, Job, StepMetrics, Transition
from backend.jobs.services import job_cancel
from backend.jobs.states import AttemptStatus, JobStatus, Reason
from backend.metering.models import UsageRecord
from backend.metering.selectors import accounting
from backend.metering.services import pool_meter
from backend.pool.models import Device, Placement, SubStage
from scheduler.core.state import POLICIES, Policy
from scheduler.shell import daemon as daemon_module
from scheduler.shell.daemon import Daemon
from scheduler.shell.leader import leadership
from tests import factories
from tests.scheduler.shell.fake import SUBSTAGES, FakeCluster, FakePipeline

pytestmark = pytest.mark.django_db(transaction=True)
LIMIT_S = 30

in_database = sync_to_async


def drive(story: Callable[[], Awaitable[None]]) -> None:
    """Run an async story within a limit, and close the connection of its database thread."""

    async def told() -> None:
        try:
            await asyncio.wait_for(story(), LIMIT_S)
        except TimeoutError:
            raise AssertionError(await in_database(what_waits)()) from None
        finally:
            await in_database(connections.close_all)()

    asyncio.run(told())


def what_waits() -> str:
    """For a story that does not end: what is open, and why the rest does not run."""
    open_now = SubStage.objects.filter(status__in=["ready", "granted", "leaving"])
    rows = [f"{s.job_id} {s.node} {s.status} {s.share}" for s in open_now.order_by("job", "pk")]
    jobs = [
        f"{job.pk} {job.status} {job.steps_done} {job.wait_code} {job.wait_text}" for job in Job.objects.all()
    ]
    return "\n".join(["it does not end", *rows, *jobs])


@asynccontextmanager
async def leading(cluster: FakeCluster, policy: Policy = POLICIES["lookahead"]):
    """A daemon that leads meanwhile; if it fails, so does the story."""
    ready = asyncio.Event()

    async def lead() -> None:
        async with leadership() as lead:
            await Daemon(cluster, policy).run(lead, ready.set)

    task = asyncio.create_task(lead())
    told = asyncio.current_task()
    task.add_done_callback(lambda done: None if done.cancelled() else told.cancel())
    try:
        await ready.wait()
        yield
    finally:
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def ended(cluster: FakeCluster, count: int) -> None:
    for _ in range(count):
        await cluster.over.get()


def reload(job: Job) -> Job:
    job.refresh_from_db()
    return job


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """A lost attempt is followed by the next at once."""
    monkeypatch.setattr(attempts, "RETRY_AFTER_S", (0.0, 0.0, 0.0))


@pytest.fixture
def tenants():
    return factories.organization(), factories.organization(), factories.organization()


def test_two_tenants_run_to_the_bill_and_the_stranger_pays_nothing(tenants, tmp_path):
    one, two, stranger = tenants
    jobs = [factories.job(of, tmp_path, rl={"steps": 3}) for of in (one, two)]
    cluster = FakeCluster(cpus=2)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 2)

    drive(story)
    pool_meter(datetime.now(UTC))
    for job in jobs:
        assert reload(job).status == JobStatus.SUCCEEDED
        assert (job.steps_done, job.tokens, job.last_reward) == (3, 192, 0.5)
        assert [(t.old, t.new) for t in Transition.objects.filter(job=job, attempt__status="succeeded")] != []
        assert set(job.substages.values_list("status", flat=True)) == {"done"}
        assert job.substages.count() == 3 * SUBSTAGES
        assert not job.substages.filter(kind="grade", device__isnull=False).exists()
    totals = accounting()
    assert totals.difference_micro_usd == 0
    assert not Placement.objects.filter(closed_at__isnull=True).exists()
    assert not UsageRecord.objects.filter(organization=stranger).exists()
    for job in jobs:
        billed = sum(job.usage.values_list("micro_usd", flat=True))
        assert billed == job.cost_micro_usd
    assert Device.objects.count() == 2


def test_a_new_daemon_goes_on_where_the_old_one_stopped(tenants, tmp_path):
    job = factories.job(tenants[0], tmp_path, rl={"steps": 3})
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(pipeline: FakePipeline, step: int) -> None:
        if step == 1:
            reached.set()
            await go.wait()

    cluster = FakeCluster(before_step=hold)

    async def story() -> None:
        async with leading(cluster):
            await reached.wait()
        go.set()
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.SUCCEEDED
    assert len(cluster.launched) == 1
    assert job.substages.count() == 3 * SUBSTAGES
    assert StepMetrics.objects.filter(job=job).count() == 3


def test_a_lost_attempt_resumes_from_its_checkpoint_and_its_lost_work_is_not_billed(tenants, tmp_path):
    job = factories.job(tenants[0], tmp_path, rl={"steps": 4, "checkpoint_every": 2})

    async def die_once(pipeline: FakePipeline, step: int) -> None:
        if step == 3 and pipeline.launch.attempt == 1:
            pipeline.die()

    cluster = FakeCluster(before_step=die_once)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 2)

    drive(story)
    pool_meter(datetime.now(UTC))
    assert reload(job).status == JobStatus.SUCCEEDED
    first, second = job.attempts.order_by("number")
    assert (first.status, second.status) == (AttemptStatus.LOST, AttemptStatus.SUCCEEDED)
    assert (second.start_step, second.resume_from.step) == (2, 2)
    lost = UsageRecord.objects.filter(substage__attempt=first, substage__step__gte=2)
    assert sum(lost.filter(entry__in=["usage", "credit"]).values_list("micro_usd", flat=True)) == 0
    kept = UsageRecord.objects.filter(substage__attempt=first, substage__step__lt=2)
    assert not kept.filter(entry="credit").exists()
    assert accounting().difference_micro_usd == 0
    assert cluster.released == [f"{job.public_id}.1"]


def test_a_job_that_never_gets_further_fails_and_says_so(tenants, tmp_path):
    job = factories.job(tenants[0], tmp_path, rl={"steps": 4})

    async def die(pipeline: FakePipeline, step: int) -> None:
        pipeline.die()

    cluster = FakeCluster(before_step=die)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 3)
            await settled(job)

    drive(story)
    assert reload(job).status == JobStatus.FAILED
    assert job.reason == Reason.TOO_MANY_ATTEMPTS
    assert job.attempts.count() == 3
    assert job.cost_micro_usd == 0


async def settled(job: Job) -> None:
    """The row is written before the daemon says that the attempt is over; read it in the database thread."""
    await in_database(job.refresh_from_db)()


def test_cancelling_stops_the_pipeline_and_frees_the_device(tenants, tmp_path):
    job = factories.job(tenants[0], tmp_path, rl={"steps": 50})
    actor = factories.actor(tenants[0])
    reached = asyncio.Event()

    async def hold(pipeline: FakePipeline, step: int) -> None:
        if step == 2:
            reached.set()
            await asyncio.Event().wait()

    cluster = FakeCluster(before_step=hold)

    async def story() -> None:
        async with leading(cluster):
            await reached.wait()
            await in_database(job_cancel)(actor=actor, job=await in_database(reload)(job))
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.CANCELLED
    assert job.attempts.get().status == AttemptStatus.CANCELLED
    assert not Placement.objects.filter(closed_at__isnull=True).exists()
    assert not SubStage.objects.filter(status__in=["ready", "granted"]).exists()


def test_a_pipeline_that_does_not_stop_is_killed(tenants, tmp_path, monkeypatch):
    monkeypatch.setattr(daemon_module, "STOP_LIMIT_S", 0.01)
    job = factories.job(tenants[0], tmp_path, rl={"steps": 50})
    actor = factories.actor(tenants[0])
    reached = asyncio.Event()

    async def ignore(pipeline: FakePipeline, step: int) -> None:
        pipeline.deaf = True
        reached.set()
        await asyncio.Event().wait()

    cluster = FakeCluster(before_step=ignore)

    async def story() -> None:
        async with leading(cluster):
            await reached.wait()
            await in_database(job_cancel)(actor=actor, job=await in_database(reload)(job))
            await ended(cluster, 1)
            while await in_database(Attempt.objects.filter(status=AttemptStatus.STOPPING).exists)():
                await asyncio.sleep(0)

    drive(story)
    assert reload(job).status == JobStatus.CANCELLED
    assert job.attempts.get().status == AttemptStatus.LOST
    assert not Placement.objects.filter(closed_at__isnull=True).exists()


def test_more_jobs_than_devices_take_turns(tenants, tmp_path):
    jobs = [factories.job(of, tmp_path, rl={"steps": 4}) for of in tenants for _ in range(2)]
    cluster = FakeCluster(cpus=1)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, len(jobs))

    drive(story)
    assert {reload(job).status for job in jobs} == {JobStatus.SUCCEEDED}
    spans = SubStage.objects.filter(device__isnull=False).order_by("started_at")
    for before, after in pairwise(spans):
        assert before.ended_at <= after.started_at


def test_data_parallel_workers_hold_different_devices(tenants, tmp_path):
    job = factories.job(tenants[0], tmp_path, rl={"steps": 2, "devices": 2})
    cluster = FakeCluster(cpus=2)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.SUCCEEDED
    for step in range(2):
        used = job.substages.filter(step=step, device__isnull=False)
        assert {(s.worker, s.device.name) for s in used} == {(0, "local/cpu0"), (1, "local/cpu1")}


def test_a_job_the_pool_can_never_hold_fails_with_the_reason(tenants, tmp_path):
    job = factories.job(tenants[0], tmp_path, rl={"steps": 2, "devices": 3})
    other = factories.job(tenants[1], tmp_path, rl={"steps": 1})
    cluster = FakeCluster(cpus=2)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.FAILED
    assert job.detail == "needs 3 devices, the pool has 2"
    assert reload(other).status == JobStatus.SUCCEEDED


def test_only_one_leads_at_a_time():
    order: list[str] = []

    async def story() -> None:
        second_may_lead = asyncio.Event()

        async def second() -> None:
            async with leadership():
                order.append("second")
                second_may_lead.set()

        async with leadership():
            task = asyncio.create_task(second())
            await asyncio.sleep(0)
            order.append("first")
        await second_may_lead.wait()
        await task

    drive(story)
    assert order == ["first", "second"]
