"""The desk: what is offered, granted, crossed and finished, and how long a run has waited."""

from __future__ import annotations

import asyncio

import pytest

from tests.workers.local import device, grant
from workers import grants
from workers.grants import Desk, Waiting
from workers.outbox import Outbox
from workers.protocol import Crossed, Finished, Offer, SubStageKind


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(grants.time, "monotonic", lambda: Clock.now)
    return Clock


def test_waiting_counts_only_while_nothing_of_the_run_has_a_device(clock):
    waiting = Waiting()
    clock.now = 5.0
    waiting.change(+2, 0)
    clock.now = 8.0
    waiting.change(-1, +1)  # one of two begins
    clock.now = 20.0
    waiting.change(0, -1)  # and ends; the other still waits
    clock.now = 21.0
    assert waiting.take() == pytest.approx(3 + 1)
    waiting.change(-1, +1)
    clock.now = 30.0
    assert waiting.take() == 0.0


def test_a_lease_keeps_its_device_when_it_crosses_and_its_old_name_still_reaches_it():
    async def story():
        outbox = Outbox(1)
        desk = Desk(outbox, "run")
        offering = asyncio.create_task(desk.offer(SubStageKind.PREFILL, 0, 0, 8, part=0))
        await asyncio.sleep(0)
        offer = (await outbox.after(0, 1))[0].body
        desk.grant(grant(offer, device()))
        lease = await offering
        lease.count(1.0, 2.0, 100)
        desk.cross(lease, SubStageKind.TAIL, 8, part=3, cached_tokens=108)
        lease.count(2.5, 4.0, 16, 2)
        assert desk.find(offer.node) is lease
        assert lease.device == device()
        desk.finish(lease)
        assert desk.find(offer.node) is None
        return [report.body for report in await outbox.after(1, 1)], offer

    (crossed, finished), offer = asyncio.run(story())
    assert isinstance(crossed, Crossed) and isinstance(finished, Finished)
    assert crossed.finished == Finished(node=offer.node, started_at=1.0, ended_at=2.0, tokens=100)
    assert (crossed.offer.kind, crossed.offer.part, crossed.offer.cached_tokens) == ("tail", 3, 108)
    assert (finished.node, finished.started_at, finished.tokens) == (crossed.offer.node, 2.5, 16)
    assert finished.forwards == 2


def test_the_nodes_of_a_gang_share_a_name_and_begin_together():
    async def story():
        outbox = Outbox(1)
        desk = Desk(outbox, "run")
        ganging = asyncio.create_task(desk.gang(SubStageKind.UPDATE, 3, {0: 5, 1: 6}, part=1))
        await asyncio.sleep(0)
        offers = [report.body for report in await outbox.after(0, 1)]
        desk.grant(grant(offers[0], device()))
        await asyncio.sleep(0)
        assert not ganging.done()
        desk.grant(grant(offers[1], device("local/cpu1")))
        gang = await ganging
        assert {worker: lease.device.name for worker, lease in gang.items()} == {
            0: "local/cpu0",
            1: "local/cpu1",
        }
        return offers

    offers = asyncio.run(story())
    assert all(isinstance(offer, Offer) for offer in offers)
    assert len({offer.gang for offer in offers}) == 1 and offers[0].gang
