"""How an update averages over its tokens: a weight per token, and one division.

A token's weight is decided by its own sequence (``workers.rl.losses.token_weights``); the division, by the
whole update's totals, comes at the end. So the gradient is a sum over micro-batches and over workers, however
the batch is split and whatever is not known yet when a part of it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.spec import Average


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


def divisor(average: Average, over: Denominator) -> int:
    """What the weighted sum over an update's tokens is divided by.

    token: all tokens (https://arxiv.org/abs/2503.14476). sequence: sequences
    (https://arxiv.org/abs/2402.03300). constant: sequences x max_tokens (https://arxiv.org/abs/2503.20783).
    """
    if average == "token":
        return over.tokens
    return over.sequences if average == "sequence" else over.sequences * over.max_tokens
