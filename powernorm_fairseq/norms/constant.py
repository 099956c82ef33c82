"""What a norm is in evaluation, where its statistics are constants: y = h * gain + shift, h being x or row-scaled x.

Two channel vectors can be multiplied into neighbouring linear layers; what cannot is the scale of each row.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from powernorm_fairseq.norms.base import Norm, TokenNorm, divisor
from powernorm_fairseq.norms.batch import BatchNorm
from powernorm_fairseq.norms.functional import group_rms_scale
from powernorm_fairseq.norms.none import NoNorm
from powernorm_fairseq.norms.power import PowerNorm, PowerNormV
from powernorm_fairseq.norms.rms import RMSNorm, ScaleNorm


class Constants(NamedTuple):
    """Evaluation as y = h * gain + shift.

    Attributes:
        gain, shift: (C,) float64.
        groups: channel groups whose root mean square divides a token before that; 0: h = x.
        eps: added to the mean square of a group.
    """

    gain: Tensor
    shift: Tensor
    groups: int
    eps: float


def constants(norm: Norm) -> Optional[Constants]:
    """What ``norm`` does in evaluation, or None where that is not of this form."""
    if not isinstance(norm, (PowerNorm, PowerNormV, BatchNorm, RMSNorm, ScaleNorm)):
        return None
    if isinstance(norm, ScaleNorm):
        # The sum of squares is C times the mean.
        gain = (norm.g.detach().double() * norm.dim**-0.5).expand(norm.dim).clone()
        return Constants(gain, torch.zeros_like(gain), 1, norm.eps / norm.dim)
    one = torch.ones(norm.dim, dtype=torch.float64)
    gain = one if norm.weight is None else norm.weight.detach().double()
    if isinstance(norm, RMSNorm):
        return Constants(gain, torch.zeros_like(one), 1, norm.eps)
    shift = torch.zeros_like(one) if norm.bias is None else norm.bias.detach().double()
    if isinstance(norm, BatchNorm):
        gain = gain * torch.rsqrt(norm.running_var.double() + norm.eps)
        shift = shift - norm.running_mean.double() * gain
    else:
        gain = gain * torch.rsqrt(norm.running_psi_sq.double() + norm.eps)
    return Constants(gain, shift, norm.groups, norm.eps)


class ConstantNorm(TokenNorm):
    """y = h * gain + shift with constants; h is x, or x with each channel group divided by its root mean square.

    For inference: it is what stays of a norm with running statistics, and nothing of it is trained.

    Args:
        dim: number of channels C.
        groups: channel groups of the row scale, 0 for none.
        eps: added to the mean square.
        affine: with gain and shift (buffers), else y = h.
    """

    gain: Optional[Tensor]
    shift: Optional[Tensor]

    def __init__(self, dim: int, groups: int = 0, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(dim, eps)
        self.groups = divisor(groups, dim)
        self.register_buffer("gain", torch.ones(dim) if affine else None)
        self.register_buffer("shift", torch.zeros(dim) if affine else None)

    def normalize_tokens(self, x: Tensor) -> Tensor:
        if self.groups:
            return group_rms_scale(x, self.groups, self.eps, self.gain, self.shift)
        # A decoder step has few rows, where a call costs more than what it computes.
        return x if self.gain is None or self.shift is None else torch.addcmul(self.shift, x, self.gain)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}, affine={self.gain is not None}"


def what_stays(norm: Norm, affine: bool) -> Norm:
    """The module that takes the place of ``norm`` for inference: all of its :func:`constants`, or the row scale alone.

    Raises:
        ValueError: its evaluation is not of that form.
    """
    found = constants(norm)
    if found is None:
        raise ValueError(f"{type(norm).__name__} cannot be folded")
    if not affine and not found.groups:
        return NoNorm(norm.dim)
    return ConstantNorm(norm.dim, found.groups, found.eps, affine)
