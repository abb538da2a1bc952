"""A trainer with a run on the tiny model, and rollouts to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from workers.engines.engine import TorchEngine
from workers.engines.sequences import Request
from workers.engines.weights import Weights
from workers.rl.batching import Batch, denominator, micro_batches
from workers.rl.sums import Sums
from workers.spec import RLConfig
from workers.train.trainer import TorchTrainer

MAX_TOKENS = 9


def config(**changes: Any) -> RLConfig:
    """GRPO over tokens, if nothing else is asked for."""
    settings: dict[str, Any] = {"sampling": {"max_tokens": 9}, "optimizer": {"learning_rate": 1e-2}}
    if "algorithm" not in changes:
        changes["loss"] = {"average": "token"} | changes.get("loss", {})
    return RLConfig.model_validate(settings | changes)


def rollout(
    weights: Weights,
    adapter: dict[str, torch.Tensor] | None,
    scaling: float,
    step: int = 0,
    temperature: float = 1.0,
) -> Batch:
    """Three groups of four, of different lengths, with rewards that are none of the test's business."""
    engine = TorchEngine(weights)
    engine.load_adapter("run", 0, adapter, scaling)
    engine.submit(
        [
            Request(
                "run",
                (group, sample),
                tuple(range(5, 9 + 2 * group)),
                3 + 2 * sample,
                (0, step, group, sample),
                temperature=temperature,
            )
            for group in range(3)
            for sample in range(4)
        ]
    )
    done = sorted(engine.decode().finished, key=lambda sequence: sequence.request.key)
    advantages = [0.5, -1.0, 1.5, -1.0, -0.2, 0.9, 0.3, -1.0, 1.0, 1.0, -1.0, -1.0]
    return Batch(
        groups=[sequence.request.key[0] for sequence in done],
        prompts=[sequence.request.prompt for sequence in done],
        completions=[tuple(sequence.tokens) for sequence in done],
        engine_logprobs=[sequence.logprobs for sequence in done],
        advantages=[
            [advantage] * len(sequence.tokens) for advantage, sequence in zip(advantages, done, strict=True)
        ],
        keep=[index != 6 for index in range(12)],
    )


def opened(weights: Weights, spec: RLConfig, seed: int = 0, activation_bytes: int = 2**40) -> TorchTrainer:
    """A trainer whose adapter is not the neutral start."""
    trainer = TorchTrainer(weights, activation_bytes)
    trainer.open("run", spec, seed)
    if spec.tuning.type == "lora":
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, tensor in trainer.parameters("run").items():
                if "lora_B" in name:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return trainer


def train(trainer: TorchTrainer, batch: Batch, size: int = 4) -> Sums:
    return sum((trainer.forward_backward("run", micro) for micro in micro_batches(batch, size)), Sums())


def advantaged(batch: Batch, advantages: Sequence[float]) -> Batch:
    """The batch with one advantage for all tokens of a sample."""
    rows = zip(advantages, batch.completions, strict=True)
    return replace(batch, advantages=[[value] * len(tokens) for value, tokens in rows])


def masked(batch: Batch) -> Batch:
    """As if an environment had written some of the tokens: parts of most completions, all of the second."""
    sampled = [
        [index != 1 and (index + place) % 3 != 1 for place in range(len(tokens))]
        for index, tokens in enumerate(batch.completions)
    ]
    logprobs = [
        [value if mark else 0.0 for value, mark in zip(row, marks, strict=True)]
        for row, marks in zip(batch.engine_logprobs, sampled, strict=True)
    ]
    return replace(batch, sampled=sampled, engine_logprobs=logprobs)


def gradients(trainer: TorchTrainer, parts: int = 1) -> dict[str, torch.Tensor]:
    return {name: tensor / parts for name, tensor in trainer.gradients("run").items()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal to within the rounding of fp32 sums added in another order."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-4, msg=name)


def step(trainer: TorchTrainer, batch: Batch, rate: float = 1e-2) -> float:
    train(trainer, batch)
    return trainer.optim_step("run", rate, denominator(batch, MAX_TOKENS))
