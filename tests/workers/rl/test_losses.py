from __future__ import annotations

import math

import torch

from workers.rl.averages import Denominator, divisor
from workers.rl.kl import estimate
from workers.rl.losses import clipped_policy_loss, importance_weights, token_weights


def test_clipped_loss_by_hand() -> None:
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0, 2.0])
    loss, clipped = clipped_policy_loss(ratios.log(), advantages, clip_low=0.2, clip_high=0.28)
    # Clipped only where the ratio has already moved the way the advantage pushes.
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.56, 3.0, -1.0, 1.6, -2.2]))
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_gradient_stops_where_clipped() -> None:
    logprobs = torch.tensor([1.5, 1.5]).log().requires_grad_()
    loss, _ = clipped_policy_loss(logprobs, torch.tensor([1.0, -1.0]), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5]))


def test_averages_by_hand() -> None:
    lengths, totals = torch.tensor([2, 4]), Denominator(tokens=10, sequences=3, max_tokens=8)
    assert token_weights(lengths, "token").tolist() == [1, 1]
    assert divisor("token", totals) == 10
    assert token_weights(lengths, "sequence").tolist() == [0.5, 0.25]
    assert divisor("sequence", totals) == 3
    assert token_weights(lengths, "constant").tolist() == [1, 1]
    assert divisor("constant", totals) == 24


def test_importance_by_hand() -> None:
    old, engine = torch.tensor([0.3, 0.4, 0.1, 0.5]).log(), torch.tensor([0.2, 0.1, 0.2, 0.25]).log()
    weights, capped = importance_weights(old, engine, cap=2.001)
    torch.testing.assert_close(weights, torch.tensor([1.5, 2.001, 0.5, 2.0]))
    assert capped.tolist() == [False, True, False, False]


def test_importance_of_what_was_next_to_impossible_stays_finite() -> None:
    weights, capped = importance_weights(torch.tensor([-1.0]), torch.tensor([-1000.0]), cap=2.0)
    assert weights.tolist() == [2.0]
    assert capped.tolist() == [True]


def test_kl_by_hand() -> None:
    policy, reference = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    two = math.log(2)
    torch.testing.assert_close(estimate(policy, reference, "k3"), torch.tensor([0.5 + two - 1, 2 - two - 1]))


def test_kl_is_unbiased() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    torch.testing.assert_close((p * estimate(p.log(), q.log(), "k3")).sum(), (p * (p / q).log()).sum())
