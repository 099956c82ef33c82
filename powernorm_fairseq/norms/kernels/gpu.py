"""The fused implementation for CUDA devices: Triton kernels (gpu_rows, gpu_totals, gpu_tokens) and what launches them.

Functions here have the names, arguments and results of the plain implementations in ``norms.rows`` and
``norms.formulas``; vectors may be of any floating-point type. None of them waits for the device or asks for a tensor's
value, so that the processor runs ahead and CUDA graphs can be captured, and each gives the same result whenever it is
called with the same tensors on the same kind of device.

Unit: one read or write of N * C elements. PowerNorm with layer scale and padding takes 2 in the forward pass (3 in the
warm-up) and 3 in the backward pass, as many as LayerNorm, with one kernel over the rows and one that finishes the
sums in each.

Needs Triton 3. Tried with 3.9 through its interpreter (``TRITON_INTERPRET=1``, which works on CPU tensors), and with
3.0 and 3.9 by compiling for compute capability 8.0 and 9.0. Not measured on a GPU.
"""

import ctypes
import logging
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powernorm_fairseq.norms.formulas import contribution, mean_and_squares
from powernorm_fairseq.norms.rows import Backward, Forward, compute_dtype, real_rows

if int(triton.__version__.split(".")[0]) < 3:
    raise ImportError(f"Triton 3 is needed, which comes with PyTorch 2.4; this is {triton.__version__}")

from powernorm_fairseq.norms.kernels.gpu_rows import (
    backward_rows,
    forward_rows,
    moment_rows,
    wide_backward,
    wide_forward,
)
from powernorm_fairseq.norms.kernels.gpu_tokens import standardize_back_rows, standardize_rows
from powernorm_fairseq.norms.kernels.gpu_totals import (
    finish_backward,
    finish_forward,
    finish_moments,
    finish_sums,
)

logger = logging.getLogger(__name__)

FORWARD_ELEMENTS = 2048  # of a tile for 4 warps: 16 of each tensor in a thread's registers
BACKWARD_ELEMENTS = 1024  # the backward pass holds more tensors at once
WIDEST_GROUP = 8192  # a row of a channel group is one tile up to here
COLUMNS = 512  # of a tile where nothing asks for a whole group
WARPS_PER_PROCESSOR = 20  # that are started: all at once have room, with 100 registers to a thread
DEPTH, BLOCK = 64, 32  # strips by channels that a finishing program adds up at a time


def usable() -> bool:
    """Whether kernels can be built and started here; says in the log why not."""
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        ones = torch.ones(3, 5, device=device)
        return _totals(ones).shape == (5,)
    except Exception as error:  # no compiler, no driver, an old device: Triton has an exception for each
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning(f"the norms' fused GPU kernels cannot be used ({reason}): plain PyTorch is, which is slower")
        return False


class _Tiling(NamedTuple):
    tiles: int  # over the channels
    strips: int  # over the rows
    warps: int  # per program
    wide: bool  # a channel group has several tiles
    constants: Dict[str, Any]


