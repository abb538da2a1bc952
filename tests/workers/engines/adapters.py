"""Adapters and forward passes for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, head_logits, hidden_states
from workers.engines.lora import PROJECTIONS, shapes, tensor_name
from workers.engines.packed import pack, packed_attention
from workers.engines.weights import Weights
from workers.models.config import ModelConfig

ALL = tuple(name for names in PROJECTIONS.values() for name in names)


def random_adapter(
    config: ModelConfig, seed: int, rank: int = 4, targets: Sequence[str] = ALL
) -> dict[str, Tensor]:
    """Large enough to change which token is likeliest."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.layers):
        for projection in targets:
            inputs, outputs = shapes(config, projection)
            tensors[tensor_name(layer, projection, "A")] = (
                torch.randn(rank, inputs, generator=generator) * 0.1
            )
            tensors[tensor_name(layer, projection, "B")] = (
                torch.randn(outputs, rank, generator=generator) * 0.1
            )
    return tensors


@torch.no_grad()
def logits(weights: Weights, tokens: Sequence[int], adapters: Adapters | None = None) -> Tensor:
    """[tokens, vocab] of one plain sequence."""
    batch = pack([tokens], [], weights.device)
    hidden = hidden_states(weights, batch.tokens_T, batch.positions_T, packed_attention(batch), adapters)
    return head_logits(weights, hidden)
