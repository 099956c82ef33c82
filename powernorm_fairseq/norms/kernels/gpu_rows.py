"""Triton kernels of ``norms.kernels.gpu``: what one program of each does. Notation as in ``norms.rows``.

A matrix (N, C) is cut into column tiles, none of which reaches over the edge of a channel group, and into blocks of
``rows`` rows. A program has one tile and every ``strips``-th block of rows, holds the sums over its rows in registers
and writes them out as partial sums; a finishing kernel adds these up in a fixed order. Nothing is added atomically, so
that results are always the same for a shape and a device.

Arguments that are None leave out what belongs to them; those in lower-case after ``n_rows`` are compiled in:

    eps: inside the root of the layer scale and under the statistics' roots
    channels, groups: C and G (0 without layer scale)
    width: channels of a group
    per_group: tiles of a group
    rows, block: shape of a tile, powers of two
    kind: the computing type

``padding`` is uint8. Offsets into matrices are 64 bits wide, for these may have more than 2^31 elements.
"""
# mypy: allow-untyped-defs, allow-untyped-calls
# (An annotation of a kernel's argument means something else to Triton.)
# ruff: noqa: SIM108
# (An `if` on what is compiled in chooses what is compiled.)

import triton
import triton.language as tl


@triton.jit
def _tile(tile, per_group: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """The group of a tile, its columns, and which of them there are."""
    group = tile // per_group
    inner = tile % per_group * block + tl.arange(0, block)
    return group, group * width + inner, inner < width


@triton.jit
def vector(pointer, columns, inside, kind: tl.constexpr):
    return tl.load(pointer + columns, mask=inside, other=0.0).to(kind)


@triton.jit
def inverse_root(mean_sq, eps: tl.constexpr):
    return 1.0 / tl.sqrt(mean_sq + eps)


@triton.jit(do_not_specialize=["n_rows"])
def forward_rows(
    x, padding, s, new_s, r, gain, bias, shift, y, sum_sq, counts, n_rows,
    root: tl.constexpr, eps: tl.constexpr, channels: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    per_group: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """y = (h - shift) * r * gain + bias, partial sums (strips, C) of h^2, numbers of real rows (strips,).

    s: (N, G) if known already, else ``new_s`` gets it.
    r: (C,) the factor, or with ``root`` the mean square whose inverse root it is.
    """
    strip = tl.program_id(0)
    strips = tl.num_programs(0)
    group, columns, inside = _tile(tl.program_id(1), per_group, width, block)
    if r is not None:
        factor = vector(r, columns, inside, kind)
        if root:
            factor = inverse_root(factor, eps)
        if gain is not None:
            factor = factor * vector(gain, columns, inside, kind)
    elif gain is not None:
        factor = vector(gain, columns, inside, kind)
    if bias is not None:
        added = vector(bias, columns, inside, kind)
    if shift is not None:
        centre = vector(shift, columns, inside, kind)
    total = tl.zeros([rows, block], kind)
    seen = tl.zeros([rows], tl.int32)
    for index in range(strip, tl.cdiv(n_rows, rows), strips):
        row = index * rows + tl.arange(0, rows)
        present = row < n_rows
        real = present
        if padding is not None:
            real = present & (tl.load(padding + row, mask=present, other=1) == 0)
        offsets = row.to(tl.int64)[:, None] * channels + columns[None, :]
        h = tl.load(x + offsets, mask=real[:, None] & inside[None, :], other=0.0).to(kind)
        if groups > 0:
            at = row.to(tl.int64) * groups + group
            if s is not None:
                inverse = tl.load(s + at, mask=present, other=0.0)
            else:
                inverse = inverse_root(tl.sum(h * h, 1) / width, eps)
                tl.store(new_s + at, inverse, mask=present)
            h = h * inverse[:, None]
        if sum_sq is not None:
            total += h * h
        if counts is not None:
            seen += real.to(tl.int32)
        if y is not None:
            out = h
            if shift is not None:
                out = out - centre[None, :]
            if r is not None or gain is not None:
                out = out * factor[None, :]
            if bias is not None:
                out = out + added[None, :]
            if padding is not None:
                out = tl.where(real[:, None], out, 0.0)
            tl.store(y + offsets, out, mask=present[:, None] & inside[None, :])
    if sum_sq is not None:
        tl.store(sum_sq + strip * channels + columns, tl.sum(total, 0), mask=inside)
    if counts is not None:
        tl.store(counts + strip, tl.sum(seen, 0), mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["n_rows"])
def backward_rows(
    x, dy, padding, s, along, a, b, d, shift, stats, gain, nu, dx, sums, flags, counts, n_rows, high, low,
    channels: tl.constexpr, width: tl.constexpr, groups: tl.constexpr, per_group: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """dx of dh = dy * a - (h - shift) * b - d, and partial sums (strips, 2, C) of dy and of dy * (h - shift).

    along: (N, G) mean over the group of dh * h where a group is wider than a tile.
    flags: (strips, tiles) say whether a dy was not zero.
    stats: (3, C) makes it PowerNorm's: then a and b come of it, ``gain``, ``nu`` and the scale ``high`` + ``low``, and
        2 is added to a flag if a sum is not finite or, with those of the other strips, might not be.
    """
    strip = tl.program_id(0)
    strips = tl.num_programs(0)
    group, columns, inside = _tile(tl.program_id(1), per_group, width, block)
    if stats is not None:
        scale = tl.zeros([block], kind) + high + low
        r = vector(stats + channels, columns, inside, kind)
        factor = vector(stats + 2 * channels, columns, inside, kind)
        slope = vector(nu, columns, inside, kind) * scale * r * factor
        if gain is not None:
            factor = factor * vector(gain, columns, inside, kind)
    else:
        if a is not None:
            factor = vector(a, columns, inside, kind)
        if b is not None:
            slope = vector(b, columns, inside, kind)
    if d is not None:
        constant = vector(d, columns, inside, kind)
    if shift is not None:
        centre = vector(shift, columns, inside, kind)
    total_dy = tl.zeros([rows, block], kind)
    total_dy_h = tl.zeros([rows, block], kind)
    live = tl.zeros([rows, block], tl.int32)
    seen = tl.zeros([rows], tl.int32)
    for index in range(strip, tl.cdiv(n_rows, rows), strips):
        row = index * rows + tl.arange(0, rows)
        present = row < n_rows
        real = present
        if padding is not None:
            real = present & (tl.load(padding + row, mask=present, other=1) == 0)
        offsets = row.to(tl.int64)[:, None] * channels + columns[None, :]
        taken = real[:, None] & inside[None, :]
        h = tl.load(x + offsets, mask=taken, other=0.0).to(kind)
        g = tl.load(dy + offsets, mask=taken, other=0.0).to(kind)
        if groups > 0:
            at = row.to(tl.int64) * groups + group
            inverse = tl.load(s + at, mask=present, other=0.0)
            h = h * inverse[:, None]
        off = h
        if shift is not None:
            off = h - centre[None, :]
        if sums is not None:
            total_dy += g
            total_dy_h += g * off
        if flags is not None:
            live = tl.where(g != 0.0, 1, live)
        if counts is not None:
            seen += real.to(tl.int32)
        if dx is not None:
            dh = g
            if stats is not None or a is not None:
                dh = dh * factor[None, :]
            if stats is not None or b is not None:
                dh = dh - off * slope[None, :]
            if d is not None:
                dh = dh - constant[None, :]
            if groups > 0:
                if along is not None:
                    mean = tl.load(along + at, mask=present, other=0.0)
                else:
                    mean = tl.sum(dh * h, 1) / width
                dh = (dh - h * mean[:, None]) * inverse[:, None]
            if padding is not None:
                dh = tl.where(real[:, None], dh, 0.0)
            tl.store(dx + offsets, dh, mask=present[:, None] & inside[None, :])
    if sums is not None:
        sum_dy_h = tl.sum(total_dy_h, 0)
        tl.store(sums + 2 * strip * channels + columns, tl.sum(total_dy, 0), mask=inside)
        tl.store(sums + (2 * strip + 1) * channels + columns, sum_dy_h, mask=inside)
        if flags is not None:
            flag = tl.max(tl.max(live, 1), 0)
            if stats is not None:
                value = sum_dy_h * r
                if gain is not None:
                    value = value * vector(gain, columns, inside, kind)
                sum_sq = vector(stats, columns, inside, kind)
                # If a strip's sums times the number of strips are finite, then so are the sums over all strips.
                finite = tl.abs(value / scale) * strips < float("inf")
                finite = finite & (sum_sq < float("inf")) & (sum_sq * r * r < float("inf"))
                flag += 2 * tl.max(1 - finite.to(tl.int32), 0)
            tl.store(flags + strip * tl.num_programs(1) + tl.program_id(1), flag)
        if counts is not None:
            tl.store(counts + strip, tl.sum(seen, 0), mask=tl.program_id(1) == 0)


@triton.jit
def wide_forward(
    x, padding, s, eps: tl.constexpr, channels: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """s (N, G) where a group is wider than a tile; a program has one group of a row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = width
    if padding is not None:
        limit = tl.where(tl.load(padding + row) == 0, width, 0)
    total = tl.zeros([block], kind)
    for first in range(0, width, block):
        inner = first + tl.arange(0, block)
        inside = inner < limit
        h = tl.load(x + row * channels + group * width + inner, mask=inside, other=0.0).to(kind)
        total += h * h
    tl.store(s + row * groups + group, inverse_root(tl.sum(total, 0) / width, eps))


@triton.jit
def wide_backward(
    x, dy, padding, s, a, b, d, shift, along, channels: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The mean over the group of dh * h (N, G), for ``backward_rows``; a program has one group of a row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = width
    if padding is not None:
        limit = tl.where(tl.load(padding + row) == 0, width, 0)
    inverse = tl.load(s + row * groups + group)
    total = tl.zeros([block], kind)
    for first in range(0, width, block):
        inner = first + tl.arange(0, block)
        columns = group * width + inner
        inside = inner < limit
        h = tl.load(x + row * channels + columns, mask=inside, other=0.0).to(kind) * inverse
        dh = tl.load(dy + row * channels + columns, mask=inside, other=0.0).to(kind)
        if a is not None:
            dh = dh * vector(a, columns, inside, kind)
        if b is not None:
            off = h
            if shift is not None:
                off = h - vector(shift, columns, inside, kind)
            dh = dh - off * vector(b, columns, inside, kind)
        if d is not None:
            dh = dh - vector(d, columns, inside, kind)
        total += dh * h
    tl.store(along + row * groups + group, tl.sum(total, 0) / width)


@triton.jit(do_not_specialize=["n_rows"])
def moment_rows(
    x, padding, s, new_s, partial, counts, n_rows, eps: tl.constexpr, channels: tl.constexpr, width: tl.constexpr,
    groups: tl.constexpr, per_group: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Partial (strips, 2, C) mean of h and sum of squared deviations from it, numbers of real rows (strips,).

    Each row of the tile keeps moments of its own (Welford, "Note on a method for calculating corrected sums of squares
    and products", 1962), which are put together at the end.
    """
    strip = tl.program_id(0)
    group, columns, inside = _tile(tl.program_id(1), per_group, width, block)
    n = tl.zeros([rows], kind)
    mean = tl.zeros([rows, block], kind)
    deviation = tl.zeros([rows, block], kind)
    for index in range(strip, tl.cdiv(n_rows, rows), tl.num_programs(0)):
        row = index * rows + tl.arange(0, rows)
        present = row < n_rows
        real = present
        if padding is not None:
            real = present & (tl.load(padding + row, mask=present, other=1) == 0)
        offsets = row.to(tl.int64)[:, None] * channels + columns[None, :]
        h = tl.load(x + offsets, mask=real[:, None] & inside[None, :], other=0.0).to(kind)
        if groups > 0:
            at = row.to(tl.int64) * groups + group
            if s is not None:
                inverse = tl.load(s + at, mask=present, other=0.0)
            else:
                inverse = inverse_root(tl.sum(h * h, 1) / width, eps)
                tl.store(new_s + at, inverse, mask=present)
            h = h * inverse[:, None]
        new = real.to(kind)
        n += new
        off = tl.where(real[:, None], h - mean, 0.0)
        mean += off * (new / tl.maximum(n, 1.0))[:, None]
        deviation += off * (h - mean)
    count = tl.sum(n, 0)
    centre = tl.sum(mean * n[:, None], 0) / tl.maximum(count, 1.0)
    off = mean - centre[None, :]
    total = tl.sum(deviation + off * off * n[:, None], 0)
    tl.store(partial + 2 * strip * channels + columns, centre, mask=inside)
    tl.store(partial + (2 * strip + 1) * channels + columns, total, mask=inside)
    tl.store(counts + strip, count.to(tl.int32), mask=tl.program_id(1) == 0)
