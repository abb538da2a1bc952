"""The life of a sub-stage: its edges, and what is written when it is offered, crosses, leaves and ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from backend.jobs.models import Attempt, Event
from backend.jobs.states import AttemptStatus
from backend.pool.models import Device, SubStage
from backend.pool.states import SUBSTAGE_EDGES, DeviceState, SubStageStatus
from backend.pool.substages import (
    substage_finish,
    substage_grant,
    substage_leave,
    substage_offer,
    substages_lose,
)
from tests.backend.metering.conftest import at, grant, make_device
from tests.backend.pool.conftest import crosses, had, leaves, offer, over, start
from workers.protocol import Finished, Offer, SubStageKind


@pytest.mark.parametrize("new", set(SubStageStatus) - {SubStageStatus.READY})
@pytest.mark.parametrize("old", SubStageStatus)
def test_a_sub_stage_changes_along_the_edges_of_the_table_and_no_others(device, ada, old, new):
    substage = grant(ada, device, 0)
    row = SubStage.objects.filter(pk=substage.pk)
    row.update(status=old)
    changes(ada, device)[new](node=substage.node)
    assert (row.get().status == new) == ((old, new) in SUBSTAGE_EDGES or old is new)


def changes(attempt: Attempt, device) -> dict[SubStageStatus, Callable[..., object]]:
    def done(node: str) -> None:
        report = Finished(node=node, started_at=at(1).timestamp(), ended_at=at(2).timestamp(), tokens=0)
        substage_finish(attempt=attempt, finished=report, now=at(3))

    def lost(node: str) -> None:
        substages_lose(attempt=attempt, now=at(3))

    terms = {"share": 1.0, "slot": "", "speed": 1.0, "reason": "", "action_id": "again"}
    return {
        SubStageStatus.GRANTED: partial(
            substage_grant, attempt_id=attempt.pk, device=device, now=at(1), **terms
        ),
        SubStageStatus.LEAVING: partial(substage_leave, attempt_id=attempt.pk, moves_to="", now=at(1)),
        SubStageStatus.DONE: done,
        SubStageStatus.LOST: lost,
    }


def test_an_offer_says_what_the_planner_must_know(ada):
    told = Offer(
        node="s3.update.2",
        step=3,
        worker=1,
        kind=SubStageKind.UPDATE,
        sequences=16,
        part=2,
        gang="s3.update",
        early=True,
        yielded=True,
        left=0.25,
        cached_tokens=70,
    )
    substage = substage_offer(attempt=ada, offer=told, now=at(1))
    substage.refresh_from_db()
    assert {name: getattr(substage, name) for name in told.model_dump(exclude={"type"})} == told.model_dump(
        exclude={"type"}
    )
    assert (substage.status, substage.granted_at) == (SubStageStatus.READY, None)


@pytest.mark.parametrize("kind", SubStageKind)
def test_what_needs_no_device_has_begun_with_its_offer_and_ends_with_its_report(ada, kind):
    substage = offer(ada, "a", 1, kind=kind)
    if kind.needs_device:
        assert substage.status == SubStageStatus.READY
        return
    assert (substage.status, substage.granted_at) == (SubStageStatus.GRANTED, at(1))
    assert not leaves(ada, "a", 2)
    done = over(ada, "a", 1, 5)
    assert (done.status, done.device, done.ended_at, had(done)) == (SubStageStatus.DONE, None, at(5), [])


def test_a_grant_says_where_in_which_slot_and_why(device, ada):
    substage = start(ada, device, "a", 1, share=0.5, slot="rollout base")
    assert (substage.device, substage.share, substage.slot) == (device, 0.5, "rollout base")
    assert (substage.reason, substage.action_id) == ("it was its turn", f"start:{ada.pk}/a")
    assert substage.allotments.get().reason == "it was its turn"


@pytest.mark.parametrize(
    "status", sorted(set(AttemptStatus) - {AttemptStatus.STARTING, AttemptStatus.RUNNING})
)
def test_an_attempt_that_stops_or_is_over_is_granted_nothing(device, ada, status):
    Attempt.objects.filter(pk=ada.pk).update(status=status)
    offer(ada, "a", 1)
    assert not granted(ada, device, "a")
    assert had(ada.substages.get()) == []


def test_nothing_is_granted_on_a_lost_device(device, ada):
    Device.objects.update(state=DeviceState.LOST)
    offer(ada, "a", 1)
    assert not granted(ada, device, "a")
    assert ada.substages.get().status == SubStageStatus.READY


def granted(attempt: Attempt, device: Device, node: str) -> bool:
    return changes(attempt, device)[SubStageStatus.GRANTED](node=node)


def test_a_crossing_ends_the_one_and_begins_the_other_in_its_place(device, ada):
    start(ada, device, "a", 1, share=0.5, slot="rollout")
    new = crosses(ada, "a", 2, 4, "a2", rows=3, now=5)
    old = ada.substages.get(node="a")
    assert (old.status, old.started_at, old.ended_at, old.forwards) == (SubStageStatus.DONE, at(2), at(4), 2)
    new.refresh_from_db()
    assert (new.status, new.device, new.share, new.slot) == (SubStageStatus.GRANTED, device, 0.5, "rollout")
    assert (new.granted_at, new.sequences, new.reason) == (at(4), 3, "it was its turn")
    assert new.action_id == f"cross:{ada.pk}/a2"
    assert Event.objects.filter(job=ada.job, type=Event.Type.SUBSTAGE).count() == 1


@pytest.mark.parametrize("status", [SubStageStatus.READY, SubStageStatus.DONE, SubStageStatus.LOST])
def test_what_does_not_run_does_not_cross(device, ada, status):
    start(ada, device, "a", 1)
    SubStage.objects.update(status=status)
    assert crosses(ada, "a", 2, 4, "a2") is None
    assert not SubStage.objects.filter(node="a2").exists()


def test_rows_that_move_count_as_the_targets_from_the_order_on(device, ada, bob):
    other = make_device("n/cpu1")
    start(ada, device, "source", 1, rows=2)
    start(ada, other, "target", 1, slot="rollout", rows=3)
    start(bob, other, "neighbour", 1, slot="rollout", rows=5)
    assert leaves(ada, "source", 3, moves_to="target")
    target = ada.substages.get(node="target")
    assert (target.sequences, had(target)) == (5, [(1, 3, 375), (3, None, 500)])
    done = over(ada, "source", 1, 4)
    assert (done.moves_to, had(done)) == ("target", [(1, 3, 1000)])


def test_an_order_to_move_that_came_after_a_crossing_is_void(device, ada):
    start(ada, device, "source", 1, share=0.5, rows=2)
    start(ada, make_device("n/cpu1"), "target", 1, rows=3)
    leaves(ada, "source", 3, moves_to="target")
    new = crosses(ada, "source", 1, 2, "source2", rows=1, now=4)
    # From the crossing to the order it is billed, and again from when it is known that it goes on.
    assert had(ada.substages.get(node="source")) == [(1, 2, 500)]
    assert (new.status, had(new)) == (SubStageStatus.GRANTED, [(2, 3, 500), (4, None, 500)])
    assert ada.substages.get(node="source").moves_to == ""
    assert ada.substages.get(node="target").sequences == 3
