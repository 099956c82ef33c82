"""The norms' formulas for ``torch.compile``, to see what a compiler makes of them."""

from typing import Any, Tuple

import torch
from torch import Tensor, nn


def power_forward(
    x: Tensor, weight: Tensor, bias: Tensor, psi_sq: Tensor, groups: int, eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """y (N, C), the layer scale's factors (N, G, 1) and the sum of h^2 (C,)."""
    rows, channels = x.shape
    grouped = x.view(rows, groups, channels // groups)
    s = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    h = (grouped * s).view(rows, channels)
    return h * (torch.rsqrt(psi_sq + eps) * weight) + bias, s, h.square().sum(0)


def power_backward(
    x: Tensor, dy: Tensor, weight: Tensor, s: Tensor, psi_sq: Tensor, nu: Tensor, eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """dx (N, C) and the gradients of weight and bias (C,)."""
    rows, channels = x.shape
    groups = s.shape[1]
    h = (x.view(rows, groups, channels // groups) * s).view(rows, channels)
    r = torch.rsqrt(psi_sq + eps)
    dh = ((dy * weight - nu * h * r) * r).view(rows, groups, -1)
    grouped = h.view(rows, groups, -1)
    dx = s * (dh - grouped * (dh * grouped).mean(-1, keepdim=True))
    return dx.view(rows, channels), (dy * h).sum(0) * r, dy.sum(0)


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: "CompiledPowerNorm") -> Tensor:
        y, s, sum_sq = norm.forward_formula(x, weight, bias, norm.psi_sq, norm.groups, norm.eps)
        ctx.save_for_backward(x, weight, s, sum_sq)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, s, sum_sq = ctx.saved_tensors
        norm = ctx.norm
        psi_sq, nu = norm.psi_sq.clone(), norm.nu.clone()
        dx, dweight, dbias = norm.backward_formula(x, dy, weight, s, psi_sq, nu, norm.eps)
        big_gamma = sum_sq / (psi_sq + norm.eps) / len(x)
        norm.nu.mul_(1 - 0.1 * big_gamma).add_(0.1 / len(x) * weight * dweight)
        norm.psi_sq.mul_(0.9).add_(0.1 / len(x) * sum_sq)
        return dx, dweight, dbias, None


class CompiledPowerNorm(nn.Module):
    """PowerNorm after the warm-up, without padding: the formulas of both passes, each compiled as a whole.

    Args:
        compiler: ``torch.compile``; anything else that takes a function and gives one, in tests.
    """

    psi_sq: Tensor
    nu: Tensor

    def __init__(self, dim: int, groups: int, compiler: Any, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("psi_sq", torch.ones(dim))
        self.register_buffer("nu", torch.zeros(dim))
        self.forward_formula, self.backward_formula = compiler(power_forward), compiler(power_backward)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x (N, C)."""
        if self.training:
            return _Power.apply(x, self.weight, self.bias, self)
        return self.forward_formula(x, self.weight, self.bias, self.psi_sq, self.groups, self.eps)[0]


def ada(x: Tensor, scale: float = 1.0, k: float = 0.1, eps: float = 1e-5) -> Tensor:
    """AdaNorm, paper numerics."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scale * (1 - k * y)).detach() * y
