"""Several tenants on the same devices: every action of the planner is carried out, once, and paid by whom it
served.
"""

from __future__ import annotations

import pytest

from backend.jobs.models import Attempt, Job
from backend.jobs.services import job_cancel
from backend.jobs.states import JobStatus
from backend.pool.models import Allotment, Decision, Device, SubStage
from backend.pool.services import device_drain
from scheduler.core import multiplex
from scheduler.core.forecast import Question
from scheduler.core.state import POLICIES
from scheduler.shell.daemon import Daemon
from scheduler.shell.orders import Order, PipelineOrder
from scheduler.shell.policies import policy_named
from tests import factories
from tests.scheduler.shell import test_daemon as daemons
from tests.scheduler.shell.fake import FakeCluster, FakePipeline, Gate
from tests.scheduler.shell.shared import (
    calibrate,
    in_database,
    jobs_over_one_base,
    pipeline_of,
    require_each_order_once,
    require_settled,
    until,
)
from tests.scheduler.shell.test_daemon import drive, ended, leading, reload
from workers.protocol import Grant, Merge, Offer, Resize, SubStageKind, Yield

pytestmark = pytest.mark.django_db(transaction=True)

LOOKAHEAD, GREEDY = POLICIES["lookahead"], POLICIES["greedy"]


@pytest.fixture
def tenants():
    return factories.organization(), factories.organization(), factories.organization()


def finished(jobs: list[Job]) -> bool:
    return {reload(job).status for job in jobs} == {JobStatus.SUCCEEDED}


def at(kind: str, step: int, job: Job, part: int | None = None):
    """In the middle of that sub-stage of the job."""

    def where(pipeline: FakePipeline, offer: Offer) -> bool:
        here = (pipeline.launch.job_id, offer.kind, offer.step) == (job.public_id, kind, step)
        return here and part in (None, offer.part)

    return where


def running(job: Job, *kinds: str):
    return SubStage.objects.filter(job=job, status="granted", device__isnull=False, kind__in=kinds)


def test_rollouts_of_two_tenants_decode_in_one_batch_and_pay_by_their_rows(tenants, tmp_path):
    calibrate()
    one, two = jobs_over_one_base(tenants[:2], tmp_path)
    gate = Gate(at(SubStageKind.TAIL, 0, one, part=4))
    other = Gate(at(SubStageKind.TAIL, 0, two, part=4))

    async def during(pipeline: FakePipeline, offer: Offer) -> None:
        await gate(pipeline, offer)
        await other(pipeline, offer)

    cluster = FakeCluster(cpus=1, during=during)

    def parts() -> None:
        rows = Allotment.objects.filter(end__isnull=True, substage__kind="tail").select_related("substage")
        assert {row.substage.slot for row in rows} == {f"rollout:{one.weights_key}"}
        assert len({(row.share, row.part_ppm) for row in rows}) == 1
        assert len(rows) == 2

    async def story() -> None:
        async with leading(cluster):
            await gate.reached.wait()
            await other.reached.wait()
            await until(lambda: running(one, "tail").count() == running(two, "tail").count() == 1)
            await in_database(parts)()
            gate.go.set()
            other.go.set()
            await ended(cluster, 2)

    drive(story)
    assert finished([one, two])
    require_settled()
    require_each_order_once(cluster)


def test_training_computes_beside_a_tail_and_each_is_told_its_share(tenants, tmp_path):
    calibrate()
    one, two = jobs_over_one_base(tenants[:2], tmp_path)
    tail = Gate(at(SubStageKind.TAIL, 0, one, part=4))
    update = Gate(
        lambda pipeline, offer: at(SubStageKind.UPDATE, 0, two)(pipeline, offer) and not tail.go.is_set()
    )

    async def during(pipeline: FakePipeline, offer: Offer) -> None:
        await tail(pipeline, offer)
        await update(pipeline, offer)

    cluster = FakeCluster(cpus=1, during=during)

    def shares() -> dict[str, float]:
        rows = Allotment.objects.filter(end__isnull=True).select_related("substage")
        return {row.substage.kind: row.share for row in rows}

    async def story() -> None:
        async with leading(cluster, policy_named("lookahead-no-stream")):
            await tail.reached.wait()
            await update.reached.wait()
            assert await in_database(shares)() == {"tail": 0.25, "update": 0.75}
            resized = [o for o in pipeline_of(cluster, one).orders if isinstance(o, Resize)]
            assert resized[-1].share == 0.25
            grants = [o for o in pipeline_of(cluster, two).orders if isinstance(o, Grant)]
            assert grants[-1].share == 0.75
            tail.go.set()
            update.go.set()
            await ended(cluster, 2)

    drive(story)
    assert finished([one, two])
    require_settled()
    require_each_order_once(cluster)


