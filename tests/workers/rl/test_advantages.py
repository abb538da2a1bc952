from __future__ import annotations

import math

import pytest

from workers.rl.advantages import group_advantages


def test_mean_and_deviation_by_hand() -> None:
    # Mean 2.5; squared distances 2.25 + 0.25 + 0.25 + 2.25 = 5, sample variance 5/3.
    deviation = math.sqrt(5 / 3) + 1e-4
    assert group_advantages([1, 2, 3, 4], [True] * 4, normalize=False) == [-1.5, -0.5, 0.5, 1.5]
    assert group_advantages([1, 2, 3, 4], [True] * 4, normalize=True) == pytest.approx(
        [-1.5 / deviation, -0.5 / deviation, 0.5 / deviation, 1.5 / deviation], abs=1e-12
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_teach_exactly_nothing(normalize: bool) -> None:
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert group_advantages([0.1] * 3, [True] * 3, normalize) == [0.0, 0.0, 0.0]


def test_failed_and_not_finite_samples_stay_out() -> None:
    rewards = [1.0, float("nan"), 3.0, 100.0, float("inf")]
    valid = [True, True, True, False, True]
    assert group_advantages(rewards, valid, normalize=False) == [-1.0, 0.0, 1.0, 0.0, 0.0]


def test_fewer_than_two_that_count() -> None:
    assert group_advantages([1.0, 5.0], [True, False], normalize=False) == [0.0, 0.0]
    assert group_advantages([1.0, 5.0], [False, False], normalize=True) == [0.0, 0.0]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1"):
        group_advantages([1.0, 2.0], [True], normalize=True)
