"""BatchNorm over real tokens."""

from typing import Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from powernorm_fairseq.norms.formulas import mean_and_squares
from powernorm_fairseq.norms.functional import batch_norm, group_rms_scale, moment_sums
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
        sync: what several workers share: ``running`` statistics, the ``batch``'s mean and variance too (as torch's
            SyncBatchNorm does), or ``none``.
    """

    STATISTICS = ("running_mean", "running_var")
    sums_recorded = 2
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
        sync: str = "running",
    ) -> None:
        super().__init__(dim, groups, eps, affine, sync)
        self.momentum: Optional[float] = None
        if not (cumulative or momentum is None or momentum == "cumulative"):
            if isinstance(momentum, str) or not 0 < momentum <= 1:
                raise ValueError(f"momentum must be above 0 and at most 1, None or 'cumulative', not {momentum!r}")
            self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def normalize_in_training(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        return batch_norm(
            x, self.weight, self.bias, padding, self.groups, self.eps, self.recorder, self.workers,
            self.record_gradient if self.watched else None, self.token,
        )  # fmt: skip

    def normalize_by_statistics(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        r, mean = self.constants()
        return group_rms_scale(x, self.groups, self.eps, self.weight, self.bias, padding, factor=r, shift=mean)

    def constants_of_statistics(self) -> Tuple[Tensor, ...]:
        return torch.rsqrt(self.running_var + self.eps), self.running_mean.clone()

    def measure(self, x: Tensor, padding: Optional[Tensor]) -> Tuple[Tensor, ...]:
        return mean_and_squares(*moment_sums(x, padding, self.groups, self.eps))

    def assign(self, count: Tensor, *sums: Tensor) -> None:
        for running, new in zip((self.running_mean, self.running_var), self._moments(count, *sums)):
            running.copy_(new)

    @staticmethod
    def _moments(count: Tensor, total: Tensor, total_sq: Tensor) -> Tuple[Tensor, Tensor]:
        """Mean and unbiased variance."""
        mean = total / count.clamp(min=1)
        return mean, (total_sq - total * mean).clamp(min=0) / (count - 1).clamp(min=1)

    def absorb(self, count: Tensor, sums: Tensor) -> None:
        weight = self.momentum if self.momentum is not None else 1 / (self.updates_tracked + 1)
        for running, new in zip((self.running_mean, self.running_var), self._moments(count, sums[0], sums[1])):
            changed = running + weight * (new.to(running.dtype) - running)
            running.copy_(torch.where(count > 0, changed, running))

    def absorb_fused(self, absorb: Callable[..., bool], contribution: Tensor) -> bool:
        momentum = -1.0 if self.momentum is None else self.momentum
        return absorb("batch", contribution, self.counters(), (self.running_mean, self.running_var), momentum)

    def compare(self, count: Tensor, sums: Tensor, gradients: Optional[Tensor]) -> Dict[str, Tensor]:
        """``fwd_mean``: mu_B - mu; ``fwd_var``: sigma_B^2 - sigma^2; ``bkw_mean``, ``bkw_var``: the means of g and of
        g * xhat, which the exact gradient subtracts."""
        mean, variance = self._moments(count, sums[0], sums[1])
        seen = {"fwd_mean": self._size(mean - self.running_mean), "fwd_var": self._size(variance - self.running_var)}
        if gradients is not None:
            for name, total in zip(("bkw_mean", "bkw_var"), gradients[1:]):
                seen[name] = self._size(total / gradients[0].clamp(min=1))
        return seen

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, momentum={'cumulative' if self.momentum is None else self.momentum}"
