"""Residents alone: runs that come and go while others compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny
from tests.workers.local import device
from workers.engines.sequences import Request
from workers.residents import ModelLoad, RolloutResident, RunClosed, TrainerResident
from workers.rl.batching import Batch
from workers.spec import RLConfig


@pytest.fixture(autouse=True)
def polite_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda by: 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def trainer(model: Path) -> TrainerResident:
    made = TrainerResident(device(), str(model), "fp32")
    made.open("a", RLConfig(), 0, None)
    return made


@pytest.fixture
def engine(model: Path, trainer: TrainerResident) -> RolloutResident:
    made = RolloutResident(device(), str(model), "fp32")
    made.load()
    made.load_adapter("a", 0, *trainer.adapter("a"), share=1.0)
    return made


def request(run_key: str = "a", sample: int = 0, tokens: int = 6) -> Request:
    return Request(run_key, (0, 0, sample), (5, 6, 7), tokens, (0, 0, 0, sample))


def test_prefill_and_decode_finish_everything(engine):
    started = engine.prefill("a", [request(sample=n) for n in range(3)], share=1.0)
    assert (started.tokens, started.value.left) == (3, 3)  # one prompt, computed once
    ended = engine.decode("a", 0, share=1.0)
    assert (len(ended.value.finished), ended.value.left, ended.tokens) == (3, 0, 15)
    assert ended.ended_at >= ended.started_at >= started.started_at


def test_a_closed_run_computes_no_more_and_is_not_opened_by_a_late_call(engine, trainer):
    engine.prefill("a", [request()], share=1.0)
    engine.close("a")
    with pytest.raises(RunClosed):
        engine.decode("a", 0, share=1.0)
    with pytest.raises(RunClosed):
        engine.load_adapter("a", 1, *trainer.adapter("a"), share=1.0)
    trainer.close("a")
    with pytest.raises(RunClosed):
        trainer.open("a", RLConfig(), 0, None)


def test_a_run_that_cannot_be_set_up_leaves_nothing(trainer, tmp_path):
    with pytest.raises((OSError, ValueError)):
        trainer.open("b", RLConfig(), 0, str(tmp_path / "nowhere"))
    with pytest.raises(RunClosed):
        trainer.optim_step("b", 0.1, share=1.0)


def test_weights_that_are_not_there_are_a_load_error(tmp_path):
    made = RolloutResident(device(), str(tmp_path / "nothing"), "fp32")
    with pytest.raises(ModelLoad, match="nothing"):
        made.load()


def test_log_probs_come_back_in_the_order_of_the_batch(trainer):
    """Whatever the split, which goes by group and length."""
    completions = [(5,), (6, 7, 8), (9, 10), (11, 12, 13, 14)]
    batch = Batch(
        groups=[1, 0, 1, 0],
        prompts=[(20, 21), (22,), (20, 21), (22,)],
        completions=completions,
        engine_logprobs=[[0.0] * len(tokens) for tokens in completions],
        advantages=[0.0] * 4,
        keep=[True] * 4,
    )
    whole = trainer.logprobs("a", batch, 4, False, share=1.0).value
    assert [len(values) for values in whole] == [1, 3, 2, 4]
    split = trainer.logprobs("a", batch, 1, False, share=1.0).value
    for one, other in zip(whole, split, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
