"""Losses per token and per pair. How they are averaged: ``workers.rl.averages``.

Shapes: N trained tokens, one sequence after the other; R sequences; P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from workers.spec.algorithms import Ratio


def log_ratios(logprobs_N: Tensor, old_N: Tensor, lengths_R: Tensor, ratio: Ratio) -> Tensor:
    """Logarithm of how much likelier each token, or its sequence, is than before the update, [N].

    token: log p - log p_old. sequence_mean: its mean over the sequence (GSPO,
    https://arxiv.org/abs/2507.18071). sequence: its sum (RLOO, https://arxiv.org/abs/2402.14740).
    """
    difference = logprobs_N - old_N
    if ratio == "token":
        return difference
    rows_N = torch.arange(len(lengths_R), device=difference.device).repeat_interleave(lengths_R)
    sums_R = torch.zeros(len(lengths_R), dtype=difference.dtype, device=difference.device)
    sums_R = sums_R.index_add(0, rows_N, difference)
    return (sums_R / lengths_R if ratio == "sequence_mean" else sums_R)[rows_N]


def clipped_policy_loss(
    log_ratios_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss (https://arxiv.org/abs/1707.06347) with a low and a high bound of its own
    (https://arxiv.org/abs/2503.14476):

        -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    and at most ``-dual_clip * A`` where A is negative (https://arxiv.org/abs/1912.09729). The second result
    marks tokens whose gradient a clip has cut off.
    """
    ratio_N = log_ratios_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    plain_loss, clipped_loss = -ratio_N * advantages_N, -clipped_N * advantages_N
    loss, cut = torch.maximum(plain_loss, clipped_loss), clipped_loss > plain_loss
    if dual_clip is None:
        return loss, cut
    bound = torch.where(advantages_N < 0, -dual_clip * advantages_N, torch.inf)
    return torch.minimum(loss, bound), cut | (loss > bound)


def cut_policy_loss(
    logprobs_N: Tensor, log_ratios_N: Tensor, advantages_N: Tensor, clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO's loss (https://arxiv.org/abs/2506.13585): the ratio is a weight that is cut and not
    differentiated,

        -min(ratio, 1 + clip_high) * A * log p

    so that every token keeps a gradient. The second result marks tokens whose ratio was cut.
    """
    ratio_N = log_ratios_N.detach().exp()
    return -ratio_N.clamp(max=1 + clip_high) * advantages_N * logprobs_N, ratio_N > 1 + clip_high


def token_weights(lengths_R: Tensor, average: str) -> Tensor:
    """What a token of each sequence counts before the division, [R] in fp64: its share of the sequence where
    each sequence counts once, else 1. ``lengths_R`` count trained tokens.
    """
    lengths = lengths_R.double()
    return 1 / lengths if average == "sequence" else torch.ones_like(lengths)


def importance_weights(
    old_N: Tensor, engine_N: Tensor, cap: float, mask: bool = False
) -> tuple[Tensor, Tensor]:
    """How much likelier each token is before the update than it was where it was sampled: by older weights,
    or by an engine that computes a little differently. Cut at ``cap``, or, with ``mask``, 0 beyond ``cap`` or
    below ``1 / cap``; the second result marks those.

    ``old_N`` are the log-probs before the update: the policy loss stays a ratio to them, and these weights
    correct for who sampled (the decoupled objective, https://arxiv.org/abs/2505.24298).
    """
    ratio = (old_N - engine_N).exp()
    if not mask:
        return ratio.clamp(max=cap), ratio > cap
    beyond = (ratio > cap) | (ratio < 1 / cap)
    return ratio.masked_fill(beyond, 0.0), beyond


def clipped_value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """Half the squared error of the values, [N]; what one has moved beyond ``clip`` earns it nothing more,
    as in PPO's reference implementation.
    """
    near_N = old_N + (values_N - old_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (near_N - returns_N).square()) / 2


def preference_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    chosen_reference_P: Tensor,
    rejected_reference_P: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """DPO (https://arxiv.org/abs/2305.18290), from the log-probs of whole completions: -log sigmoid(margin)
    and the margin, beta * ((chosen - its reference) - (rejected - its reference)).
    """
    margin_P = beta * ((chosen_P - chosen_reference_P) - (rejected_P - rejected_reference_P))
    return -functional.logsigmoid(margin_P), margin_P
