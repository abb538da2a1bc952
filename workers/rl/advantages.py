"""Group-relative advantages (GRPO, https://arxiv.org/abs/2402.03300; Dr. GRPO,
https://arxiv.org/abs/2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def group_advantages(rewards_G: Sequence[float], valid_G: Sequence[bool], normalize: bool) -> list[float]:
    """How much better each sample did than its group, in float64: r - mean, over the sample deviation if
    asked.

    Samples that are not valid (their grade failed) or whose reward is not finite get 0 and count in neither
    mean nor deviation. Fewer than two that count, or all of them equal, give exactly 0: there is nothing to
    learn.
    """
    if len(rewards_G) != len(valid_G):
        raise ValueError(f"{len(rewards_G)} rewards but {len(valid_G)} validity marks")
    rewards = np.asarray(rewards_G, dtype=np.float64)
    counted = np.asarray(valid_G, dtype=bool) & np.isfinite(rewards)
    used = rewards[counted]
    # Equality is decided on the rewards: their mean may differ from each of them by rounding.
    if len(used) < 2 or bool((used == used[0]).all()):
        return [0.0] * len(rewards_G)
    centred = np.where(counted, rewards - used.mean(), 0.0)
    if normalize:
        centred = centred / (used.std(ddof=1) + EPSILON)
    return [float(value) for value in centred]
