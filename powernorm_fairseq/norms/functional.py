"""The mathematics of the norms, without state.

Notation: x has channels last; ``padding`` has shape ``x.shape[:-1]`` and is True at padding, which is left out of
every statistic and gets zero output and zero gradient. With layer scale h is x divided by its root mean square over
each channel group of a token, without it (``groups=0``) h = x.

Statistics are computed in float32, in float64 for float64 input, and cast once at the end. What backward passes keep is
the input, one number per token and group, and channel vectors.
"""

from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from powernorm_fairseq.norms.rows import (
    any_nonzero,
    backward_pass,
    blocks,
    compute_dtype,
    forward_pass,
    load,
    moments,
    real_rows,
)

Record = Callable[..., None]


def _over_workers(workers: Any, *parts: Tensor) -> Tuple[Tensor, ...]:
    """Statistics of a batch, each added up over ``workers`` if there are any; float64 then."""
    if workers is None:
        return parts
    values = torch.cat([part.reshape(-1).double() for part in parts])
    values = workers.add_up(values if workers.batch_counts else torch.zeros_like(values))
    totals = values.split([part.numel() for part in parts])
    return tuple(total.view(part.shape) for total, part in zip(totals, parts))


def _mean(total: Tensor, count: Tensor, like: Tensor) -> Tensor:
    return (total / count.clamp(min=1)).to(compute_dtype(like))


