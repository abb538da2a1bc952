"""KV cache: rectangles of rows x tokens, one per size, for the sequences of all runs.

Sequences that may grow about equally long share a rectangle, so that attention of all runs is a few large
products over plain slices. Rows in use always come first: when a row's sequence leaves, the last row takes
its place. Rows that nobody uses are zero, for a masked place still enters as 0 x value, which what a diverged
run has left could turn into NaN. One token of cache takes 2 x layers x kv_heads x head_dim numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.models.config import ModelConfig
from workers.models.limits import KV_ROUND


@dataclass(frozen=True)
class Kept:
    """The cache of one sequence out of its pool: per layer keys [K, D, tokens] and values [K, tokens, D]."""

    tokens: tuple[int, ...]  # whose keys and values these are, the prompt's first
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(eq=False)
class Seat:
    """A row of a pool; ``index`` changes when another row leaves."""

    pool: Pool
    index: int

    def take(self, tokens: tuple[int, ...]) -> Kept:
        """A copy of the first places, which hold ``tokens``."""
        keys = [keys[self.index, :, :, : len(tokens)].clone() for keys in self.pool.keys]
        values = [values[self.index, :, : len(tokens)].clone() for values in self.pool.values]
        return Kept(tokens, keys, values)

    def put(self, kept: Kept) -> None:
        count = len(kept.tokens)
        for layer, (keys, values) in enumerate(zip(kept.keys, kept.values, strict=True)):
            self.pool.keys[layer][self.index, :, :, :count] = keys
            self.pool.values[layer][self.index, :, :count] = values

    def leave(self) -> None:
        self.pool.leave(self)


class Pool:
    """``keys[layer]`` [rows, K, D, length], as the product with queries reads them, and ``values[layer]``
    [rows, K, length, D].
    """

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = 0
        self.length = length
        self.seats: list[Seat] = []
        heads, size = config.kv_heads, config.head_dim
        kind = {"dtype": dtype, "device": device}
        self.keys = [torch.zeros(0, heads, size, length, **kind) for _ in range(config.layers)]
        self.values = [torch.zeros(0, heads, length, size, **kind) for _ in range(config.layers)]

    @property
    def tokens(self) -> int:
        """Of the rows there are, or will be once ``settle`` has made them for those who sit."""
        return max(self.rows, len(self.seats)) * self.length

    @property
    def growth(self) -> int:
        """Tokens that one more seat takes."""
        return self.length if len(self.seats) >= self.rows else 0

    def sit(self) -> Seat:
        """A seat; its row exists after ``settle``."""
        self.seats.append(Seat(self, len(self.seats)))
        return self.seats[-1]

    def settle(self, spare_tokens: int) -> None:
        """Make the rows for those who sit; half as many again as there were, if ``spare_tokens`` more may be
        taken: sequences that join one by one must not copy the pool each.
        """
        used = len(self.seats)
        if used > self.rows:
            self._resize(max(used, min(self.rows * 3 // 2, used + spare_tokens // self.length)))

    def trim(self) -> None:
        """Give back the rows that nobody uses."""
        if self.rows > len(self.seats):
            self._resize(len(self.seats))

    def leave(self, seat: Seat) -> None:
        last = self.seats.pop()
        if not self.seats:
            self._resize(0)
            return
        for tensor in self._tensors():
            if last.index < self.rows:
                if last is not seat:
                    tensor[seat.index] = tensor[last.index]
                tensor[last.index] = 0
        if last is not seat:
            last.index = seat.index
            self.seats[seat.index] = last

    def write(self, layer: int, rows: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [T, K, D] of the tokens at ``places`` of ``rows``."""
        self.keys[layer][rows, :, :, places] = keys
        self.values[layer][rows, :, places] = values

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.keys
        yield from self.values

    def _resize(self, rows: int) -> None:
        """Layer by layer, so that little is held twice."""
        kept = min(rows, self.rows)
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                tensors[index] = old.new_zeros(rows, *old.shape[1:])
                tensors[index][:kept] = old[:kept]
        self.rows = rows


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def rounded(length: int) -> int:
    return -(-length // KV_ROUND) * KV_ROUND


def size_of(longest: int, limit: int) -> int:
    """The length of the pool for a sequence that may take ``longest`` tokens, itself at most ``limit``.

    1, 2, 3, 4, 6, 8, 12, 16, … times the smallest: few sizes, each at most half too long.
    """
    units = -(-longest // KV_ROUND)
    power = 1 << (units - 1).bit_length()  # the next power of two
    size = power * 3 // 4 if units <= power * 3 // 4 else power
    return min(size * KV_ROUND, limit // KV_ROUND * KV_ROUND)
