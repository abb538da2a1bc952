"""Reports are believed once, in order, and only while their attempt lives."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from backend.jobs.models import Event, Sample, StepMetrics
from backend.jobs.states import AttemptStatus, JobStatus
from backend.pool.models import Device, Node, SubStage
from backend.pool.services import node_seen, placements_open
from backend.pool.substages import substage_grant, substage_offer
from scheduler.core.board import Board
from scheduler.core.state import Place, Plan, Policy, Start
from scheduler.shell.commit import commit
from scheduler.shell.daemon import _apply
from scheduler.shell.decide import Decision
from scheduler.shell.facts import Lore
from scheduler.shell.inventory import devices_of
from scheduler.shell.observe import observe
from scheduler.shell.reports import News, attempt_lost, reports_apply
from tests import factories
from workers.launch import NodeSeen
from workers.protocol import (
    CheckpointSaved,
    Ended,
    Failure,
    FailureKind,
    Finished,
    Offer,
    Report,
    SampleRecord,
    StepDone,
    SubStageKind,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def device() -> Device:
    node = NodeSeen("local", "f" * 56, "127.0.0.1", 1, 0, "", 8 << 30)
    seen = devices_of(node, threads_per_device=1, gpu_memory_bytes=0)
    early = datetime.now(UTC) - timedelta(minutes=1)
    node_seen(name="local", ray_node_id=node.ray_node_id, address=node.address, devices=seen, now=early)
    return Device.objects.get()


@pytest.fixture
def attempt(tmp_path):
    job = factories.job(factories.organization(), tmp_path, status=JobStatus.RUNNING, rl={"steps": 2})
    return factories.attempt(job, status=AttemptStatus.STARTING)


def say(attempt, seq: int, body) -> News | None:
    return reports_apply(batch(attempt, seq, body), Lore())


def offer(node: str = "s0.w0.update.1") -> Offer:
    return Offer(node=node, step=0, worker=0, kind=SubStageKind.UPDATE, sequences=8)


def grant(attempt, device, node: str = "s0.w0.update.1") -> datetime:
    now = datetime.now(UTC) - timedelta(seconds=10)
    assert substage_grant(
        attempt_id=attempt.pk,
        node=node,
        device=device,
        share=1.0,
        slot=f"train:{attempt.pk}",
        speed=1.0,
        reason="test",
        action_id=f"a-{node}",
        now=now,
    )
    return now


def done(step: int = 0, reward: float = 0.5) -> StepDone:
    sample = SampleRecord(
        group=0,
        index=0,
        row=3,
        prompt="p",
        completion="c",
        tokens=4,
        reward=reward,
        advantage=0.0,
        finish="stop",
    )
    return StepDone(step=step, metrics={"reward": reward, "tokens": 32.0}, samples=(sample,))


def counts() -> tuple[int, ...]:
    return tuple(model.objects.count() for model in (SubStage, StepMetrics, Sample, Event))


def test_the_first_report_starts_the_attempt(attempt):
    assert say(attempt, 1, offer())
    attempt.refresh_from_db()
    assert (attempt.status, attempt.report_seq) == (AttemptStatus.RUNNING, 1)


def test_a_repeated_report_changes_nothing(attempt, device):
    bodies = [offer(), done()]
    for seq, body in enumerate(bodies, start=1):
        assert say(attempt, seq, body)
    before = counts()
    attempt.job.refresh_from_db()
    tokens = attempt.job.tokens
    for seq, body in enumerate(bodies, start=1):
        assert not say(attempt, seq, body)
    attempt.job.refresh_from_db()
    assert counts() == before
    assert attempt.job.tokens == tokens == 32


def test_a_report_that_skips_one_waits_for_it(attempt):
    assert not say(attempt, 2, offer())
    assert say(attempt, 1, offer())


def batch(attempt, first: int, *bodies) -> list[Report]:
    return [
        Report(attempt_id=attempt.pk, seq=seq, at=time.time(), body=body)
        for seq, body in enumerate(bodies, start=first)
    ]


def test_reports_that_come_together_are_applied_once_and_count_one_by_one(attempt):
    reports = batch(attempt, 1, offer("one"), offer("two"), done())
    news = reports_apply(reports, Lore())
    assert news.touch.pipelines == {attempt.pk}
    before = counts()
    assert reports_apply(reports, Lore()) is None
    assert reports_apply(batch(attempt, 5, offer("five")), Lore()) is None
    assert counts() == before
    assert reports_apply(batch(attempt, 4, offer("four")), Lore())
    attempt.refresh_from_db()
    assert attempt.report_seq == 4
    assert set(attempt.substages.values_list("node", flat=True)) == {"one", "two", "four"}


def test_what_came_before_a_report_that_cannot_be_applied_still_counts(attempt):
    broken = StepDone(step=0, metrics={"reward": 0.5}, samples=())  # without its tokens
    failure = _apply(batch(attempt, 1, offer("one"), broken, offer("three")), Lore())
    assert isinstance(failure, Failure)
    attempt.refresh_from_db()
    assert attempt.report_seq == 1
    assert [row.node for row in attempt.substages.all()] == ["one"]


def test_reports_after_the_end_change_nothing(attempt):
    assert say(attempt, 1, Ended(outcome="succeeded"))
    attempt.job.refresh_from_db()
    assert attempt.job.status == JobStatus.SUCCEEDED
    before = counts()
    assert not say(attempt, 2, done())
    assert not attempt_lost(
        attempt_id=attempt.pk, failure=Failure(kind=FailureKind.WORKER_LOST, message="x"), stimulus="t"
    )
    assert counts() == before


def test_a_zombie_of_an_earlier_attempt_is_not_heard(attempt, device):
    job = attempt.job
    attempt_lost(
        attempt_id=attempt.pk, failure=Failure(kind=FailureKind.WORKER_LOST, message="x"), stimulus="t"
    )
    second = factories.attempt(job, status=AttemptStatus.RUNNING)
    assert not say(attempt, 1, done(reward=0.9))
    assert say(second, 1, done(reward=0.1))
    assert StepMetrics.objects.get(job=job, step=0).values["reward"] == 0.1


def test_a_step_run_again_replaces_its_first_run(attempt):
    assert say(attempt, 1, done(reward=0.2))
    assert say(attempt, 2, done(reward=0.4))
    attempt.job.refresh_from_db()
    assert attempt.job.tokens == 32
    assert Sample.objects.get(job=attempt.job).reward == 0.4


def test_a_foreign_clock_cannot_move_the_bill(attempt, device):
    """Times before the grant, or in the future, are cut to the time between grant and report."""
    say(attempt, 1, offer())
    granted = grant(attempt, device)
    assert say(
        attempt, 2, Finished(node="s0.w0.update.1", started_at=0.0, ended_at=time.time() + 9999, tokens=5)
    )
    row = SubStage.objects.get()
    assert row.started_at == granted
    assert row.ended_at <= datetime.now(UTC)
    assert row.status == "done"


def test_finishing_what_was_not_granted_changes_nothing(attempt):
    say(attempt, 1, offer())
    say(attempt, 2, Finished(node="s0.w0.update.1", started_at=1.0, ended_at=2.0, tokens=5))
    assert SubStage.objects.get().status == "ready"


@pytest.mark.parametrize(
    ("kind", "billed"), [(FailureKind.WORKER_LOST, False), (FailureKind.GRADER_FAILED, True)]
)
def test_our_fault_is_credited_and_the_tenants_own_is_not(attempt, device, kind, billed):
    job = attempt.job
    say(attempt, 1, offer())
    grant(attempt, device)
    start = time.time() - 5
    say(attempt, 2, Finished(node="s0.w0.update.1", started_at=start, ended_at=start + 5, tokens=5))
    say(attempt, 3, done())
    job.refresh_from_db()
    assert job.cost_micro_usd > 0
    say(attempt, 4, Ended(outcome="failed", failure=Failure(kind=kind, message="because")))
    job.refresh_from_db()
    assert (job.cost_micro_usd > 0) is billed
    assert job.status == (JobStatus.FAILED if billed else JobStatus.QUEUED)
    assert (job.retry_at is None) is billed
    assert job.wait_text == ("" if billed else "the next attempt starts 1 s after the last was lost")


def test_what_the_ledger_has_closed_is_not_billed_again(attempt, device):
    say(attempt, 1, offer())
    grant(attempt, device)
    closed = datetime.now(UTC) - timedelta(seconds=2)
    Device.objects.update(metered_until=closed)
    start = time.time() - 5
    say(attempt, 2, Finished(node="s0.w0.update.1", started_at=start, ended_at=start + 5, tokens=5))
    assert SubStage.objects.get().started_at == closed


def test_a_step_tells_how_long_the_next_may_take(attempt, device):
    opened = datetime.now(UTC) - timedelta(seconds=4)
    assert placements_open(attempt=attempt, devices=[device], reason="turn", now=opened)
    say(attempt, 1, done())
    attempt.refresh_from_db()
    assert 4 <= attempt.step_seconds < 5
    assert not attempt.placements.filter(closed_at__isnull=True).exists()


def test_a_checkpoint_written_again_at_the_same_place_replaces_the_row(attempt):
    saved = CheckpointSaved(step=1, path="/somewhere/step-1", bytes=10, final=False)
    assert say(attempt, 1, saved)
    assert say(attempt, 2, saved)
    live = attempt.job.job_checkpoints.filter(checkpoint__deleted_at__isnull=True)
    assert live.count() == 1


def test_the_loser_of_a_race_for_a_device_does_nothing(tmp_path, device):
    """Two decisions give the same device away: the second writes neither its hold nor its grant."""
    made = []
    for number in range(2):
        job = factories.job(factories.organization(), tmp_path / str(number), status=JobStatus.RUNNING)
        made.append(factories.attempt(job, status=AttemptStatus.RUNNING))
        substage_offer(attempt=made[-1], offer=offer(), now=datetime.now(UTC))
    winner, loser = made
    now = datetime.now(UTC)
    world = observe(now)
    assert placements_open(attempt=winner, devices=[device], reason="first", now=now)
    node = f"{loser.pk}/s0.w0.update.1"
    actions = (
        Place(loser.pk, (device.name,), "second"),
        Start(node, loser.pk, device.name, 1.0, "second"),
    )
    after = Board.of(world.snapshot)
    for action in actions:
        after.apply(action)
    decision = Decision(world, Policy(), Plan(actions), after, frozenset())
    orders, again = commit(decision, Lore(), stimulus="test", now=now)
    assert orders == []
    assert again.pipelines == {loser.pk}
    assert SubStage.objects.get(attempt=loser).status == "ready"
    assert not loser.placements.exists()


def test_a_node_that_restarts_has_nothing_loaded(device):
    node = Node.objects.get()
    device.residents.create(weights_key="m", bytes=1, last_used_at=datetime.now(UTC))
    node_seen(name=node.name, ray_node_id="e" * 56, address="", devices=(), now=datetime.now(UTC))
    assert not device.residents.exists()
