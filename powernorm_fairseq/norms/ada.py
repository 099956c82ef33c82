"""AdaNorm and its relatives: LayerNorm-simple and DetachNorm, none of which has parameters."""

from torch import Tensor

from powernorm_fairseq.norms.base import TokenNorm, choice
from powernorm_fairseq.norms.functional import ada_norm, layer_norm, standardize


class _Parameterless(TokenNorm):
    def __init__(self, dim: int, eps: float, numerics: str) -> None:
        super().__init__(dim, eps)
        self.numerics = choice("numerics", numerics, ["paper", "released"])
        self.released = numerics == "released"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, numerics={self.numerics}"


class AdaNorm(_Parameterless):
    """AdaNorm (Xu et al. 2019): z = C * (1 - k * y) * y, where y is the standardized token; C and k are fixed numbers.

    Args:
        dim: number of channels.
        scale: the factor C.
        k: the slope; 0.1 in the paper.
        numerics: ``paper`` divides by sqrt(biased variance + eps), ``released`` by unbiased standard deviation + eps.
        eps: see ``numerics``.
    """

    def __init__(
        self, dim: int, scale: float = 1.0, k: float = 0.1, numerics: str = "paper", eps: float = 1e-5
    ) -> None:
        super().__init__(dim, eps, numerics)
        self.scale = scale
        self.k = k

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return ada_norm(x, self.scale, self.k, self.eps, self.released)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}, k={self.k}"


class LayerNormSimple(_Parameterless):
    """LayerNorm without gain and bias (Xu et al. 2019).

    Args:
        dim: number of channels.
        numerics: see :class:`AdaNorm`.
        eps: see :class:`AdaNorm`.
    """

    def __init__(self, dim: int, numerics: str = "paper", eps: float = 1e-5) -> None:
        super().__init__(dim, eps, numerics)

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return standardize(x, self.eps, True) if self.released else layer_norm(x, eps=self.eps)


class DetachNorm(_Parameterless):
    """LayerNorm-simple whose statistics are constants in the backward pass (Xu et al. 2019).

    Args:
        dim: number of channels.
        detach: what is constant: ``both``, ``mean`` or ``sigma``.
        numerics: see :class:`AdaNorm`.
        eps: see :class:`AdaNorm`.
    """

    def __init__(self, dim: int, detach: str = "both", numerics: str = "paper", eps: float = 1e-5) -> None:
        super().__init__(dim, eps, numerics)
        self.detach = choice("detach", detach, ["both", "mean", "sigma"])

    def normalize_tokens(self, x: Tensor) -> Tensor:
        return standardize(x, self.eps, self.released, self.detach != "sigma", self.detach != "mean")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, detach={self.detach}"
