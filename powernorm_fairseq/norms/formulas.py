"""Forward and backward passes of the norms with batch statistics, as plain functions without autograd.

Notation as in ``norms.rows``: x (N, C), padding (N,), s (N, G) or None. ``weight`` and ``bias`` are (C,), or
None. ``stats`` holds what a forward pass leaves for the backward pass, one (C,) vector per row.

A backward pass returns dx, the gradients of gain and bias in the computing type, and its contribution to the running
statistics (:func:`contribution`). Where there is a fused implementation of a whole norm, it is used.

``workers`` join their batches' statistics (``norms.running.Workers``): each function then has a collective.
"""

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.norms import kernels
from powernorm_fairseq.norms.rows import (
    any_nonzero,
    backward_pass,
    compute_dtype,
    forward_pass,
    moments,
    real_rows,
    vector,
)


class Gradients(NamedTuple):
    """What a backward pass gives; dx is None where it is not wanted."""

    dx: Any
    dweight: Any
    dbias: Any
    contribution: Any


def contribution(live: Any, count: Tensor, *sums: Tensor) -> Tensor:
    """What a batch adds to the running statistics: (dropped, count, sums...) in one row of double precision.

    All zeros where nothing came back (``live`` is False), and 1 and zeros where a sum is not finite.
    """
    dtype = torch.float32 if count.device.type == "mps" else torch.float64
    new = torch.cat([part.reshape(-1).to(dtype) for part in (count, *sums)])
    finite = torch.isfinite(new).all()
    new = torch.where(finite & live, new, torch.zeros_like(new))
    dropped = (~finite & live).to(dtype).reshape(1)
    return torch.cat([dropped, new])


def mean_and_squares(count: Tensor, mean: Tensor, deviation: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Count, sum and sum of squares: what adds up, in double precision where there is one."""
    if mean.device.type != "mps":
        count, mean, deviation = count.double(), mean.double(), deviation.double()
    return count, mean * count, deviation + mean * mean * count


def over_workers(workers: Any, *parts: Tensor) -> Tuple[Tensor, ...]:
    """Statistics of a batch, each added up over ``workers`` if there are any; float64 then."""
    if workers is None:
        return parts
    values = torch.cat([part.reshape(-1).double() for part in parts])
    values = workers.add_up(values if workers.batch_counts else torch.zeros_like(values))
    totals = values.split([part.numel() for part in parts])
    return tuple(total.view(part.shape) for total, part in zip(totals, parts))


def _mean(total: Tensor, count: Tensor, like: Tensor) -> Tensor:
    return (total / count.clamp(min=1)).to(compute_dtype(like))


def _times(vector: Tensor, gain: Optional[Tensor]) -> Tensor:
    return vector if gain is None else vector * gain


def group_rms_scale_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], groups: int, eps: float,
    factor: Optional[Tensor] = None, shift: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """y = (h - shift) * factor * weight + bias, and s."""
    factor, weight, bias, shift = (vector(v, x) for v in (factor, weight, bias, shift))
    y, s, _ = forward_pass(x, padding, groups, eps, factor, bias, None, shift, want_sum_sq=False, gain=weight)
    return y, s


def group_rms_scale_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor],
    factor: Optional[Tensor], shift: Optional[Tensor], want_dx: bool = True, want_sums: bool = True,
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """dx and the gradients of weight and bias, where they are wanted."""
    factor, weight, shift = (vector(v, x) for v in (factor, weight, shift))
    a = weight if factor is None else _times(factor, weight)
    passed = backward_pass(x, dy, padding, s, a, None, None, shift, want_dx=want_dx, want_sums=want_sums)
    return passed.dx, None if passed.sum_dy_h is None else _times(passed.sum_dy_h, factor), passed.sum_dy


def power_norm_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], psi_sq: Tensor,
    groups: int, eps: float, use_batch_psi: bool, released: bool, workers: Any = None,
) -> Tuple[Tensor, Optional[Tensor], Tensor]:  # fmt: skip
    """y, s and stats: the sum of h^2 over real rows, r = 1 / psi of the forward pass, and r of the backward pass."""
    weight, bias = vector(weight, x), vector(bias, x)
    fused = kernels.fused(x)
    if fused is not None and workers is None:
        psi = vector(psi_sq, x)
        return fused.power_norm_forward(x, weight, bias, padding, psi, groups, eps, use_batch_psi, released)
    count = real_rows(x, padding)

    def batch_r(sum_sq: Tensor) -> Tensor:
        total_count, total_sq = over_workers(workers, count, sum_sq)
        return torch.rsqrt(_mean(total_sq, total_count, x) + eps)

    if use_batch_psi:
        _, s, sum_sq = forward_pass(x, padding, groups, eps, want_y=False)
        r = r_back = batch_r(sum_sq)
        y = forward_pass(x, padding, groups, eps, _times(r, weight), bias, s, want_sum_sq=False).y
    else:
        r = torch.rsqrt(psi_sq.to(compute_dtype(x)) + eps)
        y, s, sum_sq = forward_pass(x, padding, groups, eps, _times(r, weight), bias)
        r_back = batch_r(sum_sq) if released else r
    return y, s, torch.stack([sum_sq, r, r_back])


def power_norm_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    nu: Tensor, scale: float, want_dx: bool = True,
) -> Gradients:  # fmt: skip
    """The approximate gradient. ``dy`` and all that comes of it is ``scale`` times as large as the loss wants it; nu
    (C,) and the contribution (sums of h^2, xhat^2 and g * xhat) are not scaled."""
    weight = vector(weight, x)
    fused = kernels.fused(x)
    if fused is not None:
        return Gradients(*fused.power_norm_backward(x, dy, weight, padding, s, stats, vector(nu, x), scale, want_dx))
    sum_sq, r, r_back = stats
    live = any_nonzero(dy, padding)
    # Nothing came back, so nothing is passed on: the approximation would subtract nu * xhat all the same.
    nu = torch.where(live, nu * scale, torch.zeros_like(nu))
    passed = backward_pass(x, dy, padding, s, _times(r_back, weight), b=nu * r * r_back, want_dx=want_dx)
    sum_dy_xhat = passed.sum_dy_h * r
    row = contribution(live, real_rows(x, padding), sum_sq, sum_sq * r * r, _times(sum_dy_xhat, weight) / scale)
    return Gradients(passed.dx, sum_dy_xhat, passed.sum_dy, row)


def power_norm_v_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], groups: int, eps: float,
    workers: Any = None,
) -> Tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor]]:  # fmt: skip
    """y, s, stats (the sum of h^2 over this worker's real rows, and r), and with workers the count of all rows."""
    weight, bias = vector(weight, x), vector(bias, x)
    fused = kernels.fused(x)
    if hasattr(fused, "power_norm_v_forward") and workers is None:
        return (*fused.power_norm_v_forward(x, weight, bias, padding, groups, eps), None)
    _, s, sum_sq = forward_pass(x, padding, groups, eps, want_y=False)
    total_count, total_sq = over_workers(workers, real_rows(x, padding), sum_sq)
    r = torch.rsqrt(_mean(total_sq, total_count, x) + eps)
    y = forward_pass(x, padding, groups, eps, _times(r, weight), bias, s, want_sum_sq=False).y
    return y, s, torch.stack([sum_sq, r]), None if workers is None else total_count


def power_norm_v_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    want_dx: bool = True, workers: Any = None, total_count: Optional[Tensor] = None, counted: bool = True,
) -> Gradients:  # fmt: skip
    """The exact gradient; the contribution has the sum of h^2. ``counted`` says whether this batch was part of the
    statistics: if not, nothing flows back through them."""
    weight = vector(weight, x)
    fused = kernels.fused(x)
    if hasattr(fused, "power_norm_v_backward") and workers is None:
        return Gradients(*fused.power_norm_v_backward(x, dy, weight, padding, s, stats, want_dx))
    sum_sq, r = stats
    count = real_rows(x, padding)
    _, sum_dy, sum_dy_h = backward_pass(x, dy, padding, s, want_dx=False)
    row = contribution(any_nonzero(dy, padding), count, sum_sq)
    # Also where no gradient of x is wanted: the other workers wait.
    (total_dy_h,) = over_workers(workers, sum_dy_h)
    dx = None
    if want_dx:
        a = _times(r, weight)
        b = a * r * r * _mean(total_dy_h, count if total_count is None else total_count, x) if counted else None
        dx = backward_pass(x, dy, padding, s, a, b, want_sums=False).dx
    return Gradients(dx, sum_dy_h * r, sum_dy, row)


def batch_norm_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], groups: int, eps: float,
    workers: Any = None,
) -> Tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """y, s, stats (mean and sum of squared deviations of this worker's real rows, and r), and with workers the count
    and the mean of all rows."""
    weight, bias = vector(weight, x), vector(bias, x)
    fused = kernels.fused(x)
    if hasattr(fused, "batch_norm_forward") and workers is None:
        return (*fused.batch_norm_forward(x, weight, bias, padding, groups, eps), None, None)
    s, count, mean, deviation = moments(x, padding, groups, eps)
    total_count, centre, total_deviation = _joined(workers, count, mean, deviation)
    r = torch.rsqrt(total_deviation / total_count.clamp(min=1) + eps)
    y = forward_pass(x, padding, groups, eps, _times(r, weight), bias, s, centre, want_sum_sq=False).y
    stats = torch.stack([mean, deviation, r])
    return (y, s, stats, None, None) if workers is None else (y, s, stats, total_count, centre)


