from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.workers.engines.adapters import logits, random_adapter
from tests.workers.train.runs import assert_close, config, opened, rollout, step
from workers.engines.lora import join, tensor_name
from workers.engines.weights import Weights, load_weights
from workers.train import checkpoint
from workers.train.trainer import TorchTrainer

CPU = torch.device("cpu")


def test_start_is_seeded_and_neutral(tiny: Weights) -> None:
    trainers = [TorchTrainer(tiny) for _ in range(3)]
    for trainer, seed in zip(trainers, (3, 3, 4), strict=True):
        trainer.open("run", config(), seed)
    first, same, other = (trainer.adapter("run") for trainer in trainers)
    name = tensor_name(0, "q_proj", "A")
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert first[name].abs().max() <= 1 / 128**0.5
    assert all(not tensor.any() for key, tensor in first.items() if "lora_B" in key)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), None])
def test_adapter_loads_in_peft(targets: Any, tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    tuning = {"type": "lora", "rank": 6, "alpha": 20.0} | ({"targets": targets} if targets else {})
    trainer = opened(tiny, config(tuning=tuning))
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path)
    tokens = [3, 9, 22, 7, 31, 40, 5]
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = logits(
        tiny, tokens, join(tiny.config, trainer.adapter("run"), trainer.scaling("run"), torch.float32)
    )
    assert (ours - logits(tiny, tokens)).abs().max() > 0.05
    assert (ours - theirs).abs().max() < 1e-4


def test_adapter_written_by_peft_loads_here(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = opened(tiny, config())
    (tmp_path / "ours").mkdir()
    trainer.save_state("run", tmp_path / "ours", str(tiny_folder), tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours/optimizer.safetensors").rename(tmp_path / "theirs/optimizer.safetensors")
    other = TorchTrainer(tiny)
    other.open("run", config(), 9)
    other.load_state("run", tmp_path / "theirs")
    assert_close(other.adapter("run"), trainer.adapter("run"))


def test_full_model_is_a_hugging_face_folder(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = opened(tiny, config(tuning={"type": "full"}))
    step(trainer, rollout(tiny, None, 1.0))
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([[3, 9, 22, 7]])).logits[0]
    found = logits(load_weights(tmp_path, torch.float32, CPU), [3, 9, 22, 7])
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(tiny, [3, 9, 22, 7])).abs().max() > 0.01
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_six_steps_equal_three_reload_three(
    tuning: str, tiny: Weights, tiny_folder: Path, tmp_path: Path
) -> None:
    spec = config(tuning={"type": tuning})

    def steps(trainer: TorchTrainer, first: int, last: int) -> None:
        for number in range(first, last):
            step(trainer, rollout(tiny, None, 1.0, number))

    through = TorchTrainer(tiny)
    through.open("run", spec, 0)
    steps(through, 0, 6)
    stopped = TorchTrainer(tiny)
    stopped.open("run", spec, 0)
    steps(stopped, 0, 3)
    folder = checkpoint.write(
        tmp_path, 3, {"step": 3}, lambda to: stopped.save_state("run", to, "tiny", tiny_folder)
    )
    resumed = TorchTrainer(tiny)
    resumed.open("run", spec, 1)
    resumed.load_state("run", folder)
    steps(resumed, 3, 6)
    ours, theirs = resumed.adapter("run"), through.adapter("run")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_state_of_another_run_is_refused(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = opened(tiny, config())
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    other = TorchTrainer(tiny)
    other.open("rank", config(tuning={"type": "lora", "rank": 4}), 0)
    other.open("targets", config(tuning={"type": "lora", "targets": ["q_proj"]}), 0)
    other.open("full", config(tuning={"type": "full"}), 0)
    for run, reason in (("rank", "has shape"), ("targets", "other parameters"), ("full", "is missing")):
        with pytest.raises(ValueError, match=reason):
            other.load_state(run, tmp_path)


def test_adapter_of_the_engine_is_a_copy(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    adapter = trainer.adapter("run")
    before = {name: tensor.clone() for name, tensor in adapter.items()}
    step(trainer, rollout(tiny, None, 1.0), 0.1)
    assert_close(adapter, before)
    assert random_adapter(tiny.config, 1, rank=16).keys() == adapter.keys()
