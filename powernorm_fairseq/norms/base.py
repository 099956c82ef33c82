"""What all norms share: one call, one treatment of padding, one way to refuse bad input."""

import threading
from contextlib import contextmanager
from typing import Iterator, List, Optional

from torch import Tensor, nn


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.masks: List[Optional[Tensor]] = []


_scopes = _Scopes()


@contextmanager
def padding_scope(mask: Optional[Tensor]) -> Iterator[None]:
    """Within this context ``mask`` is the padding mask of norms that are called without one.

    Made for code that calls its norms without a mask. Scopes nest, the innermost counts, and ``padding_scope(None)``
    hides an outer one; each thread has its own. Norms with ``token_wise = True`` ignore scopes.

    Args:
        mask: True at padding, of the shape that :meth:`Norm.forward` wants, or None.
    """
    _scopes.masks.append(mask)
    try:
        yield
    finally:
        _scopes.masks.pop()


class Norm(nn.Module):
    """A normalization layer over the last dimension of its input.

    Args:
        dim: number of channels C.
        eps: added to mean squares or variances inside the root (exceptions are documented where they occur).

    Attributes:
        token_wise: a token's output depends on this token alone, so that a caller may leave the mask out.
    """

    token_wise: bool = True

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim must be at least 1, not {dim}")
        # With eps = 0 a token of zeros, which padding is made to be, would be divided by zero.
        if not 0 < eps < float("inf"):
            raise ValueError(f"eps must be positive and finite, not {eps}")
        self.dim = dim
        self.eps = eps

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """Normalizes ``x``.

        Args:
            x: (T, B, C) or (..., C), floating point.
            padding_mask: True at padding; (B, T) for x of three dimensions, otherwise ``x.shape[:-1]``. Without it
                the innermost :func:`padding_scope` counts, except for token-wise norms.

        Returns:
            A tensor of the shape and dtype of ``x``, zero at padding. What ``x`` and the upstream gradient hold at
            padding (NaN too) has no influence on anything, and the gradient of ``x`` is zero there.

        Raises:
            ValueError: ``x`` has not ``dim`` channels, or the mask does not fit it.
        """
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"expected {self.dim} channels in the last dimension, got x of shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"expected x of a floating-point type, not {x.dtype}")
        if padding_mask is None and not self.token_wise and _scopes.masks:
            padding_mask = _scopes.masks[-1]
        if padding_mask is None:
            return self.normalize(x, None)
        wanted = (x.shape[1], x.shape[0]) if x.dim() == 3 else tuple(x.shape[:-1])
        if tuple(padding_mask.shape) != wanted:
            raise ValueError(
                f"x of shape {tuple(x.shape)} needs a padding mask of shape {wanted}, not {tuple(padding_mask.shape)}"
            )
        padding = padding_mask.bool()
        return self.normalize(x, padding.t() if x.dim() == 3 else padding)

    def normalize(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        """What a norm does with checked input; ``padding`` has shape ``x.shape[:-1]``."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class TokenNorm(Norm):
    """A norm that looks at one token at a time; only an explicit mask makes it do more than that."""

    def normalize(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        if padding is None:
            return self.normalize_tokens(x)
        padding = padding.unsqueeze(-1)
        return self.normalize_tokens(x.masked_fill(padding, 0)).masked_fill(padding, 0)

    def normalize_tokens(self, x: Tensor) -> Tensor:
        """The norm of ``x`` (..., C), all of it real tokens."""
        raise NotImplementedError


def choice(name: str, value: str, allowed: List[str]) -> str:
    """``value`` if it is allowed, else a ValueError that names what is."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return value


def fraction(name: str, value: float) -> float:
    """``value`` if it lies in [0, 1), else a ValueError."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, not {value}")
    return value


def divisor(groups: int, dim: int) -> int:
    """``groups`` if it is 0 (no layer scale) or divides ``dim``, else a ValueError."""
    if groups < 0 or (groups > 0 and dim % groups):
        raise ValueError(f"groups must be 0 (no layer scale) or a divisor of the {dim} channels, not {groups}")
    return groups