class Streaming:
    """One tenant trains early while its last sequences roll out; then the other, which cannot stream,
    wants to train.
    """

    def __init__(self, tenants, tmp_path) -> None:
        calibrate()
        model = factories.base_model(tmp_path / "model")
        self.one = factories.job(tenants[0], tmp_path, model=model, rl={"steps": 2})
        late = {"steps": 2, "loss": {"kl_beta": 0.1}}
        self.two = factories.job(tenants[1], tmp_path, model=model, rl=late)
        self.tail = Gate(at(SubStageKind.TAIL, 0, self.one, part=4))
        self.rolls = Gate(at(SubStageKind.TAIL, 0, self.two, part=4))
        early = at(SubStageKind.UPDATE, 0, self.one, part=0)
        self.early = Gate(lambda pipeline, offer: early(pipeline, offer) and not offer.yielded)

    async def during(self, pipeline: FakePipeline, offer: Offer) -> None:
        if at(SubStageKind.DECODE, 0, self.one)(pipeline, offer):
            await self.rolls.reached.wait()
        for gate in (self.tail, self.rolls, self.early):
            await gate(pipeline, offer)

    async def until_it_yields(self) -> None:
        await self.tail.reached.wait()
        await self.early.reached.wait()
        self.rolls.go.set()
        await until(lambda: SubStage.objects.filter(job=self.one, status="leaving").exists())

    def go_on(self) -> None:
        for gate in (self.tail, self.early):
            gate.go.set()


def test_early_training_makes_room_and_what_is_left_is_offered_again(tenants, tmp_path):
    world = Streaming(tenants, tmp_path)
    one, two = world.one, world.two
    cluster = FakeCluster(cpus=1, during=world.during)

    async def story() -> None:
        async with leading(cluster, GREEDY):
            await world.until_it_yields()
            await until(
                lambda: SubStage.objects.filter(job=two, kind="logprob").exclude(status="ready").exists()
            )
            world.go_on()
            await ended(cluster, 2)

    drive(story)
    assert finished([one, two])
    yields = [o for o in pipeline_of(cluster, one).orders if isinstance(o, Yield)]
    assert len({o.action_id for o in yields}) == 1
    assert Decision.objects.filter(kind="yield", job=one).count() == 1
    again = SubStage.objects.get(job=one, yielded=True)
    assert (again.left, again.status) == (0.5, "done")
    require_settled()
    require_each_order_once(cluster)


def merging_jobs(tenants, tmp_path) -> tuple[Job, Job]:
    wide, narrow = tenants[:2]
    model = factories.base_model(tmp_path / "model")
    one = factories.job(wide, tmp_path, model=model, rl={"steps": 2, "devices": 2})
    two = factories.job(narrow, tmp_path, rl={"steps": 2})
    return one, two


def test_tails_move_to_one_device_and_the_other_is_free(tenants, tmp_path):
    calibrate()
    one, two = merging_jobs(tenants, tmp_path)
    gate = Gate(lambda p, o: o.kind is SubStageKind.TAIL and o.part == 4 and o.step == 0)
    cluster = FakeCluster(cpus=2, during=gate)

    def merged() -> bool:
        return SubStage.objects.filter(job=one, kind="tail", moves_to__gt="").exists()

    async def story() -> None:
        async with leading(cluster, GREEDY):
            await until(merged)
            target = await in_database(lambda: running(one, "tail").get())()
            assert target.sequences == 14
            gate.go.set()
            await ended(cluster, 2)

    drive(story)
    assert finished([one, two])
    source = SubStage.objects.filter(job=one, moves_to__gt="").first()
    target = SubStage.objects.get(attempt=source.attempt, node=source.moves_to)
    assert source.status == target.status == "done"
    assert source.device != target.device
    merges = [o for o in pipeline_of(cluster, one).orders if isinstance(o, Merge)]
    assert (merges[0].sources, merges[0].target) == ((source.node,), target.node)
    require_settled()
    require_each_order_once(cluster)


def test_a_drained_device_is_left_between_two_steps(tenants, tmp_path):
    calibrate()
    (job,) = jobs_over_one_base(tenants[:1], tmp_path)
    gate = Gate(at(SubStageKind.TAIL, 1, job))
    cluster = FakeCluster(cpus=2, during=gate)

    async def story() -> None:
        async with leading(cluster):
            await gate.reached.wait()
            home = (await in_database(Attempt.objects.get)()).home[0]
            await in_database(device_drain)(home)
            gate.go.set()
            await ended(cluster, 1)

    drive(story)
    assert finished([job])
    first, second = (
        {s.device.name for s in job.substages.filter(step__in=steps, device__isnull=False)}
        for steps in ((0, 1), (2,))
    )
    assert len(first) == len(second) == 1
    assert first != second
    assert Decision.objects.filter(kind="rehome", job=job).count() == 1
    assert Device.objects.get(name=first.pop()).draining
    require_settled()


