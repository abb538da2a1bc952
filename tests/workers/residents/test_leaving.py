"""Runs that leave a rollout resident: sequences that move, runs that are closed, callers that are lost."""

from __future__ import annotations

import pytest

from tests.workers.engines.adapters import random_adapter
from tests.workers.residents.runs import SEEDS, WAIT_S, Steps, made, request, result, sequences, tokens
from workers.engines.sequences import Rollout
from workers.residents.errors import RunClosed
from workers.residents.rollout import RolloutResident


def test_pipelines_that_come_and_go_as_they_like_get_their_own_tokens(engine, callers, alone, tiny):
    """Eight at a time on two engines, with tails that move and weights that are loaded again."""
    engines = [engine(), engine()]

    def pipeline(number: int) -> bool:
        name, wanted, found = f"run{number}", 8, list[Rollout]()
        adapter = random_adapter(tiny.config, SEEDS["abc"[number % 3]])
        for resident in engines:
            resident.load_adapter(name, 0, adapter, 2.0, 1.0)
        home = engines[number % 2]
        home.submit(name, [Rollout(request(name, sample, 6 + sample)) for sample in range(wanted)], 1.0)
        while len(found) < wanted:
            news = home.news(name, 0)
            found += news.finished
            if news.finished and len(found) % 2 and len(found) < wanted:
                moving = home.export(name, {(wanted - 1,), (wanted - 2 - number % 3,)})
                home.load_adapter(name, len(found), adapter, 2.0, 1.0)
                found += home.news(name, wanted).finished
                home.submit(name, moving, 1.0)
            if number % 4 == 3 and len(found) == 3:
                home = _move(name, home, engines, found)
        for resident in engines:
            resident.close(name)
        expected = alone(
            [Rollout(request("abc"[number % 3], sample, 6 + sample)) for sample in range(wanted)]
        )
        return tokens(sorted(found, key=lambda rollout: rollout.request.key)) == expected

    assert all(callers.map(pipeline, range(24)))
    assert [resident._loaded.cached_tokens for resident in engines] == [0, 0]


def _move(
    name: str, source: RolloutResident, engines: list[RolloutResident], found: list[Rollout]
) -> RolloutResident:
    """All of a run to the other engine, as a merge does: what ended meanwhile comes with the news."""
    (target,) = (resident for resident in engines if resident is not source)
    moving = source.export(name)
    found += source.news(name, 0).finished
    target.submit(name, moving, 1.0)
    return target


def test_sequences_move_to_another_engine_and_end_as_they_would_have(engine, callers, alone):
    source, target = engine(), engine()
    steps = Steps(source, callers)
    moved = steps.after(6, source.export, "a")
    source.submit("a", sequences("a", 4, tokens=6), 1.0)
    stayed = made(source, "a")
    target.submit("a", result(moved), 1.0)
    arrived = made(target, "a")
    assert stayed and arrived
    together = sorted(stayed + arrived, key=lambda rollout: rollout.request.key)
    assert tokens(together) == alone(sequences("a", 4, tokens=6))


def test_some_sequences_leave_and_the_others_stay(resident, callers, alone):
    steps = Steps(resident, callers)
    moved = steps.after(2, resident.export, "a", {(0,), (2,), (77,)})
    resident.submit("a", sequences("a", 4), 1.0)
    stayed = made(resident, "a")
    assert [rollout.request.key for rollout in stayed] == [(1,), (3,)]
    assert sorted(rollout.request.key for rollout in result(moved)) == [(0,), (2,)]
    assert tokens(stayed) == alone(sequences("a", 4))[1::2]


def test_news_that_wait_end_when_the_run_leaves_or_is_closed(resident, callers):
    def waits(run_key: str) -> bool:
        return bool(resident._boxes[run_key]._changed._waiters)

    asked = callers.submit(resident.news, "b", -1)
    while not waits("b"):
        pass
    resident.close("b")
    with pytest.raises(RunClosed):
        asked.result(WAIT_S)


def test_a_lost_caller_leaves_no_more_than_its_sequences(resident):
    """Nobody asks for news: what was submitted is computed, held once, and the engine rests."""
    resident.submit("a", sequences("a", 3), 1.0)
    while resident._boxes["a"].computes or resident._stepping:
        pass
    assert len(resident._boxes["a"]._finished) == 3
    assert resident._loaded.cached_tokens == 0


def test_closing_the_run_of_a_lost_caller_stops_its_computing(resident, callers):
    steps = Steps(resident, callers)
    resident.submit("a", sequences("a", 3, tokens=400), 1.0)
    resident.close("a")
    computed = len(steps.keys)
    resident.load()  # through the queue, behind a step that might be there
    resident.load()
    assert len(steps.keys) == computed < 400
    assert resident._loaded.cached_tokens == 0
    assert set(resident._boxes) == {"b", "c"}


def test_a_closed_run_computes_no_more_and_is_not_opened_by_a_late_call(resident, tiny):
    resident.submit("a", sequences("a"), 1.0)
    resident.close("a")
    adapter = random_adapter(tiny.config, 1)
    for late in (
        lambda: resident.news("a", 0),
        lambda: resident.export("a"),
        lambda: resident.submit("a", sequences("a"), 1.0),
        lambda: resident.load_adapter("a", 1, adapter, 2.0, 1.0),
    ):
        with pytest.raises(RunClosed):
            late()


def test_a_run_that_returns_may_come_back_and_finds_nothing_of_before(resident, tiny, alone):
    resident.submit("a", sequences("a", tokens=100), 1.0)
    resident.close("a", True)
    with pytest.raises(RunClosed):
        resident.submit("a", sequences("a"), 1.0)
    resident.load_adapter("a", 0, random_adapter(tiny.config, SEEDS["a"]), 2.0, 1.0)
    resident.submit("a", sequences("a"), 1.0)
    assert tokens(made(resident, "a")) == alone(sequences("a"))
