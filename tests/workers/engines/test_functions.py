"""Gradients written by hand against autograd's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.functions import add_low_rank, collect, gated_silu, rms_norm, rotate, spread
from workers.engines.logprobs import chosen_logprobs
from workers.engines.packed import masked, pack
from workers.models.limits import LOGIT_ROWS


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return list(torch.autograd.grad((y * weights).sum(), inputs))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    ours = rms_norm(x, weight, 1e-5, torch.float32)
    theirs = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(ours, x, weight), gradients(theirs, x, weight))


def test_rms_norm_per_head() -> None:
    x, weight = torch.randn(5, 3, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    ours = rms_norm(x, weight, 1e-5, torch.float32)
    theirs = functional.rms_norm(x, (16,), weight, 1e-5)
    assert_same(gradients(ours, x, weight), gradients(theirs, x, weight))


def test_rotate() -> None:
    x, angles = torch.randn(5, 3, 8, requires_grad=True), torch.randn(5, 1, 4)
    ours = rotate(x, angles.cos(), angles.sin())
    first, second = x.chunk(2, dim=-1)
    theirs = torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(ours, x), gradients(theirs, x))


def test_gated_silu() -> None:
    x = torch.randn(5, 12, requires_grad=True)
    theirs = functional.silu(x[:, :6]) * x[:, 6:]
    torch.testing.assert_close(gated_silu(x), theirs)
    assert_same(gradients(gated_silu(x), x), gradients(theirs, x))


def test_add_low_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    x, down, up = (
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((5, 8), (3, 8), (6, 3))
    )
    weight = torch.randn(6, 8, generator=generator)
    ours = add_low_rank(x @ weight.T, x, down, up)
    theirs = x @ weight.T + x @ down.T @ up.T
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(ours, x, down, up), gradients(theirs, x, down, up))
    with torch.no_grad():
        torch.testing.assert_close(add_low_rank(x @ weight.T, x, down, up), theirs)


def test_attention_with_shared_key_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, 6, 8, generator=generator, requires_grad=True)
    keys, values = (torch.randn(2, 5, 2, 8, generator=generator, requires_grad=True) for _ in range(2))
    visible = torch.tensor([[[1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]], dtype=torch.bool)
    visible = visible.expand(2, 3, 5)
    ours = masked(queries, keys, values, visible)
    per_head = (tensor.repeat_interleave(3, dim=2).transpose(1, 2) for tensor in (keys, values))
    theirs = functional.scaled_dot_product_attention(
        queries.transpose(1, 2), *per_head, attn_mask=visible.unsqueeze(1)
    ).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(ours, queries, keys, values), gradients(theirs, queries, keys, values))


def test_spread_and_collect() -> None:
    batch = pack([[1, 2, 3], [4]], [(0, [5, 6]), (1, [7]), (1, [])], torch.device("cpu"))
    x = torch.randn(7, 2, requires_grad=True)
    padded = spread(x, batch.row_pad_RL, batch.row_flat)
    assert padded.shape == (3, 2, 2)
    assert torch.equal(collect(padded, batch.row_flat), x[4:])
    # Padding points at token 0 and must pass no gradient to it.
    (gradient,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(gradient, torch.tensor([0.0, 0, 0, 0, 1, 1, 1]).unsqueeze(1).expand(7, 2))


def test_chosen_logprobs() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 8, generator=generator, requires_grad=True)
    head = torch.randn(30, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 30, (70,), generator=generator)
    ours, entropy = chosen_logprobs(hidden, head, targets, 0.7)
    table = (hidden @ head.T / 0.7).log_softmax(-1)
    theirs = table.gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1), atol=1e-5, rtol=1e-5)
    assert_same(gradients(ours, hidden, head), gradients(theirs, hidden, head))
    assert not entropy.requires_grad


def test_entropy_gradient() -> None:
    """Over more positions than have their logits at once, also where a token is all but certain."""
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(2 * LOGIT_ROWS + 5, 8, generator=generator)).requires_grad_()
    head = torch.randn(30, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 30, (len(hidden),), generator=generator)
    logprobs, entropies = chosen_logprobs(hidden, head, targets, 0.7, entropy_gradient=True)
    table = (hidden @ head.T / 0.7).log_softmax(-1)
    chosen = table.gather(1, targets.unsqueeze(1)).squeeze(1)
    theirs = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(entropies, theirs, atol=1e-5, rtol=1e-5)
    both = torch.stack([logprobs, entropies], 1), torch.stack([chosen, theirs], 1)
    assert_same(gradients(both[0], hidden, head), gradients(both[1], hidden, head))


def test_entropy_gradient_of_two_tokens_by_hand() -> None:
    """At p = 3/4: dH/dlogit of the first token = -p (log p + H) = -p (1 - p) log 3."""
    hidden = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    _, entropy = chosen_logprobs(hidden, torch.eye(2), torch.tensor([0]), 1.0, entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    slope = 3 / 16 * math.log(3.0)
    torch.testing.assert_close(gradient, torch.tensor([[-slope, slope]]))
