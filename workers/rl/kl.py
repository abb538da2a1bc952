"""Per-token estimator of KL(policy || reference) from samples of the policy
(http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from torch import Tensor


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Unbiased and never negative."""
    difference = reference_N - logprobs_N
    return difference.exp() - difference - 1
