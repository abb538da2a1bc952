"""The same batch through TRL's trainers and through ours: the same loss, the same gradients.

TRL computes with its own ``_compute_loss`` on transformers' model, padded; ours with packed sequences. Old
and reference log-probs are given, so that ratios, clips and penalties are all at work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_tiny
from workers.engines.weights import load_weights
from workers.rl.averages import averaging, divisor
from workers.rl.batching import Batch, denominator, micro_batches
from workers.spec import RLConfig
from workers.train.trainer import TorchTrainer

pytest.importorskip("trl")

MAX_TOKENS = 8
LENGTHS = [8, 3, 5, 1, 7, 6, 2, 4]
ADVANTAGES = [1.2, -0.7, 0.4, -0.9, 1.5, -1.1, 0.3, -0.7]
BETA = 0.3
#: How far log-probs were from ours before the update: many ratios are beyond every clip.
MOVED = 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def columns() -> dict[str, Any]:
    """Two groups of four; prompts of 5 and 9 tokens."""
    chance = torch.Generator().manual_seed(11)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 60, (count,), generator=chance).tolist())

    def noise(scale: float) -> list[list[float]]:
        return [(scale * torch.randn(length, generator=chance)).tolist() for length in LENGTHS]

    prompts = [drawn(5)] * 4 + [drawn(9)] * 4
    return {
        "prompts": prompts,
        "completions": [drawn(length) for length in LENGTHS],
        "moved": noise(MOVED),
        "reference": noise(0.2),
    }


# ---------------------------------------------------------------- ours


class Ours:
    def __init__(self, folder: Path, spec: RLConfig, columns: dict[str, Any]) -> None:
        self._spec = spec
        self._weights = load_weights(folder, torch.float32, torch.device("cpu"))
        self._trainer = TorchTrainer(self._weights)
        self._trainer.open("run", spec, 0)
        plain = Batch(
            groups=[index // 4 for index in range(8)],
            prompts=columns["prompts"],
            completions=columns["completions"],
            engine_logprobs=[[0.0] * length for length in LENGTHS],
            advantages=[[value] * length for value, length in zip(ADVANTAGES, LENGTHS, strict=True)],
            keep=[True] * 8,
        )
        now = self._trainer.logprobs("run", plain)
        self.old, self.reference = plus(now, columns["moved"]), plus(now, columns["reference"])
        self._batch = plain.with_logprobs(old=self.old, reference=self.reference)

    def loss_and_gradients(self, micro_batch_size: int) -> tuple[float, dict[str, Tensor]]:
        loss = 0.0
        for micro in micro_batches(self._batch, micro_batch_size):
            loss += self._trainer.forward_backward("run", micro).loss
        over = divisor(averaging(self._spec), denominator(self._batch, MAX_TOKENS))
        found = self._trainer.gradients("run")
        named = self._weights.map(lambda name, _: found[name] / over)
        return loss / over, named.state_dict()


def plus(rows: list[list[float]], noise: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(rows, noise, strict=True)]


# ---------------------------------------------------------------- theirs


def trainer_of(folder: Path, output: Path, kind: str, **settings: Any) -> Any:
    """TRL's trainer around the same weights; it never trains."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    # DeepSeek-V3.2's weight on the penalty, which TRL takes by default, is no part of these algorithms.
    if kind != "rloo":
        settings["use_bias_correction_kl"] = False
    config, trainer = (RLOOConfig, RLOOTrainer) if kind == "rloo" else (GRPOConfig, GRPOTrainer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    return trainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(
            output_dir=str(output),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=MAX_TOKENS,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def padded(rows: list[Any], left: bool, value: Any) -> Tensor:
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, fill, strict=True)])


def theirs(trainer: Any, columns: dict[str, Any], ours: Ours) -> tuple[float, dict[str, Tensor]]:
    ones = [[1] * len(row) for row in columns["prompts"]], [[1] * length for length in LENGTHS]
    old = padded(ours.old, False, 0.0)
    inputs = {
        "prompt_ids": padded(columns["prompts"], True, 1),
        "prompt_mask": padded(ones[0], True, 0),
        "completion_ids": padded(columns["completions"], False, 1),
        "completion_mask": padded(ones[1], False, 0),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": old,
        "old_logps": old.sum(1),
        "ref_per_token_logps": padded(ours.reference, False, 0.0),
        "num_items_in_batch": torch.tensor(sum(LENGTHS)),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    named = dict(trainer.model.named_parameters())
    return float(loss.detach()), {name: parameter.grad for name, parameter in named.items()}


# ---------------------------------------------------------------- both

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": BETA},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": BETA},
    "dapo": {"loss_type": "dapo", "beta": BETA, "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "beta": BETA,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3, "beta": BETA},
    "rloo": {"beta": 0.0},
}
#: What TRL asks for by numbers of its own: its cut of CISPO is the whole ratio.
CHANGES: dict[str, dict[str, Any]] = {"cispo": {"clip_high": 0.3}}


@pytest.mark.parametrize("micro_batch_size", [8, 3])
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_loss_and_gradients_are_trls(
    folder: Path, tmp_path: Path, columns: dict[str, Any], algorithm: str, micro_batch_size: int
) -> None:
    beta = SETTINGS[algorithm]["beta"]
    spec = RLConfig.model_validate(
        {
            "algorithm": algorithm,
            "group_size": 4,
            "updates_per_step": 2,
            "overlong_buffer": 0,
            "precision": "fp32",
            "tuning": {"type": "full"},
            "sampling": {"max_tokens": MAX_TOKENS},
            "loss": {"kl_beta": beta, **CHANGES.get(algorithm, {})},
        }
    )
    ours = Ours(folder, spec, columns)
    trainer = trainer_of(folder, tmp_path, algorithm, **SETTINGS[algorithm])
    expected, gradients = theirs(trainer, columns, ours)
    loss, found = ours.loss_and_gradients(micro_batch_size)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        worst = float((found[name] - gradient).norm() / gradient.norm())
        assert worst < 1e-5, f"{name}: {worst}"
