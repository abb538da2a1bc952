"""A run that starts from another's checkpoint: its weights, and penalties to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.train.runs import assert_close, config, gradients, opened, rollout, step, train
from workers.engines.weights import Weights
from workers.spec import RLConfig
from workers.train.trainer import TorchTrainer

TUNINGS = ["lora", "full"]


def spec(tuning: str, beta: float = 0.5, **changes: Any) -> RLConfig:
    return config(tuning={"type": tuning}, loss={"kl_beta": beta}, **changes)


@pytest.fixture
def start(request: pytest.FixtureRequest, tiny: Weights, tiny_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint after two large steps of the tuning that the test is about."""
    trainer = opened(tiny, spec(request.getfixturevalue("tuning"), 0.0))
    for number in range(2):
        step(trainer, rollout(tiny, None, 1.0, number), 0.02)
    folder = tmp_path / "start"
    folder.mkdir()
    trainer.save_state("run", folder, "tiny", tiny_folder)
    return folder


def started(tiny: Weights, rl: RLConfig, start: Path) -> TorchTrainer:
    trainer = TorchTrainer(tiny)
    trainer.open("run", rl, 3, start)
    return trainer


@pytest.mark.parametrize("tuning", TUNINGS)
def test_weights_are_those_of_the_checkpoint_and_so_is_the_reference(
    tuning: str, tiny: Weights, start: Path
) -> None:
    trainer, fresh = started(tiny, spec(tuning), start), TorchTrainer(tiny)
    fresh.open("run", spec(tuning), 3)
    batch = rollout(tiny, None, 1.0)
    base, now = fresh.logprobs("run", batch), trainer.logprobs("run", batch)
    assert now[0] != pytest.approx(base[0], abs=1e-2)
    assert trainer.logprobs("run", batch, reference=True) == now
    assert fresh.logprobs("run", batch, reference=True) == base
    sums = train(trainer, batch.with_logprobs(reference=now))
    assert sums.kl == 0


@pytest.mark.parametrize("tuning", TUNINGS)
def test_training_moves_the_weights_and_not_the_reference(tuning: str, tiny: Weights, start: Path) -> None:
    trainer = started(tiny, spec(tuning), start)
    batch = rollout(tiny, None, 1.0)
    reference = trainer.logprobs("run", batch, reference=True)
    step(trainer, batch.with_logprobs(reference=reference))
    assert trainer.logprobs("run", batch, reference=True) == reference
    assert trainer.logprobs("run", batch)[0] != pytest.approx(reference[0], abs=1e-3)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_optimizer_is_fresh_and_a_resumed_run_goes_on_from_its_own_state(
    tuning: str, tiny: Weights, tiny_folder: Path, start: Path, tmp_path: Path
) -> None:
    def steps(trainer: TorchTrainer, first: int, last: int) -> None:
        for number in range(first, last):
            batch = rollout(tiny, None, 1.0, number)
            step(trainer, batch.with_logprobs(reference=trainer.logprobs("run", batch, reference=True)))

    through, stopped = (started(tiny, spec(tuning), start) for _ in range(2))
    fresh = opened(tiny, spec(tuning))
    with torch.no_grad():
        for name, tensor in fresh.parameters("run").items():
            tensor.copy_(through.parameters("run")[name])
    batch = rollout(tiny, None, 1.0)
    own = fresh.logprobs("run", batch)
    for trainer in (fresh, through):
        step(trainer, batch.with_logprobs(reference=own))
    assert_close(fresh.adapter("run"), through.adapter("run"))
    step(stopped, batch.with_logprobs(reference=own))
    steps(through, 1, 4)
    steps(stopped, 1, 2)
    stopped.save_state("run", tmp_path, "tiny", tiny_folder)
    resumed = started(tiny, spec(tuning), start)
    resumed.load_state("run", tmp_path)
    steps(resumed, 2, 4)
    ours, theirs = resumed.adapter("run"), through.adapter("run")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_weight_of_the_penalty_matters(tuning: str, tiny: Weights, start: Path) -> None:
    batch = rollout(tiny, None, 1.0)
    found = []
    for beta in (0.0, 0.5):
        trainer = started(tiny, spec(tuning, beta), start)
        if beta:
            batch = batch.with_logprobs(reference=trainer.logprobs("run", batch, reference=True))
        for _ in range(2):
            step(trainer, batch)
        found.append(trainer.logprobs("run", batch)[0])
    assert found[0] != pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_nothing_is_kept_that_nothing_compares_with(tuning: str, tiny: Weights, start: Path) -> None:
    trainer = started(tiny, spec(tuning, 0.0), start)
    with pytest.raises(ValueError, match="keeps no reference"):
        trainer.logprobs("run", rollout(tiny, None, 1.0), reference=True)


@pytest.mark.parametrize("tuning", ["lora"])
def test_an_adapter_of_another_kind_is_refused(tuning: str, tiny: Weights, start: Path) -> None:
    for changes, reason in (
        ({"rank": 4}, "has shape"),
        ({"targets": ["q_proj"]}, "other parameters"),
        ({"alpha": 8.0}, "scaled by 2, expected 0.5"),
    ):
        with pytest.raises(ValueError, match=reason):
            started(tiny, config(tuning={"type": "lora"} | changes), start)
    (start / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="is missing"):
        started(tiny, config(), start)
    trainer = TorchTrainer(tiny)
    with pytest.raises(ValueError, match="is missing"):
        trainer.open("run", config(tuning={"type": "full"}), 0, start)
    trainer.open("run", config(), 0)  # a refused start leaves nothing open


@pytest.mark.parametrize("tuning", ["lora"])
def test_dropout_is_written_and_does_not_hinder_a_start(tuning: str, tiny: Weights, start: Path) -> None:
    rl = config(tuning={"type": "lora", "dropout": 0.1})
    trainer = started(tiny, rl, start)
    assert json.loads((start / "adapter_config.json").read_text())["lora_dropout"] == 0
    assert not any(gradient.any() for gradient in gradients(trainer).values())
