"""PPO's value head: what it reads, how it is trained, and where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.workers.train.runs import assert_close, config, masked, opened, rollout
from workers.engines.weights import Weights
from workers.rl.batching import Batch
from workers.train.trainer import TorchTrainer
from workers.train.value_head import BIAS, FILE, WEIGHT


def with_value(tiny: Weights, tuning: str = "lora") -> TorchTrainer:
    """Whose head is not the neutral start."""
    trainer = opened(tiny, config(algorithm="ppo", tuning={"type": tuning}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        trainer.parameters("run")[WEIGHT].copy_(torch.randn(1, 128, generator=generator) * 0.1)
        trainer.parameters("run")[BIAS].fill_(0.25)
    return trainer


def test_a_new_head_expects_nothing_and_reads_the_policys_last_states(
    tiny: Weights, tiny_folder: Path, tmp_path: Path
) -> None:
    """Against transformers: the value before a token is read where the token is predicted."""
    batch = masked(rollout(tiny, None, 1.0))
    assert not any(map(any, opened(tiny, config(algorithm="ppo")).values("run", batch)))
    trainer = with_value(tiny)
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path)
    head = trainer.parameters("run")
    values = trainer.values("run", batch)
    for index, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        with torch.no_grad():
            output = model(torch.tensor([[*prompt, *completion]]), output_hidden_states=True)
            states = output.hidden_states[-1][0, len(prompt) - 1 : -1]
            theirs = (states @ head[WEIGHT].T + head[BIAS]).squeeze(1).tolist()
        marks = batch.sampled[index]
        expected = [value if mark else 0.0 for value, mark in zip(theirs, marks, strict=True)]
        assert values[index] == pytest.approx(expected, abs=1e-4)
    assert max(abs(value) for row in values for value in row) > 0.3


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_it_is_kept_in_checkpoints_and_not_sent_to_the_engine(
    tuning: str, tiny: Weights, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer, batch = with_value(tiny, tuning), rollout(tiny, None, 1.0)
    assert not {WEIGHT, BIAS} & trainer.adapter("run").keys()
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    resumed, started = TorchTrainer(tiny), TorchTrainer(tiny)
    rl = config(algorithm="ppo", tuning={"type": tuning})
    resumed.open("run", rl, 9)
    resumed.load_state("run", tmp_path)
    started.open("run", rl, 9, tmp_path)
    for other in (resumed, started):
        assert_close(other.parameters("run"), trainer.parameters("run"))
        assert other.values("run", batch) == trainer.values("run", batch)
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match="is missing"):
        resumed.load_state("run", tmp_path)


def test_a_start_without_a_value_begins_with_none(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    opened(tiny, config()).save_state("run", tmp_path, "tiny", tiny_folder)
    assert not (tmp_path / FILE).exists()
    trainer = TorchTrainer(tiny)
    trainer.open("run", config(algorithm="ppo"), 0, tmp_path)
    assert not trainer.parameters("run")[WEIGHT].any()


def test_only_ppo_has_one(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    assert not {WEIGHT, BIAS} & trainer.parameters("run").keys()
    with pytest.raises(ValueError, match="has no value head"):
        trainer.values("run", Batch([0], [(5,)], [(6,)], [[0.0]], [[1.0]], [True]))
