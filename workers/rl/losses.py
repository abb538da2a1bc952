"""Policy loss per token, and how tokens are averaged.

Averaging is a weight per token, computed from the whole update's totals (``Denominator``), so the gradient is
the sum over micro-batches and over workers however the batch is split.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workers.rl.batching import Denominator

Average = Literal["token", "sequence", "constant"]


def clipped_policy_loss(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss (https://arxiv.org/abs/1707.06347) with a low and a high bound of its own
    (https://arxiv.org/abs/2503.14476); the second result marks tokens whose gradient the clip has cut off."""
    ratio = (logprobs_N - old_N).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain_loss, clipped_loss = -ratio * advantages_N, -clipped * advantages_N
    return torch.maximum(plain_loss, clipped_loss), clipped_loss > plain_loss


def token_weights(lengths_R: Tensor, average: Average, denominator: Denominator) -> Tensor:
    """What a token of each sequence counts, [R] in fp64: the update's loss is the weighted sum over its
    tokens.

    token: 1 / all tokens (https://arxiv.org/abs/2503.14476). sequence: 1 / (its length x sequences)
    (https://arxiv.org/abs/2402.03300). constant: 1 / (sequences x max_tokens)
    (https://arxiv.org/abs/2503.20783).
    """
    lengths = lengths_R.double()
    if average == "token":
        return torch.full_like(lengths, 1 / denominator.tokens)
    if average == "sequence":
        return 1 / (lengths * denominator.sequences)
    return torch.full_like(lengths, 1 / (denominator.sequences * denominator.max_tokens))
