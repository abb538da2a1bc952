"""The trainer resident: several runs that compute at once, make room, take on shares and end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.workers.residents.devices import cpu
from workers.engines.errors import NotFinite
from workers.residents.errors import ModelLoad, RunClosed
from workers.residents.trainer import TrainerResident
from workers.rl.averages import Denominator
from workers.rl.batching import Batch, denominator
from workers.rl.sums import Sums
from workers.spec import RLConfig
from workers.train.value_head import WEIGHT

WAIT_S = 30
OVER = Denominator(10, 4, 8)


def batch(*completions: tuple[int, ...], advantage: float = 1.0) -> Batch:
    return Batch(
        groups=[0] * len(completions),
        prompts=[(20, 21)] * len(completions),
        completions=list(completions),
        engine_logprobs=[[0.0] * len(tokens) for tokens in completions],
        advantages=[[advantage * (-1) ** index] * len(tokens) for index, tokens in enumerate(completions)],
        keep=[True] * len(completions),
    )


MICROS = [batch((5, 6), (7, 8, 9)), batch((9, 10, 11), (12,)), batch((13, 14, 15, 16))]


def between(trainer: TrainerResident, act: Callable[[str, int], Any]) -> None:
    """Call ``act(run, n)`` before a run's n-th micro-batch computes, on the computing thread."""
    compute, counts = trainer._loaded.forward_backward, dict[str, int]()

    def watched(run_key: str, micro: Batch) -> Sums:
        counts[run_key] = counts.get(run_key, 0) + 1
        act(run_key, counts[run_key])
        return compute(run_key, micro)

    trainer._loaded.forward_backward = watched  # type: ignore[method-assign]


@pytest.fixture
def make(tiny_folder: Path) -> Callable[..., TrainerResident]:
    def made(*run_keys: str, threads: int = 1) -> TrainerResident:
        trainer = TrainerResident(cpu(threads), str(tiny_folder), "fp32")
        for seed, key in enumerate(run_keys):
            trainer.open(key, RLConfig(), seed, None)
        return trainer

    return made


@pytest.fixture
def trainer(make: Callable[..., TrainerResident]) -> TrainerResident:
    return make("a")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- at once


def test_runs_compute_at_once_and_come_to_the_same_as_alone(make, callers):
    alone, both = make("a", "b"), make("a", "b", threads=2)
    for key in ("a", "b"):
        alone.forward_backward(key, MICROS, 1.0)
    together = Barrier(2, timeout=WAIT_S)
    between(both, lambda run_key, n: together.wait())  # each micro-batch waits for one of the other
    asked = [callers.submit(both.forward_backward, key, MICROS, 0.5) for key in ("a", "b")]
    sums = [each.result(WAIT_S).value for each in asked]
    assert [made.done for made in sums] == [3, 3]
    for key in ("a", "b"):
        assert same(alone.gradients(key), both.gradients(key))
        assert any(gradient.any() for gradient in both.gradients(key).values())


def test_more_runs_than_threads_take_turns(make, callers):
    trainer, order = make("a", "b", threads=1), []
    gate = Barrier(2, timeout=WAIT_S)

    def note(run_key: str, n: int) -> None:
        if not order:
            gate.wait()  # until the other run waits for its turn
        order.append(run_key)

    between(trainer, note)
    first = callers.submit(trainer.forward_backward, "a", MICROS, 1.0)
    while not trainer._lanes._lanes:
        pass
    other = callers.submit(trainer.forward_backward, "b", MICROS, 1.0)
    while len(trainer._lanes._lanes) < 2:
        pass
    gate.wait()
    first.result(WAIT_S), other.result(WAIT_S)
    assert order[:2] == ["a", "b"]
    assert sorted(order) == ["a"] * 3 + ["b"] * 3


