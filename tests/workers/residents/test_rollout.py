"""The rollout resident: runs that join, leave, change their weights and fail while others sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tests.workers.engines.adapters import random_adapter
from tests.workers.residents.devices import cpu
from workers.engines.engine import TorchEngine
from workers.engines.errors import NotFinite
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights
from workers.residents import ModelLoad, News, RolloutResident, RunClosed
from workers.residents import rollout as module

WAIT_S = 30
SEEDS = {"a": 1, "b": 2, "c": 3}


def request(run_key: str, sample: int = 0, tokens: int = 10, **more: Any) -> Request:
    return Request(run_key, (sample,), (7, 8, 9), tokens, (0, 0, sample), **more)


def sequences(run_key: str, count: int = 2, tokens: int = 10) -> list[Rollout]:
    """The first is the shortest: they end one after the other."""
    return [Rollout(request(run_key, sample, tokens + sample)) for sample in range(count)]


def made(resident: RolloutResident, run_key: str) -> list[Rollout]:
    """All that the run is given, in order of key."""
    found: list[Rollout] = []
    news = resident.news(run_key, -1)
    while news.running + news.waiting or news.finished:
        found += news.finished
        news = resident.news(run_key, 0)
    return sorted(found, key=lambda rollout: rollout.request.key)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.tokens for rollout in rollouts]


class Steps:
    """Watches the engine's steps, and does things between two of them: ``steps.after(2, call, ...)``.

    The third step does not return before the call stands in the resident's queue.
    """

    def __init__(self, resident: RolloutResident, callers: ThreadPoolExecutor) -> None:
        self.keys: list[tuple[str, ...]] = []
        self.threads: list[int] = []
        self.before: Callable[[tuple[str, ...]], None] = lambda keys: None
        self._resident, self._callers = resident, callers
        self._calls: dict[int, tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = {}
        self._decode = resident._loaded.decode
        resident._loaded.decode = self._watched  # type: ignore[method-assign]

    def after(self, step: int, call: Callable[..., Any], *args: Any) -> Future[Any]:
        self._calls[step] = (Future(), call, args)
        return self._calls[step][0]

    def _watched(self, keys: list[str], **named: Any) -> Any:
        self.before(tuple(keys))
        step = len(self.keys)
        self.keys.append(tuple(keys))
        self.threads.append(torch.get_num_threads())
        progress = self._decode(keys, **named)
        if step in self._calls:
            self._queue(*self._calls.pop(step))
        return progress

    def _queue(self, done: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        queue = self._resident._thread._work_queue
        before = queue.qsize()
        asked = self._callers.submit(call, *args)
        asked.add_done_callback(lambda asked: done.set_result(asked))
        while queue.qsize() == before and not asked.done():
            pass


def result(done: Future[Any]) -> Any:
    return done.result(WAIT_S).result(WAIT_S)


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def engine(tiny_folder: Path, tiny: Weights) -> Callable[[], RolloutResident]:
    def make() -> RolloutResident:
        resident = RolloutResident(cpu(), str(tiny_folder), "fp32")
        resident.load()
        for key, seed in SEEDS.items():
            resident.load_adapter(key, 0, random_adapter(tiny.config, seed), 2.0, 1.0)
        return resident

    return make


@pytest.fixture
def resident(engine: Callable[[], RolloutResident]) -> RolloutResident:
    return engine()


@pytest.fixture
def alone(tiny: Weights) -> Callable[[list[Rollout]], list[list[int]]]:
    """What each sequence comes to when its run has an engine to itself."""

    def sample(wanted: list[Rollout]) -> list[list[int]]:
        engine = TorchEngine(tiny)
        key = wanted[0].request.run_key
        engine.load_adapter(key, 0, random_adapter(tiny.config, SEEDS[key]), 2.0)
        engine.import_(wanted)
        return tokens(sorted(engine.decode().finished, key=lambda rollout: rollout.request.key))

    return sample


# ---------------------------------------------------------------- news


def test_news_tell_each_thing_once(resident):
    resident.submit("a", sequences("a", 3), 1.0)
    told: list[News] = [resident.news("a", 0)]
    while told[-1].running + told[-1].waiting:
        told.append(resident.news("a", 0))
    finished = [rollout.request.key for news in told for rollout in news.finished]
    assert sorted(finished) == [(0,), (1,), (2,)]
    assert sum(news.prompt_tokens for news in told) == 3  # one prompt, computed once
    assert sum(news.sampled_tokens for news in told) == 10 + 11 + 12
    assert sum(news.forwards for news in told) == 11  # the first step makes two tokens: prefill and decode
    assert told[-1].cached_tokens == 0
    times = [time for news in told if news.ended_at for time in (news.started_at, news.ended_at)]
    assert times == sorted(times)
    assert resident.news("a", 0) == News([], 0, 0, 0, 0, 0, 0, None, None)


def test_prefilled_is_told_once_and_early(resident, callers):
    steps = Steps(resident, callers)
    gate = Event()
    steps.before = lambda keys: gate.wait(WAIT_S) if len(steps.keys) == 1 else None
    resident.submit("a", sequences("a", 2), 1.0)
    news = resident.news("a", 0)
    assert (news.finished, news.running, news.waiting) == ([], 2, 0)
    assert news.cached_tokens == 2 * (3 + 2)
    gate.set()
    assert resident.news("a", 0).finished


def test_nothing_to_tell_is_told_after_a_while(resident, monkeypatch):
    monkeypatch.setattr(module, "NEWS_WAIT_S", 0.01)
    assert resident.news("a", -1) == News([], 0, 0, 0, 0, 0, 0, None, None)


# ---------------------------------------------------------------- one batch


def test_runs_join_and_leave_one_batch_between_any_two_tokens(resident, callers, alone):
    steps = Steps(resident, callers)
    joined = steps.after(2, resident.submit, "b", sequences("b", 3), 1.0)
    left = steps.after(5, resident.close, "c")
    resident.submit("c", sequences("c", tokens=50), 1.0)
    resident.submit("a", sequences("a", tokens=20), 1.0)
    assert tokens(made(resident, "a")) == alone(sequences("a", tokens=20))
    result(joined), result(left)
    assert tokens(made(resident, "b")) == alone(sequences("b", 3))
    sets = list(map(set, steps.keys))
    assert {"a", "b", "c"} in sets  # together in one step
    assert not any("c" in keys for keys in sets[6:])
    assert sets[-1] == {"a"}


def test_new_weights_hold_from_the_next_token_on_and_for_their_run_only(resident, callers, alone, tiny):
    steps = Steps(resident, callers)
    adapter = random_adapter(tiny.config, 9)
    swapped = steps.after(3, resident.load_adapter, "a", 1, adapter, 2.0, 1.0)
    resident.submit("b", sequences("b", 2), 1.0)
    resident.submit("a", [Rollout(request("a", tokens=12))], 1.0)
    (changed,) = made(resident, "a")
    assert changed.versions in ([0] * n + [1] * (12 - n) for n in (4, 5))
    assert result(swapped).tokens == 0
    (as_before,) = alone([Rollout(request("a", tokens=12))])
    held = changed.versions.count(0)
    assert changed.tokens[:held] == as_before[:held] and changed.tokens != as_before
    assert tokens(made(resident, "b")) == alone(sequences("b", 2))


def test_a_batch_takes_on_another_share_at_the_next_token(tiny_folder, tiny, callers):
    resident = RolloutResident(cpu(threads=4), str(tiny_folder), "fp32")
    resident.load()
    resident.load_adapter("a", 0, random_adapter(tiny.config, 1), 2.0, 0.25)
    steps = Steps(resident, callers)
    steps.before = lambda keys: resident.resize("a", 0.5) if len(steps.keys) == 3 else None
    resident.submit("a", [Rollout(request("a"))], 1.0)
    made(resident, "a")
    resident.resize("stranger", 0.25)
    assert steps.threads[:6] == [4, 4, 4, 4, 2, 2]
    assert resident._share == 0.5


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


# ---------------------------------------------------------------- failures


def test_a_run_that_diverges_disturbs_nobody(resident, callers, alone, tiny):
    steps = Steps(resident, callers)
    broken = {name: tensor * 1e30 for name, tensor in random_adapter(tiny.config, 1).items()}
    loaded = steps.after(3, resident.load_adapter, "a", 1, broken, 2.0, 1.0)
    for key in ("b", "a", "c"):
        resident.submit(key, sequences(key, 3), 1.0)
    with pytest.raises(NotFinite, match="run a"):
        made(resident, "a")
    result(loaded)
    with pytest.raises(NotFinite):
        resident.news("a", 0)
    with pytest.raises(NotFinite):
        resident.submit("a", [Rollout(request("a", 9))], 1.0)
    for key in ("b", "c"):
        assert tokens(made(resident, key)) == alone(sequences(key, 3))


def test_a_failure_of_nobody_knows_whom_is_that_of_the_run_that_fails_alone(resident, callers, alone):
    steps = Steps(resident, callers)

    def fail(keys: tuple[str, ...]) -> None:
        if "a" in keys and len(steps.keys) > 2:
            raise MemoryError("no memory")

    steps.before = fail
    for key in ("b", "a"):
        resident.submit(key, sequences(key, 3, tokens=20), 1.0)
    with pytest.raises(MemoryError):
        made(resident, "a")
    assert tokens(made(resident, "b")) == alone(sequences("b", 3, tokens=20))
    assert resident._loaded.counts("a") == (0, 0)


def test_runs_that_fail_together_only_go_on_one_by_one(resident, callers, alone):
    steps = Steps(resident, callers)

    def fail(keys: tuple[str, ...]) -> None:
        if len(keys) > 1:
            raise MemoryError("too many rows")

    steps.before = fail
    for key in ("a", "b"):
        resident.submit(key, sequences(key, 3), 1.0)
    for key in ("a", "b"):
        assert tokens(made(resident, key)) == alone(sequences(key, 3))


def test_sequences_that_never_get_room_fail_instead_of_waiting_for_ever(resident, callers, monkeypatch):
    room = resident._loaded._room
    steps = Steps(resident, callers)
    steps.before = lambda keys: monkeypatch.setattr(room, "kv_tokens", 2)
    resident.submit("a", [Rollout(request("a", tokens=4))], 1.0)
    with pytest.raises(MemoryError, match="room"):
        made(resident, "a")


def test_a_bad_sequence_is_refused_and_nothing_is_queued(resident):
    with pytest.raises(ValueError, match="key"):
        resident.submit("a", [Rollout(request("a")), Rollout(request("a"))], 1.0)
    assert resident.news("a", 0).waiting == 0


# ---------------------------------------------------------------- moving, closing


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


def test_weights_that_are_not_there_are_a_load_error(tmp_path):
    resident = RolloutResident(cpu(), str(tmp_path / "nothing"), "fp32")
    with pytest.raises(ModelLoad, match="nothing"):
        resident.load()
