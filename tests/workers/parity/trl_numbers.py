"""TRL's losses, gradients and advantages on a fixed batch; run by the parity test in a process of its own.

    python trl_numbers.py cases.json numbers.safetensors

TRL's trainers do everything from the rewards and the token ids on: advantages, reference log-probs, masks,
the loss, the gradients. Only two things are put in their place: the ids are given instead of generated, and
so are the log-probs that the ratio is taken to, as if there had been updates since.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


class Given:
    """Token ids and rewards of a batch, where TRL would generate and grade."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def rewards(self, prompts: list[str], **_: object) -> list[float | None]:
        return self.batch["rewards"]

    def grpo(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = self.batch["prompts"], self.batch["completions"]
        sampled = [list(map(int, row)) for row in self.batch["sampled"]]
        return *ids, sampled, [""] * len(prompts), None, {}, None, None

    def rloo(self, prompts: list[str]) -> tuple[Any, ...]:
        return self.batch["prompts"], self.batch["completions"], [""] * len(prompts)

    @property
    def inputs(self) -> list[dict[str, str]]:
        return [{"prompt": f"group {group}"} for group in self.batch["groups"]]


def sampling_trainer(case: dict[str, Any], given: Given, files: dict[str, Any], folder: str) -> Any:
    """A trainer whose reference is the start and whose policy has moved from it."""
    trainer, config = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[case["trainer"]]
    samples = len(given.batch["groups"])
    settings = config(
        output_dir=folder,
        per_device_train_batch_size=samples,
        num_generations=given.batch["groups"].count(given.batch["groups"][0]),
        max_completion_length=case["max_tokens"],
        temperature=case["temperature"],
        **case["settings"],
        **PLAIN,
    )
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(files["start"], dtype=torch.float32),
        reward_funcs=given.rewards,
        args=settings,
        train_dataset=Dataset.from_list(given.inputs),
        processing_class=AutoTokenizer.from_pretrained(files["start"]),
    )
    made._generate = getattr(given, case["trainer"])
    return made


def sampled_loss(case: dict[str, Any], files: dict[str, Any], folder: str) -> tuple[Any, Tensor, Tensor]:
    given = Given(files["batch"])
    trainer = sampling_trainer(case, given, files, folder)
    move(trainer, files)
    inputs = trainer._generate_and_score_completions(given.inputs)
    old = padded(given.batch["old"])
    if case["trainer"] == "rloo":
        inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
    else:
        inputs["old_per_token_logps"] = old
    return trainer, trainer._compute_loss(trainer.model, inputs), inputs["advantages"]


def preference_loss(case: dict[str, Any], files: dict[str, Any], folder: str) -> tuple[Any, Tensor, Tensor]:
    settings = DPOConfig(output_dir=folder, **case["settings"], **PLAIN)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2
    tokenizer = AutoTokenizer.from_pretrained(files["start"])
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(files["start"], dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    move(trainer, files)
    batch = files["pairs"]
    examples = [
        {
            "prompt_ids": batch["prompts"][at],
            "chosen_ids": batch["completions"][at],
            "rejected_ids": batch["completions"][at + 1],
        }
        for at in range(0, len(batch["groups"]), 2)
    ]
    inputs = DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id)(examples)
    return trainer, trainer._compute_loss(trainer.model, inputs, False), torch.zeros(len(batch["groups"]))


def move(trainer: Any, files: dict[str, Any]) -> None:
    """From the start to the policy, and into a step of one micro-batch."""
    trainer.model.load_state_dict(load_file(Path(files["policy"]) / "model.safetensors"), strict=False)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1


def padded(rows: list[list[float]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def main() -> None:
    files = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Tensor] = {}
    for name, case in files["cases"].items():
        make = preference_loss if case["trainer"] == "dpo" else sampled_loss
        with tempfile.TemporaryDirectory() as folder:
            trainer, loss, advantages = make(case, files, folder)
        loss.backward()
        found[f"{name}/loss"] = loss.detach()
        found[f"{name}/advantages"] = advantages
        for parameter, tensor in trainer.model.named_parameters():
            found[f"{name}/gradient/{parameter}"] = tensor.grad
    save_file(found, sys.argv[2])


if __name__ == "__main__":
    main()
