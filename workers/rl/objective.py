"""The loss of a micro-batch: a sum over its tokens (DPO: its pairs), not divided yet.

    policy loss * importance + kl_beta * KL - entropy_coef * entropy + value.coef * value loss, by token
    weights

What an update divides the sum by is ``workers.rl.averages.divisor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workers.rl import kl
from workers.rl.averages import averaging
from workers.rl.batching import Batch, sampled
from workers.rl.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    cut_policy_loss,
    importance_weights,
    log_ratios,
    preference_loss,
    token_weights,
)
from workers.rl.sums import Sums
from workers.spec import RLConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What a forward pass found at the sampled tokens, one sample after the other, [N] each.

    The entropy has a gradient only where a bonus asks for it.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None = None


def objective(spec: RLConfig, micro: Batch, found: Found) -> tuple[Tensor, Sums]:
    """The loss's sum over the micro-batch, and what it measured. All samples of ``micro`` are trained."""
    if spec.method.objective == "preference":
        return _preference(spec, micro, found)
    if spec.method.objective == "likelihood":
        return likelihood(spec, micro, found)
    return _policy(spec, micro, found)


# ---------------------------------------------------------------- reinforcement learning


def _policy(spec: RLConfig, micro: Batch, found: Found) -> tuple[Tensor, Sums]:
    """The ratio is taken to ``micro.old_logprobs``; without them to the current log-probs, which is right for
    the first update after a rollout (the ratio is 1).
    """
    logprobs = found.logprobs_N
    rows = _Rows(micro, logprobs.device)
    engine = rows.column(micro.engine_logprobs)
    old = logprobs.detach() if micro.old_logprobs is None else rows.column(micro.old_logprobs)
    losses, clipped = _surrogate(spec, rows, logprobs, old, rows.column(micro.advantages))
    losses, capped = _corrected(spec, losses, old, engine)
    losses, divergence = _penalized(spec, micro, rows, losses, logprobs)
    if spec.loss.entropy_coef:
        losses = losses - spec.loss.entropy_coef * found.entropy_N
    losses, value_sums = _with_values(spec, micro, rows, losses, found.values_N)
    loss = (losses * rows.weights(averaging(spec))).sum()
    mismatch = (engine - old).abs()
    return loss, value_sums + Sums(
        tokens=len(logprobs),
        loss=float(loss.detach()),
        kl=divergence,
        entropy=float(found.entropy_N.detach().sum()),
        clipped=float(clipped.sum()),
        capped=capped,
        mismatch=float(mismatch.sum()),
        mismatch_max=float(mismatch.max()),
        average=averaging(spec),
    )