def _flat(x: Tensor, padding: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    if padding is not None and padding.device.type == "cpu" and not padding.any():
        padding = None  # less work, same result
    return x.reshape(-1, x.shape[-1]).contiguous(), None if padding is None else padding.reshape(-1)


def _vector(v: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    return None if v is None else v.to(compute_dtype(like))


def _like(grad: Optional[Tensor], parameter: Optional[Tensor]) -> Optional[Tensor]:
    return None if grad is None or parameter is None else grad.to(parameter.dtype)


class _ScaleAffine(Function):
    """y = h * a + b with constant or trained channel vectors a and b; the gradient is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Any, b: Any, padding: Any, groups: int, eps: float) -> Tensor:
        y, s, _ = forward_pass(x, padding, groups, eps, _vector(a, x), _vector(b, x), want_sum_sq=False)
        ctx.save_for_backward(x, a, b, padding, s)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, a, b, padding, s = ctx.saved_tensors
        want_dx, want_sums = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        dx, sum_dy, sum_dy_h = backward_pass(x, dy, padding, s, _vector(a, x), want_dx=want_dx, want_sums=want_sums)
        return dx, _like(sum_dy_h, a), _like(sum_dy, b), None, None, None


def group_rms_scale(
    x: Tensor,
    groups: int = 1,
    eps: float = 1e-5,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    padding: Optional[Tensor] = None,
) -> Tensor:
    """Layer scale, then gain and bias: y = h * weight + bias with h = x / sqrt(mean of x^2 over the group + eps).

    With one group this is RMSNorm (Zhang and Sennrich 2019); PowerNorm puts it in front with one group per attention
    head. ``groups=0`` leaves the scale out.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
    """
    rows, flat = _flat(x, padding)
    return _ScaleAffine.apply(rows, weight, bias, flat, groups, eps).view(x.shape)


class _PowerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, padding: Any, psi_sq: Tensor, nu: Tensor, groups: int, eps: float,
        use_batch_psi: bool, released: bool, record: Any, scale: Any, workers: Any,
    ) -> Tensor:  # fmt: skip
        gain, shift = _vector(weight, x), _vector(bias, x)
        count = real_rows(x, padding)

        def batch_r(sum_sq: Tensor) -> Tensor:
            total_count, total_sq = _over_workers(workers, count, sum_sq)
            return torch.rsqrt(_mean(total_sq, total_count, x) + eps)

        if use_batch_psi:
            _, s, sum_sq = forward_pass(x, padding, groups, eps, want_y=False)
            r = r_back = batch_r(sum_sq)
            y, _, _ = forward_pass(
                x, padding, groups, eps, r if gain is None else r * gain, shift, s, want_sum_sq=False
            )
        else:
            r = torch.rsqrt(psi_sq.to(compute_dtype(x)) + eps)
            y, s, sum_sq = forward_pass(x, padding, groups, eps, r if gain is None else r * gain, shift)
            r_back = batch_r(sum_sq) if released else r
        ctx.save_for_backward(x, weight, bias, padding, s, sum_sq, count, r, r_back, nu.to(r.dtype, copy=True))
        ctx.record, ctx.scale = record, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, sum_sq, count, r, r_back, nu = ctx.saved_tensors
        gain = _vector(weight, x)
        scale = ctx.scale()
        live = any_nonzero(dy, padding)
        # Nothing came back, so nothing is passed on: the approximation would subtract nu * xhat all the same.
        nu = torch.where(live, nu * scale, torch.zeros_like(nu))
        a = r_back if gain is None else r_back * gain
        dx, sum_dy, sum_dy_h = backward_pass(x, dy, padding, s, a, b=nu * r * r_back, want_dx=ctx.needs_input_grad[0])
        sum_dy_xhat = sum_dy_h * r
        if ctx.record is not None:
            sum_g_xhat = sum_dy_xhat if gain is None else sum_dy_xhat * gain
            ctx.record(live, count, sum_sq, sum_sq * r * r, sum_g_xhat / scale)
        return (dx, _like(sum_dy_xhat, weight), _like(sum_dy, bias)) + (None,) * 10


def power_norm(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    psi_sq: Tensor,
    nu: Tensor,
    padding: Optional[Tensor] = None,
    groups: int = 1,
    eps: float = 1e-5,
    use_batch_psi: bool = False,
    released: bool = False,
    record: Optional[Record] = None,
    gradient_scale: Callable[[], float] = lambda: 1.0,
    workers: Any = None,
) -> Tensor:
    """PowerNorm in training (Shen et al. 2020, Algorithm 2), with layer scale in front.

    Forward: xhat = h / sqrt(psi_sq + eps), y = weight * xhat + bias. Backward, with g = weight * dy:
    dh = (g - nu * xhat) / sqrt(psi_sq + eps). This is not the gradient of the forward pass, but an approximation of
    the exact gradient of PN-V with running in place of batch statistics. An upstream gradient that is zero everywhere
    gives a gradient of exactly zero.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
        psi_sq, nu: (C,) running mean square and running mean of g * xhat.
        use_batch_psi: divide by the batch's quadratic mean instead (in the warm-up).
        released: divide by the batch's quadratic mean in the backward pass in any case, as the released code does.
        record: called in the backward pass with live (), count () and the sums (C,) of h^2, xhat^2 and g * xhat over
            real tokens; live says whether any upstream gradient was not zero.
        gradient_scale: asked in the backward pass for the factor by which gradients are scaled; the last sum is divided
            by it and ``nu`` is multiplied by it.
        workers: the batch's quadratic mean, where one is used, is that of the batches of all these workers together
            (``norms.running.Workers``); the forward pass then has a collective.
    """
    rows, flat = _flat(x, padding)
    return _PowerNorm.apply(
        rows, weight, bias, flat, psi_sq, nu, groups, eps, use_batch_psi, released, record, gradient_scale, workers
    ).view(x.shape)


class _PowerNormV(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Any,
        bias: Any,
        padding: Any,
        groups: int,
        eps: float,
        record: Any,
        workers: Any,
        watch: Any,
    ) -> Tensor:
        gain = _vector(weight, x)
        count = real_rows(x, padding)
        _, s, sum_sq = forward_pass(x, padding, groups, eps, want_y=False)
        total_count, total_sq = _over_workers(workers, count, sum_sq)
        r = torch.rsqrt(_mean(total_sq, total_count, x) + eps)
        a = r if gain is None else r * gain
        y, _, _ = forward_pass(x, padding, groups, eps, a, _vector(bias, x), s, want_sum_sq=False)
        ctx.save_for_backward(x, weight, bias, padding, s, sum_sq, count, total_count, r)
        ctx.record, ctx.workers, ctx.watch = record, workers, watch
        ctx.counts = workers is None or workers.batch_counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, sum_sq, count, total_count, r = ctx.saved_tensors
        gain = _vector(weight, x)
        _, sum_dy, sum_dy_h = backward_pass(x, dy, padding, s, want_dx=False)
        if ctx.record is not None:
            ctx.record(any_nonzero(dy, padding), count, sum_sq)
        if ctx.watch is not None:
            ctx.watch(any_nonzero(dy, padding), count, sum_dy_h * r if gain is None else sum_dy_h * r * gain)
        # Also where no gradient of x is wanted: the other workers wait.
        (total_dy_h,) = _over_workers(ctx.workers, sum_dy_h)
        dx = None
        if ctx.needs_input_grad[0]:
            a = r if gain is None else r * gain
            # A batch that does not count was no part of the statistics, so nothing flows back through them.
            b = a * r * r * _mean(total_dy_h, total_count, x) if ctx.counts else None
            dx = backward_pass(x, dy, padding, s, a, b, want_sums=False).dx
        return dx, _like(sum_dy_h * r, weight), _like(sum_dy, bias), None, None, None, None, None, None


def power_norm_v(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    padding: Optional[Tensor] = None,
    groups: int = 1,
    eps: float = 1e-5,
    record: Optional[Record] = None,
    workers: Any = None,
    watch: Optional[Record] = None,
) -> Tensor:
    """PN-V in training (Shen et al. 2020, section 4): xhat = h / sqrt(batch mean of h^2 + eps), with exact gradient.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
        record: called in the backward pass with live (), count () and the sum (C,) of h^2 over real tokens.
        workers: the batch is that of all these workers together; a collective in the forward pass and one in the
            backward pass.
        watch: called in the backward pass with live (), count () and the sum (C,) of g * xhat over real tokens.
    """
    rows, flat = _flat(x, padding)
    return _PowerNormV.apply(rows, weight, bias, flat, groups, eps, record, workers, watch).view(x.shape)


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Any,
        bias: Any,
        padding: Any,
        groups: int,
        eps: float,
        record: Any,
        workers: Any,
        watch: Any,
    ) -> Tensor:
        gain = _vector(weight, x)
        s, count, mean, deviation = moments(x, padding, groups, eps)
        total_count, centre, total_deviation = _joined(workers, count, mean, deviation)
        r = torch.rsqrt(total_deviation / total_count.clamp(min=1) + eps)
        a = r if gain is None else r * gain
        y, _, _ = forward_pass(x, padding, groups, eps, a, _vector(bias, x), s, centre, want_sum_sq=False)
        ctx.save_for_backward(x, weight, bias, padding, s, count, mean, deviation, total_count, centre, r)
        ctx.record, ctx.workers, ctx.watch = record, workers, watch
        ctx.counts = workers is None or workers.batch_counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, count, mean, deviation, total_count, centre, r = ctx.saved_tensors
        gain = _vector(weight, x)
        _, sum_dy, sum_dy_h = backward_pass(x, dy, padding, s, shift=centre, want_dx=False)
        if ctx.record is not None:
            ctx.record(any_nonzero(dy, padding), count, mean, deviation)
        if ctx.watch is not None:
            g = torch.ones_like(r) if gain is None else gain
            ctx.watch(any_nonzero(dy, padding), count, sum_dy * g, sum_dy_h * r * g)
        total_dy, total_dy_h = _over_workers(ctx.workers, sum_dy, sum_dy_h)
        dx = None
        if ctx.needs_input_grad[0]:
            a = r if gain is None else r * gain
            b = d = None
            if ctx.counts:
                b = a * r * r * _mean(total_dy_h, total_count, x)
                d = a * _mean(total_dy, total_count, x)
            dx = backward_pass(x, dy, padding, s, a, b, d, centre, want_sums=False).dx
        return dx, _like(sum_dy_h * r, weight), _like(sum_dy, bias), None, None, None, None, None, None


def _joined(workers: Any, count: Tensor, mean: Tensor, deviation: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of the batches of all workers together."""
    if workers is None:
        return count, mean, deviation
    n, m, sum_sq_off = count.double(), mean.double(), deviation.double()
    total, total_sum, total_sq = _over_workers(workers, n, m * n, sum_sq_off + m * m * n)
    centre = total_sum / total.clamp(min=1)
    off = (total_sq - centre * total_sum).clamp(min=0)
    return total.to(count.dtype), centre.to(mean.dtype), off.to(deviation.dtype)


def batch_norm(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    padding: Optional[Tensor] = None,
    groups: int = 0,
    eps: float = 1e-5,
    record: Optional[Record] = None,
    workers: Any = None,
    watch: Optional[Record] = None,
) -> Tensor:
    """BatchNorm in training over real tokens: y = weight * (h - mean) / sqrt(biased variance + eps) + bias.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
        record: called in the backward pass with live (), count (), and the mean and the sum of squared deviations (C,)
            of h over real tokens.
        workers: the batch is that of all these workers together; a collective in the forward pass and one in the
            backward pass.
        watch: called in the backward pass with live (), count () and the sums (C,) of g = weight * dy and of g * xhat
            over real tokens.
    """
    rows, flat = _flat(x, padding)
    return _BatchNorm.apply(rows, weight, bias, flat, groups, eps, record, workers, watch).view(x.shape)


def mean_square_sums(x: Tensor, padding: Optional[Tensor], groups: int, eps: float) -> Tuple[Tensor, Tensor]:
    """Count () and sum of h^2 (C,) over the real tokens of ``x`` (..., C)."""
    rows, flat = _flat(x, padding)
    return real_rows(rows, flat), forward_pass(rows, flat, groups, eps, want_y=False).sum_sq


def moment_sums(x: Tensor, padding: Optional[Tensor], groups: int, eps: float) -> Tuple[Tensor, Tensor, Tensor]:
    """Count (), mean (C,) and sum of squared deviations (C,) of h over the real tokens of ``x`` (..., C)."""
    rows, flat = _flat(x, padding)
    return moments(rows, flat, groups, eps)[1:]


def layer_norm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm (Ba et al. 2016): y = weight * (x - mean) / sqrt(biased variance + eps) + bias, per token.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
    """
    shape = x.shape[-1:]
    if x.is_cuda and (weight is None or weight.dtype == x.dtype):
        return F.layer_norm(x, shape, weight, bias, eps)
    # Kernels for CPUs differ by version in which low-precision types and mixtures of types they take.
    return F.layer_norm(x.to(compute_dtype(x)), shape, _vector(weight, x), _vector(bias, x), eps).to(x.dtype)


class _Standardize(Function):
    """y = (x - mean) / sigma per token, and z = phi * y with phi = scale * (1 - k * y) a constant in the backward pass.

    Either statistic may be a constant in the backward pass too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, released: bool, detach_mean: bool, detach_sigma: bool, scale: float, k: float
    ) -> Tensor:
        channels = x.shape[1]
        z = torch.empty_like(x)
        mean = torch.empty(x.shape[0], 1, dtype=compute_dtype(x), device=x.device)
        inverse = torch.empty_like(mean)
        for block in blocks(x):
            part = load(x, block, None)
            if released:
                mean[block] = part.mean(-1, keepdim=True)
                off = part - mean[block]
                sigma = ((off * off).sum(-1, keepdim=True) / max(channels - 1, 1)).sqrt_()
                inverse[block] = 1 / (sigma + eps)
                y = off.mul_(inverse[block])
            else:
                y, mean[block], inverse[block] = torch.native_layer_norm(part, (channels,), None, None, eps)
            z[block] = torch.addcmul(y * scale, y, y, value=-scale * k) if k else y * scale
        ctx.save_for_backward(x, mean, inverse)
        ctx.options = eps, released, detach_mean, detach_sigma, scale, k
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Any:
        x, mean, inverse = ctx.saved_tensors
        eps, released, detach_mean, detach_sigma, scale, k = ctx.options
        channels = x.shape[1]
        dx = torch.empty_like(x)
        for block in blocks(x):
            i = inverse[block]
            y = (load(x, block, None) - mean[block]).mul_(i)
            g = load(dz, block, None)
            if k:
                g = torch.addcmul(g, g, y, value=-k)
            part = g if detach_mean else g - g.mean(-1, keepdim=True)
            if not detach_sigma:
                along = (g * y).mean(-1, keepdim=True)
                if released:
                    # sigma + eps for sigma, C - 1 for C; where sigma is 0, y is 0 and the factor does not matter.
                    sigma = 1 / i - eps
                    factor = channels / max(channels - 1, 1) / (sigma * i)
                    along = torch.where(sigma > 0, along * factor, torch.zeros_like(along))
                part = torch.addcmul(part, y, along, value=-1)
            torch.mul(part, i if scale == 1 else i * scale, out=dx[block])
        return (dx,) + (None,) * 6


def ada_norm(x: Tensor, scale: float = 1.0, k: float = 0.1, eps: float = 1e-5, released: bool = False) -> Tensor:
    """AdaNorm (Xu et al. 2019, section 4): z = C * (1 - k * y) * y, y = (x - mean) / sigma per token, C = ``scale``.

    The factor C * (1 - k * y) is a constant in the backward pass.

    Args:
        x: (..., C).
        released: sigma is the unbiased standard deviation plus ``eps``, not the root of the biased variance plus
            ``eps``, as in the released code.
    """
    return _Standardize.apply(_flat(x, None)[0], eps, released, False, False, scale, k).view(x.shape)


def standardize(
    x: Tensor, eps: float = 1e-5, released: bool = False, detach_mean: bool = False, detach_sigma: bool = False
) -> Tensor:
    """y = (x - mean) / sigma per token; DetachNorm (Xu et al. 2019, section 3) if a statistic is detached.

    Args:
        x: (..., C).
        released: see :func:`ada_norm`.
        detach_mean, detach_sigma: the statistic is a constant in the backward pass.
    """
    rows, _ = _flat(x, None)
    return _Standardize.apply(rows, eps, released, detach_mean, detach_sigma, 1.0, 0.0).view(x.shape)