def test_a_chosen_wait_ends_by_itself(tenants, tmp_path, monkeypatch):
    """Nothing happens meanwhile: only the timer can wake the daemon."""
    calibrate()
    one, two = jobs_over_one_base(tenants[:2], tmp_path)
    gate = Gate(at(SubStageKind.TAIL, 0, one, part=4))
    cluster = FakeCluster(cpus=1, during=gate)
    held: list[int] = []

    def hold_back_once(board, policy, task, may_wait):
        if may_wait and task.pipeline not in held and gate.reached.is_set():
            held.append(task.pipeline)
            return Question(holds_back=task.pipeline)
        return Question()

    monkeypatch.setattr(multiplex, "choose", hold_back_once)
    monkeypatch.setattr(multiplex, "until", lambda board, task: board.now + 0.05)

    async def story() -> None:
        async with leading(cluster):
            await until(lambda: Decision.objects.filter(kind="wait").exists())
            (waiting,) = held
            await until(lambda: SubStage.objects.filter(attempt=waiting, status="granted").exists())
            assert not gate.go.is_set()
            gate.go.set()
            await ended(cluster, 2)

    drive(story)
    assert finished([one, two])
    assert not Attempt.objects.filter(wait_until__isnull=False).exists()
    require_settled()


# ---------------------------------------------------------------- the end of an attempt, and of a daemon


@pytest.mark.parametrize(
    "kind", [SubStageKind.PREFILL, SubStageKind.TAIL, SubStageKind.UPDATE, SubStageKind.SYNC]
)
def test_who_stops_in_the_middle_leaves_the_device_to_the_others_at_once(tenants, tmp_path, kind):
    calibrate()
    one, two = jobs_over_one_base(tenants[:2], tmp_path)
    actor = factories.actor(one.organization)
    gate = Gate(lambda p, o: at(kind, 0, one)(p, o) or at(SubStageKind.TAIL, 1, two)(p, o))
    cluster = FakeCluster(cpus=1, during=gate)

    async def story() -> None:
        async with leading(cluster):
            await until(lambda: running(one, kind).exists())
            pipeline_of(cluster, one).deaf = True
            await in_database(job_cancel)(actor=actor, job=await in_database(reload)(one))
            await until(lambda: not running(one, kind).exists())
            pipeline_of(cluster, one).die()
            gate.go.set()
            await ended(cluster, 2)

    drive(story)
    assert reload(one).status == JobStatus.CANCELLED
    assert finished([two])
    require_settled()


class Forgetful(Daemon):
    """Commits its decisions and dies before it has carried out orders of this kind."""

    forgets: type = object

    async def _drive(self, order: Order) -> None:
        if not (isinstance(order, PipelineOrder) and isinstance(order.order, self.forgets)):
            await super()._drive(order)


@pytest.mark.parametrize("lost", [Grant, Resize, Yield])
def test_a_new_daemon_carries_out_what_the_old_one_only_wrote_down(tenants, tmp_path, monkeypatch, lost):
    world = Streaming(tenants, tmp_path)
    one, two = world.one, world.two
    cluster = FakeCluster(cpus=1, during=world.during)
    monkeypatch.setattr(Forgetful, "forgets", lost)
    monkeypatch.setattr(daemons, "Daemon", Forgetful)

    async def story() -> None:
        async with leading(cluster, GREEDY):
            if lost is Grant:
                await until(lambda: SubStage.objects.filter(status="granted").exists())
            else:
                await world.until_it_yields()
        monkeypatch.setattr(daemons, "Daemon", Daemon)
        before = [len(pipeline.orders) for pipeline in cluster.ran]
        async with leading(cluster, GREEDY):
            if lost is Grant:
                await world.until_it_yields()
            told = [o for p, n in zip(cluster.ran, before, strict=True) for o in p.orders[n:]]
            assert any(isinstance(order, lost) for order in told)
            world.go_on()
            await ended(cluster, 2)

    drive(story)
    assert finished([one, two])
    require_settled()
    require_each_order_once(cluster)


@pytest.mark.parametrize(
    "name",
    [
        *POLICIES,
        "lookahead-no-fuse",
        "lookahead-no-merge",
        "lookahead-no-shares",
        "lookahead-no-wait",
        "lookahead-no-stream",
    ],
)
def test_what_tenants_pay_and_what_was_idle_is_all_there_was_under_every_policy(tenants, tmp_path, name):
    calibrate()
    jobs = jobs_over_one_base(tenants, tmp_path, steps=2)
    jobs.append(factories.job(tenants[0], tmp_path, rl={"steps": 2, "devices": 2}))
    cluster = FakeCluster(cpus=2)

    async def story() -> None:
        async with leading(cluster, policy_named(name)):
            await ended(cluster, len(jobs))

    drive(story)
    assert finished(jobs)
    require_settled()
    require_each_order_once(cluster)
