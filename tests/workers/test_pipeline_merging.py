"""Two workers on two devices: tails that move from one to the other, and streams that begin meanwhile.

Engines wait between two tokens until what a test is about has happened, so that it happens every time.
"""

from __future__ import annotations

import asyncio

from tests.workers.local import (
    Cluster,
    Orders,
    ends,
    of_worker,
    offers,
    run,
    running,
    same_weights,
    texts,
)
from workers.pipeline import Pipeline
from workers.protocol import Merge, Offer, SubStageKind

TAIL = SubStageKind.TAIL
RL = {
    "devices": 2,
    "prompts_per_step": 4,
    "group_size": 4,
    "sample_groups": 4,
    "micro_batch_size": 4,
    "sampling": {"max_tokens": 100, "stop": list("abcd")},
}


class Merging:
    """Orders a merge, once a step, as soon as both workers are in their tails, and lets no token be made from
    then on until it is done.
    """

    def __init__(self, cluster: Cluster, made: Pipeline) -> None:
        self.orders = Orders(cluster, made)
        self.made = made
        self.ordered: dict[str, str] = {}  # the step, and the source's node
        cluster.may_step = self.may_step

    def may_step(self, name: str, left: int) -> bool:
        tails = running(self.made, TAIL)
        for source in tails:
            step = source.split(".")[0]
            target = f"{step}.w0."
            found = next((node for node in tails if node.startswith(target)), None)
            if ".w1." in source and found and step not in self.ordered:
                self.ordered[step] = source
                order = Merge(action_id=f"m{step}", sources=(source,), target=found)
                asyncio.run_coroutine_threadsafe(self.made.order(order), self.orders.loop)
        moving = any(source in tails for source in self.ordered.values())
        gathered = all(node.split(".")[0] in self.ordered for node in tails)
        return not moving and (left > 3 or (bool(tails) and gathered))


def test_merged_tails_give_the_same_tokens_and_weights(start, cluster):
    apart = asyncio.run(run(start("apart", RL), place=of_worker))
    made = start("merged", RL)
    merging = Merging(cluster, made)
    reports = merging.orders.run(place=of_worker)
    assert sorted(merging.ordered) == ["s0", "s1"]
    assert texts(apart) == texts(reports)
    assert same_weights(apart, reports)
    over = [end.node for end in ends(reports)]
    assert sorted(over) == sorted(offer.node for offer in offers(reports))
    for step, source in merging.ordered.items():
        rolled = [node for node in over if node.startswith(step) and ".tail." in node]
        assert rolled.index(source) < len(rolled) - 1, "the target goes on after the source is over"
    assert cluster.runs() == []


def test_a_source_whose_target_is_over_makes_room_and_is_offered_again(start, cluster):
    """The order came too late for the target; the source's device may be promised by then all the same."""
    apart = asyncio.run(run(start("apart", RL | {"steps": 1}), place=of_worker))
    made = start("late", RL | {"steps": 1})
    orders = Orders(cluster, made)
    ordered: list[str] = []

    def may_step(name: str, left: int) -> bool:
        tails = running(made, TAIL)
        if tails and not ordered:
            ordered.append(tails[0])
            order = Merge(action_id="m", sources=(tails[0],), target="s0.w9.tail.99")
            asyncio.run_coroutine_threadsafe(made.order(order), orders.loop)
        return left > 3 or (bool(ordered) and ordered[0] not in tails)

    cluster.may_step = may_step
    reports = orders.run(place=of_worker)
    offered = [report.body for report in reports if isinstance(report.body, Offer)]
    rolled = [offer for offer in offered if offer.kind in ("prefill", "decode", "tail")]
    assert [offer.kind for offer in rolled] == ["prefill", "prefill", "tail"]
    assert f".w{rolled[-1].worker}." in ordered[0]
    assert texts(apart) == texts(reports)
    assert same_weights(apart, reports)


class Streaming:
    """Lets the last sequences go on only when an early update is over."""

    def __init__(self, cluster: Cluster, made: Pipeline) -> None:
        self.made = made
        self.early: dict[str, bool] = {}  # by step: whether it is over
        cluster.may_step = self.may_step

    def may_step(self, name: str, left: int) -> bool:
        nodes = [lease.node for lease in self.made._desk._open()]
        steps = {node.split(".")[0] for node in nodes}
        return left > 2 or all(self.early.get(step) for step in steps)

    def seen(self, report) -> None:
        body = report.body
        if isinstance(body, Offer) and body.early:
            self.early[f"s{body.step}"] = False
        for end in ends([report]):
            step, _, kind, _ = end.node.split(".")
            if kind == "update":
                self.early[step] = True


def test_streaming_trains_on_whole_groups_while_others_roll_out(start, cluster):
    rl = RL | {"devices": 1}
    apart = asyncio.run(run(start("apart", rl)))
    made = start("streams", rl, streams=True)
    streaming = Streaming(cluster, made)
    reports = asyncio.run(run(made, seen=streaming.seen))
    updates = [offer for offer in offers(reports) if offer.kind is SubStageKind.UPDATE]
    assert [(offer.step, offer.part, offer.early) for offer in updates] == [
        (0, 0, True),
        (0, 2, False),
        (1, 0, True),
        (1, 2, False),
    ]
    assert all(0 < offer.sequences < 16 for offer in updates if offer.early)
    spans = {end.node: end for end in ends(reports)}
    assert all(spans[offer.node].tokens > 0 for offer in updates)
    tails = [offer for offer in offers(reports) if offer.kind is TAIL]
    for early in (offer for offer in updates if offer.early):
        last = max(spans[tail.node].ended_at for tail in tails if tail.step == early.step)
        assert spans[early.node].ended_at <= last
    assert texts(apart) == texts(reports)
    assert same_weights(apart, reports, tolerance=5e-6)


def test_an_early_update_that_is_granted_late_does_everything(start, cluster):
    rl = RL | {"devices": 1, "steps": 1}
    apart = asyncio.run(run(start("apart", rl)))
    made = start("late", rl, streams=True)
    graded: list[str] = []
    cluster.may_step = lambda name, left: (
        left > 2 or any(lease.offer.early for lease in made._desk._open()) or bool(graded)
    )

    def place(offer):
        return of_worker(offer) if not offer.early or graded else None

    def seen(report):
        graded.extend(end.node for end in ends([report]) if ".grade." in end.node)

    reports = asyncio.run(run(made, place=place, seen=seen))
    updates = [offer for offer in offers(reports) if offer.kind is SubStageKind.UPDATE]
    assert [(offer.part, offer.early) for offer in updates] == [(0, True)]
    sync = next(offer for offer in offers(reports) if offer.kind is SubStageKind.SYNC)
    assert sync not in [report.body for report in reports], "it crossed"
    assert same_weights(apart, reports, tolerance=5e-6)