def _surrogate(
    spec: RLConfig, rows: _Rows, logprobs: Tensor, old: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    ratios = log_ratios(logprobs, old, rows.lengths_R, spec.method.ratio)
    loss = spec.loss
    assert loss.clip_high is not None
    if spec.method.objective == "cut":
        return cut_policy_loss(logprobs, ratios, advantages, loss.clip_high)
    assert loss.clip_low is not None
    return clipped_policy_loss(ratios, advantages, loss.clip_low, loss.clip_high, loss.dual_clip)


def _corrected(spec: RLConfig, losses: Tensor, old: Tensor, engine: Tensor) -> tuple[Tensor, float | None]:
    """Weighted by who sampled, and how many weights were cut; None where nothing is weighted."""
    if spec.loss.importance in (None, "off"):
        return losses, None
    assert spec.loss.importance_cap is not None
    weights, cut = importance_weights(old, engine, spec.loss.importance_cap, spec.loss.importance == "mask")
    return losses * weights, float(cut.sum())


def _penalized(
    spec: RLConfig, micro: Batch, rows: _Rows, losses: Tensor, logprobs: Tensor
) -> tuple[Tensor, float | None]:
    """With the divergence added where the loss pays for it, and its sum; None where there is no reference."""
    if micro.reference_logprobs is None:
        if spec.loss.kl_in == "loss":
            raise ValueError("a KL penalty needs reference log-probs in the batch")
        return losses, None
    reference, estimator = rows.column(micro.reference_logprobs), spec.loss.kl_estimator or "k3"
    divergence = kl.penalty(logprobs, reference, estimator)
    if spec.loss.kl_in == "loss":
        losses = losses + spec.loss.kl_beta * divergence
    return losses, float(divergence.detach().sum())


def _with_values(
    spec: RLConfig, micro: Batch, rows: _Rows, losses: Tensor, values: Tensor | None
) -> tuple[Tensor, Sums]:
    if spec.value is None:
        return losses, Sums()
    if values is None or micro.values is None or micro.returns is None:
        raise ValueError("PPO needs values and returns in the batch")
    old, returns = rows.column(micro.values), rows.column(micro.returns)
    missed = clipped_value_loss(values, old, returns, spec.value.clip)
    return losses + spec.value.coef * missed, Sums(
        value_loss=float(missed.detach().sum()),
        returns=float(returns.sum()),
        returns_squared=float(returns.square().sum()),
        residuals_squared=float((returns - old).square().sum()),
    )


# ---------------------------------------------------------------- learning from the data


def likelihood(spec: RLConfig, micro: Batch, found: Found) -> tuple[Tensor, Sums]:
    """SFT: the negative log-likelihood of the data's own completions (https://arxiv.org/abs/2203.02155)."""
    rows = _Rows(micro, found.logprobs_N.device)
    loss = (-found.logprobs_N * rows.weights(averaging(spec))).sum()
    return loss, _learned(spec, loss, found)


def _preference(spec: RLConfig, micro: Batch, found: Found) -> tuple[Tensor, Sums]:
    """DPO: a group is a pair, its first sample the preferred one."""
    if micro.reference_logprobs is None:
        raise ValueError("DPO needs reference log-probs in the batch")
    assert spec.loss.dpo_beta is not None
    rows = _Rows(micro, found.logprobs_N.device)
    first, second = rows.pairs()
    now = rows.sums(found.logprobs_N)
    before = rows.sums(rows.column(micro.reference_logprobs))
    losses, margins = preference_loss(
        now[first], now[second], before[first], before[second], spec.loss.dpo_beta
    )
    loss = losses.sum()
    return loss, _learned(spec, loss, found) + Sums(
        pairs=len(first), preferred=float((margins > 0).sum()), margin=float(margins.detach().sum())
    )


def _learned(spec: RLConfig, loss: Tensor, found: Found) -> Sums:
    return Sums(
        tokens=len(found.logprobs_N),
        loss=float(loss.detach()),
        entropy=float(found.entropy_N.detach().sum()),
        average=averaging(spec),
    )


# ---------------------------------------------------------------- columns


class _Rows:
    """A micro-batch's columns as tensors over its sampled tokens."""

    def __init__(self, micro: Batch, device: torch.device) -> None:
        self._micro, self._device = micro, device
        self.lengths_R = torch.tensor([sum(marks) for marks in micro.sampled], device=device)

    def column(self, lists: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor(sampled(self._micro, lists), dtype=torch.float32, device=self._device)

    def weights(self, average: str) -> Tensor:
        return token_weights(self.lengths_R, average).float().repeat_interleave(self.lengths_R)

    def sums(self, values_N: Tensor) -> Tensor:
        """Over each sample, [R]."""
        rows_N = torch.arange(len(self.lengths_R), device=self._device).repeat_interleave(self.lengths_R)
        return values_N.new_zeros(len(self.lengths_R)).index_add(0, rows_N, values_N)

    def pairs(self) -> tuple[list[int], list[int]]:
        """Where the first and the second sample of each group stand; ``ValueError`` for a group of others."""
        groups: dict[int, list[int]] = {}
        for index, group in enumerate(self._micro.groups):
            groups.setdefault(group, []).append(index)
        if any(len(own) != 2 for own in groups.values()):
            raise ValueError("a preference needs both samples of each of its groups")
        return [own[0] for own in groups.values()], [own[1] for own in groups.values()]
