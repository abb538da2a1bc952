"""Stopping an attempt in the middle of each kind of sub-stage: it ends once, and nothing of it stays."""

from __future__ import annotations

import asyncio

import pytest

from tests.workers.local import STOP, Cluster, device, ends, of_kind, offers, run
from workers.pipeline import Pipeline
from workers.protocol import Ended, SubStageKind

#: A step of it has sub-stages of every kind.
SPEC = {"environment": {"type": "guessing_game", "max_turns": 2, "turn_tokens": 40, "delay_s": (0.01, 0.01)}}
RL = {
    "steps": 50,
    "sampling": {"max_tokens": 100, "stop": list("abcd")},
    "loss": {"kl_beta": 0.1},
}


async def stop_during(made: Pipeline, kind: SubStageKind) -> None:
    """Stop twice as soon as a sub-stage of that kind runs; computing goes on meanwhile."""
    while not any(
        lease.offer.kind is kind and (lease.on_device or not kind.needs_device) and lease._began
        for lease in made._desk._open()
    ):
        await asyncio.sleep(0)
    await made.stop(STOP)
    await made.stop(STOP)


async def stopped(made: Pipeline, kind: SubStageKind, **hooks):
    reports, _ = await asyncio.gather(run(made, **hooks), stop_during(made, kind))
    return reports


def left_behind(cluster: Cluster) -> list[object]:
    found: list[object] = [*cluster.runs()]
    for (role, *_), handle in cluster.residents.items():
        actor = handle.actor
        found += actor._boxes if role == "rollout" else actor._trainer._runs
        if role == "rollout":
            found += [actor._engine.cached_tokens] if actor._engine.cached_tokens else []
    return found


@pytest.mark.parametrize("kind", list(SubStageKind))
def test_a_stop_during_each_kind_leaves_the_residents_clean(start, cluster, kind):
    made = start("out", RL, spec=SPEC)
    reports = asyncio.run(stopped(made, kind))
    assert of_kind(reports, Ended) == [Ended(outcome="stopped")]
    assert left_behind(cluster) == []
    told = {end.node for end in ends(reports)}
    assert {offer.node for offer in offers(reports) if offer.kind is kind} <= told


@pytest.mark.parametrize("kind", [SubStageKind.TAIL, SubStageKind.UPDATE])
def test_a_stop_in_the_middle_of_an_asynchronous_step(start, cluster, kind):
    rl = {**RL, "mode": {"type": "async", "max_staleness": 2}, "loss": {}}
    made = start("out", rl)
    reports = asyncio.run(stopped(made, kind, place=lambda offer: device()))
    assert of_kind(reports, Ended) == [Ended(outcome="stopped")]
    assert left_behind(cluster) == []


def test_a_stop_while_nothing_was_granted(start, cluster):
    made = start("out", RL)

    async def story():
        running = asyncio.create_task(run(made, place=lambda offer: None))
        while not made._desk._open():
            await asyncio.sleep(0)
        await made.stop(STOP)
        return await running

    reports = asyncio.run(story())
    assert of_kind(reports, Ended) == [Ended(outcome="stopped")]
    assert ends(reports) == []
