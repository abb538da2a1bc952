"""Log-probabilities of chosen tokens from hidden states, without keeping fp32 logits of a whole batch.

The loss needs one number per position, yet a position has as many logits as the vocabulary: 2,000 positions of
SmolLM2 are 400 MB in fp32, several times over in a plain autograd graph. Here logits are made in chunks, and what is
kept for the way back is their rounded form and one normalizer each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


class ChosenLogprobs(torch.autograd.Function):
    """hidden [N, hidden], head [vocab, hidden], targets [N] -> (log-probs [N], entropies [N]) at a temperature.

    Differentiable in the log-probs; the entropies carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_N: Tensor,
        head: Tensor,
        targets_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logits, normalizers, logprobs, entropies = [], [], [], []
        for hidden, targets in zip(hidden_N.split(CHUNK), targets_N.split(CHUNK), strict=True):
            chunk = functional.linear(hidden, head)
            scaled = chunk.float() / temperature
            normalizer = scaled.logsumexp(dim=1)
            chosen = scaled.gather(1, targets.unsqueeze(1)).squeeze(1)
            probabilities = (scaled - normalizer.unsqueeze(1)).exp_()
            entropies.append(normalizer - (probabilities * scaled).sum(dim=1))
            logprobs.append(chosen - normalizer)
            logits.append(chunk)
            normalizers.append(normalizer)
        ctx.save_for_backward(hidden_N, head, targets_N, *logits, *normalizers)  # type: ignore[attr-defined]
        ctx.temperature = temperature  # type: ignore[attr-defined]
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)  # type: ignore[attr-defined]
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad_N: Tensor, _grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_N, head, targets_N, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
        chunks, normalizers = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        grad_hidden = []
        parts = (hidden_N.split(CHUNK), targets_N.split(CHUNK), grad_N.split(CHUNK), chunks, normalizers)
        for hidden, targets, grad, chunk, normalizer in zip(*parts, strict=True):
            scaled = chunk.float() / ctx.temperature  # type: ignore[attr-defined]
            probabilities = (scaled - normalizer.unsqueeze(1)).exp_()
            probabilities[torch.arange(len(targets)), targets] -= 1
            grad_logits = probabilities.mul_(-grad.unsqueeze(1) / ctx.temperature).to(head.dtype)  # type: ignore[attr-defined]
            grad_hidden.append(grad_logits @ head)
            if grad_head is not None:
                grad_head += grad_logits.T @ hidden
        return torch.cat(grad_hidden), None if grad_head is None else grad_head.to(head.dtype), None, None


def chosen_logprobs(
    hidden_N: Tensor, head: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = ChosenLogprobs.apply(hidden_N, head, targets_N, temperature)
    return result
