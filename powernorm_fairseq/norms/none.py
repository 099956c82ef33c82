"""No normalization."""

from torch import Tensor

from powernorm_fairseq.norms.base import TokenNorm


class NoNorm(TokenNorm):
    """The identity, in the place of a norm.

    Args:
        dim: number of channels C; only checked.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return str(self.dim)
