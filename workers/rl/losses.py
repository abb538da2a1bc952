"""Policy loss per token. How they are averaged: ``workers.rl.averages``."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.spec import Average


def clipped_policy_loss(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss (https://arxiv.org/abs/1707.06347) with a low and a high bound of its own
    (https://arxiv.org/abs/2503.14476); the second result marks tokens whose gradient the clip has cut off."""
    ratio = (logprobs_N - old_N).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain_loss, clipped_loss = -ratio * advantages_N, -clipped * advantages_N
    return torch.maximum(plain_loss, clipped_loss), clipped_loss > plain_loss


def token_weights(lengths_R: Tensor, average: Average) -> Tensor:
    """What a token of each sequence counts before the division, [R] in fp64: its share of the sequence where
    each sequence counts once, else 1. ``lengths_R`` count trained tokens.
    """
    lengths = lengths_R.double()
    return 1 / lengths if average == "sequence" else torch.ones_like(lengths)


def importance_weights(old_N: Tensor, engine_N: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """How much likelier each token is now than when it was sampled by older weights, cut at ``cap``; the
    second result marks those that were cut.

    ``old_N`` are the log-probs before the update: the policy loss stays a ratio to them, and these weights
    correct for who sampled (the decoupled objective, https://arxiv.org/abs/2505.24298).
    """
    ratio = (old_N - engine_N).exp()
    return ratio.clamp(max=cap), ratio > cap
