"""The life of a sub-stage: its edges, and what is written when it is offered, crosses, leaves and ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from backend.jobs.models import Attempt
from backend.pool.models import SubStage
from backend.pool.states import SUBSTAGE_EDGES, SubStageStatus
from backend.pool.substages import substage_finish, substage_grant, substage_leave, substages_lose
from tests.backend.metering.conftest import at, grant
from workers.protocol import Finished


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
