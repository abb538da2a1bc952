"""The training pass: hidden states that predict the sampled tokens, and what is read off them.

Forward passes go through the rollout engine's decoder, with each prompt computed once for all its
completions. Dimensions: N sampled tokens, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, Addition, hidden_states
from workers.engines.packed import pack, packed_attention
from workers.engines.weights import Weights
from workers.rl.batching import Batch, sampled
from workers.train.dropout import mask_bytes, segments, with_dropout

T = TypeVar("T")


@dataclass(frozen=True)
class Drawing:
    """What dropout is drawn by, beside the sequences themselves."""

    dropout: float
    seed: int
    step: int


@dataclass(frozen=True)
class Policy:
    """What a forward pass computes with."""

    weights: Weights
    adapters: Adapters | None = None


def predicting_states(policy: Policy, batch: Batch, keep: int, drawing: Drawing | None = None) -> Tensor:
    """Final normed hidden states that each sampled token is predicted from, [N, hidden].

    A pass with gradients that would keep more than ``keep`` bytes computes its blocks again on the way back.
    """
    weights, device = policy.weights, policy.weights.device
    prompts: dict[tuple[int, ...], int] = {}
    for prompt in batch.prompts:
        prompts.setdefault(prompt, len(prompts))
    places = [[at for at, sampled in enumerate(row) if sampled] for row in batch.sampled]
    # From its last sampled token on, a completion predicts nothing that was sampled.
    rows = [
        (prompts[prompt], tokens[: found[-1] if found else 0])
        for prompt, tokens, found in zip(batch.prompts, batch.completions, places, strict=True)
    ]
    packed = pack(list(prompts), rows, device)
    kept = packed.activation_bytes(weights.config, weights.dtype.itemsize)
    adapters: Sequence[Mapping[str, Addition]] | None = policy.adapters
    if drawing is not None and policy.adapters is not None:
        drawn = segments(drawing.seed, drawing.step, list(prompts), rows, device)
        adapters = with_dropout(policy.adapters, drawing.dropout, drawn)
        kept += mask_bytes(policy.adapters, len(packed.tokens_T))
    recompute = torch.is_grad_enabled() and kept > keep
    hidden = hidden_states(
        weights, packed.tokens_T, packed.positions_T, packed_attention(packed), adapters, recompute
    )
    predicting: list[int] = []
    cursor = sum(len(prompt) for prompt in prompts)
    last_R = packed.last_P[packed.row_prompt_R].tolist()
    for (_, tokens), last, found in zip(rows, last_R, places, strict=True):
        # A token is predicted by the one before it, the first by the prompt's last.
        predicting += [cursor + at - 1 if at else last for at in found]
        cursor += len(tokens)
    return hidden[torch.tensor(predicting, dtype=torch.int64, device=device)]


def targets(batch: Batch, device: torch.device) -> Tensor:
    """The sampled tokens, [N]."""
    return torch.tensor(sampled(batch, batch.completions), dtype=torch.int64, device=device)


def by_sample(batch: Batch, values: Sequence[float]) -> list[list[float]]:
    """Values of the sampled tokens by sample and token; 0.0 where the token was not sampled."""
    numbers = iter(values)
    return [[next(numbers) if mark else 0.0 for mark in marks] for marks in batch.sampled]
