"""LayerNorm, and LayerNorm without gain and bias."""

import torch
from torch import Tensor, nn

from powernorm_fairseq.norms.base import TokenNorm
from powernorm_fairseq.norms.functional import layer_norm


class LayerNorm(TokenNorm):
    """LayerNorm (Ba et al. 2016): each token is centred and divided by its standard deviation over channels.

    Args:
        dim: number of channels C.
        eps: added to the variance.
        affine: gain and bias per channel.
    """

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
