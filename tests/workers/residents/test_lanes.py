"""Lanes: one piece of a run at a time, in order, and no run before all others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest

from workers.residents.lanes import Lanes

WAIT_S = 20


def ask(lanes: Lanes, callers: ThreadPoolExecutor, key: str, work: Callable[[], Any]) -> Future[Any]:
    """From a thread of its own; returns when the work is queued."""
    before = sum(map(len, lanes._lanes.values()))
    asked = callers.submit(lanes.run, key, work)
    while sum(map(len, lanes._lanes.values())) == before:
        pass
    return asked


def test_work_of_one_run_keeps_its_order_and_runs_take_turns():
    lanes, done, gate = Lanes(1), [], Event()
    with ThreadPoolExecutor(8) as callers:
        asked = [ask(lanes, callers, "a", lambda: gate.wait(WAIT_S))]
        for name in ("a1", "a2", "b1", "b2"):
            asked.append(ask(lanes, callers, name[0], lambda name=name: done.append(name)))
        gate.set()
        for each in asked:
            each.result(WAIT_S)
    assert done == ["b1", "a1", "b2", "a2"]
    assert lanes._lanes == {}


def test_runs_compute_at_once_and_one_run_never_does():
    lanes, together, inside = Lanes(2), Barrier(2, timeout=WAIT_S), []

    def alone() -> int:
        inside.append("a")
        seen = len(inside)
        inside.pop()
        return seen

    with ThreadPoolExecutor(8) as callers:
        pair = [callers.submit(lanes.run, key, together.wait) for key in ("a", "b")]
        for each in pair:
            each.result(WAIT_S)  # each waits inside for the other
        assert {each.result(WAIT_S) for each in [callers.submit(lanes.run, "a", alone)] * 1} == {1}
        assert max(callers.map(lambda _: lanes.run("a", alone), range(50))) == 1


def test_what_fails_is_raised_to_the_caller_and_the_lane_goes_on():
    lanes = Lanes(1)
    with pytest.raises(ZeroDivisionError):
        lanes.run("a", lambda: 1 // 0)
    assert lanes.run("a", lambda: 3) == 3
