"""A stand-in for the released code: its arithmetic, written plainly from its description.

PowerNorm's statistics have shape (1, C, 1, 1) there, so tokens are laid out as (B, C, T, 1); statistics of the forward
pass are over the real tokens alone, picked out of the batch, those of the backward pass over all; the forward pass
divides by the running quadratic mean (in the warm-up by the batch's), the backward pass always by the batch's. Every
intermediate result is a tensor, as a first implementation has it. Tests hold it against what the released code gave.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, real: Tensor, weight: Tensor, bias: Tensor, norm: "NaivePowerNorm") -> Tensor:
        batch_psi_sq = real.pow(2).mean(0).view(1, -1, 1, 1)
        psi_sq = batch_psi_sq if norm.iteration <= norm.warmup else norm.running_phi
        xhat = h / (psi_sq + norm.eps).sqrt()
        ctx.save_for_backward(xhat, batch_psi_sq, weight)
        ctx.norm = norm
        with torch.no_grad():
            if norm.iteration < norm.warmup:
                done = norm.iteration
                norm.running_phi.mul_((done - 1) / done).add_(batch_psi_sq / done)
            norm.running_phi.mul_(norm.alpha_fwd).add_((1 - norm.alpha_fwd) * batch_psi_sq)
        return weight.view(1, -1, 1, 1) * xhat + bias.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tuple[Any, ...]:
        xhat, batch_psi_sq, weight = ctx.saved_tensors
        norm = ctx.norm
        g = dy * weight.view(1, -1, 1, 1)
        step = 1 - norm.alpha_bkw
        dh = (g - step * norm.ema_gz * xhat) / (batch_psi_sq + norm.eps).sqrt()
        big_lambda = (g * xhat).mean((0, 2, 3), keepdim=True)
        big_gamma = (xhat * xhat).mean((0, 2, 3), keepdim=True)
        norm.ema_gz.mul_(1 - step * big_gamma).add_(big_lambda)
        return dh, None, (dy * xhat).sum((0, 2, 3)), dy.sum((0, 2, 3)), None


class NaivePowerNorm(nn.Module):
    """PowerNorm as released; ``running_phi`` is psi^2 and ``ema_gz`` is nu / (1 - alpha_bkw).

    Args:
        dim: number of channels C.
        groups: channel groups of the layer scale.
        warmup: iterations whose forward pass divides by the batch's quadratic mean.
    """

    running_phi: Tensor
    ema_gz: Tensor

    def __init__(
        self, dim: int, groups: int, warmup: int = 0, alpha_fwd: float = 0.9, alpha_bkw: float = 0.9, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.groups, self.warmup, self.eps = groups, warmup, eps
        self.alpha_fwd, self.alpha_bkw = alpha_fwd, alpha_bkw
        self.iteration = 0
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_phi", torch.ones(1, dim, 1, 1))
        self.register_buffer("ema_gz", torch.zeros(1, dim, 1, 1))

    def layer_scale(self, x: Tensor) -> Tensor:
        """Each channel group of each token of x (T, B, C) divided by its root mean square."""
        time, batch, channels = x.shape
        grouped = x.view(time, batch, self.groups, channels // self.groups)
        mean_square = (grouped * grouped).mean(-1, keepdim=True)
        return (grouped / (mean_square + self.eps).sqrt()).view(time, batch, channels)

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """The norm of x (T, B, C); ``padding_mask`` (B, T) is True at padding."""
        h = self.layer_scale(x)
        laid_out = h.permute(1, 2, 0).contiguous().unsqueeze(-1)
        if not self.training:
            xhat = laid_out / (self.running_phi + self.eps).sqrt()
            y = self.weight.view(1, -1, 1, 1) * xhat + self.bias.view(1, -1, 1, 1)
            return y.squeeze(-1).permute(2, 0, 1)
        self.iteration += 1
        real = h.detach().reshape(-1, h.shape[-1]) if padding_mask is None else h.detach()[~padding_mask.t()]
        y = _Power.apply(laid_out, real, self.weight, self.bias, self)
        return y.squeeze(-1).permute(2, 0, 1)


class NaiveAdaNorm(nn.Module):
    """AdaNorm as released: sigma is the unbiased standard deviation plus eps; phi is constant in the backward pass."""

    def __init__(self, dim: int, scale: float = 1.0, k: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.k, self.eps = scale, k, eps

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x (..., C)."""
        y = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
        phi = self.scale * (1 - self.k * y)
        return phi.detach() * y
