"""The present objective, until ``workers.rl.objective`` is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.rl.batching import Batch
from workers.rl.kl import k3
from workers.rl.losses import clipped_policy_loss, importance_weights, token_weights
from workers.rl.sums import Sums
from workers.spec import RLConfig
from workers.train.forward import sampled


@dataclass(frozen=True)
class Found:
    logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None


def objective(spec: RLConfig, micro: Batch, found: Found) -> tuple[Tensor, Sums]:
    if spec.loss.kl_beta > 0 and micro.reference_logprobs is None:
        raise ValueError("a KL penalty needs reference log-probs in the batch")
    logprobs, entropy = found.logprobs_N, found.entropy_N
    device = logprobs.device
    lengths = torch.tensor([sum(marks) for marks in micro.sampled], device=device)

    def per_token(values: Tensor) -> Tensor:
        return values.to(device, torch.float32).repeat_interleave(lengths)

    def column(lists: list[list[float]]) -> Tensor:
        return torch.tensor(sampled(micro, lists), device=device)

    current, engine = logprobs.detach(), column(micro.engine_logprobs)
    old = current if micro.old_logprobs is None else column(micro.old_logprobs)
    assert spec.loss.average and spec.loss.clip_low and spec.loss.clip_high
    weights = per_token(token_weights(lengths, spec.loss.average))
    advantages = per_token(torch.tensor(micro.advantages, dtype=torch.float64))
    losses, clipped = clipped_policy_loss(logprobs, old, advantages, spec.loss.clip_low, spec.loss.clip_high)
    capped_sum = None
    if spec.loss.importance_cap:
        importance, capped = importance_weights(old, engine, spec.loss.importance_cap)
        losses = losses * importance
        capped_sum = float(capped.sum())
    kl_sum = None
    if micro.reference_logprobs is not None:
        divergence = k3(logprobs, column(micro.reference_logprobs))
        kl_sum = float(divergence.detach().sum())
        if spec.loss.kl_beta > 0:
            losses = losses + spec.loss.kl_beta * divergence
    losses = losses - spec.loss.entropy_coef * entropy
    loss = (losses * weights).sum()
    mismatch = (engine - old).abs()
    return loss, Sums(
        tokens=len(logprobs),
        loss=float(loss.detach()),
        kl=kl_sum,
        entropy=float(entropy.sum()),
        clipped=float(clipped.sum()),
        capped=capped_sum,
        mismatch=float(mismatch.sum()),
        mismatch_max=float(mismatch.max()),
        average=spec.loss.average,
    )
