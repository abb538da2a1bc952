"""Attention over the KV cache, for prompts that fill it and steps that go on from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.cache import Pool, Seat, rounded
from workers.engines.decoder import Attend
from workers.engines.functions import collect, spread
from workers.engines.packed import PackedBatch, masked, packed_attention, padding


@dataclass(frozen=True)
class Cell:
    """A token to be cached: flat token ``source`` at ``place`` of the seat's row."""

    source: int
    seat: Seat
    place: int


def prefill_attention(batch: PackedBatch, cells: Sequence[Cell]) -> Attend:
    """Packed attention that also caches."""
    device = batch.tokens_T.device
    inner = packed_attention(batch)
    writes = []
    for pool in {id(cell.seat.pool): cell.seat.pool for cell in cells}.values():
        own = [cell for cell in cells if cell.seat.pool is pool]
        source, rows, places = torch.tensor(
            [(cell.source, cell.seat.index, cell.place) for cell in own], device=device
        ).unbind(1)
        writes.append((pool, source, rows, places))

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for pool, source, rows, places in writes:
            pool.write(layer, rows, places, keys[source], values[source])
        return inner(layer, queries, keys, values)

    return attend


@dataclass(frozen=True)
class Fed:
    """What one row is fed in a step: its tokens at ``places``, which are flat tokens from ``start`` on."""

    seat: Seat
    start: int
    places: range

    @property
    def last(self) -> int:
        return self.start + len(self.places) - 1


def step_attention(fed: Sequence[Fed], device: torch.device) -> Attend:
    """Attention over what is cached and what is fed, which it caches.

    ``fed`` are the flat tokens in order. Each pool gives the results of its rows' last tokens in the order of
    the rows, then those of the other tokens; ``back`` puts all in the order of the flat tokens.
    """
    pools = {id(one.seat.pool): one.seat.pool for one in fed}.values()
    parts = []
    order: list[int] = []
    for pool in pools:
        own = sorted((one for one in fed if one.seat.pool is pool), key=lambda one: one.seat.index)
        part = _PoolPart(pool, own, device)
        order += part.order
        parts.append(part)
    place_of = {flat: index for index, flat in enumerate(order) if flat >= 0}
    back = None
    if order != list(range(len(order))):
        back = torch.tensor([place_of[flat] for flat in range(len(place_of))], device=device)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = [out for part in parts for out in part.attend(layer, queries, keys, values)]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return joined if back is None else joined.index_select(0, back)

    return attend


class _PoolPart:
    """The rows of one pool. ``order`` tells of each result its flat token; -1 where a row between the others
    is not fed, whose result is of no use.
    """

    def __init__(self, pool: Pool, fed: Sequence[Fed], device: torch.device) -> None:
        first, last = fed[0].seat.index, fed[-1].seat.index
        of_row = {one.seat.index: one for one in fed}
        self._pool, self._rows = pool, slice(first, last + 1)
        asked = [of_row.get(row) for row in range(first, last + 1)]
        flat = [0 if one is None else one.last for one in asked]
        ends = torch.tensor([0 if one is None else one.places[-1] for one in asked], device=device)
        self._length = min(pool.length, rounded(int(ends.max()) + 1))
        hidden = torch.arange(self._length, device=device) > ends.unsqueeze(1)
        self._mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        self._queries = torch.tensor(flat, device=device)
        cells = [
            (one.start + index, one.seat.index, place)
            for one in fed
            for index, place in enumerate(one.places)
        ]
        self._source, self._cell_rows, self._cell_places = torch.tensor(cells, device=device).unbind(1)
        several = [one for one in fed if len(one.places) > 1]
        self._several = _several_attention(pool, several, self._length, device) if several else None
        self.order = [-1 if one is None else one.last for one in asked]
        self.order += [one.start + index for one in several for index in range(len(one.places) - 1)]
        # Rows that lie in the batch as they do in the pool need no gathering.
        begin = fed[0].start
        plain = self.order == list(range(begin, begin + len(cells)))
        self._span = slice(begin, begin + len(cells)) if plain else None

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        pool, length = self._pool, self._length
        if self._span is not None:
            own, keys, values = queries[self._span], keys[self._span], values[self._span]
        else:
            own = queries.index_select(0, self._queries)
            keys, values = keys.index_select(0, self._source), values.index_select(0, self._source)
        pool.write(layer, self._cell_rows, self._cell_places, keys, values)
        (count, heads, size), kv_heads = own.shape, keys.shape[1]
        # The query heads that share a key head are the query length.
        scores = torch.bmm(
            own.reshape(count * kv_heads, -1, size),
            pool.keys[layer][self._rows].flatten(0, 1)[:, :, :length],
        )
        scores = torch.add(self._mask.unsqueeze(1), scores.view(count, heads, length), alpha=size**-0.5)
        weights = scores.softmax(-1).to(values.dtype)
        mixed = torch.bmm(
            weights.view(count * kv_heads, -1, length),
            pool.values[layer][self._rows].flatten(0, 1)[:, :length],
        ).view(count, heads, size)
        return [mixed] if self._several is None else [mixed, self._several(layer, queries)]


def _several_attention(
    pool: Pool, fed: Sequence[Fed], length: int, device: torch.device
) -> Callable[[int, Tensor], Tensor]:
    """Of all but the last tokens of rows that are fed several, over a copy of these rows: they are few, and
    seldom.
    """
    rows = torch.tensor([one.seat.index for one in fed], device=device)
    counts = torch.tensor([len(one.places) - 1 for one in fed])
    pad, flat = (tensor.to(device) for tensor in padding(counts, 0))
    tokens = torch.tensor(
        [one.start + index for one in fed for index in range(len(one.places) - 1)], device=device
    )
    starts = torch.tensor([one.places.start for one in fed], device=device)
    own = starts.unsqueeze(1) + torch.arange(pad.shape[1], device=device)
    visible = torch.arange(length, device=device) <= own.unsqueeze(2)  # [rows, fed, length]

    def attend(layer: int, queries: Tensor) -> Tensor:
        keys = pool.keys[layer][:, :, :, :length].index_select(0, rows).permute(0, 3, 1, 2)
        values = pool.values[layer][:, :, :length].index_select(0, rows).transpose(1, 2)
        padded = spread(queries.index_select(0, tokens), pad, flat)
        return collect(masked(padded, keys, values, visible), flat)

    return attend