def _joined(workers: Any, count: Tensor, mean: Tensor, deviation: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of the batches of all workers together."""
    if workers is None:
        return count, mean, deviation
    n, m, sum_sq_off = count.double(), mean.double(), deviation.double()
    total, total_sum, total_sq = over_workers(workers, n, m * n, sum_sq_off + m * m * n)
    centre = total_sum / total.clamp(min=1)
    off = (total_sq - centre * total_sum).clamp(min=0)
    return total.to(count.dtype), centre.to(mean.dtype), off.to(deviation.dtype)


def batch_norm_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    want_dx: bool = True, workers: Any = None, total_count: Optional[Tensor] = None, centre: Optional[Tensor] = None,
    counted: bool = True,
) -> Gradients:  # fmt: skip
    """The exact gradient; the contribution has the sums of h and of h^2. ``counted``: see power_norm_v_backward."""
    weight = vector(weight, x)
    fused = kernels.fused(x)
    if hasattr(fused, "batch_norm_backward") and workers is None:
        return Gradients(*fused.batch_norm_backward(x, dy, weight, padding, s, stats, want_dx))
    mean, deviation, r = stats
    count = real_rows(x, padding)
    centre = mean if centre is None else centre
    _, sum_dy, sum_dy_h = backward_pass(x, dy, padding, s, shift=centre, want_dx=False)
    row = contribution(any_nonzero(dy, padding), *mean_and_squares(count, mean, deviation))
    total_dy, total_dy_h = over_workers(workers, sum_dy, sum_dy_h)
    dx = None
    if want_dx:
        a = _times(r, weight)
        b = d = None
        if counted:
            total_count = count if total_count is None else total_count
            b = a * r * r * _mean(total_dy_h, total_count, x)
            d = a * _mean(total_dy, total_count, x)
        dx = backward_pass(x, dy, padding, s, a, b, d, centre, want_sums=False).dx
    return Gradients(dx, sum_dy_h * r, sum_dy, row)
