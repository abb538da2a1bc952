"""The worked example of the core's note: what forecasts say, and what is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.board import Board
from scheduler.core.forecast import Forecast, Question
from scheduler.core.lookahead import horizon_of
from scheduler.core.plan import plan
from scheduler.core.state import POLICIES, Resize, Snapshot, Start, Tenant
from tests.scheduler.core.build import TABLES, decode, device, part_of, pipeline, run_on, steps, tail, update

LOOKAHEAD = POLICIES["lookahead"]


def example() -> Snapshot:
    """A's tail of 10 s runs, an update of 6 s follows; B offers an update of 6 s, then decodes for 10 s."""
    a = pipeline(1, "d1", outlook=steps(tail(10), update(6)))
    b = pipeline(2, "d1", tenant=2, outlook=steps(decode(10), update(6)))
    return Snapshot(
        now=0.0,
        devices=(device("d1", 40),),
        tenants=(Tenant(1), Tenant(2)),
        pipelines=(a, b),
        nodes=(run_on(part_of(a, 0), "d1"), part_of(b, 1)),
        tables=TABLES,
    )


def work(question: Question, horizon: float) -> float:
    return Forecast(Board.of(example()), LOOKAHEAD, ["d1"], question).run(horizon)


def test_the_work_of_the_first_eight_seconds_by_hand():
    """At 1/4 and 3/4 the tail does 0.8 of a second in a second and the update 0.75: B is done after 8 s."""
    assert work(Question(), 8.0) == pytest.approx(8 * 0.8 + 6)
    # A favoured: at 1/2 each the weighted sum is largest, 4 * 1 + 0.5.
    assert work(Question(favour=((1, 4.0),)), 8.0) == pytest.approx(8 * 1.5)
    assert work(Question(holds_back=2), 8.0) == pytest.approx(8)


def test_held_back_the_updates_come_one_after_the_other():
    """A's tail to 10 s and its update to 16; B's update would gain nothing beside A's, so it waits for
    that.
    """
    assert work(Question(holds_back=2), 16.0) == pytest.approx(16)


def test_the_best_future_is_decided():
    board = Board.of(example())
    assert horizon_of(board, ["d1"]) == 1.25 * 16
    futures = [work(q, 20.0) for q in (Question(), Question(holds_back=2))]
    assert futures == pytest.approx([29.8, 21.2])
    decided = plan(example(), LOOKAHEAD)
    assert [(type(a), a.share) for a in decided.actions] == [(Resize, 0.25), (Start, 0.75)]


def test_without_shares_both_get_half():
    decided = plan(example(), replace(LOOKAHEAD, shares=False))
    assert [a.share for a in decided.actions] == [0.5, 0.5]
