"""A batch of prompts with completions as flat tokens: each prompt once, however many completions follow it.

    flat tokens:  prompt 0 | prompt 1 | … | completion 0 | completion 1 | …        (T tokens, no padding)

A completion's tokens see their own prompt and themselves. Sharing the prompt halves the work of a
group-sampled batch, exactly: the prompt's hidden states do not depend on what follows them. Dimensions as in
``decoder.py``; P prompts, R rows (completions), with padded lengths Lp and Lr inside attention only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.decoder import Attend
from workers.engines.functions import collect, spread
from workers.models.config import ModelConfig

# Below this many keys the plain softmax is faster than the flash kernel on a CPU, above all backwards.
MATH_KEYS = 1024


@dataclass(frozen=True)
class PackedBatch:
    """Index tensors of one flat batch. ``*_pad`` map padded places to flat tokens, ``*_flat`` back."""

    tokens_T: Tensor
    positions_T: Tensor
    prompt_pad_PL: Tensor
    prompt_flat: Tensor
    row_pad_RL: Tensor
    row_flat: Tensor
    row_prompt_R: Tensor
    visible_RLL: Tensor  # [R, Lr, Lp + Lr]
    last_P: Tensor  # flat index of each prompt's last token

    def activation_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """About what a training pass keeps for the way back, if every block keeps all of it."""
        tokens, (rows, row_length, keys) = len(self.tokens_T), self.visible_RLL.shape
        prompts, prompt_length = self.prompt_pad_PL.shape
        streams = 2 * 4 * config.hidden + itemsize * (2 * config.hidden + 3 * config.intermediate)
        projections = itemsize * 3 * config.head_dim * (config.heads + 2 * config.kv_heads)
        scores = (rows * row_length * keys + prompts * prompt_length**2) * config.heads * itemsize
        return config.layers * (tokens * (streams + projections) + scores)


@dataclass(frozen=True)
class PaddedArea:
    """What a batch to be packed takes inside attention, where every prompt and row is as long as the longest.

    ``tokens`` bounds the memory: attention holds at most ``tokens`` x the longest context numbers per head.
    """

    prompts: frozenset[Sequence[int]] = frozenset()
    prompt_length: int = 0
    rows: int = 0
    row_length: int = 0

    def plus(self, prompt: Sequence[int], row_length: int) -> PaddedArea:
        return PaddedArea(
            self.prompts | {prompt},
            max(self.prompt_length, len(prompt)),
            self.rows + 1,
            max(self.row_length, row_length),
        )

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.prompt_length + self.rows * self.row_length


def pack(
    prompts: Sequence[Sequence[int]], rows: Sequence[tuple[int, Sequence[int]]], device: torch.device
) -> PackedBatch:
    """``rows`` are (prompt index, the tokens that follow it); a row may be empty."""
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    row_lengths = torch.tensor([len(tokens) for _, tokens in rows], dtype=torch.int64)
    row_prompt = torch.tensor([prompt for prompt, _ in rows], dtype=torch.int64)
    flat = [token for prompt in prompts for token in prompt] + [
        token for _, tokens in rows for token in tokens
    ]
    starts = prompt_lengths[row_prompt] if rows else row_lengths
    positions = [torch.arange(int(n)) for n in prompt_lengths]
    positions += [torch.arange(int(n)) + start for n, start in zip(row_lengths, starts, strict=True)]
    prompt_total = int(prompt_lengths.sum())
    prompt_pad, prompt_flat = padding(prompt_lengths, 0)
    row_pad, row_flat = padding(row_lengths, prompt_total)
    batch = PackedBatch(
        tokens_T=torch.tensor(flat),
        positions_T=torch.cat(positions),
        prompt_pad_PL=prompt_pad,
        prompt_flat=prompt_flat,
        row_pad_RL=row_pad,
        row_flat=row_flat,
        row_prompt_R=row_prompt,
        visible_RLL=_visible(prompt_pad.shape[1], row_pad.shape[1], starts),
        last_P=prompt_lengths.cumsum(0) - 1,
    )
    return PackedBatch(**{name: tensor.to(device) for name, tensor in vars(batch).items()})


def padding(lengths: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Padded [N, L] -> flat index (padding points at token 0), and the padded places that are real."""
    if not len(lengths) or not int(lengths.max()):
        return torch.zeros(len(lengths), 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    places = torch.arange(int(lengths.max()))
    real = places < lengths.unsqueeze(1)
    starts = (lengths.cumsum(0) - lengths).unsqueeze(1) + offset
    return torch.where(real, starts + places, 0), real.flatten().nonzero().squeeze(1)


def _visible(prompt_length: int, row_length: int, starts_R: Tensor) -> Tensor:
    in_prompt = torch.arange(prompt_length) < starts_R.unsqueeze(1)  # [R, Lp]
    in_row = torch.ones(row_length, row_length, dtype=torch.bool).tril()
    rows = len(starts_R)
    return torch.cat(
        [
            in_prompt.unsqueeze(1).expand(rows, row_length, prompt_length),
            in_row.unsqueeze(0).expand(rows, row_length, row_length),
        ],
        dim=2,
    )


def packed_attention(batch: PackedBatch) -> Attend:
    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        prompt = batch.prompt_pad_PL, batch.prompt_flat
        prompt_keys, prompt_values = spread(keys, *prompt), spread(values, *prompt)  # [P, Lp, K, D]
        mixed = collect(causal(spread(queries, *prompt), prompt_keys, prompt_values), batch.prompt_flat)
        if not batch.row_pad_RL.numel():
            return mixed
        row = batch.row_pad_RL, batch.row_flat
        row_keys = torch.cat([prompt_keys.index_select(0, batch.row_prompt_R), spread(keys, *row)], dim=1)
        row_values = torch.cat(
            [prompt_values.index_select(0, batch.row_prompt_R), spread(values, *row)], dim=1
        )
        rows = masked(spread(queries, *row), row_keys, row_values, batch.visible_RLL)
        return torch.cat([mixed, collect(rows, batch.row_flat)])

    return attend


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[N, L, heads, D] each; padding at the end needs no mask, for no real token sees it."""
    length = queries.shape[1]
    if length > MATH_KEYS or queries.device.type != "cpu":
        return _flash(queries, keys, values, None, causal=True)
    visible = torch.ones(1, length, length, dtype=torch.bool, device=queries.device).tril()
    return _math(queries, keys, values, visible)


def masked(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Queries [N, Lq, H, D] over keys [N, Lk, K, D] where ``visible`` [N, Lq, Lk]."""
    if keys.shape[1] > MATH_KEYS or queries.device.type != "cpu":
        return _flash(queries, keys, values, visible.unsqueeze(1), causal=False)
    return _math(queries, keys, values, visible)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    mixed = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return mixed.transpose(1, 2)


def _math(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _attended(queries, keys, values, visible)[0]
    mixed: Tensor = _Attention.apply(queries, keys, values, visible)
    return mixed


def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax in fp32; also the grouped queries and the weights, [N, K, shared * Lq, D and Lk]."""
    rows, length, heads, size = queries.shape
    kv_heads = keys.shape[2]
    q = _grouped(queries, kv_heads)
    split = rows, kv_heads, heads // kv_heads, length, keys.shape[1]
    scores = torch.matmul(q, keys.permute(0, 2, 3, 1)).view(split)
    hidden = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))
    # One pass scales in fp32 and masks.
    scores = torch.add(hidden[:, None, None], scores, alpha=size**-0.5)
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    return _ungrouped(torch.matmul(weights, values.transpose(1, 2)), heads), q, weights


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[N, L, H, D] -> [N, K, shared * L, D]: query heads that share a key head lie along the query length, so
    that no key is repeated.
    """
    rows, length, heads, size = x.shape
    split = x.view(rows, length, kv_heads, heads // kv_heads, size)
    return split.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    rows, kv_heads, _, size = x.shape
    split = x.view(rows, kv_heads, heads // kv_heads, -1, size)
    return split.permute(0, 3, 1, 2, 4).reshape(rows, -1, heads, size)


class _Attention(torch.autograd.Function):
    """Keeps the rounded weights only, and computes no score again in fp32 on the way back."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        mixed, q, weights = _attended(queries, keys, values, visible)
        ctx.save_for_backward(q, keys, values, weights)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, keys, values, weights = ctx.saved_tensors
        scale, heads = q.shape[3] ** -0.5, grad.shape[2]
        grad = _grouped(grad, keys.shape[2])
        grad_values = torch.matmul(weights.transpose(2, 3), grad).transpose(1, 2)
        scores = torch.matmul(grad, values.permute(0, 2, 3, 1))
        scores = torch.ops.aten._softmax_backward_data(scores, weights, -1, weights.dtype)
        grad_queries = torch.matmul(scores, keys.transpose(1, 2)).mul_(scale)
        grad_keys = torch.matmul(scores.transpose(2, 3), q).mul_(scale).transpose(1, 2)
        return _ungrouped(grad_queries, heads), grad_keys, grad_values, None
