"""KV cache: one rectangle of rows x tokens per run.

A run's sequences are alike in length, and different runs need not be: a rectangle per run wastes little and
lets attention read plain slices. Running sequences always fill the first rows; a row that ends is overwritten
by the last one. One token of cache takes 2 x layers x kv_heads x head_dim numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.decoder import Attend
from workers.engines.functions import collect, spread
from workers.engines.packed import PackedBatch, masked, packed_attention, padding
from workers.models.config import ModelConfig
from workers.models.limits import KV_ROUND


@dataclass(frozen=True)
class Kept:
    """The cache of one sequence out of its pool: ``keys[layer]`` and ``values[layer]`` are [K, tokens, D]."""

    tokens: tuple[int, ...]  # whose keys and values these are, the prompt's first
    keys: list[Tensor]
    values: list[Tensor]


class Pool:
    """``keys[layer]`` and ``values[layer]`` are [rows, K, length, D]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
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

    def emptied(self) -> Pool:
        return Pool(self._config, self.keys[0].dtype, self.keys[0].device)

    def move(self, source: int, target: int) -> None:
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target] = tensor[source]

    def take(self, row: int, tokens: tuple[int, ...]) -> Kept:
        """A copy of the row's first places, which hold ``tokens``."""
        keys, values = (
            [tensor[row, :, : len(tokens)].clone() for tensor in tensors]
            for tensors in (self.keys, self.values)
        )
        return Kept(tokens, keys, values)

    def put(self, row: int, kept: Kept) -> None:
        for tensors, sources in ((self.keys, kept.keys), (self.values, kept.values)):
            for tensor, source in zip(tensors, sources, strict=True):
                tensor[row, :, : source.shape[1]] = source


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


@dataclass(frozen=True)
class Fed:
    """Which tokens the first rows of a pool are fed in one step.

    Flat, the last token of every row comes first, then the other tokens of rows that are fed several.
    """

    pool: Pool
    last: list[int]  # place of each row's last token
    firsts: list[tuple[int, range]]  # (row, places of its other tokens)

    @property
    def tokens(self) -> int:
        return len(self.last) + sum(len(places) for _, places in self.firsts)


def step_attention(parts: Sequence[Fed], device: torch.device) -> Attend:
    """Attention over what is cached and what is fed, which it caches; the parts' tokens in order."""
    prepared = []
    start = 0
    for fed in parts:
        prepared.append((slice(start, start + fed.tokens), _fed_attention(fed, device)))
        start += fed.tokens

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = [inner(layer, queries[part], keys[part], values[part]) for part, inner in prepared]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend


def _fed_attention(fed: Fed, device: torch.device) -> Attend:
    pool, count = fed.pool, len(fed.last)
    rows = list(range(count)) + [row for row, places in fed.firsts for _ in places]
    places = fed.last + [place for _, several in fed.firsts for place in several]
    rows_T, places_T = torch.tensor(rows, device=device), torch.tensor(places, device=device)
    length = max(places) + 1
    visible = torch.arange(length, device=device) <= places_T[:count].view(-1, 1, 1, 1)
    of_firsts = _firsts_attention(fed, length, device) if fed.firsts else None

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (heads, size), kv_heads = queries.shape[1:], keys.shape[1]
        pool.keys[layer][rows_T, :, places_T] = keys
        pool.values[layer][rows_T, :, places_T] = values
        # The query heads that share a key head are the query length.
        mixed = functional.scaled_dot_product_attention(
            queries[:count].view(count, kv_heads, heads // kv_heads, size),
            pool.keys[layer][:count, :, :length],
            pool.values[layer][:count, :, :length],
            attn_mask=visible,
        ).reshape(count, heads, size)
        if of_firsts is None:
            return mixed
        return torch.cat([mixed, of_firsts(layer, queries[count:])])

    return attend


def _firsts_attention(fed: Fed, length: int, device: torch.device) -> Callable[[int, Tensor], Tensor]:
    """Over a copy of the rows that are fed several tokens: they are few, and seldom."""
    rows = torch.tensor([row for row, _ in fed.firsts], device=device)
    pad, flat = (
        tensor.to(device) for tensor in padding(torch.tensor([len(places) for _, places in fed.firsts]), 0)
    )
    starts = torch.tensor([places.start for _, places in fed.firsts], device=device)
    own = starts.unsqueeze(1) + torch.arange(pad.shape[1], device=device)
    visible = torch.arange(length, device=device) <= own.unsqueeze(2)  # [rows, fed, length]

    def attend(layer: int, queries: Tensor) -> Tensor:
        keys, values = (
            tensors[layer][:, :, :length].index_select(0, rows).transpose(1, 2)
            for tensors in (fed.pool.keys, fed.pool.values)
        )
        return collect(masked(spread(queries, pad, flat), keys, values, visible), flat)

    return attend