@lru_cache(maxsize=None)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _kind(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _tiling(x: Tensor, groups: int, elements: int) -> _Tiling:
    """How a pass over ``x`` is cut; depends on the shape and the device alone."""
    count, channels = x.shape
    width = channels // max(groups, 1)
    wide = groups > 0 and width > WIDEST_GROUP
    block = max(triton.next_power_of_2(width), 16)
    if wide or not groups:
        block = min(block, COLUMNS)
    per_group = triton.cdiv(width, block)
    tiles = max(groups, 1) * per_group
    rows = max(elements // block, 1)
    warps = min(max(4 * block * rows // elements, 4), 16)
    blocks = triton.cdiv(count, rows)
    most = max(_processors(x.device) * WARPS_PER_PROCESSOR // warps // tiles, 1)
    turns = max(triton.cdiv(blocks, most), 1)  # as many for each program as can be
    constants = {"channels": channels, "width": width, "groups": groups, "per_group": per_group, "rows": rows}
    constants.update(block=block, kind=_kind(x))
    return _Tiling(tiles, max(triton.cdiv(blocks, turns), 1), warps, wide, constants)


def _launch(kernel: Any, grid: Tuple[int, ...], *args: Any, warps: int = 4, **constants: Any) -> None:
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, num_warps=warps, **constants)


def _bytes(padding: Optional[Tensor]) -> Optional[Tensor]:
    return None if padding is None else padding.contiguous().view(torch.uint8)


def _new(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=compute_dtype(x), device=x.device)


def _counts(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=x.device)


def _finishing(x: Tensor) -> Dict[str, Any]:
    return {"channels": x.shape[1], "depth": DEPTH, "block": BLOCK, "kind": _kind(x)}


def _totals(partial: Tensor) -> Tensor:
    """The sums (C,) of partial sums (strips, C)."""
    strips, channels = partial.shape
    totals = torch.empty_like(partial[0])
    _launch(finish_sums, (triton.cdiv(channels, BLOCK),), partial, totals, strips, **_finishing(partial))
    return totals


def _scales(x: Tensor, padding: Optional[Tensor], groups: int, eps: float, wide: bool) -> Tuple[Any, Any]:
    """s and whether a pass over the rows has to write it: (s, None) or (None, s)."""
    if not groups:
        return None, None
    s = _new(x, x.shape[0], groups)
    if not wide:
        return None, s
    if x.shape[0]:
        constants = {"channels": x.shape[1], "width": x.shape[1] // groups, "groups": groups, "kind": _kind(x)}
        _launch(wide_forward, s.shape, x, padding, s, eps=eps, block=COLUMNS, **constants)
    return s, None


class _Sums(NamedTuple):
    s: Optional[Tensor]
    partial: Optional[Tensor]  # sums of h^2 (strips, C)
    counts: Optional[Tensor]  # real rows (strips,)


def _forward(
    x: Tensor, padding: Optional[Tensor], groups: int, eps: float, s: Optional[Tensor], factors: Tuple[Any, ...],
    y: Optional[Tensor], root: bool = False, want_sum_sq: bool = True, want_counts: bool = False,
) -> _Sums:  # fmt: skip
    """One pass over the rows of ``x``; ``factors`` are r, gain, bias and shift (``forward_rows``)."""
    tiling = _tiling(x, groups, FORWARD_ELEMENTS)
    new_s = None
    if s is None:
        s, new_s = _scales(x, padding, groups, eps, tiling.wide)
    partial = _new(x, tiling.strips, x.shape[1]) if want_sum_sq else None
    counts = _counts(x, tiling.strips) if want_counts else None
    _launch(
        forward_rows, (tiling.strips, tiling.tiles), x, padding, s, new_s, *factors, y, partial, counts, x.shape[0],
        root=root, eps=eps, warps=tiling.warps, **tiling.constants,
    )  # fmt: skip
    return _Sums(s if new_s is None else new_s, partial, counts)


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
    """See :func:`norms.rows.forward_pass`."""
    y = torch.empty_like(x) if want_y else None
    sums = _forward(x, _bytes(padding), groups, eps, s, (a, gain, b, shift), y, want_sum_sq=want_sum_sq)
    return Forward(y, sums.s, None if sums.partial is None else _totals(sums.partial))


def _along(x: Tensor, dy: Tensor, padding: Optional[Tensor], s: Tensor, a: Any, b: Any, d: Any, shift: Any) -> Tensor:
    """The mean over each group of dh * h (N, G), where a group has several tiles."""
    along = torch.empty_like(s)
    if x.shape[0]:
        groups = s.shape[1]
        constants = {"channels": x.shape[1], "width": x.shape[1] // groups, "groups": groups, "kind": _kind(x)}
        _launch(wide_backward, s.shape, x, dy, padding, s, a, b, d, shift, along, block=COLUMNS, **constants)
    return along


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
    """See :func:`norms.rows.backward_pass`."""
    return _backward(x, dy, padding, s, a, b, d, shift, want_dx, want_sums)


def _backward(
    x: Tensor, dy: Tensor, padding: Optional[Tensor], s: Optional[Tensor], a: Any, b: Any, d: Any, shift: Any,
    want_dx: bool, want_sums: bool, flags: Optional[List[Tensor]] = None,
) -> Backward:  # fmt: skip
    """:func:`backward_pass`, which also appends to ``flags``, if given, what says whether a dy was not zero."""
    dy, padding = dy.contiguous(), _bytes(padding)
    tiling = _tiling(x, 0 if s is None else s.shape[1], BACKWARD_ELEMENTS)
    dx = torch.empty_like(x) if want_dx else None
    sums = _new(x, tiling.strips, 2 * x.shape[1]) if want_sums else None
    along = _along(x, dy, padding, s, a, b, d, shift) if s is not None and tiling.wide and want_dx else None
    live = None
    if flags is not None:
        live = _counts(x, tiling.strips, tiling.tiles)
        flags.append(live)
    _launch(
        backward_rows, (tiling.strips, tiling.tiles), x, dy, padding, s, along, a, b, d, shift, None, None, None, dx,
        sums, live, None, x.shape[0], 1.0, 0.0, warps=tiling.warps, **tiling.constants,
    )  # fmt: skip
    if sums is None:
        return Backward(dx, None, None)
    sum_dy, sum_dy_h = _totals(sums).view(2, -1)
    return Backward(dx, sum_dy, sum_dy_h)


def moments(
    x: Tensor, padding: Optional[Tensor], groups: int, eps: float
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:
    """See :func:`norms.rows.moments`."""
    padding = _bytes(padding)
    tiling = _tiling(x, groups, BACKWARD_ELEMENTS)
    s, new_s = _scales(x, padding, groups, eps, tiling.wide)
    partial, counts = _new(x, tiling.strips, 2, x.shape[1]), _counts(x, tiling.strips)
    _launch(
        moment_rows, (tiling.strips, tiling.tiles), x, padding, s, new_s, partial, counts, x.shape[0], eps=eps,
        warps=tiling.warps, **tiling.constants,
    )  # fmt: skip
    count, both = _new(x), _new(x, 2, x.shape[1])
    grid = (triton.cdiv(x.shape[1], BLOCK),)
    _launch(finish_moments, grid, partial, counts, count, both, tiling.strips, **_finishing(x))
    return s if new_s is None else new_s, count, both[0], both[1]


def power_norm_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], psi_sq: Tensor,
    groups: int, eps: float, use_batch_psi: bool, released: bool,
) -> Tuple[Tensor, Optional[Tensor], Tensor]:  # fmt: skip
    """See :func:`norms.formulas.power_norm_forward`."""
    padding = _bytes(padding)
    y, stats = torch.empty_like(x), _new(x, 3, x.shape[1])
    by_batch = use_batch_psi or released
    factors = (psi_sq, weight, bias, None)
    sums = _forward(
        x, padding, groups, eps, None, factors, None if use_batch_psi else y, root=True, want_counts=by_batch
    )
    assert sums.partial is not None
    _launch(
        finish_forward, (triton.cdiv(x.shape[1], BLOCK),), sums.partial, sums.counts, psi_sq, stats,
        sums.partial.shape[0], by_batch=use_batch_psi, back_by_batch=by_batch, eps=eps, **_finishing(x),
    )  # fmt: skip
    if use_batch_psi:
        _forward(x, padding, groups, eps, sums.s, (stats[1], *factors[1:]), y, want_sum_sq=False)
    return y, sums.s, stats


def power_norm_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    nu: Tensor, scale: float, want_dx: bool = True,
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`norms.formulas.power_norm_backward`."""
    dy, padding = dy.contiguous(), _bytes(padding)
    count, channels = x.shape
    tiling = _tiling(x, 0 if s is None else s.shape[1], BACKWARD_ELEMENTS)
    # Triton passes numbers in float32; the scale of float64 input takes two.
    high = ctypes.c_float(scale).value
    low = scale - high
    along = None
    if s is not None and tiling.wide and want_dx:
        r, r_back = stats[1], stats[2]
        a = r_back if weight is None else r_back * weight
        along = _along(x, dy, padding, s, a, nu * scale * r * r_back, None, None)
    dx = torch.empty_like(x) if want_dx else None
    sums, grads = _new(x, tiling.strips, 2, channels), _new(x, 2, channels)
    flags, counts = _counts(x, tiling.strips, tiling.tiles), _counts(x, tiling.strips)
    row = torch.empty(2 + 3 * channels, dtype=torch.float64, device=x.device)
    _launch(
        backward_rows, (tiling.strips, tiling.tiles), x, dy, padding, s, along, None, None, None, None, stats, weight,
        nu, dx, sums, flags, counts, count, high, low, warps=tiling.warps, **tiling.constants,
    )  # fmt: skip
    # Programs that have no channels to add up are there to set dx to zero.
    programs = max(triton.cdiv(channels, BLOCK), _processors(x.device) * 2 if want_dx else 1)
    _launch(
        finish_backward, (programs,), sums, flags, counts, stats, weight, grads, row, dx, tiling.strips, flags.numel(),
        count, high, low, zero_rows=8, zero_block=min(max(triton.next_power_of_2(channels), 16), 256), **_finishing(x),
    )  # fmt: skip
    return dx, grads[0], grads[1], row


def power_norm_v_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    want_dx: bool = True,
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`norms.formulas.power_norm_v_backward`."""
    sum_sq, r = stats
    flags: List[Tensor] = []
    _, sum_dy, sum_dy_h = _backward(x, dy, padding, s, None, None, None, None, False, True, flags)
    count = real_rows(x, padding)
    dx = None
    if want_dx:
        a = r if weight is None else r * weight
        b = a * r * r * (sum_dy_h / count.clamp(min=1))
        dx = backward_pass(x, dy, padding, s, a, b, want_sums=False).dx
    return dx, sum_dy_h * r, sum_dy, contribution(flags[0].any(), count, sum_sq)


def batch_norm_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    want_dx: bool = True,
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`norms.formulas.batch_norm_backward`."""
    mean, deviation, r = stats
    flags: List[Tensor] = []
    _, sum_dy, sum_dy_h = _backward(x, dy, padding, s, None, None, None, mean, False, True, flags)
    count = real_rows(x, padding)
    dx = None
    if want_dx:
        a = r if weight is None else r * weight
        n = count.clamp(min=1)
        dx = backward_pass(x, dy, padding, s, a, a * r * r * (sum_dy_h / n), a * (sum_dy / n), mean, True, False).dx
    row = contribution(flags[0].any(), *mean_and_squares(count, mean, deviation))
    return dx, sum_dy_h * r, sum_dy, row


def _tokens(x: Tensor, elements: int) -> Tuple[Tuple[int], Dict[str, Any]]:
    """Grid and constants of a pass that holds whole rows."""
    count, channels = x.shape
    block = max(triton.next_power_of_2(channels), 16)
    rows = max(elements // block, 1)
    warps = min(max(4 * block * rows // elements, 4), 32)
    constants = {"channels": channels, "rows": rows, "block": block, "kind": _kind(x), "warps": warps}
    return (triton.cdiv(count, rows),), constants


def standardize_forward(x: Tensor, eps: float, released: bool, scale: float, k: float) -> Tuple[Tensor, Tensor, Tensor]:
    """See :func:`norms.rows.standardize_forward`."""
    z, mean, inverse = torch.empty_like(x), _new(x, x.shape[0], 1), _new(x, x.shape[0], 1)
    grid, constants = _tokens(x, FORWARD_ELEMENTS)
    if x.shape[0]:
        constants.update(eps=eps, released=released, scale=scale, k=k)
        _launch(standardize_rows, grid, x, z, mean, inverse, x.shape[0], **constants)
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
    """See :func:`norms.rows.standardize_backward`."""
    dx = torch.empty_like(x)
    grid, constants = _tokens(x, BACKWARD_ELEMENTS)
    if x.shape[0]:
        constants.update(eps=eps, released=released, detach_mean=detach_mean, detach_sigma=detach_sigma)
        constants.update(scale=scale, k=k)
        _launch(standardize_back_rows, grid, x, dz.contiguous(), mean, inverse, dx, x.shape[0], **constants)
    return dx
