"""How an update averages over its tokens: a weight per token, and one division.

A token's weight is decided by its own sequence (``workers.rl.losses.token_weights``); the division, by the
whole update's totals, comes at the end. So the gradient is a sum over micro-batches and over workers, however
the batch is split and whatever is not known yet when a part of it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.spec import Average, RLConfig

#: pair: DPO's mean over pairs of sequences.
Averaging = Average | Literal["pair"]


@dataclass(frozen=True)
class Denominator:
    """Totals over what a whole update trains, all workers together: sampled tokens and their sequences."""

    tokens: int
    sequences: int
    max_tokens: int

    def __add__(self, other: Denominator) -> Denominator:
        if self.max_tokens != other.max_tokens:
            raise ValueError("denominators of jobs with different max_tokens do not add up")
        return Denominator(self.tokens + other.tokens, self.sequences + other.sequences, self.max_tokens)


def averaging(spec: RLConfig) -> Averaging:
    """How the job's updates average: as it asks, or over pairs."""
    return spec.loss.average or "pair"


def divisor(average: Averaging, over: Denominator) -> int:
    """What the weighted sum over an update's tokens is divided by.

    token: all tokens (https://arxiv.org/abs/2503.14476). sequence: sequences
    (https://arxiv.org/abs/2402.03300). constant: sequences x max_tokens (https://arxiv.org/abs/2503.20783).
    pair: half the sequences (https://arxiv.org/abs/2305.18290).
    """
    match average:
        case "token":
            return over.tokens
        case "sequence":
            return over.sequences
        case "constant":
            return over.sequences * over.max_tokens
        case "pair":
            return over.sequences // 2
