"""Dropout on what adapters read (https://arxiv.org/abs/1207.0580, as in PEFT: not on the frozen product).

Which inputs of a token are dropped depends on the run's seed, the optimizer step, the layer, and the sequence
that the token belongs to: the prompt, or the prompt and its completion. It does not depend on what else is in
the micro-batch, nor on the worker. So the gradient stays the same for every split of an update, and a resumed
run goes on as if it had not stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, Addition, LowRank


@dataclass(frozen=True)
class Segments:
    """The sequences that lie one after the other in a flat batch: tokens of each, and what it is drawn by."""

    lengths: tuple[int, ...]
    keys: tuple[bytes, ...]
    device: torch.device

    def kept(self, share: float, width: int, place: str) -> Tensor:
        """True with probability ``share``, [T, width]; always the same for the same place."""
        kept = torch.empty(sum(self.lengths), width, dtype=torch.bool, device=self.device)
        generator = torch.Generator(self.device)
        for key, rows in zip(self.keys, kept.split(self.lengths), strict=True):
            generator.manual_seed(int.from_bytes(_digest(key, place.encode()), "little") >> 1)
            rows.bernoulli_(share, generator=generator)
        return kept


def segments(
    seed: int,
    step: int,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[tuple[int, Sequence[int]]],
    device: torch.device,
) -> Segments:
    """In the order of ``workers.engines.packed.pack``: the prompts, then ``rows`` (prompt index, tokens)."""
    start = f"{seed} {step}".encode()
    of_prompts = [_digest(start, _bytes(prompt)) for prompt in prompts]
    of_rows = [_digest(of_prompts[prompt], b"+", _bytes(tokens)) for prompt, tokens in rows]
    lengths = [len(prompt) for prompt in prompts] + [len(tokens) for _, tokens in rows]
    return Segments(tuple(lengths), (*of_prompts, *of_rows), device)


def _bytes(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()


@dataclass(frozen=True)
class Dropped:
    """An adapter of one stored matrix whose input is dropped. Projections stored as one share the drawing."""

    pair: LowRank
    place: str
    dropout: float
    segments: Segments

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        # A mask of one byte is all that is kept for the way back; blocks computed again draw it again.
        kept = self.segments.kept(1 - self.dropout, x.shape[1], self.place)
        return self.pair.added(y, x * kept / (1 - self.dropout))


def mask_bytes(adapters: Adapters, tokens: int) -> int:
    """What the masks of a training pass keep for the way back."""
    return tokens * sum(pair.down.shape[1] for pairs in adapters for pair in pairs.values())


def with_dropout(adapters: Adapters, dropout: float, drawn: Segments) -> tuple[Mapping[str, Addition], ...]:
    return tuple(
        {place: Dropped(pair, f"{layer} {place}", dropout, drawn) for place, pair in pairs.items()}
        for layer, pairs in enumerate(adapters)
    )
