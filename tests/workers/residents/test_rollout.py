"""The rollout resident: runs that join one batch, change their weights and fail while others sample."""

from __future__ import annotations

from threading import Event

import pytest

import workers.residents.rollout as module
from tests.workers.engines.adapters import random_adapter
from tests.workers.residents.devices import cpu
from tests.workers.residents.runs import WAIT_S, Steps, made, request, result, sequences, tokens
from workers.engines.errors import NotFinite
from workers.engines.sequences import Rollout
from workers.residents.errors import ModelLoad
from workers.residents.mailbox import News
from workers.residents.rollout import RolloutResident

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


def test_weights_that_are_not_there_are_a_load_error(tmp_path):
    resident = RolloutResident(cpu(), str(tmp_path / "nothing"), "fp32")
    with pytest.raises(ModelLoad, match="nothing"):
        resident.load()
