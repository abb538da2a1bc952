"""Log-probabilities of chosen tokens from hidden states, without keeping logits.

The loss needs one number per position, yet a position has as many logits as the vocabulary: 2,000 positions
of SmolLM2 are 400 MB in fp32, several times over in a plain autograd graph. The gradient of a position's
log-prob,

    d logprob / d hidden = (head[target] - softmax @ head) / temperature,

does not depend on the loss, so it is made beside the log-prob, chunk by chunk, while the logits are in cache;
the way back only multiplies it.
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
        ctx: Any, hidden_N: Tensor, head: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_head = ctx.needs_input_grad[:2]
        logprobs = hidden_N.new_empty(len(hidden_N), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        gradient = hidden_N.new_empty(hidden_N.shape, dtype=torch.float32) if need_hidden else None
        kept = []
        scratch = hidden_N.new_empty(2, SLICE, len(head), dtype=torch.float32)
        for start in range(0, len(hidden_N), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            logits = functional.linear(hidden_N[part], head)
            _softmax_in_place(logits, targets_N[part], temperature, logprobs[part], entropies[part], scratch)
            if gradient is not None:
                gradient[part] = (head[targets_N[part]].float() - (logits @ head).float()) / temperature
            if need_head:
                kept.append(logits)
        ctx.save_for_backward(hidden_N, head, targets_N, gradient, *kept)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_N, head, targets_N, gradient, *kept = ctx.saved_tensors
        grad_hidden = None if gradient is None else (gradient * grad_N.unsqueeze(1)).to(hidden_N.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None
        weighted = hidden_N * (grad_N / ctx.temperature).unsqueeze(1).to(hidden_N.dtype)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        for probabilities, rows in zip(kept, weighted.split(LOGIT_ROWS), strict=True):
            grad_head -= probabilities.T @ rows
        grad_head.index_add_(0, targets_N, weighted.float())
        return grad_hidden, grad_head.to(head.dtype), None, None


def _softmax_in_place(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, entropies: Tensor, scratch: Tensor
) -> None:
    """``logits`` become probabilities; log-probs of the targets and entropies are written in place."""
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


def chosen_logprobs(
    hidden_N: Tensor, head: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """hidden [N, hidden], head [vocab, hidden], targets [N] -> log-probs and entropies [N] at the
    temperature.

    Differentiable in the log-probs; the entropies carry no gradient.
    """
    result: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(hidden_N, head, targets_N, temperature)
    return result
