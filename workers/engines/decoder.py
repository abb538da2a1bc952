"""One decoder for the rollout engine and the trainer, so that both compute the same log-probabilities.

Tokens of all sequences lie flat, without padding, through every linear layer; only attention knows which
token belongs to which sequence, and it is passed in (``Attend``): over a packed batch (``packed.py``) or over
a KV cache (``cache.py``). The residual stream and the norms are fp32, matrix products are in the weights'
type.

Dimensions: T tokens of the batch, H query heads, K key-value heads, D head size, C columns of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from workers.engines.functions import add_low_rank, gated_silu, rms_norm, rotate
from workers.engines.weights import Layer, Weights
from workers.models.config import ModelConfig

# (layer, queries [T, H, D], keys [T, K, D], values [T, K, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Addition(Protocol):
    """What adapters add to the product of one stored matrix."""

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        """x [T, in], y [T, out] -> the sum, in y's type; ``y`` may be written over."""
        ...


@dataclass(frozen=True)
class LowRank:
    """Adapter of one stored matrix, for one or several adapters side by side.

    ``down`` [C, in], ``up`` [out, C] with the scaling already in it. ``mask`` [T, C] says which columns a
    token may use; None when there is one adapter and every token has it.
    """

    down: Tensor
    up: Tensor
    mask: Tensor | None

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        if self.mask is None:
            return add_low_rank(y, x, self.down, self.up)
        # Selected, not multiplied: another adapter's overflow must not reach this token as 0 * inf.
        h = torch.where(self.mask, x @ self.down.T, 0)
        return torch.addmm(y, h, self.up.T)


# Per layer: the stored matrix's name -> its adapter.
Adapters = tuple[dict[str, LowRank], ...]


def hidden_states(
    weights: Weights,
    tokens_T: Tensor,
    positions_T: Tensor,
    attend: Attend,
    adapters: Sequence[Mapping[str, Addition]] | None,
    recompute: bool = False,
) -> Tensor:
    """Final normed hidden states, [T, hidden] in the weights' type.

    ``recompute`` keeps only each block's input for the way back (https://arxiv.org/abs/1604.06174).
    """
    config = weights.config
    cos, sin = (table[positions_T].unsqueeze(1) for table in rotary_tables(config, weights.device))
    residual = functional.embedding(tokens_T, weights.embed).float()

    def block(index: int, residual: Tensor) -> Tensor:
        layer = weights.layers[index]
        lora: Mapping[str, Addition] = adapters[index] if adapters is not None else {}
        x = rms_norm(residual, layer.attn_norm, config.norm_eps, weights.dtype)
        residual = residual + _attention(config, layer, index, x, cos, sin, attend, lora)
        x = rms_norm(residual, layer.mlp_norm, config.norm_eps, weights.dtype)
        return residual + _feed_forward(layer, x, lora)

    for index in range(config.layers):
        if recompute:
            residual = checkpoint(block, index, residual, use_reentrant=False)
        else:
            residual = block(index, residual)
    return rms_norm(residual, weights.norm, config.norm_eps, weights.dtype)


def head_logits(weights: Weights, hidden_N: Tensor) -> Tensor:
    """[N, vocab] in the weights' type."""
    return linear(hidden_N, weights.head, None)


def _attention(
    config: ModelConfig,
    layer: Layer,
    index: int,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    lora: Mapping[str, Addition],
) -> Tensor:
    heads, kv_heads = config.heads, config.kv_heads
    qkv = linear(x, layer.qkv, layer.qkv_bias, lora.get("qkv")).view(
        -1, heads + 2 * kv_heads, config.head_dim
    )
    queries_keys, values = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        queries, keys = queries_keys.split([heads, kv_heads], dim=1)
        normed = [
            rms_norm(queries.float(), layer.q_norm, config.norm_eps, x.dtype),
            rms_norm(keys.float(), layer.k_norm, config.norm_eps, x.dtype),
        ]
        queries_keys = torch.cat(normed, dim=1)
    queries, keys = rotate(queries_keys, cos, sin).split([heads, kv_heads], dim=1)
    mixed = attend(index, queries, keys, values).reshape(-1, heads * config.head_dim)
    return linear(mixed, layer.out, layer.out_bias, lora.get("out"))


def _feed_forward(layer: Layer, x: Tensor, lora: Mapping[str, Addition]) -> Tensor:
    gate_up = linear(x, layer.gate_up, layer.gate_up_bias, lora.get("gate_up"))
    return linear(gated_silu(gate_up), layer.down, layer.down_bias, lora.get("down"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, lora: Addition | None = None) -> Tensor:
    """``x @ weight.T + bias`` plus what adapters add."""
    if weight.is_mkldnn:
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        y = functional.linear(x, weight, bias)
    return y if lora is None else lora.added(y, x)


_tables: dict[tuple[ModelConfig, torch.device], tuple[Tensor, Tensor]] = {}


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, [context, D/2] in fp32; made once per model and device."""
    key = (config, device)
    if key not in _tables:
        # Outside inference mode, or a later training pass could not use the tables.
        with torch.inference_mode(False):
            positions = torch.arange(config.context, device=device, dtype=torch.float32)
            angles = torch.outer(positions, inverse_frequencies(config).to(device))
            _tables[key] = (angles.cos(), angles.sin())
    return _tables[key]


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[D/2] in fp32, stretched for long contexts where the config says so (Llama 3)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
