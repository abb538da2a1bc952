"""The rollout engine on the tiny model: what is sampled must depend on the request alone."""

from __future__ import annotations

import pickle

import pytest
import torch

from tests.workers.engines.adapters import logits, random_adapter
from tests.workers.engines.requests import request, run_alone, tokens_by_key
from workers.engines.engine import TorchEngine
from workers.engines.errors import NotFinite
from workers.engines.lora import join
from workers.engines.packed import PackedBatch, pack
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights
from workers.models.chat import ChatTokenizer

EOS = 1


@pytest.fixture
def engine(tiny: Weights, tokenizer: ChatTokenizer) -> TorchEngine:
    engine = TorchEngine(tiny, tokenizer)
    engine.open("base")
    return engine


def test_greedy_follows_the_full_forward_pass(engine: TorchEngine, tiny: Weights) -> None:
    engine.submit([request("base", 0, temperature=0.0)])
    (sequence,) = engine.decode().finished
    context = [7, 8, 9]
    for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
        table = logits(tiny, context)[-1].log_softmax(-1)
        assert token == int(table.argmax())
        assert logprob == pytest.approx(float(table[token]), abs=1e-5)
        context.append(token)
    assert sequence.finish == "length"
    assert len(sequence.tokens) == 12


def test_logprobs_are_at_the_sampling_temperature(engine: TorchEngine, tiny: Weights) -> None:
    engine.submit([request("base", 0, temperature=0.6, top_p=0.8)])
    (sequence,) = engine.decode().finished
    context = [7, 8, 9]
    for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
        table = (logits(tiny, context)[-1] / 0.6).log_softmax(-1)
        assert logprob == pytest.approx(float(table[token]), abs=1e-5)
        context.append(token)


def test_samples_do_not_depend_on_the_batch(tiny: Weights) -> None:
    """Three runs with their own adapters, prompts and lengths, fused in one batch, against each sequence
    alone.
    """
    seeds = {"a": 1, "b": 2, "c": None}
    requests = [
        request(run, key, prompt=range(5, 8 + 3 * key), max_tokens=6 + 5 * key, temperature=1.0 + 0.1 * key)
        for run in seeds
        for key in range(4)
    ]
    engine = TorchEngine(tiny)
    for run, seed in seeds.items():
        engine.load_adapter(run, 0, None if seed is None else random_adapter(tiny.config, seed), 2.0)
    engine.submit(requests)
    together = tokens_by_key(engine.decode().finished)
    for entry in requests:
        alone = run_alone(tiny, entry, seeds[entry.run_key])
        assert together[entry.run_key, entry.key] == alone.tokens
    # The adapters do matter: runs differ for the same key.
    assert together["a", (0,)] != together["c", (0,)]


def test_joining_and_leaving_changes_nothing(tiny: Weights) -> None:
    engine = TorchEngine(tiny, max_batch=3)
    engine.load_adapter("a", 0, random_adapter(tiny.config, 1), 2.0)
    engine.open("b")
    first = [request("a", key, max_tokens=4 + 3 * key) for key in range(5)]
    late = [request("b", key, prompt=(20, 21), max_tokens=5) for key in range(4)]
    engine.submit(first)
    finished = engine.decode(max_steps=3).finished
    engine.submit(late)
    while sum(map(sum, (engine.counts("a"), engine.counts("b")))):
        progress = engine.decode(max_steps=2)
        assert sum(engine.counts(run)[0] for run in "ab") <= 3
        finished += progress.finished
    found = tokens_by_key(finished)
    assert len(finished) == 9
    for entry in first:
        assert found["a", entry.key] == run_alone(tiny, entry, 1).tokens
    for entry in late:
        assert found["b", entry.key] == run_alone(tiny, entry).tokens


def test_export_and_import_continue_as_if_never_moved(tiny: Weights) -> None:
    requests = [request("a", key, prompt=(9,) * (3 + key), max_tokens=10 + key) for key in range(4)]

    def fresh() -> TorchEngine:
        engine = TorchEngine(tiny)
        engine.load_adapter("a", 3, random_adapter(tiny.config, 1), 2.0)
        return engine

    stayed = fresh()
    stayed.submit(requests)
    expected = tokens_by_key(stayed.decode().finished)

    source, target = fresh(), fresh()
    source.submit(requests)
    source.prefill("a")
    source.decode(max_steps=4)
    source.submit([request("a", 9)])
    moved = source.export("a")
    assert [len(entry.tokens) for entry in moved] == [5, 5, 5, 5, 0]
    assert source.counts("a") == (0, 0)
    target.import_(moved)
    progress = target.prefill("a")
    assert progress.prompt_tokens == sum(3 + key + 5 for key in range(4)) + 3
    found = tokens_by_key(target.decode().finished)
    assert {key: found[key] for key in expected} == expected
    assert found["a", (9,)] == run_alone(tiny, request("a", 9), 1).tokens


def test_shared_prompts_are_computed_once(engine: TorchEngine) -> None:
    engine.submit([request("base", key, prompt=range(5, 25)) for key in range(8)])
    progress = engine.prefill("base")
    assert (progress.prompt_tokens, progress.sampled_tokens, progress.running) == (20, 8, 8)


