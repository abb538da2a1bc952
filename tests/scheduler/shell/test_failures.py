"""What goes wrong is one attempt's, or the daemon's own; nothing hangs and nobody else pays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from backend.jobs.models import Attempt, Job
from backend.jobs.services import job_cancel
from backend.jobs.states import AttemptStatus, JobStatus, Reason
from backend.metering.models import UsageRecord
from backend.pool.models import Device, Node, Placement
from backend.pool.services import node_seen
from scheduler.core.state import POLICIES
from scheduler.shell import daemon as daemon_module
from scheduler.shell.cluster import ClusterSilent
from scheduler.shell.commit import commit
from scheduler.shell.decide import decide as decided
from scheduler.shell.facts import Lore
from scheduler.shell.inventory import devices_of
from scheduler.shell.observe import observe
from tests import factories
from tests.scheduler.shell.fake import FakeCluster, FakePipeline
from tests.scheduler.shell.test_daemon import drive, ended, in_database, leading, reload
from workers.launch import NodeSeen
from workers.protocol import Ended, Log, Order, Report

#: What decisions of these tests remember.
LORE = Lore()

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def job(tmp_path) -> Job:
    return factories.job(factories.organization(), tmp_path, rl={"steps": 3})


def nodes(*names: str, cpus: int = 1) -> list[NodeSeen]:
    return [NodeSeen(name, name.ljust(56, "f"), "127.0.0.1", cpus, 0, "", 8 << 30) for name in names]


class Gate:
    """Lets a story stop every pipeline at a step, and go on."""

    def __init__(self, step: int, attempt: int = 1) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._step, self._attempt = step, attempt

    async def __call__(self, pipeline: FakePipeline, step: int) -> None:
        if (step, pipeline.launch.attempt) == (self._step, self._attempt):
            self.reached.set()
            await self.go.wait()


def test_a_broken_database_connection_costs_no_attempt(job, monkeypatch):
    """The server ends the daemon's connection while a report is applied; it is applied on the next."""
    real, broken = daemon_module.reports_apply, []

    def fragile(reports: Sequence[Report], lore: Lore):
        if not broken and isinstance(reports[0].body, Log):
            broken.append(reports)
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return real(reports, lore)

    monkeypatch.setattr(daemon_module, "reports_apply", fragile)
    cluster = FakeCluster()

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert len(broken) == 1
    assert reload(job).status == JobStatus.SUCCEEDED
    assert job.attempts.count() == 1


def test_a_report_that_cannot_be_applied_ends_its_attempt_only(job, monkeypatch, tmp_path):
    other = factories.job(factories.organization(), tmp_path / "other", rl={"steps": 3})
    real = daemon_module.reports_apply

    def picky(reports: Sequence[Report], lore: Lore):
        attempt = Attempt.objects.get(pk=reports[0].attempt_id)
        if attempt.job_id == job.pk:
            raise ValueError("a row that no table takes, from /srv/secret")
        return real(reports, lore)

    monkeypatch.setattr(daemon_module, "reports_apply", picky)
    cluster = FakeCluster()

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 4)

    drive(story)
    assert reload(other).status == JobStatus.SUCCEEDED
    assert reload(job).status == JobStatus.FAILED
    assert job.attempts.count() == 3
    assert "/srv" not in job.detail


def test_a_job_whose_settings_are_not_understood_stops_nobody_else(job, tmp_path):
    strange = factories.job(factories.organization(), tmp_path / "strange", rl={"steps": 3})
    Job.objects.filter(pk=strange.pk).update(spec={**strange.spec, "from_the_future": 1})
    cluster = FakeCluster()

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.SUCCEEDED
    assert reload(strange).status == JobStatus.FAILED
    assert (strange.reason, strange.attempts.count()) == (Reason.INTERNAL, 0)


def test_an_attempt_that_holds_a_lost_node_is_lost_and_frees_the_rest(monkeypatch, tmp_path):
    """It computes nothing at that moment, so that nothing but the missing node can tell."""
    monkeypatch.setattr(daemon_module, "NODES_EVERY_S", 0.01)
    job = factories.job(factories.organization(), tmp_path, rl={"steps": 3, "devices": 2})
    pool = nodes("n1", "n2")

    class TwoNodes(FakeCluster):
        async def nodes(self) -> list[NodeSeen]:
            return list(pool)

    async def story() -> None:
        gate = Gate(1)
        cluster = TwoNodes(before_step=gate)
        async with leading(cluster):
            await gate.reached.wait()
            while await in_database(open_holds().exists)():
                await asyncio.sleep(0)
            await in_database(hold_both)(job)
            pool.pop()
            await ended(cluster, 1)

    drive(story)
    assert job.attempts.first().status == AttemptStatus.LOST
    assert not open_holds().exists()
    assert reload(job).status in {JobStatus.QUEUED, JobStatus.RUNNING}


def open_holds():
    return Placement.objects.filter(closed_at__isnull=True)


def hold_both(job: Job) -> None:
    for worker, device in enumerate(Device.objects.order_by("name")):
        Placement.objects.create(
            attempt=job.attempts.get(), device=device, worker=worker, opened_at=datetime.now(UTC)
        )


