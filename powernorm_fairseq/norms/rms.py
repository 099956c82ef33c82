"""Norms that divide a token by its length and centre nothing: RMSNorm and ScaleNorm."""

import torch
from torch import Tensor, nn

from powernorm_fairseq.norms.base import TokenNorm
from powernorm_fairseq.norms.functional import group_rms_scale


class RMSNorm(TokenNorm):
    """RMSNorm (Zhang and Sennrich 2019): y = weight * x / sqrt(mean over channels of x^2 + eps).

    Args:
        dim: number of channels C.
        eps: added to the mean square.
        affine: gain per channel (there is no bias).
    """

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return group_rms_scale(x, 1, self.eps, self.weight)


class ScaleNorm(TokenNorm):
    """ScaleNorm (Nguyen and Salazar 2019): y = g * x / sqrt(sum over channels of x^2 + eps), one g for all channels.

    ``g`` starts at the square root of C, so that at first this is RMSNorm.

    Args:
        dim: number of channels C.
        eps: added to the sum of squares.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        self.g = nn.Parameter(torch.tensor(dim**0.5))

    def normalize_tokens(self, x: Tensor) -> Tensor:
        gain = (self.g * self.dim**-0.5).expand(self.dim)
        return group_rms_scale(x, 1, self.eps / self.dim, gain)
