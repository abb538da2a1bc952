from __future__ import annotations

import math

import pytest
import torch

from workers.rl.batching import Denominator
from workers.rl.kl import k3
from workers.rl.losses import clipped_policy_loss, token_weights


def test_clipped_loss_by_hand() -> None:
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0, 2.0])
    loss, clipped = clipped_policy_loss(
        ratios.log(), torch.zeros(6), advantages, clip_low=0.2, clip_high=0.28
    )
    # Clipped only where the ratio has already moved the way the advantage pushes.
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.56, 3.0, -1.0, 1.6, -2.2]))
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_gradient_stops_where_clipped() -> None:
    logprobs = torch.tensor([1.5, 1.5]).log().requires_grad_()
    loss, _ = clipped_policy_loss(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5]))


def test_averages_by_hand() -> None:
    lengths, totals = torch.tensor([2, 4]), Denominator(tokens=10, sequences=3, max_tokens=8)
    assert token_weights(lengths, "token", totals).tolist() == [0.1, 0.1]
    assert token_weights(lengths, "sequence", totals).tolist() == pytest.approx([1 / 6, 1 / 12])
    assert token_weights(lengths, "constant", totals).tolist() == pytest.approx([1 / 24, 1 / 24])


def test_kl_by_hand() -> None:
    policy, reference = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    two = math.log(2)
    torch.testing.assert_close(k3(policy, reference), torch.tensor([0.5 + two - 1, 2 - two - 1]))


def test_kl_is_unbiased() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), (p * (p / q).log()).sum())
