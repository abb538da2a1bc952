"""Adapters of several runs for decode on a CPU, where every run has few tokens.

The runs are one dimension of batched products: a wide product over all adapters' columns
(``lora.side_by_side``) computes every token with every adapter, and a product per run pays each small call
many times over. Measured within decode steps of SmolLM2-135M, rank 16, bf16, one thread: 4 runs of 1, 4, 16
tokens pay 15, 16, 32 ms for their adapters, and 24, 24, 50 ms by the wide product.

R runs, M tokens of the run with most, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, Addition
from workers.engines.lora import PROJECTIONS
from workers.models.config import ModelConfig

#: Tokens per run that padding may add before a product per run is cheaper.
PADDING = 10


@dataclass(frozen=True)
class Rows:
    """Where each run's tokens lie. ``pad_RM`` and ``flat_T`` map padded places to tokens and back; None when
    every run has as many, or when ``spans`` are computed one by one.
    """

    spans: list[tuple[int, slice]]  # (slot, tokens)
    batched: bool
    pad_RM: Tensor | None = None
    flat_T: Tensor | None = None

    @classmethod
    def of(cls, counts: Sequence[int]) -> Rows:
        """``counts[slot]`` tokens, in the order of the slots. In a batched product those without cost as much
        as others: where they are half of it, each run has a product of its own.
        """
        spans, start = [], 0
        for slot, count in enumerate(counts):
            if count:
                spans.append((slot, slice(start, start + count)))
            start += count
        most = max(counts)
        if len(counts) * (most - PADDING) > start or len(counts) >= 2 * len(spans):
            return cls(spans, batched=False)
        if min(counts) == most:
            return cls(spans, batched=True)
        places = torch.arange(most)
        lengths = torch.tensor(counts).unsqueeze(1)
        real = places < lengths
        pad = torch.where(real, lengths.cumsum(0) - lengths + places, 0)
        return cls(spans, True, pad.flatten(), real.flatten().nonzero().squeeze(1))


@dataclass(frozen=True)
class StackedAddition:
    """``down`` [R, in, C] and ``up`` [R, C, out] of one stored matrix."""

    down: Tensor
    up: Tensor
    rows: Rows

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        rows, slots = self.rows, len(self.down)
        if not rows.batched:
            parts = [
                torch.addmm(y[span], x[span] @ self.down[slot], self.up[slot]) for slot, span in rows.spans
            ]
            return torch.cat(parts)
        # Added inside the product: its rounding must not depend on how many rows the others have.
        if rows.pad_RM is None or rows.flat_T is None:
            return self._product(y.view(slots, -1, y.shape[1]), x.view(slots, -1, x.shape[1]))
        x, y = (tensor.index_select(0, rows.pad_RM) for tensor in (x, y))
        added = self._product(y.view(slots, -1, y.shape[1]), x.view(slots, -1, x.shape[1]))
        return added.index_select(0, rows.flat_T)

    def _product(self, y: Tensor, x: Tensor) -> Tensor:
        """[R, M, out] + [R, M, in] -> [R M, out]."""
        return torch.baddbmm(y, torch.bmm(x, self.down), self.up).flatten(0, 1)


class Stack:
    """Adapters side by side, each in its slot; a slot without an adapter adds nothing."""

    def __init__(self, config: ModelConfig, adapters: Sequence[Adapters | None]) -> None:
        """At least one is not None."""
        self._adapters: list[Adapters | None] = list(adapters)
        self._layers = [_places(config, layer, adapters) for layer in range(config.layers)]

    def additions(
        self, adapters: Sequence[Adapters | None], counts: Sequence[int]
    ) -> list[Mapping[str, Addition]] | None:
        """For a batch of ``counts[i]`` tokens with ``adapters[i]``, in this order; None when the stack does
        not hold one of them.
        """
        slots = self._slots(adapters)
        if slots is None:
            return None
        of_slot = dict(zip(slots, counts, strict=True))
        used = slice(slots[0], slots[-1] + 1)
        rows = Rows.of([of_slot.get(slot, 0) for slot in range(used.start, used.stop)])
        return [
            {name: StackedAddition(down[used], up[used], rows) for name, (down, up) in layer.items()}
            for layer in self._layers
        ]

    def renew(self, adapters: Sequence[Adapters | None]) -> bool:
        """Write those that are new into their slots; False when the slots are others, or not wide enough."""
        new = [
            slot
            for slot, (old, adapter) in enumerate(zip(self._adapters, adapters, strict=False))
            if old is not adapter
        ]
        if len(adapters) != len(self._adapters) or not all(self._fits(adapters[slot]) for slot in new):
            return False
        for slot in new:
            self._write(slot, adapters[slot])
        self._adapters = list(adapters)
        return True

    def _fits(self, adapter: Adapters | None) -> bool:
        return adapter is None or all(
            name in places and len(pair.down) <= places[name][0].shape[2]
            for places, layer in zip(self._layers, adapter, strict=True)
            for name, pair in layer.items()
        )

    def _write(self, slot: int, adapter: Adapters | None) -> None:
        for number, places in enumerate(self._layers):
            for name, (down, up) in places.items():
                pair = None if adapter is None else adapter[number].get(name)
                columns = 0 if pair is None else len(pair.down)
                down[slot, :, columns:] = 0
                up[slot, columns:] = 0
                if pair is not None:
                    down[slot, :, :columns] = pair.down.T
                    up[slot, :columns] = pair.up.T

    def _slots(self, adapters: Sequence[Adapters | None]) -> list[int] | None:
        found: list[int] = []
        for adapter in adapters:
            begin = found[-1] + 1 if found else 0
            later = range(begin, len(self._adapters))
            slot = next((slot for slot in later if self._adapters[slot] is adapter), None)
            if slot is None:
                return None
            found.append(slot)
        return found


def _places(
    config: ModelConfig, layer: int, adapters: Sequence[Adapters | None]
) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for name in PROJECTIONS:
        pairs = [None if adapter is None else adapter[layer].get(name) for adapter in adapters]
        present = [pair for pair in pairs if pair is not None]
        if not present:
            continue
        columns = max(len(pair.down) for pair in present)
        down = present[0].down.new_zeros(len(pairs), columns, present[0].down.shape[1])
        up = down.new_zeros(len(pairs), len(present[0].up), columns)
        for slot, pair in enumerate(pairs):
            if pair is not None:
                down[slot, : len(pair.down)] = pair.down
                up[slot, :, : len(pair.down)] = pair.up
        found[name] = (down.transpose(1, 2), up.transpose(1, 2))
    return found