def test_a_run_that_diverges_disturbs_nobody(make, callers):
    trainer, alone = make("a", "b", threads=2), make("a", "b")
    alone.forward_backward("b", MICROS, 1.0)
    bad = [batch((5, 6), advantage=float("inf"))]
    together = Barrier(2, timeout=WAIT_S)
    between(trainer, lambda run_key, n: together.wait() if n == 1 else None)
    failed = callers.submit(trainer.forward_backward, "a", bad, 0.5)
    trainer.forward_backward("b", MICROS, 0.5)
    with pytest.raises(NotFinite, match="run a"):
        failed.result(WAIT_S)
    assert same(alone.gradients("b"), trainer.gradients("b"))


# ---------------------------------------------------------------- between micro-batches


def test_a_run_makes_room_after_its_micro_batch_and_loses_nothing(make):
    trainer, whole = make("a"), make("a")
    between(trainer, lambda run_key, n: trainer.make_room("a") if n == 2 else None)
    stopped = trainer.forward_backward("a", MICROS, 1.0)
    assert (stopped.value.done, stopped.tokens) == (2, 17)
    rest = trainer.forward_backward("a", MICROS[2:], 1.0)
    at_once = whole.forward_backward("a", MICROS, 1.0)
    assert (rest.value.done, at_once.value.done) == (1, 3)
    assert stopped.value.sums + rest.value.sums == at_once.value.sums
    assert same(trainer.gradients("a"), whole.gradients("a"))
    assert stopped.started_at <= stopped.ended_at <= rest.started_at


def test_making_room_that_overtakes_its_call_counts_for_it_but_not_for_the_next_update(trainer):
    trainer.make_room("a")
    assert trainer.forward_backward("a", MICROS, 1.0).value.done == 1
    assert trainer.forward_backward("a", MICROS, 1.0).value.done == 3
    trainer.make_room("a")
    trainer.optim_step("a", 1e-3, OVER, share=1.0)
    assert trainer.forward_backward("a", MICROS, 1.0).value.done == 3
    assert trainer.forward_backward("a", [], 1.0).value.done == 0


def test_a_share_holds_from_the_next_micro_batch_on_for_its_run(make, callers):
    trainer, threads = make("a", "b", threads=4), {"a": [], "b": []}
    together = Barrier(2, timeout=WAIT_S)

    def watch(run_key: str, n: int) -> None:
        threads[run_key].append(torch.get_num_threads())
        together.wait()
        if run_key == "a" and n == 2:
            trainer.resize("a", 0.75)

    between(trainer, watch)
    other = callers.submit(trainer.forward_backward, "b", MICROS, 0.25)
    trainer.forward_backward("a", MICROS, 0.5)
    other.result(WAIT_S)
    assert threads == {"a": [2, 2, 3], "b": [1, 1, 1]}


def test_a_closed_run_ends_at_its_micro_batch_and_the_others_go_on(make, callers):
    trainer = make("a", "b")
    seen = []

    def close_at_the_second(run_key: str, n: int) -> None:
        seen.append(n)
        if n == 2:
            callers.submit(trainer.close, "a")
            while "a" in trainer._open:
                pass

    between(trainer, close_at_the_second)
    with pytest.raises(RunClosed):
        trainer.forward_backward("a", MICROS, 1.0)
    assert seen == [1, 2]
    assert trainer.forward_backward("b", MICROS[:1], 1.0).value.done == 1
    with pytest.raises(RunClosed):
        trainer.optim_step("a", 0.1, OVER, share=1.0)
    with pytest.raises(RunClosed):
        trainer.open("a", RLConfig(), 0, None)
    trainer.make_room("a")
    trainer.resize("a", 0.5)
    assert (trainer._shares, trainer._making_room) == ({"b": 1.0}, set())


# ---------------------------------------------------------------- one run


def test_a_run_that_cannot_be_set_up_leaves_nothing(trainer, tmp_path):
    with pytest.raises((OSError, ValueError)):
        trainer.open("b", RLConfig(), 0, str(tmp_path / "nowhere"))
    with pytest.raises(RunClosed):
        trainer.optim_step("b", 0.1, OVER, share=1.0)


