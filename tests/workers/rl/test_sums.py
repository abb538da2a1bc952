from __future__ import annotations

import pytest

from workers.rl.averages import Denominator
from workers.rl.sums import Sums, step_metrics

HALF = Sums(tokens=4, loss=6.0, kl=2.0, entropy=8.0, clipped=1.0, mismatch=0.4, mismatch_max=0.3)


def test_a_worker_that_had_nothing_to_train_adds_nothing() -> None:
    assert Sums() + HALF == HALF + Sums() == HALF
    constant = Sums(tokens=1, loss=2.0, average="constant")
    assert (Sums() + constant).average == (constant + Sums()).average == "constant"


@pytest.mark.parametrize(
    ("average", "loss"), [("token", 12 / 8), ("sequence", 12 / 2), ("constant", 12 / 32)]
)
def test_metrics_by_hand(average: str, loss: float) -> None:
    half = Sums(**vars(HALF) | {"average": average, "capped": 1.0})
    metrics = (half + Sums(**vars(half) | {"kl": 1.0, "mismatch_max": 0.2})).metrics(Denominator(8, 2, 16))
    assert metrics == pytest.approx(
        {
            "loss": loss,
            "kl": 0.375,
            "entropy": 2.0,
            "clip_fraction": 0.25,
            "importance_capped": 0.25,
            "mismatch": 0.1,
            "mismatch_max": 0.3,
        }
    )


def test_what_was_not_measured_is_not_reported() -> None:
    assert {"kl", "importance_capped"}.isdisjoint(Sums(tokens=4).metrics(Denominator(4, 1, 9)))
    assert Sums().metrics(Denominator(0, 0, 9))["loss"] == 0.0


def test_losses_of_several_updates_are_meaned_and_tokens_counted() -> None:
    short = Sums(tokens=2, loss=4.0, entropy=8.0)
    long = Sums(tokens=6, loss=6.0, entropy=8.0)
    metrics = step_metrics([(short, Denominator(2, 1, 9)), (long, Denominator(6, 1, 9))])
    assert metrics["loss"] == pytest.approx((2.0 + 1.0) / 2)
    assert metrics["entropy"] == pytest.approx(16 / 8)


def test_different_averages_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="different averages"):
        HALF + Sums(tokens=1, average="sequence")
