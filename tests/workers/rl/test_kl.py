"""The estimators of the divergence against enumeration over two tokens."""

from __future__ import annotations

import math

import pytest
import torch

from workers.rl.kl import Estimator, estimate, penalty

REFERENCE = torch.tensor([0.4, 0.6], dtype=torch.float64)


def policy() -> torch.Tensor:
    return torch.tensor([0.7, -0.2], dtype=torch.float64, requires_grad=True)


def divergence(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - REFERENCE.log())).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Estimator) -> None:
    logprobs = policy().log_softmax(0)
    expected = (logprobs.exp() * estimate(logprobs, REFERENCE.log(), estimator)).sum()
    torch.testing.assert_close(expected, divergence(policy()))


def test_k2_by_hand() -> None:
    found = estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), "k2")
    assert found.item() == pytest.approx(math.log(2) ** 2 / 2)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_expected_gradient_of_a_penalty_is_the_divergences_own(estimator: Estimator) -> None:
    """Tokens are drawn, not differentiated: the expectation is over the gradients of their penalties."""
    logits = policy()
    logprobs = logits.log_softmax(0)
    weighted = (logprobs.exp().detach() * penalty(logprobs, REFERENCE.log(), estimator)).sum()
    (found,) = torch.autograd.grad(weighted, logits)
    other = policy()
    (true,) = torch.autograd.grad(divergence(other), other)
    torch.testing.assert_close(found, true)


def test_the_expected_gradient_of_k3_is_that_of_the_reverse_divergence() -> None:
    """KL(reference || policy), as its authors note: it pulls the policy to the reference all the same."""
    logits = policy()
    logprobs = logits.log_softmax(0)
    weighted = (logprobs.exp().detach() * penalty(logprobs, REFERENCE.log(), "k3")).sum()
    (found,) = torch.autograd.grad(weighted, logits)
    other = policy()
    reverse = (REFERENCE * (REFERENCE.log() - other.log_softmax(0))).sum()
    (true,) = torch.autograd.grad(reverse, other)
    torch.testing.assert_close(found, true)


def test_k1s_own_gradient_expects_nothing() -> None:
    logits = policy()
    logprobs = logits.log_softmax(0)
    weighted = (logprobs.exp().detach() * estimate(logprobs, REFERENCE.log(), "k1")).sum()
    (found,) = torch.autograd.grad(weighted, logits)
    torch.testing.assert_close(found, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence_and_no_pull(estimator: Estimator) -> None:
    logprobs = torch.tensor([0.3, 0.7]).log().requires_grad_()
    found = penalty(logprobs, logprobs.detach(), estimator)
    assert found.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(found.sum(), logprobs)[0].tolist() == [0.0, 0.0]