def test_a_grant_that_was_lost_is_sent_again(job, monkeypatch):
    class Deaf(FakePipeline):
        lost: list[Order] = []

        async def order(self, order: Order) -> None:
            if not self.lost:
                self.lost.append(order)
                raise ClusterSilent("interrupted")
            await super().order(order)

        async def reports(self, after: int) -> Sequence[Report]:
            """Silence ends at once, so that the test need not wait for it."""
            return await asyncio.wait_for(super().reports(after), 5) if self._outbox._last > after else []

    monkeypatch.setattr("tests.scheduler.shell.fake.FakePipeline", Deaf)
    cluster = FakeCluster()

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert len(Deaf.lost) == 1
    assert reload(job).status == JobStatus.SUCCEEDED
    assert job.attempts.count() == 1


def test_success_that_comes_after_the_cancel_is_a_cancelled_attempt(job):
    actor = factories.actor(job.organization)

    class Quick(FakePipeline):
        async def stop(self, stop) -> None:
            """Too late: the last step was done."""
            self._outbox.add(Ended(outcome="succeeded"))

    async def story() -> None:
        gate = Gate(1)
        cluster = FakeCluster(before_step=gate)
        cluster_start = cluster.start

        async def start(order):
            made = await cluster_start(order)
            made.__class__ = Quick
            return made

        cluster.start = start
        async with leading(cluster):
            await gate.reached.wait()
            await in_database(job_cancel)(actor=actor, job=await in_database(reload)(job))
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.CANCELLED
    assert job.attempts.get().status == AttemptStatus.CANCELLED


def test_a_cancelled_job_pays_for_what_ran_even_if_it_had_to_be_killed(job, monkeypatch):
    monkeypatch.setattr(daemon_module, "STOP_LIMIT_S", 0.01)
    actor = factories.actor(job.organization)

    async def story() -> None:
        gate = Gate(2)
        cluster = FakeCluster(before_step=gate)
        async with leading(cluster):
            await gate.reached.wait()
            for pipeline in cluster.pipelines.values():
                pipeline.deaf = True
            await in_database(job_cancel)(actor=actor, job=await in_database(reload)(job))
            await ended(cluster, 1)
            while await in_database(Attempt.objects.filter(status=AttemptStatus.STOPPING).exists)():
                await asyncio.sleep(0)

    drive(story)
    assert job.attempts.get().status == AttemptStatus.LOST
    assert not UsageRecord.objects.filter(entry="credit").exists()


def test_what_is_loaded_without_a_row_is_unloaded_at_the_start(job):
    """A daemon died between the decision to evict and the deed."""
    cluster = FakeCluster()
    cluster.loaded.add(("local/cpu0", "forgotten"))

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert cluster.evicted == [("local/cpu0", "forgotten")]


def test_a_hold_that_an_ended_attempt_left_is_closed_at_the_start(job, tmp_path):
    register(cpus=1)
    over = factories.attempt(factories.job(factories.organization(), tmp_path / "x"), AttemptStatus.LOST)
    Placement.objects.create(attempt=over, device=Device.objects.get(), worker=0, opened_at=datetime.now(UTC))
    cluster = FakeCluster(cpus=1)

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, 1)

    drive(story)
    assert reload(job).status == JobStatus.SUCCEEDED


def test_a_lost_attempt_is_not_tried_again_at_once(job):
    now = datetime.now(UTC)
    register(cpus=1)
    Job.objects.filter(pk=job.pk).update(retry_at=now.replace(year=now.year + 1))
    assert observe(now).snapshot.queue == ()
    later = observe(now.replace(year=now.year + 2)).snapshot
    assert [queued.id for queued in later.queue] == [job.public_id]


def register(cpus: int) -> None:
    (node,) = nodes("local", cpus=cpus)
    seen = devices_of(node, threads_per_device=1, gpu_memory_bytes=0)
    node_seen(name=node.name, ray_node_id=node.ray_node_id, address="", devices=seen, now=datetime.now(UTC))
    assert Node.objects.count() == 1


def decide() -> int:
    """One decision on what is there; how many queries it took."""
    now, policy = datetime.now(UTC), replace(POLICIES["lookahead"], max_pipelines_per_device=1)
    with CaptureQueriesContext(connection) as queries:
        decision = decided(observe(now, lore=LORE), policy)
        commit(decision, LORE, stimulus="test", now=now)
    return len(queries)


def test_a_decision_takes_as_many_queries_for_many_waiting_jobs_as_for_few(tmp_path):
    register(cpus=1)
    of = factories.organization()
    model, file = factories.base_model(tmp_path / "model"), factories.file(of, tmp_path)
    for count in (3, 40):
        for _ in range(count):
            factories.job(of, tmp_path, model=model, training_file=file)
        decide()  # the first tells every job why it waits, the second reads what was admitted
        decide()
        Job.objects.filter(status=JobStatus.QUEUED).update(ahead=1000)
        few_or_many = decide()
        if count == 3:
            few = few_or_many
    assert few_or_many == few
    assert decide() < few
    waiting = Job.objects.filter(status=JobStatus.QUEUED).order_by("id")
    assert list(waiting.values_list("ahead", flat=True)) == sorted(waiting.values_list("ahead", flat=True))
