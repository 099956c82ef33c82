"""Passes over the rows of a matrix (tokens by channels): what forward and backward of the norms consist of.

Notation: x (N, C) is the input; with layer scale h = x * s, where s (N, G) is one over the root mean square of each
channel group of a token, and without it h = x. ``padding`` (N,) is True at rows that do not count: h and the upstream
gradient dy are taken as zero there. Arithmetic is in float32, or float64 for float64 input.

Where there is a fused implementation of a pass for the device (``norms.kernels``), it is used; here are the plain ones,
which need nothing but PyTorch. On a CPU they work on blocks that stay in the cache, so that no temporary tensor of the
size of x is ever made; on other devices a block is the whole matrix.
"""

from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.norms import kernels

BLOCK_ELEMENTS = 1 << 16  # per thread: 256 KiB of float32; smaller blocks cost more in calls than they save


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which statistics of ``x`` are computed: float64 for float64, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vector(v: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """``v`` (C,) in the computing type of ``like``, contiguous.

    Raises:
        ValueError: it is not a vector of the channels of ``like`` on the same device.
    """
    if v is None:
        return v
    if v.shape != like.shape[-1:] or v.device != like.device:
        raise ValueError(
            f"expected a vector of {like.shape[-1]} channels on {like.device}, got one of shape {tuple(v.shape)} on "
            f"{v.device}"
        )
    if v.dtype == compute_dtype(like) and v.is_contiguous():
        return v  # nearly always; asking costs less than two conversions that do nothing
    return v.to(compute_dtype(like)).contiguous()


def blocks(x: Tensor, rows: Optional[int] = None) -> Iterator[slice]:
    """Slices that cover the rows of ``x`` (N, C), of ``rows`` rows each if this is given."""
    count, channels = x.shape
    if rows is None:
        # A trace would keep the number of blocks for all inputs.
        several = x.device.type == "cpu" and not kernels.jit_tracing()
        rows = max(torch.get_num_threads() * BLOCK_ELEMENTS // channels, 1) if several else max(count, 1)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def zero_rows_(part: Tensor, padding: Tensor) -> None:
    """Sets the rows of ``part`` to zero where ``padding`` is True."""
    if part.device.type == "cpu":
        # Filling by a mask that is broadcast over the channels takes ten times as long as copying the rows.
        part.index_fill_(0, padding.nonzero().view(-1), 0)
    else:
        part.masked_fill_(padding.unsqueeze(-1), 0)


def load(x: Tensor, block: slice, padding: Optional[Tensor]) -> Tensor:
    """Rows of ``x`` in the computing type, zero at padding; may be a view of ``x``."""
    part = x[block].to(compute_dtype(x), copy=padding is not None)
    if padding is not None:
        zero_rows_(part, padding[block])
    return part


def grouped(part: Tensor, groups: int) -> Tensor:
    """(n, C) seen as (n, G, C / G)."""
    return part.view(part.shape[0], groups, part.shape[1] // groups)


def inverse_rms(part: Tensor, groups: int, eps: float) -> Tensor:
    """s (n, G) = 1 / sqrt(mean of part^2 over each channel group + eps)."""
    return grouped(part * part, groups).mean(-1).add_(eps).rsqrt_()


def scaled(part: Tensor, s: Optional[Tensor]) -> Tensor:
    """h of the rows in ``part``, whose inverse root mean squares are ``s`` (n, G)."""
    if s is None:
        return part
    return (grouped(part, s.shape[1]) * s.unsqueeze(-1)).view_as(part)


def write_affine(
    h: Tensor, shift: Optional[Tensor], a: Optional[Tensor], b: Optional[Tensor], padding: Optional[Tensor], y: Tensor
) -> None:
    """y = (h - shift) * a + b, zero at padding."""
    off = h if shift is None else h - shift
    if a is None:
        y.copy_(off)
    elif b is None:
        torch.mul(off, a, out=y)
    elif y.dtype == off.dtype:
        torch.addcmul(b, off, a, out=y)
    else:
        y.copy_(torch.addcmul(b, off, a))
    if padding is not None:  # also what is zero already: statistics may be no numbers
        zero_rows_(y, padding)


class Forward(NamedTuple):
    """Results of :func:`forward_pass`: tensors, or None where not asked for (``s``: where there is no layer scale)."""

    y: Any
    s: Any
    sum_sq: Any


def forward_pass(
    x: Tensor,
    padding: Optional[Tensor],
    groups: int,
    eps: float,
    a: Optional[Tensor] = None,
    b: Optional[Tensor] = None,
    s: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    want_y: bool = True,
    want_sum_sq: bool = True,
    gain: Optional[Tensor] = None,
) -> Forward:
    """y = (h - shift) * a * gain + b and the sums of h^2 over real rows, never both with a shift.

    Args:
        x: (N, C), contiguous.
        padding: (N,) or None.
        groups: channel groups of the layer scale, 0 for none.
        eps: inside the root of the layer scale.
        a, b, shift, gain: (C,) in the computing type.
        s: (N, G) where an earlier pass has computed it already.
    """
    fused = kernels.fused(x)
    if fused is not None:
        return fused.forward_pass(x, padding, groups, eps, a, b, s, shift, want_y, want_sum_sq, gain)
    if gain is not None:
        a = gain if a is None else a * gain
    dtype = compute_dtype(x)
    y = torch.empty_like(x) if want_y else None
    sum_sq = torch.zeros(x.shape[1], dtype=dtype, device=x.device) if want_sum_sq else None
    new_s = None
    if groups and s is None:
        s = new_s = torch.empty(x.shape[0], groups, dtype=dtype, device=x.device)
    for block in blocks(x):
        part = load(x, block, padding)
        if new_s is not None:
            new_s[block] = inverse_rms(part, groups, eps)
        h = scaled(part, None if s is None else s[block])
        if sum_sq is not None:
            sum_sq += (h * h).sum(0)
        if y is not None:
            write_affine(h, shift, a, b, None if padding is None else padding[block], y[block])
    return Forward(y, s, sum_sq)


def moments(
    x: Tensor, padding: Optional[Tensor], groups: int, eps: float
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:
    """s, count (), and mean (C,) and sum of squared deviations (C,) of h over real rows, without cancellation."""
    fused = kernels.fused(x)
    if fused is not None:
        return fused.moments(x, padding, groups, eps)
    dtype = compute_dtype(x)
    s = torch.empty(x.shape[0], groups, dtype=dtype, device=x.device) if groups else None
    count = torch.zeros((), dtype=dtype, device=x.device)
    mean = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
    deviation = torch.zeros_like(mean)
    for block in blocks(x):
        part = load(x, block, padding)
        if s is not None:
            s[block] = inverse_rms(part, groups, eps)
        h = scaled(part, None if s is None else s[block])
        n = real_rows(h, None if padding is None else padding[block])
        centre = h.sum(0) / n.clamp(min=1)
        off = h - centre
        if padding is not None:
            zero_rows_(off, padding[block])
        total = (count + n).clamp(min=1)
        delta = centre - mean
        # The sums of two parts: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979.
        deviation += (off * off).sum(0) + delta * delta * (count * n / total)
        mean += delta * (n / total)
        count = count + n
    return s, count, mean, deviation


def real_rows(x: Tensor, padding: Optional[Tensor]) -> Tensor:
    """Number of rows of ``x`` that are not padding, a () tensor in the computing type."""
    if padding is None:
        return torch.full((), x.shape[0], dtype=compute_dtype(x), device=x.device)
    return (~padding).sum().to(compute_dtype(x))


def any_nonzero(dy: Tensor, padding: Optional[Tensor]) -> Tensor:
    """Whether any real row of ``dy`` holds something other than zero, a () bool tensor."""
    found = torch.zeros((), dtype=torch.bool, device=dy.device)
    on_cpu = dy.device.type == "cpu"
    for block in blocks(dy, rows=8 if on_cpu else None):
        part = dy[block] != 0
        if padding is not None:
            part.masked_fill_(padding[block].unsqueeze(-1), False)
        found = found | part.any()
        # A look at the first rows is enough nearly always; on an accelerator it would wait for the device.
        if on_cpu and found:
            break
    return found


class Backward(NamedTuple):
    """Results of :func:`backward_pass`: tensors, or None where not asked for."""

    dx: Any
    sum_dy: Any
    sum_dy_h: Any


def backward_pass(
    x: Tensor,
    dy: Tensor,
    padding: Optional[Tensor],
    s: Optional[Tensor],
    a: Optional[Tensor] = None,
    b: Optional[Tensor] = None,
    d: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    want_dx: bool = True,
    want_sums: bool = True,
) -> Backward:
    """dh = dy * a - (h - shift) * b - d, through the layer scale to dx; the sums of dy and of dy * (h - shift).

    All vectors are (C,); the layer scale's gradient is dx = s * (dh - h * mean over the group of (dh * h)).
    """
    fused = kernels.fused(x)
    if fused is not None:
        return fused.backward_pass(x, dy, padding, s, a, b, d, shift, want_dx, want_sums)
    dtype = compute_dtype(x)
    dx = torch.empty_like(x) if want_dx else None
    sum_dy = torch.zeros(x.shape[1], dtype=dtype, device=x.device) if want_sums else None
    sum_dy_h = torch.zeros_like(sum_dy) if sum_dy is not None else None
    for block in blocks(x):
        s_part = None if s is None else s[block]
        h = scaled(load(x, block, padding), s_part)
        g = load(dy, block, padding)
        off = h if shift is None else h - shift
        if sum_dy is not None and sum_dy_h is not None:
            sum_dy += g.sum(0)
            sum_dy_h += (g * off).sum(0)
        if dx is None:
            continue
        dh = g if a is None else g * a
        if b is not None:
            dh = torch.addcmul(dh, off, b, value=-1)
        if d is not None:
            dh = dh - d
        if s_part is None:
            dx[block] = dh
        else:
            groups = s_part.shape[1]
            along = grouped(dh * h, groups).sum(-1, keepdim=True)
            across = torch.addcmul(grouped(dh, groups), grouped(h, groups), along, value=-groups / x.shape[1])
            torch.mul(across, s_part.unsqueeze(-1), out=grouped(dx[block], groups))
        if padding is not None:
            zero_rows_(dx[block], padding[block])
    return Backward(dx, sum_dy, sum_dy_h)


def standardize_forward(x: Tensor, eps: float, released: bool, scale: float, k: float) -> Tuple[Tensor, Tensor, Tensor]:
    """z = scale * (1 - k * y) * y with y = (x - mean) / sigma per row, the mean (N, 1) and 1 / sigma (N, 1).

    Args:
        x: (N, C), contiguous.
        released: sigma is the unbiased standard deviation plus ``eps``, not the root of the biased variance plus
            ``eps``.
    """
    fused = kernels.fused(x)
    if fused is not None:
        return fused.standardize_forward(x, eps, released, scale, k)
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
    return z, mean, inverse


def standardize_backward(
    x: Tensor,
    dz: Tensor,
    mean: Tensor,
    inverse: Tensor,
    eps: float,
    released: bool,
    detach_mean: bool,
    detach_sigma: bool,
    scale: float,
    k: float,
) -> Tensor:
    """dx of :func:`standardize_forward`, with scale * (1 - k * y) a constant, and a statistic too if it is detached."""
    fused = kernels.fused(x)
    if fused is not None:
        return fused.standardize_backward(x, dz, mean, inverse, eps, released, detach_mean, detach_sigma, scale, k)
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
    return dx
