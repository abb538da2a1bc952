"""The decoder's small functions with their gradients written out.

Autograd's own gradients of these take two to five times as many passes over memory, which on a CPU is a third
of a training step. Each function computes in fp32; without gradients the plain forward is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Context = Any  # torch's own type does not know the attributes that a function stores on it


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """fp32 ``x`` over its last dimension, result in ``dtype`` (https://arxiv.org/abs/1910.07467)."""
    if not torch.is_grad_enabled():
        return functional.rms_norm(x, (x.shape[-1],), weight, eps).to(dtype)
    y: Tensor = _RMSNorm.apply(x, weight, eps, dtype)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad = grad.float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * x * scale).flatten(0, -2).sum(dim=0)
        weighted = grad * weight
        inner = (weighted * x).mean(dim=-1, keepdim=True) * scale.square()
        return weighted.addcmul_(x, inner, value=-1).mul_(scale), grad_weight, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (https://arxiv.org/abs/2104.09864) in Hugging Face's half-split layout.

    x [T, heads, D], cos and sin [T, 1, D/2] in fp32; the result in x's type.
    """
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin)
    y: Tensor = _Rotate.apply(x, cos, sin)
    return y


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    low, high = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)
    return out.to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2 F] -> [T, F] in the input's type (https://arxiv.org/abs/2002.05202)."""
    if not torch.is_grad_enabled():
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    y: Tensor = _GatedSilu.apply(gate_up)
    return y


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, functional.silu(gate), out=grad_up)
        return out


def add_low_rank(y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``y + (x @ down.T) @ up.T``, written over ``y``, which must be a product just made: a sum of its own
    would write and read every output of a matrix once more.
    """
    if not torch.is_grad_enabled():
        return y.addmm_(x @ down.T, up.T)
    added: Tensor = _AddLowRank.apply(y, x, down, up)
    return added


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        h = x @ down.T
        ctx.save_for_backward(x, down, up, h)
        ctx.mark_dirty(y)
        return y.addmm_(h, up.T)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, down, up, h = ctx.saved_tensors
        grad_h = grad @ up
        grad_x = grad_h @ down if ctx.needs_input_grad[1] else None
        # Transposed: the tall factor is read along its rows.
        return grad, grad_x, grad_h.T @ x, (h.T @ grad).T


def spread(x: Tensor, pad: Tensor, flat: Tensor) -> Tensor:
    """Flat tokens [T, …] to padded [N, L, …] by ``pad`` [N, L]; ``flat`` are the padded places that are real.

    Each token has one padded place, so the gradient is a gather too; padding passes none.
    """
    if not torch.is_grad_enabled():
        return _gathered(x, pad)
    y: Tensor = _Spread.apply(x, pad, flat)
    return y


def collect(x: Tensor, flat: Tensor) -> Tensor:
    """Padded [N, L, …] back to its flat tokens, the inverse of ``spread``."""
    return x.flatten(0, 1).index_select(0, flat)


def _gathered(x: Tensor, pad: Tensor) -> Tensor:
    return x.index_select(0, pad.flatten()).view(*pad.shape, *x.shape[1:])


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, pad: Tensor, flat: Tensor) -> Tensor:
        ctx.save_for_backward(pad, flat)
        ctx.tokens = len(x)
        return _gathered(x, pad)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        pad, flat = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[2:])
        places = pad.flatten().index_select(0, flat)
        out.index_copy_(0, places, grad.flatten(0, 1).index_select(0, flat))
        return out, None, None
