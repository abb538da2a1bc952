"""Whatever is granted, resized or yielded, and when: the same tokens and the same weights."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tests.workers.local import (
    Orders,
    device,
    ends,
    of_kind,
    of_worker,
    offers,
    part_by_part,
    run,
    running,
    same_weights,
    texts,
    the_node,
)
from workers.chain import rollout_part
from workers.protocol import Ended, Finished, Merge, Offer, Resize, SubStageKind, Yield

TWO = {"devices": 2, "prompts_per_step": 4, "sample_groups": 4}
#: Completions of many lengths.
LONG = {"sampling": {"max_tokens": 150, "stop": list("abcd")}}


def test_a_chain_of_rollouts_crosses_on_one_grant(start, cluster):
    """40 sequences on a device that 36 saturate: the parts of the chain, each where its batch begins."""
    rl = {
        "steps": 1,
        "prompts_per_step": 4,
        "group_size": 10,
        "sampling": {"max_tokens": 150, "stop": list("abcd")},
    }
    made = start("out", rl)
    cluster.may_step = part_by_part(made, saturation=36)
    reports = asyncio.run(run(made, place=lambda offer: device(saturation=36)))
    rolled = [offer for offer in offers(reports) if offer.kind in ("prefill", "decode", "tail")]
    assert [offer.part for offer in rolled] == [0, 1, 2, 3, 4]
    assert sum(isinstance(report.body, Offer) and report.body in rolled for report in reports) == 1
    assert all(rollout_part(offer.sequences, 36) == offer.part for offer in rolled[1:])
    assert all(offer.cached_tokens > offer.sequences for offer in rolled[1:])
    spans = {end.node: end for end in ends(reports)}
    ran = [spans[offer.node] for offer in rolled]
    assert all(one.ended_at <= other.started_at for one, other in pairwise(ran))
    assert all(end.tokens > 0 for end in ran)
    assert all(end.forwards > 0 for end in ran[1:])


def test_training_crosses_from_part_to_part(start):
    rl = {"steps": 1, "updates_per_step": 3}
    reports = asyncio.run(run(start("out", rl)))
    trained = [offer for offer in offers(reports) if offer.kind in ("logprob", "update", "sync")]
    assert [(offer.kind, offer.part) for offer in trained] == [("logprob", 1), ("update", 2), ("sync", 3)]
    assert len({offer.gang for offer in trained}) == 3
    assert sum(isinstance(report.body, Offer) and report.body in trained for report in reports) == 1


def test_a_new_share_reaches_the_engine(start, cluster):
    made = start("out", {"steps": 1, **LONG})
    orders = Orders(cluster, made)
    given: list[str] = []

    def resize(name: str, left: int) -> bool:
        tails = running(made, SubStageKind.TAIL)
        if tails and not given:
            given.append(tails[0])
            order = Resize(action_id="r", node=tails[0], share=0.5)
            asyncio.run_coroutine_threadsafe(made.order(order), orders.loop)
        engine = cluster.find("rollout", device())
        return left > 3 or engine._share == 0.5

    cluster.may_step = resize
    reports = orders.run()
    assert given and of_kind(reports, Ended)[0].outcome == "succeeded"


def test_a_new_share_reaches_the_trainer(start, cluster):
    made = start("out", {"steps": 1, "micro_batch_size": 3})
    orders = Orders(cluster, made)
    orders.at_micro(2, lambda: Resize(action_id="r", node=the_node(made, SubStageKind.UPDATE), share=0.25))
    shares: list[float] = []
    count = cluster.before_micro

    def watch(name: str) -> None:
        count(name)
        shares.append(cluster.find("trainer", device())._shares["out.1"])

    cluster.before_micro = watch
    reports = orders.run()
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert shares == [1.0, 0.25, 0.25]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("updates", [1, 2])
def test_an_update_that_makes_room_is_offered_again_and_changes_no_weight(start, cluster, devices, updates):
    rl = {**TWO, "devices": devices, "micro_batch_size": 3, "updates_per_step": updates}
    calm = asyncio.run(run(start("calm", rl), place=of_worker))
    made = start("yields", rl)
    orders = Orders(cluster, made)
    orders.at_micro(
        2 if updates == 1 else 6,
        lambda: Yield(action_id="y", node=the_node(made, SubStageKind.UPDATE)),
    )
    reports = orders.run(place=of_worker)
    again = [offer for offer in offers(reports) if offer.yielded]
    assert len(again) == devices
    assert {offer.kind for offer in again} == {SubStageKind.UPDATE}
    assert {offer.part for offer in again} == {1 if updates == 1 else 2}
    assert len({offer.gang for offer in again}) == 1
    assert any(0 < offer.left < 1 for offer in again)
    assert same_weights(calm, reports)
    assert texts(calm) == texts(reports)


def test_log_probs_make_room_as_well(start, cluster):
    rl = {"micro_batch_size": 3, "updates_per_step": 3, "loss": {"kl_beta": 0.1}}
    calm = asyncio.run(run(start("calm", rl)))
    made = start("yields", rl)
    orders = Orders(cluster, made)
    orders.at_micro(3, lambda: Yield(action_id="y", node=the_node(made, SubStageKind.LOGPROB)))
    reports = orders.run()
    again = [offer for offer in offers(reports) if offer.yielded]
    assert [(offer.kind, offer.part) for offer in again] == [(SubStageKind.LOGPROB, 1)]
    assert again[0].left == pytest.approx(3 / 6)
    assert same_weights(calm, reports)


def test_an_update_that_made_room_goes_on_elsewhere_with_its_gradients(start, cluster, tmp_path):
    rl = {"micro_batch_size": 3}
    calm = asyncio.run(run(start("calm", rl)))
    made = start("moves", rl)
    orders = Orders(cluster, made)
    orders.at_micro(2, lambda: Yield(action_id="y", node=the_node(made, SubStageKind.UPDATE)))
    reports = orders.run(place=lambda offer: device("local/cpu1") if offer.yielded else device())
    assert sum(offer.yielded for offer in offers(reports)) == 1
    assert same_weights(calm, reports)
    assert cluster.runs() == []


def test_orders_for_what_is_over_or_unknown_change_nothing(start):
    made = start("out", {"steps": 1})

    async def repeat(report):
        if isinstance(report.body, Finished):
            node = report.body.node
            await made.order(Resize(action_id="r", node=node, share=0.5))
            await made.order(Yield(action_id="y", node=node))
            await made.order(Merge(action_id="m", sources=(node, "s9.w9.tail.9"), target=node))

    reports = asyncio.run(run(made, seen=repeat))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert not any(offer.yielded for offer in offers(reports))
