"""Sequences of several turns: whichever way the engine goes on after an answer, the tokens are the same."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.workers.engines.adapters import logits, random_adapter
from tests.workers.engines.requests import request, tokens_by_key
from workers.engines.engine import TorchEngine
from workers.engines.lora import join
from workers.engines.sequences import NOBODY, Request, Rollout
from workers.engines.weights import Weights
from workers.models.chat import ChatTokenizer

OBSERVATION = [11, 12, 13, 14, 15]


def turns(run: str, key: int, **more: object) -> Request:
    settings = {"prompt": range(5, 9 + key), "max_tokens": 24, "turn_tokens": 4 + key, "keep": True}
    return request(run, key, **(settings | more))  # type: ignore[arg-type]


def fresh(tiny: Weights, *runs: str, **limits: int) -> TorchEngine:
    engine = TorchEngine(tiny, **limits)
    for seed, run in enumerate(runs or "a"):
        engine.load_adapter(run, 0, random_adapter(tiny.config, seed), 2.0)
    return engine


def first_turns(engine: TorchEngine, run: str = "a", count: int = 3, **more: object) -> list[Rollout]:
    engine.submit([turns(run, key, **more) for key in range(count)])
    return engine.decode([run]).finished


def answered(sequences: list[Rollout]) -> list[Rollout]:
    sequences = copy.deepcopy(sequences)
    for sequence in sequences:
        sequence.answer(OBSERVATION)
    return sequences


def test_an_answer_is_read_and_not_trained(tiny: Weights) -> None:
    engine = fresh(tiny)
    engine.submit([turns("a", 0, temperature=0.0)])
    (sequence,) = engine.decode().finished
    assert (len(sequence.tokens), sequence.finish) == (4, "length")
    sequence.answer(OBSERVATION)
    assert (sequence.finish, sequence.turn_start, sequence.left) == (None, 9, 15)
    engine.import_([sequence])
    (sequence,) = engine.decode().finished
    assert sequence.sampled == [True] * 4 + [False] * 5 + [True] * 4
    assert sequence.versions == [0] * 4 + [NOBODY] * 5 + [0] * 4
    assert sequence.logprobs[4:9] == [0.0] * 5
    adapter = join(tiny.config, random_adapter(tiny.config, 0), 2.0, torch.float32)
    table = logits(tiny, [*sequence.request.prompt, *sequence.tokens], adapter).log_softmax(-1)[3:-1]
    for place, (token, own) in enumerate(zip(sequence.tokens, sequence.sampled, strict=True)):
        if own:
            assert token == int(table[place].argmax())
            assert sequence.logprobs[place] == pytest.approx(float(table[place, token]), abs=1e-5)


@pytest.mark.parametrize("pass_tokens", [2048, 3])
def test_all_ways_to_go_on_sample_the_same(tiny: Weights, pass_tokens: int) -> None:
    """From the kept cache alone; beside rows of others that run; computed again here; and moved."""

    def go_on(engine: TorchEngine, sequences: list[Rollout]) -> tuple[int, dict[object, list[int]]]:
        engine.import_(answered(sequences))
        computed, finished = 0, []
        while engine.counts("a") != (0, 0):
            progress = engine.decode(max_steps=1, max_tokens_per_forward=pass_tokens)
            computed += progress.prompt_of.get("a", 0)
            finished += progress.finished
        return computed, {key: found for key, found in tokens_by_key(finished).items() if key[0] == "a"}

    engine = fresh(tiny, "a", "b")
    sequences = first_turns(engine)
    assert engine.cached_tokens == sum(entry.context - 1 for entry in sequences)
    computed, expected = go_on(engine, sequences)
    assert computed == 3 * len(OBSERVATION)
    assert len(expected) == 3

    others = fresh(tiny, "a", "b")
    sequences = first_turns(others)
    others.submit([request("b", key, prompt=range(20, 30), max_tokens=100) for key in range(4)])
    others.decode(["b"], max_steps=3)
    assert go_on(others, sequences) == (computed, expected)

    forgotten = fresh(tiny, "a", "b")
    sequences = first_turns(forgotten)
    forgotten.forget("a")
    assert forgotten.cached_tokens == 0
    contexts = sum(entry.context + len(OBSERVATION) for entry in sequences)
    assert go_on(forgotten, sequences) == (contexts, expected)

    assert go_on(fresh(tiny, "a", "b"), sequences) == (contexts, expected)


def test_missing_tokens_cost_no_pass_of_their_own(tiny: Weights) -> None:
    engine = fresh(tiny, "a", "b")
    sequences = first_turns(engine)
    engine.submit([request("b", 0, max_tokens=100)])
    engine.decode(["b"], max_steps=1)
    engine.import_(answered(sequences))
    progress = engine.decode(max_steps=1)
    assert progress.forwards == 1
    assert progress.sampled_of == {"a": 3, "b": 1}
    assert progress.prompt_of == {"a": 3 * len(OBSERVATION)}


def test_a_kept_cache_of_something_else_is_not_used(tiny: Weights) -> None:
    engine = fresh(tiny)
    first_turns(engine, count=1)
    engine.submit([turns("a", 0, prompt=range(30, 50))])
    progress = engine.decode()
    assert progress.prompt_of == {"a": 20}
    alone = fresh(tiny)
    alone.submit([turns("a", 0, prompt=range(30, 50))])
    assert progress.finished[0].tokens == alone.decode().finished[0].tokens


def test_kept_caches_give_way_largest_first(tiny: Weights) -> None:
    engine = fresh(tiny, "a", "b", kv_tokens=160)
    sequences = first_turns(engine, prompt=range(5, 9))
    assert engine.cached_tokens == sum(entry.context - 1 for entry in sequences) == 7 + 8 + 9
    engine.submit([request("b", key, max_tokens=60) for key in range(2)])
    engine.decode(["b"], max_steps=1)
    # Two rows of 64 tokens leave 32, in which all three fit; a third needs 64 and none is left.
    assert engine.counts("b") == (2, 0)
    assert engine.cached_tokens == 2 * 64 + 24
    engine.submit([request("b", 2, max_tokens=40)])
    engine.decode(["b"], max_steps=1)
    assert engine.counts("b") == (2, 1)
    engine.export("b")
    engine.submit([request("b", key, max_tokens=28) for key in range(5)])
    engine.decode(["b"], max_steps=1)
    assert engine.cached_tokens == 5 * 32
    engine.export("b")
    engine.import_(answered(sequences))
    assert len(engine.decode().finished) == 3


def test_keeping_never_exceeds_the_memory(tiny: Weights) -> None:
    engine = fresh(tiny, kv_tokens=128)
    engine.submit([turns("a", key, prompt=range(5, 20), max_tokens=17, turn_tokens=3) for key in range(12)])
    whole: list[Rollout] = []
    for _ in range(200):
        progress = engine.decode(max_steps=1)
        assert engine.cached_tokens <= 128
        whole += [entry for entry in progress.finished if entry.left <= len(OBSERVATION)]
        going_on = [entry for entry in progress.finished if entry.left > len(OBSERVATION)]
        engine.import_(answered(going_on))
        if len(whole) == 12:
            break
    assert {tuple(entry.sampled) for entry in whole} == {
        (True,) * 3 + (False,) * 5 + (True,) * 3 + (False,) * 5 + (True,)
    }


def test_an_earlier_turn_cannot_end_a_later_one(tiny: Weights, tokenizer: ChatTokenizer) -> None:
    free = fresh(tiny)
    free.submit([turns("a", 0, keep=False)])
    (sequence,) = free.decode().finished
    stop = tokenizer.decode(sequence.tokens[1:3], skip_special=False)
    engine = TorchEngine(tiny, tokenizer)
    engine.load_adapter("a", 0, random_adapter(tiny.config, 0), 2.0)
    engine.submit([turns("a", 0, stop=(stop,))])
    (stopped,) = engine.decode().finished
    assert (stopped.finish, len(stopped.tokens)) == ("stop", 3)
    stopped.answer([])
    engine.import_([stopped])
    (stopped,) = engine.decode().finished
    assert len(stopped.tokens) > 4


def test_answers_that_cannot_be_are_refused(tiny: Weights) -> None:
    engine = fresh(tiny)
    engine.submit([turns("a", 0, max_tokens=9)])
    (sequence,) = engine.decode().finished
    with pytest.raises(ValueError, match="room for 5 tokens, its answer takes 5"):
        sequence.answer(OBSERVATION)
    sequence.answer(OBSERVATION[:4])
    with pytest.raises(ValueError, match="still sampling"):
        sequence.answer([])
    engine.import_([sequence])
    (sequence,) = engine.decode().finished
    assert (sequence.finish, sequence.left) == ("length", 0)
    assert engine.cached_tokens == 0
    with pytest.raises(ValueError, match="is finished already"):
        engine.import_([sequence])


def test_some_are_exported_and_the_others_go_on(tiny: Weights) -> None:
    requests = [request("a", key, prompt=range(5, 9 + key), max_tokens=12 + key) for key in range(5)]
    stayed = fresh(tiny)
    stayed.submit(requests)
    expected = tokens_by_key(stayed.decode().finished)

    source, target = fresh(tiny, max_batch=4), fresh(tiny)
    source.submit(requests)
    source.decode(max_steps=3)
    moved = source.export("a", {(1,), (4,), (77,)})
    assert [entry.request.key for entry in moved] == [(1,), (4,)]
    assert [len(entry.tokens) for entry in moved] == [4, 0]
    assert source.counts("a") == (3, 0)
    target.import_(moved)
    found = source.decode().finished + target.decode().finished
    assert tokens_by_key(found) == expected


def test_what_has_finished_is_still_handed_out_after_an_export(tiny: Weights) -> None:
    engine = fresh(tiny)
    engine.submit([request("a", 0, max_tokens=1), request("a", 1)])
    asked = iter([False])
    with pytest.raises(StopIteration):
        engine.decode(should_stop=lambda: next(asked))
    assert [entry.request.key for entry in engine.export("a")] == [(1,)]
    assert [entry.request.key for entry in engine.decode().finished] == [(0,)]
