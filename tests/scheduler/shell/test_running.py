"""Races by construction: the world changes between what a plan read and what it writes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus, JobStatus
from backend.pool.allotments import Terms, device_allot
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.services import node_seen
from backend.pool.states import SubStageStatus
from backend.pool.substages import substage_finish, substage_grant, substage_leave, substage_offer
from scheduler.core.state import POLICIES, Plan, Resize, Start, Yield
from scheduler.shell.commit import commit
from scheduler.shell.decide import Decision, board_of
from scheduler.shell.facts import Lore
from scheduler.shell.observe import observe
from scheduler.shell.orders import open_orders
from scheduler.shell.reports import reports_apply
from scheduler.shell.running import survivors
from scheduler.shell.touch import Touch
from tests import factories
from tests.scheduler.shell.shared import calibrate, one_device, require_never_overbooked
from workers.protocol import Crossed, Finished, Grant, Offer, Report, SubStageKind
from workers.protocol import Resize as ResizeOrder
from workers.protocol import Yield as YieldOrder

pytestmark = pytest.mark.django_db

POLICY = POLICIES["lookahead"]
EARLY, LATE = "s0.w0.update.1", "s0.w0.sync.2"


@pytest.fixture
def device() -> Device:
    calibrate()
    node_seen(name="local", ray_node_id="f" * 56, address="", devices=[one_device()], now=datetime.now(UTC))
    return Device.objects.get()


def attempt_at(device: Device, folder) -> Attempt:
    job = factories.job(factories.organization(), folder, status=JobStatus.RUNNING)
    return factories.attempt(job, home=[device.name], profile={"streams": True})


def offered(attempt: Attempt, node: str = EARLY, kind=SubStageKind.UPDATE, **fields) -> SubStage:
    offer = Offer(node=node, step=0, worker=0, kind=kind, sequences=8, **{"part": 0, "gang": node, **fields})
    return substage_offer(attempt=attempt, offer=offer, now=datetime.now(UTC))


def runs(attempt: Attempt, device: Device, share: float = 1.0, **fields) -> SubStage:
    row = offered(attempt, **fields)
    assert substage_grant(
        attempt_id=attempt.pk,
        node=row.node,
        device=device,
        share=share,
        slot=f"train:{attempt.pk}",
        speed=share,
        reason="test",
        action_id=f"start:{attempt.pk}/{row.node}",
        now=datetime.now(UTC),
    )
    row.refresh_from_db()
    return row


def finish(row: SubStage) -> None:
    now = datetime.now(UTC)
    report = Finished(node=row.node, started_at=now.timestamp(), ended_at=now.timestamp(), tokens=1)
    assert substage_finish(attempt=row.attempt, finished=report, now=now)


def node(row: SubStage) -> str:
    return f"{row.attempt_id}/{row.node}"


def decision(*actions) -> Decision:
    world = observe(datetime.now(UTC))
    after = board_of(world.snapshot, POLICY)
    for action in actions:
        after.apply(action)
    return Decision(world, POLICY, Plan(actions), after, frozenset())


def carry_out(made: Decision):
    orders, again = commit(made, Lore(), stimulus="test", now=datetime.now(UTC))
    return [type(order.order) for order in orders], again


def shares() -> dict[int, float]:
    rows = Allotment.objects.filter(end__isnull=True)
    return dict(rows.values_list("substage__attempt", "share"))


@pytest.fixture
def two(device, tmp_path):
    """One trains on the whole device, the other wants to."""
    one, other = attempt_at(device, tmp_path / "1"), attempt_at(device, tmp_path / "2")
    return runs(one, device), offered(other)


def beside(running: SubStage, waiting: SubStage, device: Device) -> Decision:
    return decision(
        Resize(node(running), running.attempt_id, 0.25, "makes room"),
        Start(node(waiting), waiting.attempt_id, device.name, 0.75, "computes beside"),
    )


def test_shares_change_with_the_start_in_one_transaction(two, device):
    running, waiting = two
    orders, again = carry_out(beside(running, waiting, device))
    assert orders == [ResizeOrder, Grant]
    assert not again
    assert shares() == {running.attempt_id: 0.25, waiting.attempt_id: 0.75}
    require_never_overbooked()


def test_who_relied_on_one_that_is_over_meanwhile_waits_for_the_next_decision(two, device):
    running, waiting = two
    made = beside(running, waiting, device)
    finish(running)
    assert carry_out(made) == ([], made_again(device))
    assert SubStage.objects.get(pk=waiting.pk).status == "ready"


def made_again(device: Device):
    return Touch(devices={device.name})


def test_who_relied_on_one_that_yields_waits_when_it_is_over_meanwhile(two, device):
    running, waiting = two
    made = decision(
        Yield(node(running), running.attempt_id, "others want it"),
        Start(node(waiting), waiting.attempt_id, device.name, 1.0, "its device is free"),
    )
    finish(running)
    assert carry_out(made) == ([], made_again(device))
    assert SubStage.objects.get(pk=waiting.pk).status == "ready"


def test_an_attempt_that_is_asked_to_stop_meanwhile_gets_nothing(two, device):
    running, waiting = two
    made = beside(running, waiting, device)
    Attempt.objects.filter(pk=waiting.attempt_id).update(status=AttemptStatus.STOPPING)
    orders, again = carry_out(made)
    assert (orders, again.devices) == ([], {device.name})
    assert shares() == {running.attempt_id: 1.0}


def test_a_gang_starts_whole_or_not_at_all():
    """Of what else depends on a lost action, only what is on its device."""
    gang = {(1, "1/a"): "g", (1, "1/b"): "g"}
    actions = [
        Resize("2/x", 2, 0.5, "r"),
        Start("1/a", 1, "d0", 0.5, "r"),
        Start("1/b", 1, "d1", 1.0, "r"),
        Start("3/c", 3, "d1", 0.5, "r"),
        Start("4/d", 4, "d2", 1.0, "r"),
    ]
    assert survivors(actions, {0}, {(2, "2/x"): "d0"}, gang) == {0, 1, 2, 3}
    assert survivors(actions, set(), {}, gang) == set()


def test_who_crosses_before_it_hears_that_it_should_leave_shares_the_device(two, device):
    """Its yield point was the last: it goes on with the sync while another has its place."""
    running, waiting = two
    now = datetime.now(UTC)
    assert substage_leave(attempt_id=running.attempt_id, node=running.node, moves_to="", now=now)
    assert open_orders()[0].order == YieldOrder(action_id=f"yield:{node(running)}", node=running.node)
    runs(waiting.attempt, device, node="s0.w0.update.9")
    at = now.timestamp()
    body = Crossed(
        finished=Finished(node=running.node, started_at=at, ended_at=at, tokens=1),
        offer=Offer(node=LATE, step=0, worker=0, kind=SubStageKind.SYNC, sequences=8, part=3),
    )
    news = reports_apply([Report(attempt_id=running.attempt_id, seq=1, at=at, body=body)], Lore())
    assert shares() == {running.attempt_id: 0.5, waiting.attempt_id: 0.5}
    assert {type(order.order) for order in news.orders} == {ResizeOrder}
    assert {order.attempt_id for order in news.orders} == {running.attempt_id, waiting.attempt_id}
    assert news.touch.devices == {device.name}
    require_never_overbooked()


def test_who_was_told_to_leave_computes_nothing_in_the_planners_eyes(two):
    running, waiting = two
    substage_leave(attempt_id=running.attempt_id, node=running.node, moves_to="", now=datetime.now(UTC))
    nodes = observe(datetime.now(UTC)).snapshot.nodes
    assert [found.pipeline for found in nodes] == [waiting.attempt_id]


def test_what_is_left_is_what_its_allotments_did_not_do(device, tmp_path):
    attempt = attempt_at(device, tmp_path)
    row = runs(attempt, device, share=0.5)
    SubStage.objects.filter(pk=row.pk).update(left=0.5)
    device_allot(device_id=device.pk, terms={row.pk: Terms(1.0, 1.0, "alone")}, now=datetime.now(UTC))
    first = row.allotments.order_by("start").first()
    seen = observe(datetime.now(UTC))
    (found,) = seen.snapshot.nodes
    done = (first.end - first.start).total_seconds() * 0.5
    assert found.left == pytest.approx(found.segment.seconds * 0.5 - done)
    assert found.since == first.end.timestamp()
    assert seen.running[attempt.pk, found.id].done == pytest.approx(done)


def test_orders_are_made_again_from_rows_with_the_shares_that_hold_now(two, device):
    running, waiting = two
    carry_out(beside(running, waiting, device))
    orders = [order.order for order in open_orders()]
    assert [(o.node, o.share) for o in orders if isinstance(o, Grant)] == [
        (running.node, 0.25),
        (waiting.node, 0.75),
    ]
    assert {o.share for o in orders if isinstance(o, ResizeOrder)} == {0.25, 0.75}
    assert [order.order for order in open_orders()] == orders


def test_grades_beside_rollouts_do_not_say_that_these_are_over(device, tmp_path):
    attempt = attempt_at(device, tmp_path)
    grade = offered(attempt, "s0.w0.grade.3", SubStageKind.GRADE, part=1, gang="")
    rollouts = offered(attempt, "s0.w0.tail.2", SubStageKind.TAIL, part=4, gang="")

    def seen() -> list[str]:
        return [node.kind.value for node in observe(datetime.now(UTC), lore=Lore()).snapshot.nodes]

    assert seen() == ["tail"]
    SubStage.objects.filter(pk=rollouts.pk).update(status=SubStageStatus.DONE)
    assert seen() == ["grade"]
    assert grade.status == SubStageStatus.GRANTED
