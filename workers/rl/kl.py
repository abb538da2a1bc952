"""Per-token estimators of KL(policy || reference) from samples of the policy
(http://joschu.net/blog/kl-approx.html), with x = log policy - log reference:

    k1 = x              unbiased, of either sign
    k2 = x^2 / 2        biased by little where the two are near, never negative
    k3 = exp(-x) - 1 + x  unbiased, never negative

As a *loss*, the expected gradient of k2 is the divergence's own; that of k3 is the gradient of
KL(reference || policy), which pulls the same way; that of k1 is zero, so that ``penalty`` gives k1's value
k2's gradient.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def estimate(logprobs_N: Tensor, reference_N: Tensor, estimator: Estimator) -> Tensor:
    """The estimator itself, [N]."""
    difference = logprobs_N - reference_N
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference


def penalty(logprobs_N: Tensor, reference_N: Tensor, estimator: Estimator) -> Tensor:
    """What is added to a loss, [N]: the estimator's value with a gradient that lowers the divergence."""
    found = estimate(logprobs_N, reference_N, estimator)
    if estimator != "k1":
        return found
    pulling = estimate(logprobs_N, reference_N, "k2")
    return found.detach() + pulling - pulling.detach()
