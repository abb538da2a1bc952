"""Log-probabilities of chosen tokens from hidden states, without keeping logits.

The loss needs one number per position, yet a position has as many logits as the vocabulary: 2,000 positions
of SmolLM2 are 400 MB in fp32, several times over in a plain autograd graph. The gradients of a position's
log-prob, and of the entropy H of the distribution p that it is sampled from,

    d logprob / d hidden = (head[target] - p @ head) / temperature
    d H / d hidden       = -(p * (log p + H)) @ head / temperature,

do not depend on the loss, so they are made beside the log-prob, chunk by chunk, while the logits are in
cache; the way back only multiplies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.limits import LOGIT_ROWS

#: Positions whose fp32 logits are in cache at once.
SLICE = 8


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_N: Tensor, head: Tensor, targets_N: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_head = ctx.needs_input_grad[:2]
        logprobs = hidden_N.new_empty(len(hidden_N), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        gradient = hidden_N.new_empty(hidden_N.shape, dtype=torch.float32) if need_hidden else None
        spread = torch.empty_like(gradient) if entropy and gradient is not None else None
        kept: list[Tensor] = []
        scratch = hidden_N.new_empty(2, SLICE, len(head), dtype=torch.float32)
        for start in range(0, len(hidden_N), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            logits = functional.linear(hidden_N[part], head)
            slopes = torch.empty_like(logits) if entropy and (need_hidden or need_head) else None
            _softmax_in_place(
                logits, targets_N[part], temperature, logprobs[part], entropies[part], scratch, slopes
            )
            if gradient is not None:
                gradient[part] = (head[targets_N[part]].float() - (logits @ head).float()) / temperature
            if spread is not None and slopes is not None:
                spread[part] = (slopes @ head).float() / temperature
            if need_head:
                kept += [logits] if slopes is None else [logits, slopes]
        ctx.save_for_backward(hidden_N, head, targets_N, gradient, spread, *kept)
        ctx.temperature = temperature
        ctx.entropy = entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, entropy_N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_N, head, targets_N, gradient, spread, *kept = ctx.saved_tensors
        grad_hidden = None
        if gradient is not None:
            grad_hidden = gradient * grad_N.unsqueeze(1)
            if spread is not None:
                grad_hidden.addcmul_(spread, entropy_N.unsqueeze(1))
            grad_hidden = grad_hidden.to(hidden_N.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None, None

        def weighted(by_N: Tensor) -> Tensor:
            return hidden_N * (by_N / ctx.temperature).unsqueeze(1).to(hidden_N.dtype)

        chosen = weighted(grad_N)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        tables = kept[::2] if ctx.entropy else kept
        for probabilities, rows in zip(tables, chosen.split(LOGIT_ROWS), strict=True):
            grad_head -= probabilities.T @ rows
        if ctx.entropy:
            for slopes, rows in zip(kept[1::2], weighted(entropy_N).split(LOGIT_ROWS), strict=True):
                grad_head += slopes.T @ rows
        grad_head.index_add_(0, targets_N, chosen.float())
        return grad_hidden, grad_head.to(head.dtype), None, None, None


def _softmax_in_place(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    logprobs: Tensor,
    entropies: Tensor,
    scratch: Tensor,
    slopes: Tensor | None,
) -> None:
    """``logits`` become probabilities; log-probs of the targets, entropies and, where there is room for them,
    the entropies' gradients in the scaled logits are written in place.
    """
    for start in range(0, len(logits), SLICE):
        part = slice(start, start + SLICE)
        count = len(logits[part])
        scaled, mass = scratch[0, :count], scratch[1, :count]
        scaled.copy_(logits[part])
        if temperature != 1:
            scaled.div_(temperature)
        scaled.sub_(scaled.amax(dim=1, keepdim=True))
        torch.exp(scaled, out=mass)
        total = mass.sum(dim=1, keepdim=True)
        log_total = total.log().squeeze(1)
        logprobs[part] = scaled.gather(1, targets[part].unsqueeze(1)).squeeze(1) - log_total
        torch.div(mass, total, out=logits[part])
        expected = torch.bmm(mass.unsqueeze(1), scaled.unsqueeze(2)).view(-1) / total.squeeze(1)
        entropies[part] = log_total - expected
        if slopes is not None:
            # log p + H, which is what a logit lies above the expected one.
            above = scaled.sub_(expected.unsqueeze(1))
            slopes[part] = above.mul_(mass).div_(total).neg_()


def chosen_logprobs(
    hidden_N: Tensor, head: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """hidden [N, hidden], head [vocab, hidden], targets [N] -> log-probs and entropies [N] at the
    temperature.

    Differentiable in the log-probs, and in the entropies if asked: that is one more product with the head.
    """
    if not torch.is_grad_enabled():
        # A function cannot tell by itself that nobody will go back, and would keep what that takes.
        hidden_N, head = hidden_N.detach(), head.detach()
    result: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(
        hidden_N, head, targets_N, temperature, entropy_gradient
    )
    return result
