"""BatchNorm over real tokens."""

from typing import Optional, Union

import torch
from torch import Tensor

from powernorm_fairseq.norms.functional import batch_norm, group_rms_scale
from powernorm_fairseq.norms.running import RunningNorm


class BatchNorm(RunningNorm):
    """BatchNorm (Ioffe and Szegedy 2015) over the real tokens of a batch, per channel.

    Training normalizes by the batch's mean and biased variance, with the exact gradient; the running variance is the
    unbiased one of all tokens of the update, as in torch.

    Args:
        dim: number of channels C.
        momentum: weight of a new update in the running statistics; None or ``cumulative`` weighs all updates the same.
        groups: channel groups of a layer scale in front, 0 for none.
        eps: inside the roots.
        affine: gain and bias per channel.
        cumulative: weigh all updates the same, whatever ``momentum`` says.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        dim: int,
        momentum: Union[float, str, None] = 0.1,
        groups: int = 0,
        eps: float = 1e-5,
        affine: bool = True,
        cumulative: bool = False,
    ) -> None:
        super().__init__(dim, groups, eps, affine)
        self.momentum: Optional[float] = None
        if not (cumulative or momentum is None or momentum == "cumulative"):
            if isinstance(momentum, str) or not 0 < momentum <= 1:
                raise ValueError(f"momentum must be above 0 and at most 1, None or 'cumulative', not {momentum!r}")
            self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def normalize_in_training(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        return batch_norm(x, self.weight, self.bias, padding, self.groups, self.eps, self.record_moments)

    def normalize_by_statistics(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        gain = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            gain = gain * self.weight
        shift = -self.running_mean * gain
        if self.bias is not None:
            shift = shift + self.bias
        return group_rms_scale(x, self.groups, self.eps, gain, shift, padding)

    def record_moments(self, live: Tensor, count: Tensor, mean: Tensor, deviation: Tensor) -> None:
        """Records what adds up: the sum and, in double precision where there is one, the sum of squares."""
        if mean.device.type != "mps":
            count, mean, deviation = count.double(), mean.double(), deviation.double()
        self.record(live, count, mean * count, deviation + mean * mean * count)

    def absorb(self, count: Tensor, sums: Tensor) -> None:
        mean = sums[0] / count.clamp(min=1)
        variance = (sums[1] - sums[0] * mean).clamp(min=0) / (count - 1).clamp(min=1)
        weight = self.momentum if self.momentum is not None else 1 / (self.updates_tracked + 1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            changed = running + weight * (new.to(running.dtype) - running)
            running.copy_(torch.where(count > 0, changed, running))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, momentum={'cumulative' if self.momentum is None else self.momentum}"
