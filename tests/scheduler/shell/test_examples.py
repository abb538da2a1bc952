"""Jobs that only train: what is expected of them, and beside another tenant's rollouts."""

from __future__ import annotations

import pytest

from backend.jobs.models import Job
from backend.jobs.states import JobStatus
from backend.pool.models import SubStage
from scheduler.core.graph import build, offered, validate
from scheduler.core.state import Kind, Mode, Shape
from scheduler.shell import priors
from scheduler.shell.policies import policy_named
from tests import factories
from tests.scheduler.shell.fake import FakeCluster, FakePipeline, Gate
from tests.scheduler.shell.shared import (
    calibrate,
    in_database,
    jobs_over_one_base,
    require_each_order_once,
    require_settled,
    until,
)
from tests.scheduler.shell.test_daemon import drive, ended, leading, reload
from tests.scheduler.shell.test_profiles import RATES, seconds
from workers.protocol import Offer, SubStageKind


def test_a_prior_of_examples_counts_their_rows():
    """4 rows of 50 tokens on a worker: the data hold all, nothing is sampled, graded or synced."""
    sft = priors.prior(factories.spec("m", "f", algorithm="sft"), RATES, 16, 50, False)
    assert (sft.rollout, seconds(sft)) == ((), [("update", pytest.approx(4 * 50 * 0.5))])
    dpo = priors.prior(factories.spec("m", "f", algorithm="dpo", devices=2), RATES, 16, 50, False)
    assert seconds(dpo) == [("logprob", pytest.approx(2 * 50 * 0.1)), ("update", pytest.approx(2 * 50 * 0.5))]


def test_shape_and_graph_of_examples_have_training_alone():
    spec = factories.spec("m", "f", algorithm="dpo", devices=2)
    shape = priors.shape(spec, streams=False)
    assert shape == Shape((), (0, 1), Mode.SYNC)
    graph = build(shape, priors.prior(spec, RATES, 16, 50, False), 0, 2)
    validate(graph)
    first = offered(graph, set(), set())
    assert [(node.segment.kind, node.worker, node.step) for node in first] == [
        (Kind.LOGPROB, 0, 0),
        (Kind.LOGPROB, 1, 0),
    ]
    done = {node.id for node in graph.nodes if node.step == 0}
    assert {(node.segment.kind, node.step) for node in offered(graph, done, set())} == {(Kind.LOGPROB, 1)}


def mixed(tenants, folder, algorithm: str, steps: int = 3) -> list[Job]:
    """One tenant's job of examples, and another's that rolls out, over one base."""
    (rolling,) = jobs_over_one_base(tenants[:1], folder)
    rl = {"algorithm": algorithm, "steps": steps}
    return [rolling, factories.job(tenants[1], folder, model=rolling.base_model, rl=rl)]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("policy", ["exclusive", "rollout_only", "greedy", "lookahead"])
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_beside_another_tenants_rollouts_both_come_to_their_end(tmp_path, settings, policy, algorithm):
    settings.SCHEDULER_POLICY = policy
    calibrate()
    tenants = factories.organization(), factories.organization()
    jobs = mixed(tenants, tmp_path, algorithm)
    cluster = FakeCluster(cpus=1)

    async def story() -> None:
        async with leading(cluster, policy=policy_named(policy)):
            await ended(cluster, 2)

    drive(story)
    assert {reload(job).status for job in jobs} == {JobStatus.SUCCEEDED}
    chain = ["update"] if algorithm == "sft" else ["logprob", "update"]
    rows = SubStage.objects.filter(job=jobs[1]).order_by("pk")
    assert [row.kind for row in rows] == chain * 3
    require_settled()
    require_each_order_once(cluster)


@pytest.mark.django_db(transaction=True)
def test_examples_train_while_another_tenant_decodes(tmp_path):
    """On one device, each with a part of it: an update that begins while the other's tail runs."""
    calibrate()
    tenants = factories.organization(), factories.organization()
    rolling, examples = mixed(tenants, tmp_path, "sft", steps=200)
    tail = Gate(lambda pipeline, offer: offer.kind is SubStageKind.TAIL and offer.part == 4)
    update = Gate(lambda pipeline, offer: pipeline.launch.job_id == examples.public_id)

    async def during(pipeline: FakePipeline, offer: Offer) -> None:
        await tail(pipeline, offer)
        if tail.reached.is_set():
            await update(pipeline, offer)

    cluster = FakeCluster(cpus=1, during=during)

    def shares() -> dict[str, float]:
        running = SubStage.objects.filter(status="granted", device__isnull=False)
        return {row.kind: row.share for row in running}

    async def story() -> None:
        async with leading(cluster, policy=policy_named("greedy")):
            await until(lambda: shares().keys() == {"tail", "update"})
            assert sum((await in_database(shares)()).values()) <= 1 + 1e-6
            tail.go.set()
            update.go.set()
            await ended(cluster, 2)

    drive(story)
    assert {reload(job).status for job in (rolling, examples)} == {JobStatus.SUCCEEDED}
    require_settled()