def test_a_run_that_returns_finds_its_state_where_it_was_written(trainer, make, tmp_path):
    trainer.forward_backward("a", MICROS, 1.0)
    trainer.optim_step("a", 1e-2, denominator(MICROS[0], 8), share=1.0)
    trainer.export_state("a", str(tmp_path / "state"), "tiny")
    adapter, scaling = trainer.adapter("a")
    trainer.close("a", True)
    trainer.open("a", RLConfig(), 7, str(tmp_path / "state"))
    assert same(trainer.adapter("a")[0], adapter)
    assert trainer.adapter("a")[1] == scaling


def test_a_run_starts_from_a_checkpoint_and_goes_on_from_its_own_state(make, tmp_path):
    made, penalized = make("a"), RLConfig.model_validate({"loss": {"kl_beta": 0.1}})
    made.forward_backward("a", MICROS, 1.0)
    made.optim_step("a", 1e-2, denominator(MICROS[0], 8), share=1.0)
    start, size, _ = made.save("a", str(tmp_path / "job"), 1, {}, "tiny", 2)
    assert size > 0
    made.open("b", penalized, 5, None, start)
    assert same(made.adapter("b")[0], made.adapter("a")[0])
    own = made.logprobs("b", MICROS[0], 4, False, share=1.0).value
    assert made.logprobs("b", MICROS[0], 4, True, share=1.0).value == own
    made.forward_backward("b", [MICROS[0].with_logprobs(reference=own)], 1.0)
    made.optim_step("b", 1e-2, denominator(MICROS[0], 8), share=1.0)
    made.export_state("b", str(tmp_path / "state"), "tiny")
    made.open("c", penalized, 5, str(tmp_path / "state"), start)
    assert same(made.adapter("c")[0], made.adapter("b")[0])
    assert made.logprobs("c", MICROS[0], 4, True, share=1.0).value == own
    assert made.logprobs("c", MICROS[0], 4, False, share=1.0).value != own


def test_a_start_that_cannot_be_used_names_no_path_and_leaves_nothing(trainer, tmp_path):
    (tmp_path / "step-3").mkdir()
    with pytest.raises(ModelLoad, match=r"^the checkpoint step-3 to start from cannot be used$"):
        trainer.open("b", RLConfig(), 0, None, str(tmp_path / "step-3"))
    with pytest.raises(RunClosed):
        trainer.optim_step("b", 0.1, OVER, share=1.0)
    trainer.open("b", RLConfig(), 0, None)


def test_gradients_of_workers_add_up(make):
    one, other, whole = make("a"), make("a"), make("a")
    one.forward_backward("a", MICROS[:1], 1.0)
    other.forward_backward("a", MICROS[1:2], 1.0)
    one.sum_gradients("a", 1.0, one.gradients("a"), other.gradients("a"))
    whole.forward_backward("a", MICROS[:2], 1.0)
    for name, gradient in whole.gradients("a").items():
        torch.testing.assert_close(one.gradients("a")[name], gradient)


def test_log_probs_and_values_come_back_in_the_order_of_the_batch(trainer):
    """Whatever the split, which goes by group and length."""
    completions = [(5,), (6, 7, 8), (9, 10), (11, 12, 13, 14)]
    mixed = Batch(
        groups=[1, 0, 1, 0],
        prompts=[(20, 21), (22,), (20, 21), (22,)],
        completions=completions,
        engine_logprobs=[[0.0] * len(tokens) for tokens in completions],
        advantages=[[0.0] * len(tokens) for tokens in completions],
        keep=[True] * 4,
    )
    whole = trainer.logprobs("a", mixed, 4, False, share=1.0)
    assert whole.tokens == 6 + 10
    assert [len(values) for values in whole.value] == [1, 3, 2, 4]
    split = trainer.logprobs("a", mixed, 1, False, share=1.0).value
    for one, other in zip(whole.value, split, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    trainer.open("ppo", RLConfig(algorithm="ppo"), 0, None)
    with torch.no_grad():
        trainer._loaded.parameters("ppo")[WEIGHT].fill_(0.1)
    values = trainer.values("ppo", mixed, 4, share=1.0)
    assert values.tokens == 6 + 10
    assert [len(row) for row in values.value] == [1, 3, 2, 4]
    for one, other in zip(values.value, trainer.values("ppo", mixed, 1, share=1.0).value, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
        assert all(one)
