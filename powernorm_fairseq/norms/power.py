"""PowerNorm, and PN-V, its form with batch statistics and the exact gradient."""

from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.norms import operators
from powernorm_fairseq.norms.base import choice, fraction
from powernorm_fairseq.norms.functional import group_rms_scale, mean_square_sums, power_norm, power_norm_v
from powernorm_fairseq.norms.loss_scale import get_gradient_scale
from powernorm_fairseq.norms.running import RunningNorm


class _QuadraticMeanNorm(RunningNorm):
    STATISTICS = ("running_psi_sq",)
    running_psi_sq: Tensor

    def __init__(self, dim: int, groups: int, alpha_fwd: float, eps: float, affine: bool, sync: str) -> None:
        super().__init__(dim, groups, eps, affine, sync)
        self.alpha_fwd = fraction("alpha_fwd", alpha_fwd)
        self.register_buffer("running_psi_sq", torch.ones(dim))

    def normalize_by_statistics(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        (r,) = self.constants()
        return group_rms_scale(x, self.groups, self.eps, self.weight, self.bias, padding, factor=r)

    def constants_of_statistics(self) -> Tuple[Tensor, ...]:
        return (torch.rsqrt(self.running_psi_sq + self.eps),)

    def measure(self, x: Tensor, padding: Optional[Tensor]) -> Tuple[Tensor, ...]:
        return mean_square_sums(x, padding, self.groups, self.eps)

    def assign(self, count: Tensor, *sums: Tensor) -> None:
        self.running_psi_sq.copy_(sums[0] / count)


class PowerNorm(_QuadraticMeanNorm):
    """PowerNorm (Shen et al. 2020, Algorithm 2), with layer scale.

    Args:
        dim: number of channels C.
        groups: channel groups of the layer scale, usually the number of attention heads; 0 for none.
        alpha_fwd: decay of the running mean square.
        alpha_bkw: decay of the running gradient statistic.
        warmup_updates: number of first updates in which the forward pass divides by the batch's quadratic mean.
        numerics: ``paper`` or ``released`` (docs/norms.md says how they differ).
        eps: inside the roots.
        affine: gain and bias per channel.
        sync: what several workers share: ``running`` statistics, the ``batch``'s quadratic mean too, or ``none``.
    """

    sums_recorded = 3
    running_nu: Tensor

    def __init__(
        self,
        dim: int,
        groups: int = 1,
        alpha_fwd: float = 0.9,
        alpha_bkw: float = 0.9,
        warmup_updates: int = 0,
        numerics: str = "paper",
        eps: float = 1e-5,
        affine: bool = True,
        sync: str = "running",
    ) -> None:
        super().__init__(dim, groups, alpha_fwd, eps, affine, sync)
        if warmup_updates < 0:
            raise ValueError(f"warmup_updates must not be negative: {warmup_updates}")
        self.alpha_bkw = fraction("alpha_bkw", alpha_bkw)
        self.warmup_updates = warmup_updates
        self.numerics = choice("numerics", numerics, ["paper", "released"])
        self.register_buffer("running_nu", torch.zeros(dim))

    def normalize_in_training(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        return power_norm(
            x,
            self.weight,
            self.bias,
            self.running_psi_sq,
            self.running_nu,
            padding,
            self.groups,
            self.eps,
            use_batch_psi=not operators.tracing() and self.divides_by_batch_psi(),
            released=self.numerics == "released",
            record=self.recorder,
            gradient_scale=get_gradient_scale,
            workers=self.workers,
            token=self.token,
        )

    def divides_by_batch_psi(self) -> bool:
        """Whether the next forward pass divides by the batch's quadratic mean."""
        return self.measuring or self.num_updates < self.warmup_updates

    def absorb(self, count: Tensor, sums: Tensor) -> None:
        """psi^2 and nu after an update.

        psi^2 is the cumulative mean over the updates of the warm-up and an exponential moving average after it; in
        ``released`` numerics the average is also taken on top of the cumulative mean, except in the last update of the
        warm-up, where it is taken alone.

        nu takes a step of size eta = min(1 - alpha_bkw, 1 / Gamma) instead of 1 - alpha_bkw. With b = eta * Gamma in
        [0, 1], nu' = nu * (1 - b) + b * (Lambda / Gamma) is a convex combination, hence
        |nu'| <= max(|nu|, |Lambda / Gamma|), while the unbounded recursion grows without limit as soon as
        (1 - alpha_bkw) * Gamma stays above 2. Both are the same where Gamma <= 1 / (1 - alpha_bkw).
        """
        mean = sums / count.clamp(min=1)
        batch_psi_sq, big_gamma, big_lambda = mean[0], mean[1], mean[2]
        update = self.num_updates
        done = self.updates_tracked.to(mean.dtype).clamp(max=update)  # smaller than update if some were skipped
        psi_sq = self.running_psi_sq.to(mean.dtype)
        released = self.numerics == "released"
        in_warmup = update + released < self.warmup_updates
        if in_warmup:
            psi_sq = psi_sq + (batch_psi_sq - psi_sq) / (done + 1)
        if released or not in_warmup:
            psi_sq = self.alpha_fwd * psi_sq + (1 - self.alpha_fwd) * batch_psi_sq
        step = 1 - self.alpha_bkw
        nu = self.running_nu.to(mean.dtype)
        nu = nu + (1 / big_gamma).clamp(max=step) * (big_lambda - nu * big_gamma)
        some = count > 0
        self.running_psi_sq.copy_(torch.where(some, psi_sq.to(self.running_psi_sq.dtype), self.running_psi_sq))
        self.running_nu.copy_(torch.where(some, nu.to(self.running_nu.dtype), self.running_nu))
        self.updates_bounded.add_(some & (big_gamma * step > 1).any())

    def absorb_fused(self, absorb: Callable[..., bool], contribution: Tensor) -> bool:
        return absorb(
            "power", contribution, self.counters(), (self.running_psi_sq, self.running_nu),
            self.alpha_fwd, self.alpha_bkw, self.num_updates, self.warmup_updates, self.numerics == "released",
        )  # fmt: skip

    def compare(self, count: Tensor, sums: Tensor, gradients: Optional[Tensor]) -> Dict[str, Tensor]:
        """``fwd_psi_sq``: psi_B^2 - psi^2; ``bkw_psi_sq``: Lambda; ``bkw_nu``: Lambda - Gamma nu, what moves nu."""
        batch_psi_sq, big_gamma, big_lambda = sums / count.clamp(min=1)
        return {
            "fwd_psi_sq": self._size(batch_psi_sq - self.running_psi_sq),
            "bkw_psi_sq": self._size(big_lambda),
            "bkw_nu": self._size(big_lambda - big_gamma * self.running_nu),
        }

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, alpha_fwd={self.alpha_fwd}, alpha_bkw={self.alpha_bkw}, "
            f"warmup_updates={self.warmup_updates}, numerics={self.numerics}"
        )


class PowerNormV(_QuadraticMeanNorm):
    """PN-V (Shen et al. 2020, section 4): the batch's quadratic mean in training, with its exact gradient.

    Args:
        dim: number of channels C.
        groups: channel groups of the layer scale; 0 for none.
        alpha_fwd: decay of the running mean square that evaluation uses.
        eps: inside the roots.
        affine: gain and bias per channel.
        sync: what several workers share: ``running`` statistics, the ``batch``'s quadratic mean too, or ``none``.
    """

    sums_recorded = 1

    def __init__(
        self,
        dim: int,
        groups: int = 1,
        alpha_fwd: float = 0.9,
        eps: float = 1e-5,
        affine: bool = True,
        sync: str = "running",
    ) -> None:
        super().__init__(dim, groups, alpha_fwd, eps, affine, sync)

    def normalize_in_training(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        watch = self.record_gradient if self.watched else None
        return power_norm_v(
            x, self.weight, self.bias, padding, self.groups, self.eps, self.recorder, self.workers, watch, self.token
        )

    def absorb(self, count: Tensor, sums: Tensor) -> None:
        psi_sq = self.running_psi_sq.to(sums.dtype)
        psi_sq = self.alpha_fwd * psi_sq + (1 - self.alpha_fwd) * sums[0] / count.clamp(min=1)
        psi_sq = psi_sq.to(self.running_psi_sq.dtype)
        self.running_psi_sq.copy_(torch.where(count > 0, psi_sq, self.running_psi_sq))

    def absorb_fused(self, absorb: Callable[..., bool], contribution: Tensor) -> bool:
        return absorb("power_v", contribution, self.counters(), (self.running_psi_sq,), self.alpha_fwd)

    def compare(self, count: Tensor, sums: Tensor, gradients: Optional[Tensor]) -> Dict[str, Tensor]:
        """``fwd_psi_sq``: psi_B^2 - psi^2; ``bkw_psi_sq``: the mean of g * xhat, which the exact gradient subtracts."""
        seen = {"fwd_psi_sq": self._size(sums[0] / count.clamp(min=1) - self.running_psi_sq)}
        if gradients is not None:
            seen["bkw_psi_sq"] = self._size(gradients[1] / gradients[0].clamp(min=1))
        return seen

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha_fwd={self.alpha_fwd}"
