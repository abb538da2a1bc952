"""Per-token estimators of KL(policy || reference) from samples of the policy
(http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from torch import Tensor


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Unbiased, high variance, may be negative."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Biased, low variance."""
    return 0.5 * (logprobs_N - reference_N) ** 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Unbiased and never negative."""
    difference = reference_N - logprobs_N
    return difference.exp() - difference - 1
