"""Triton kernels that finish what ``gpu_rows`` began: they add up partial sums over strips, in a fixed order.

A program has ``block`` channels and takes ``depth`` strips at a time.
"""
# mypy: allow-untyped-defs, allow-untyped-calls
# (An annotation of a kernel's argument means something else to Triton.)
# ruff: noqa: SIM102, SIM108
# (An `if` on what is compiled in chooses what is compiled.)

import triton
import triton.language as tl

from powernorm_fairseq.norms.kernels.gpu_rows import inverse_root, vector


@triton.jit
def _total(partial, columns, inside, strips, stride, depth: tl.constexpr, block: tl.constexpr, kind: tl.constexpr):
    """The sum over strips of ``partial`` (strips, stride) for some columns."""
    total = tl.zeros([depth, block], kind)
    for first in range(0, strips, depth):
        strip = first + tl.arange(0, depth)
        taken = (strip < strips)[:, None] & inside[None, :]
        total += tl.load(partial + strip[:, None] * stride + columns[None, :], mask=taken, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _count(counts, strips, depth: tl.constexpr):
    total = tl.zeros([depth], tl.int32)
    for first in range(0, strips, depth):
        strip = first + tl.arange(0, depth)
        total += tl.load(counts + strip, mask=strip < strips, other=0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["strips"])
def finish_sums(
    partial, totals, strips, channels: tl.constexpr, depth: tl.constexpr, block: tl.constexpr, kind: tl.constexpr
):
    """Totals (C,) of partial sums (strips, C)."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    total = _total(partial, columns, inside, strips, channels, depth, block, kind)
    tl.store(totals + columns, total, mask=inside)


@triton.jit(do_not_specialize=["strips"])
def finish_moments(
    partial, counts, count, moments, strips, channels: tl.constexpr, depth: tl.constexpr, block: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    """Count () and moments (2, C), mean and sum of squared deviations, of all strips.

    Deviations are taken from the common mean, which loses nothing: Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979.
    """
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    n = _count(counts, strips, depth).to(kind)
    total = tl.zeros([depth, block], kind)
    for first in range(0, strips, depth):
        strip = first + tl.arange(0, depth)
        weight = tl.load(counts + strip, mask=strip < strips, other=0).to(kind)
        taken = (strip < strips)[:, None] & inside[None, :]
        mean = tl.load(partial + (2 * strip * channels)[:, None] + columns[None, :], mask=taken, other=0.0)
        total += mean * weight[:, None]
    centre = tl.sum(total, 0) / tl.maximum(n, 1.0)
    total = tl.zeros([depth, block], kind)
    for first in range(0, strips, depth):
        strip = first + tl.arange(0, depth)
        weight = tl.load(counts + strip, mask=strip < strips, other=0).to(kind)
        taken = (strip < strips)[:, None] & inside[None, :]
        at = partial + (2 * strip * channels)[:, None] + columns[None, :]
        off = tl.load(at, mask=taken, other=0.0) - centre[None, :]
        total += tl.load(at + channels, mask=taken, other=0.0) + off * off * weight[:, None]
    tl.store(moments + columns, centre, mask=inside)
    tl.store(moments + channels + columns, tl.sum(total, 0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, n)


@triton.jit(do_not_specialize=["strips"])
def finish_forward(
    partial, counts, psi_sq, stats, strips, by_batch: tl.constexpr, back_by_batch: tl.constexpr, eps: tl.constexpr,
    channels: tl.constexpr, depth: tl.constexpr, block: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """PowerNorm's stats (3, C): sum of h^2, r of the forward pass and r of the backward pass."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < channels
    sum_sq = _total(partial, columns, inside, strips, channels, depth, block, kind)
    tl.store(stats + columns, sum_sq, mask=inside)
    if back_by_batch:
        r_back = inverse_root(sum_sq / tl.maximum(_count(counts, strips, depth), 1).to(kind), eps)
    if by_batch:
        r = r_back
    else:
        r = inverse_root(vector(psi_sq, columns, inside, kind), eps)
    tl.store(stats + channels + columns, r, mask=inside)
    if back_by_batch:
        tl.store(stats + 2 * channels + columns, r_back, mask=inside)
    else:
        tl.store(stats + 2 * channels + columns, r, mask=inside)


@triton.jit(do_not_specialize=["strips", "n_flags", "n_rows"])
def finish_backward(
    sums, flags, counts, stats, gain, grads, row, dx, strips, n_flags, n_rows, high, low, channels: tl.constexpr,
    depth: tl.constexpr, block: tl.constexpr, kind: tl.constexpr, zero_rows: tl.constexpr, zero_block: tl.constexpr,
):  # fmt: skip
    """PowerNorm's gradients (2, C) of gain and bias, and its contribution (2 + 3C,) to the running statistics.

    Where no dy was other than zero, dx is set to zero.
    """
    program = tl.program_id(0)
    found = tl.zeros([depth], tl.int32)
    for first in range(0, n_flags, depth):
        at = first + tl.arange(0, depth)
        found = found | tl.load(flags + at, mask=at < n_flags, other=0)
    live = tl.max(found & 1, 0) == 1
    finite = tl.max(found & 2, 0) == 0
    if program * block < channels:
        columns = program * block + tl.arange(0, block)
        inside = columns < channels
        r = vector(stats + channels, columns, inside, kind)
        dweight = _total(sums + channels, columns, inside, strips, 2 * channels, depth, block, kind) * r
        tl.store(grads + columns, dweight, mask=inside)
        dbias = _total(sums, columns, inside, strips, 2 * channels, depth, block, kind)
        tl.store(grads + channels + columns, dbias, mask=inside)
        sum_sq = vector(stats, columns, inside, kind)
        sum_g_xhat = dweight
        if gain is not None:
            sum_g_xhat = sum_g_xhat * vector(gain, columns, inside, kind)
        sum_g_xhat = sum_g_xhat / (tl.zeros([block], kind) + high + low)
        counted = live & finite
        tl.store(row + 2 + columns, tl.where(counted, sum_sq, 0.0).to(tl.float64), mask=inside)
        sum_xhat_sq = tl.where(counted, sum_sq * r * r, 0.0)
        tl.store(row + 2 + channels + columns, sum_xhat_sq.to(tl.float64), mask=inside)
        sum_g_xhat = tl.where(counted, sum_g_xhat, 0.0)
        tl.store(row + 2 + 2 * channels + columns, sum_g_xhat.to(tl.float64), mask=inside)
        if program == 0:
            tl.store(row, (live & (finite == 0)).to(tl.float64))
            tl.store(row + 1, tl.where(counted, _count(counts, strips, depth), 0).to(tl.float64))
    if dx is not None:
        if live == 0:
            for first in range(program * zero_rows, n_rows, tl.num_programs(0) * zero_rows):
                lines = first + tl.arange(0, zero_rows)
                for start in range(0, channels, zero_block):
                    places = start + tl.arange(0, zero_block)
                    offsets = lines.to(tl.int64)[:, None] * channels + places[None, :]
                    taken = (lines < n_rows)[:, None] & (places < channels)[None, :]
                    tl.store(dx + offsets, tl.zeros([zero_rows, zero_block], dx.dtype.element_ty), mask=taken)
