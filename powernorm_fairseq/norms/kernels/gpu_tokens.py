"""Triton kernels of ``norms.kernels.gpu`` for norms over the channels of one token, a whole row in registers."""
# mypy: allow-untyped-defs, allow-untyped-calls
# (An annotation of a kernel's argument means something else to Triton.)

import triton
import triton.language as tl

from powernorm_fairseq.norms.kernels.gpu_rows import inverse_root


@triton.jit
def standardize_rows(
    x, z, means, inverses, n_rows, eps: tl.constexpr, released: tl.constexpr, scale: tl.constexpr, k: tl.constexpr,
    channels: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """z = scale * (1 - k * y) * y with y = (x - mean) / sigma, the mean (N,) and 1 / sigma (N,)."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    present = row < n_rows
    inside = (columns < channels)[None, :]
    offsets = row.to(tl.int64)[:, None] * channels + columns[None, :]
    taken = present[:, None] & inside
    part = tl.load(x + offsets, mask=taken, other=0.0).to(kind)
    mean = tl.sum(part, 1) / channels
    off = tl.where(inside, part - mean[:, None], 0.0)
    squares = tl.sum(off * off, 1)
    if released:
        inverse = 1.0 / (tl.sqrt(squares / max(channels - 1, 1)) + eps)
    else:
        inverse = inverse_root(squares / channels, eps)
    y = off * inverse[:, None]
    tl.store(z + offsets, (y - y * y * k) * scale, mask=taken)
    tl.store(means + row, mean, mask=present)
    tl.store(inverses + row, inverse, mask=present)


@triton.jit
def standardize_back_rows(
    x, dz, means, inverses, dx, n_rows, eps: tl.constexpr, released: tl.constexpr, detach_mean: tl.constexpr,
    detach_sigma: tl.constexpr, scale: tl.constexpr, k: tl.constexpr, channels: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """dx of ``standardize_rows`` with scale * (1 - k * y) a constant, and each statistic too if it is detached."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    present = row < n_rows
    inside = (columns < channels)[None, :]
    offsets = row.to(tl.int64)[:, None] * channels + columns[None, :]
    taken = present[:, None] & inside
    part = tl.load(x + offsets, mask=taken, other=0.0).to(kind)
    mean = tl.load(means + row, mask=present, other=0.0)
    inverse = tl.load(inverses + row, mask=present, other=1.0)
    y = tl.where(inside, part - mean[:, None], 0.0) * inverse[:, None]
    g = tl.load(dz + offsets, mask=taken, other=0.0).to(kind)
    g = g - g * y * k
    out = g
    if not detach_mean:
        out = out - (tl.sum(g, 1) / channels)[:, None]
    if not detach_sigma:
        along = tl.sum(g * y, 1) / channels
        if released:
            # sigma + eps for sigma, C - 1 for C; where sigma is 0, y is 0 and the factor does not matter.
            sigma = 1.0 / inverse - eps
            corrected = along * (channels / max(channels - 1, 1)) / (sigma * inverse)
            along = tl.where(sigma > 0.0, corrected, 0.0)
        out = out - y * along[:, None]
    tl.store(dx + offsets, out * inverse[:, None] * scale, mask=taken)