def test_prefill_is_cut_at_the_tokens_per_forward(engine: TorchEngine) -> None:
    engine.submit([request("base", key, prompt=[key + 5] * 10) for key in range(5)])
    asked: list[int] = []

    def stop_at_second() -> bool:
        asked.append(0)
        return len(asked) > 1

    progress = engine.prefill("base", max_tokens_per_forward=25, should_stop=stop_at_second)
    assert (progress.prompt_tokens, progress.running, progress.waiting) == (20, 2, 3)
    assert engine.prefill("base", max_tokens_per_forward=25).running == 5


def test_a_forward_is_bounded_with_its_padding(tiny: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt among short ones, one long completion to replay among fresh ones."""
    engine = TorchEngine(tiny, kv_tokens=65_536)
    engine.open("a")
    packed: list[PackedBatch] = []

    def spy(*arguments: object) -> PackedBatch:
        packed.append(pack(*arguments))  # type: ignore[arg-type]
        return packed[-1]

    monkeypatch.setattr("workers.engines.engine.pack", spy)
    short = [request("a", key, prompt=[key + 5] * 10) for key in range(20)]
    engine.submit([short[0], request("a", 90, prompt=[7] * 100), *short[1:]])
    replayed = Rollout(request("a", 91, prompt=[8] * 10, max_tokens=90), [9] * 80, [-1.0] * 80, [0] * 80)
    engine.import_([replayed, *(Rollout(request("a", key, prompt=[8] * 10)) for key in range(30, 40))])
    assert engine.prefill("a", max_tokens_per_forward=120).prompt_tokens == 20 * 10 + 100 + 10 + 80 + 10
    for batch in packed:
        padded = batch.prompt_pad_PL.numel() + batch.row_pad_RL.numel()
        assert padded <= 120 or len(batch.row_prompt_R) == 1
    assert sum(len(batch.row_prompt_R) for batch in packed) == 32
    assert len(packed) < 8


def test_stop_id_ends_a_sequence_and_is_kept(engine: TorchEngine) -> None:
    engine.submit([request("base", 0)])
    (free,) = engine.decode().finished
    stop = free.tokens[4]
    first = free.tokens.index(stop)
    engine.submit([request("base", 0, stop_ids=frozenset({stop, EOS}))])
    (stopped,) = engine.decode().finished
    assert stopped.finish == "stop"
    assert stopped.tokens == free.tokens[: first + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1


def test_stop_text_across_tokens(engine: TorchEngine, tokenizer: ChatTokenizer) -> None:
    engine.submit([request("base", 0, max_tokens=20)])
    (free,) = engine.decode().finished
    text = tokenizer.decode(free.tokens, skip_special=False)
    stop = tokenizer.decode(free.tokens[6:9], skip_special=False)
    engine.submit([request("base", 0, max_tokens=20, stop=("never", stop))])
    (stopped,) = engine.decode().finished
    assert stopped.finish == "stop"
    kept = tokenizer.decode(stopped.tokens, skip_special=False)
    assert kept == text[: text.index(stop) + len(stop)]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]


def test_boundaries_return_control(engine: TorchEngine) -> None:
    engine.submit([request("base", key, max_tokens=3 + key) for key in range(6)])
    progress = engine.decode(["base"], min_running=4)
    assert progress.running == 4
    assert sorted(len(entry.tokens) for entry in progress.finished) == [3, 4]
    asked = iter([False, True])
    progress = engine.decode(should_stop=lambda: next(asked))
    assert progress.sampled_tokens == 4
    assert len(progress.finished) == 1
    assert len(engine.decode().finished) == 3


def test_each_token_carries_the_version_that_made_it(tiny: Weights) -> None:
    engine = TorchEngine(tiny)
    engine.load_adapter("a", 4, random_adapter(tiny.config, 1), 1.0)
    engine.submit([request("a", 0, max_tokens=5)])
    engine.decode(max_steps=2)
    engine.load_adapter("a", 5, random_adapter(tiny.config, 2), 1.0)
    (sequence,) = engine.decode().finished
    assert sequence.versions == [4, 4, 4, 5, 5]


def test_memory_is_bounded_and_nobody_starves(tiny: Weights) -> None:
    engine = TorchEngine(tiny, kv_tokens=128)
    engine.open("a")
    engine.open("b")
    entries = [request(run, key, prompt=(5, 6), max_tokens=20) for run in "ab" for key in range(6)]
    engine.submit(entries)
    finished = []
    for _ in range(200):
        finished += engine.decode(max_steps=1).finished
        assert engine.cached_tokens <= 128
        if len(finished) == 12:
            break
    found = tokens_by_key(finished)
    assert all(found[entry.run_key, entry.key] == run_alone(tiny, entry).tokens for entry in entries)


def test_new_base_weights(tiny: Weights) -> None:
    engine = TorchEngine(tiny)
    engine.open("full")
    state = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    state["model.layers.0.mlp.down_proj.weight"] *= 20
    engine.load_weights("full", 1, state)
    engine.submit([request("full", 0)])
    (sequence,) = engine.decode().finished
    assert sequence.tokens != run_alone(tiny, request("full", 0)).tokens
    assert set(sequence.versions) == {1}
    engine.open("other")
    with pytest.raises(ValueError, match="run other computes with them"):
        engine.load_weights("full", 2, state)


def test_a_run_that_diverged_leaves_the_others_alone(tiny: Weights) -> None:
    engine = TorchEngine(tiny)
    huge = {name: torch.full_like(tensor, 1e18) for name, tensor in random_adapter(tiny.config, 1).items()}
    engine.load_adapter("bad", 0, huge, 1.0)
    engine.load_adapter("good", 0, random_adapter(tiny.config, 1), 2.0)
    engine.submit([request("good", 0), request("bad", 0)])
    with pytest.raises(NotFinite, match="run bad: the model's outputs are not finite") as raised:
        engine.decode()
    assert pickle.loads(pickle.dumps(raised.value)).run_key == "bad"
    assert engine.counts("bad") == (0, 0)
    (sequence,) = engine.decode(["good"]).finished
    assert sequence.tokens == run_alone(tiny, request("good", 0), 1).tokens


def test_what_finished_before_an_error_is_not_lost(tiny: Weights) -> None:
    engine = TorchEngine(tiny)
    engine.open("good")
    engine.submit([request("good", 0, max_tokens=2)])
    calls = iter([False, False])
    with pytest.raises(StopIteration):
        engine.submit([request("good", 1)])
        engine.decode(should_stop=lambda: next(calls))
    assert [entry.request.key for entry in engine.decode(max_steps=0).finished] == [(0,)]
    assert engine.counts("good") == (1, 0)


def test_prompts_wait_again_when_computing_them_fails(tiny: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(tiny)
    engine.open("a")
    engine.submit([request("a", 0), request("a", 1)])

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("workers.engines.engine.hidden_states", out_of_memory)
        with pytest.raises(MemoryError):
            engine.prefill("a")
    assert engine.counts("a") == (0, 2)
    found = tokens_by_key(engine.decode().finished)
    assert found["a", (1,)] == run_alone(tiny, request("a", 1)).tokens


def test_decode_returns_when_others_hold_everything(tiny: Weights) -> None:
    engine = TorchEngine(tiny, max_batch=2)
    engine.open("a")
    engine.open("b")
    engine.submit([request("a", 0), request("a", 1), request("b", 0)])
    engine.prefill("a")
    progress = engine.decode(["b"])
    assert (progress.sampled_tokens, progress.running, progress.waiting) == (0, 0, 1)


def test_dropping(engine: TorchEngine) -> None:
    engine.submit([request("base", 0), request("base", 1)])
    engine.decode(max_steps=1)
    engine.drop("base")
    assert engine.counts("base") == (0, 0)
    assert engine.decode().finished == []
    engine.submit([request("base", 0)])
    engine.drop_adapter("base")
    engine.drop_adapter("base")
    with pytest.raises(ValueError, match="run base is not open"):
        engine.counts("base")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (request("nobody", 0), "the run is not open"),
        (request("base", 0, prompt=()), "the prompt is empty"),
        (request("base", 0, prompt=(5, 999)), "outside the vocabulary of 65"),
        (request("base", 0, max_tokens=0), "must be at least 1"),
        (request("base", 0, prompt=(5,) * 500, max_tokens=13), "500 tokens and max_tokens 13 exceed the 512"),
        (request("base", 0, top_p=0.0), "top_p above 0"),
        (request("base", 0, temperature=-1.0), "temperature must be 0 or more"),
        (request("base", 5), "the key is taken"),
    ],
)
def test_bad_requests_are_refused_whole(engine: TorchEngine, entry: Request, reason: str) -> None:
    engine.submit([request("base", 5)])
    with pytest.raises(ValueError, match=reason):
        engine.submit([request("base", 6), entry])
    assert engine.counts("base") == (0, 1)


def test_adapter_of_another_shape_is_refused(engine: TorchEngine, tiny: Weights) -> None:
    tensors = random_adapter(tiny.config, 1)
    name = next(iter(tensors))
    with pytest.raises(ValueError, match="expected"):
        engine.load_adapter("base", 1, tensors | {name: torch.zeros(4, 3)})


def test_bf16_stays_close_to_fp32(tiny: Weights) -> None:
    half = tiny.map(lambda name, tensor: tensor.bfloat16() if tensor.ndim == 2 else tensor)
    engine = TorchEngine(half)
    engine.load_adapter("a", 0, random_adapter(tiny.config, 1), 2.0)
    engine.submit([request("a", key) for key in range(8)])
    adapter = join(tiny.config, random_adapter(tiny.config, 1), 2.0, torch.float32)
    for sequence in engine.decode().finished:
        context = [*sequence.request.prompt, *sequence.tokens]
        table = logits(tiny, context[:-1], adapter).log_softmax(-1)[2:]
        chosen = table.gather(1, torch.tensor(sequence.tokens).unsqueeze(1)).squeeze(1)
        assert (torch.tensor(sequence.logprobs) - chosen).abs().mean() < 0.05
