"""Drawing tokens: counter-based random numbers and the inverse of the cumulative distribution.

A token depends on its logits and on one number hashed from (stream, position). No generator is shared or
advanced, so batching, pausing and moving a sequence cannot change what it draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 256


def stream_state(stream: Sequence[int]) -> int:
    """The stream's 64-bit name."""
    state = 0
    for number in stream:
        state = int(_mix(np.array([(state + GOLDEN) & MASK ^ (number & MASK)], dtype=np.uint64))[0])
    return state


def uniforms(states: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per (stream, position), float64 with 53 random bits."""
    with np.errstate(over="ignore"):
        counters = (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        mixed = _mix(np.array(states, dtype=np.uint64) + counters)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (https://doi.org/10.1145/2660193.2660195)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits_NV: Tensor, temperature_N: Tensor, top_p_N: Tensor, uniform_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, [N] each, float64 log-probs rounded to float32.

    Log-probs are of the whole softmax at the temperature (1 where the temperature is 0).
    """
    greedy = temperature_N == 0
    divisor = torch.where(greedy, 1.0, temperature_N).unsqueeze(1)
    # One buffer for all: fresh megabytes per operation would cost more than the arithmetic.
    mass = logits_NV.float() if logits_NV.dtype != torch.float32 else logits_NV.clone()
    mass.div_(divisor)
    peak = mass.amax(dim=1, keepdim=True)
    mass.sub_(peak).exp_()
    log_total = _block_mass(mass).sum(dim=1).log()
    narrowed = top_p_N < 1
    if bool(narrowed.any()):
        mass[narrowed] = nucleus(mass[narrowed], top_p_N[narrowed])
    tokens = inverse_cdf(mass, uniform_N)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits_NV.argmax(dim=1), tokens)
    chosen = logits_NV.gather(1, tokens.unsqueeze(1)).float() / divisor - peak
    return tokens, (chosen.squeeze(1).double() - log_total).float()


def nucleus(mass_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Zero outside the smallest set of likeliest tokens that holds ``top_p``
    (https://arxiv.org/abs/1904.09751).
    """
    ordered, order = mass_NV.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1, dtype=torch.float64) - ordered
    kept = before < top_p_N.double().unsqueeze(1) * ordered.sum(dim=1, keepdim=True, dtype=torch.float64)
    return torch.zeros_like(mass_NV).scatter(1, order, torch.where(kept, ordered, 0))


def inverse_cdf(mass_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The token whose stretch of the cumulative mass, in order of ids, holds ``uniform``; the mass need not
    sum to 1.

    In two levels, blocks then tokens of one block: a cumulative sum over the whole vocabulary would cost more
    than the softmax.
    """
    rows, vocab = mass_NV.shape
    blocks = _block_mass(mass_NV).cumsum(dim=1)
    target = uniform_N.double() * blocks[:, -1]
    block = _first_above(blocks, target)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    inside = _in_blocks(mass_NV)[torch.arange(rows, device=block.device), block].cumsum(
        dim=1, dtype=torch.float64
    )
    return (block * BLOCK + _first_above(inside, target - before)).clamp(max=vocab - 1)


def _in_blocks(mass_NV: Tensor) -> Tensor:
    vocab = mass_NV.shape[1]
    padded = functional.pad(mass_NV, (0, -vocab % BLOCK)) if vocab % BLOCK else mass_NV
    return padded.view(len(mass_NV), -1, BLOCK)


def _block_mass(mass_NV: Tensor) -> Tensor:
    """[N, blocks] in fp64: short sums in fp32 are exact enough, and widening every entry is not free."""
    return _in_blocks(mass_NV).sum(dim=2).double()


def _first_above(cumulative_NB: Tensor, target_N: Tensor) -> Tensor:
    """First place whose cumulative mass exceeds the target: never one without mass of its own."""
    # Rounding may put the target at the very end; it then belongs to the last place with mass.
    below_end = cumulative_NB[:, -1] * (1 - 1e-12)
    target = torch.minimum(target_N, below_end).unsqueeze(1)
    place = torch.searchsorted(cumulative_NB.contiguous(), target, right=True).squeeze(1)
    return place.clamp(max=cumulative_NB.shape[1] - 1)
