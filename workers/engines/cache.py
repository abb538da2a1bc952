"""KV cache: one rectangle of rows x tokens per run.

A run's sequences are alike in length, and different runs need not be: a rectangle per run wastes little and
lets attention read plain slices. Running sequences always fill the first rows; a row that ends is overwritten
by the last one. One token of cache takes 2 x layers x kv_heads x head_dim numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.decoder import Attend
from workers.engines.packed import PackedBatch, packed_attention
from workers.models.config import ModelConfig
from workers.models.limits import KV_ROUND


class Pool:
    """``keys[layer]`` and ``values[layer]`` are [rows, K, length, D]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = 0
        self.length = 0
        shape = (0, config.kv_heads, 0, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def resize(self, rows: int, length: int, used: int) -> None:
        """Room for ``rows`` of ``length``, the first ``used`` rows kept; layer by layer, so that little is
        held twice.
        """
        kept = min(length, self.length)
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                # Zeros, not empty: a masked place still enters as 0 x value, which garbage could turn into
                # NaN.
                new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
                new[:used, :, :kept] = old[:used, :, :kept]
                tensors[index] = new
        self.rows, self.length = rows, length

    def move(self, source: int, target: int) -> None:
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target] = tensor[source]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def rounded(length: int) -> int:
    return -(-length // KV_ROUND) * KV_ROUND


def prefill_attention(batch: PackedBatch, pool: Pool, source: Tensor, rows: Tensor, places: Tensor) -> Attend:
    """Packed attention; also caches flat token ``source[i]`` at place ``places[i]`` of row ``rows[i]``."""
    inner = packed_attention(batch)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        pool.keys[layer][rows, :, places] = keys[source]
        pool.values[layer][rows, :, places] = values[source]
        return inner(layer, queries, keys, values)

    return attend


def decode_attention(parts: Sequence[tuple[Pool, Tensor]]) -> Attend:
    """One new token per row: ``parts`` are each pool and the place of its rows' new token, [n].

    The batch's tokens are the pools' rows in order. The query heads that share a key head are the query
    length.
    """
    prepared = []
    start = 0
    for pool, places in parts:
        length = int(places.max()) + 1
        visible = torch.arange(length, device=places.device) <= places.view(-1, 1, 1, 1)
        rows = torch.arange(len(places), device=places.device)
        prepared.append((pool, places, rows, length, visible, slice(start, start + len(places))))
        start += len(places)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = []
        for pool, places, rows, length, visible, part in prepared:
            count, (heads, size), kv_heads = len(places), queries.shape[1:], keys.shape[1]
            pool.keys[layer][rows, :, places] = keys[part]
            pool.values[layer][rows, :, places] = values[part]
            out = functional.scaled_dot_product_attention(
                queries[part].view(count, kv_heads, heads // kv_heads, size),
                pool.keys[layer][:count, :, :length],
                pool.values[layer][:count, :, :length],
                attn_mask=visible,
            )
            mixed.append(out.reshape(count, heads, size))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend
