"""The mathematics of the norms as differentiable functions, without state.

Notation: x has channels last; ``padding`` has shape ``x.shape[:-1]`` and is True at padding, which is left out of
every statistic and gets zero output and zero gradient. With layer scale h is x divided by its root mean square over
each channel group of a token, without it (``groups=0``) h = x.

Statistics are computed in float32, in float64 for float64 input, and cast once at the end. What backward passes keep is
the input, one number per token and group, and channel vectors.

Each is an autograd function in Python. Where the binding of the CPU kernels was built, that is the same in C++ and
costs less per call; where ``torch.compile`` traces, the same functions appear as operators (``norms.operators``).
"""

import ctypes
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from powernorm_fairseq.norms import formulas, kernels, loss_scale, operators
from powernorm_fairseq.norms.loss_scale import get_gradient_scale
from powernorm_fairseq.norms.rows import (
    any_nonzero,
    compute_dtype,
    forward_pass,
    moments,
    real_rows,
    standardize_backward,
    standardize_forward,
    vector,
)

Record = Callable[[Tensor], None]
Watch = Callable[..., None]

_ONE = ctypes.c_double(1.0)
_ONE_ADDRESS = ctypes.addressof(_ONE)


def _flat(x: Tensor, padding: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    if padding is not None:
        if padding.shape != x.shape[:-1]:
            raise ValueError(f"expected a mask of shape {tuple(x.shape[:-1])}, got {tuple(padding.shape)}")
        plain = not (operators.tracing() or kernels.jit_tracing()) and kernels.fused(x) is None
        if plain and padding.device.type == "cpu" and not padding.any():
            padding = None  # less work, same result
        else:
            padding = padding.reshape(-1).contiguous()
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x.contiguous(), padding


def _like(grad: Optional[Tensor], parameter: Optional[Tensor]) -> Optional[Tensor]:
    return None if grad is None or parameter is None else grad.to(parameter.dtype)


class _GroupRMSScale(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, padding: Any, groups: int, eps: float, factor: Any, shift: Any
    ) -> Tensor:
        y, s = formulas.group_rms_scale_forward(x, weight, bias, padding, groups, eps, factor, shift)
        ctx.save_for_backward(x, weight, bias, padding, s, factor, shift)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, factor, shift = ctx.saved_tensors
        want_dx, want_sums = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        dx, dweight, dbias = formulas.group_rms_scale_backward(
            x, dy, weight, padding, s, factor, shift, want_dx, want_sums
        )
        return (dx, _like(dweight, weight), _like(dbias, bias)) + (None,) * 5


def group_rms_scale(
    x: Tensor,
    groups: int = 1,
    eps: float = 1e-5,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    padding: Optional[Tensor] = None,
    factor: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
) -> Tensor:
    """Layer scale, gain and bias: y = (h - shift) * factor * weight + bias.

    The layer scale is h = x / sqrt(mean of x^2 over the group + eps). With one group this is RMSNorm (Zhang and
    Sennrich 2019); PowerNorm puts it in front with one group per attention head. ``groups=0`` leaves the scale out.
    ``factor`` and ``shift`` are constants: running statistics in evaluation.

    Args:
        x: (..., C).
        weight, bias, factor, shift: (C,) or None.
    """
    binding = kernels.binding(x)
    if binding is not None:
        return binding.group_rms_scale(x, weight, bias, padding, groups, eps, factor, shift)
    rows, flat = _flat(x, padding)
    arguments = (rows, weight, bias, flat, groups, eps, factor, shift)
    if operators.tracing():
        y = operators.group_rms_scale(*arguments)
    elif torch.is_grad_enabled():
        y = _GroupRMSScale.apply(*arguments)
    else:
        y = formulas.group_rms_scale_forward(*arguments)[0]
    return y.view(x.shape)


class _PowerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, padding: Any, psi_sq: Tensor, nu: Tensor, groups: int, eps: float,
        use_batch_psi: bool, released: bool, record: Any, scale: Any, workers: Any,
    ) -> Tensor:  # fmt: skip
        y, s, stats = formulas.power_norm_forward(
            x, weight, bias, padding, psi_sq, groups, eps, use_batch_psi, released, workers
        )
        # A copy of nu: until the backward pass the norm may have absorbed another update.
        ctx.save_for_backward(x, weight, bias, padding, s, stats, nu.to(stats.dtype, copy=True))
        ctx.record, ctx.scale = record, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, stats, nu = ctx.saved_tensors
        grads = formulas.power_norm_backward(
            x, dy, weight, padding, s, stats, nu, 1.0 if ctx.scale is None else ctx.scale(), ctx.needs_input_grad[0]
        )
        if ctx.record is not None:
            ctx.record(grads.contribution)
        return (grads.dx, _like(grads.dweight, weight), _like(grads.dbias, bias)) + (None,) * 10


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
    gradient_scale: Optional[Callable[[], float]] = None,
    workers: Any = None,
    token: Optional[Tensor] = None,
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
        record: called in the backward pass with what it adds to the running statistics: the sums of h^2, xhat^2 and
            g * xhat over real tokens (:func:`norms.formulas.contribution`).
        gradient_scale: asked in the backward pass for the factor by which gradients are scaled; the last sum is divided
            by it and ``nu`` is multiplied by it; None for 1.
        workers: the batch's quadratic mean, where one is used, is that of the batches of all these workers together
            (``norms.running.Workers``); the forward pass then has a collective.
        token: names the norm to the operator that stands for ``record`` where ``torch.compile`` traces.
    """
    binding = kernels.binding(x) if workers is None else None
    if binding is not None and gradient_scale in (None, get_gradient_scale):
        where = _ONE_ADDRESS if gradient_scale is None else loss_scale.ADDRESS
        return binding.power_norm(
            x, weight, bias, padding, psi_sq, nu, groups, eps, use_batch_psi, released, record, where
        )
    rows, flat = _flat(x, padding)
    if operators.tracing() and workers is None:
        y = operators.power_norm(rows, weight, bias, flat, psi_sq, nu, token, groups, eps, use_batch_psi, released)
        return y.view(x.shape)
    return _PowerNorm.apply(
        rows, weight, bias, flat, psi_sq, nu, groups, eps, use_batch_psi, released, record, gradient_scale, workers
    ).view(x.shape)


class _PowerNormV(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, padding: Any, groups: int, eps: float, record: Any, workers: Any,
        watch: Any,
    ) -> Tensor:  # fmt: skip
        y, s, stats, total_count = formulas.power_norm_v_forward(x, weight, bias, padding, groups, eps, workers)
        ctx.save_for_backward(x, weight, bias, padding, s, stats, total_count)
        ctx.record, ctx.workers, ctx.watch = record, workers, watch
        ctx.counted = workers is None or workers.batch_counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, stats, total_count = ctx.saved_tensors
        grads = formulas.power_norm_v_backward(
            x, dy, weight, padding, s, stats, ctx.needs_input_grad[0], ctx.workers, total_count, ctx.counted
        )
        if ctx.record is not None:
            ctx.record(grads.contribution)
        if ctx.watch is not None:
            _watch(ctx.watch, x, dy, weight, padding, grads.dweight)
        return (grads.dx, _like(grads.dweight, weight), _like(grads.dbias, bias)) + (None,) * 6


def _watch(watch: Watch, x: Tensor, dy: Tensor, weight: Any, padding: Any, *sums: Tensor) -> None:
    """Hands on sums of dy times something as sums of g = weight * dy."""
    gain = vector(weight, x)
    watch(any_nonzero(dy, padding), real_rows(x, padding), *(part if gain is None else part * gain for part in sums))


def power_norm_v(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    padding: Optional[Tensor] = None,
    groups: int = 1,
    eps: float = 1e-5,
    record: Optional[Record] = None,
    workers: Any = None,
    watch: Optional[Watch] = None,
    token: Optional[Tensor] = None,
) -> Tensor:
    """PN-V in training (Shen et al. 2020, section 4): xhat = h / sqrt(batch mean of h^2 + eps), with exact gradient.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
        record: called in the backward pass with its contribution, the sum of h^2 over real tokens.
        workers: the batch is that of all these workers together; a collective in the forward pass and one in the
            backward pass.
        watch: called in the backward pass with live (), count () and the sum (C,) of g * xhat over real tokens;
            live says whether any upstream gradient was not zero.
        token: see :func:`power_norm`; there is none for ``watch``.
    """
    alone = workers is None and watch is None
    binding = kernels.binding(x) if alone else None
    if binding is not None:
        return binding.power_norm_v(x, weight, bias, padding, groups, eps, record)
    rows, flat = _flat(x, padding)
    if operators.tracing() and alone:
        return operators.power_norm_v(rows, weight, bias, flat, token, groups, eps).view(x.shape)
    return _PowerNormV.apply(rows, weight, bias, flat, groups, eps, record, workers, watch).view(x.shape)


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, padding: Any, groups: int, eps: float, record: Any, workers: Any,
        watch: Any,
    ) -> Tensor:  # fmt: skip
        y, s, stats, *joint = formulas.batch_norm_forward(x, weight, bias, padding, groups, eps, workers)
        ctx.save_for_backward(x, weight, bias, padding, s, stats, *joint)
        ctx.record, ctx.workers, ctx.watch = record, workers, watch
        ctx.counted = workers is None or workers.batch_counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, padding, s, stats, total_count, centre = ctx.saved_tensors
        grads = formulas.batch_norm_backward(
            x, dy, weight, padding, s, stats, ctx.needs_input_grad[0], ctx.workers, total_count, centre, ctx.counted
        )
        if ctx.record is not None:
            ctx.record(grads.contribution)
        if ctx.watch is not None:
            _watch(ctx.watch, x, dy, weight, padding, grads.dbias, grads.dweight)
        return (grads.dx, _like(grads.dweight, weight), _like(grads.dbias, bias)) + (None,) * 6


def batch_norm(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    padding: Optional[Tensor] = None,
    groups: int = 0,
    eps: float = 1e-5,
    record: Optional[Record] = None,
    workers: Any = None,
    watch: Optional[Watch] = None,
    token: Optional[Tensor] = None,
) -> Tensor:
    """BatchNorm in training over real tokens: y = weight * (h - mean) / sqrt(biased variance + eps) + bias.

    Args:
        x: (..., C).
        weight, bias: (C,) or None.
        record: called in the backward pass with its contribution, the sums of h and of h^2 over real tokens.
        workers: the batch is that of all these workers together; a collective in the forward pass and one in the
            backward pass.
        watch: called in the backward pass with live (), count () and the sums (C,) of g = weight * dy and of g * xhat
            over real tokens.
        token: see :func:`power_norm`; there is none for ``watch``.
    """
    alone = workers is None and watch is None
    binding = kernels.binding(x) if alone else None
    if binding is not None:
        return binding.batch_norm(x, weight, bias, padding, groups, eps, record)
    rows, flat = _flat(x, padding)
    if operators.tracing() and alone:
        return operators.batch_norm(rows, weight, bias, flat, token, groups, eps).view(x.shape)
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
    return F.layer_norm(x.to(compute_dtype(x)), shape, vector(weight, x), vector(bias, x), eps).to(x.dtype)


class _Standardize(Function):
    """y = (x - mean) / sigma per token, and z = phi * y with phi = scale * (1 - k * y) a constant in the backward pass.

    Either statistic may be a constant in the backward pass too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, released: bool, detach_mean: bool, detach_sigma: bool, scale: float, k: float
    ) -> Tensor:
        z, mean, inverse = standardize_forward(x, eps, released, scale, k)
        ctx.save_for_backward(x, mean, inverse)
        ctx.options = eps, released, detach_mean, detach_sigma, scale, k
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Any:
        return (standardize_backward(ctx.saved_tensors[0], dz, *ctx.saved_tensors[1:], *ctx.options),) + (None,) * 6


def _standardized(x: Tensor, *options: Any) -> Tensor:
    binding = kernels.binding(x)
    if binding is not None:
        return binding.standardize(x, *options)
    apply = operators.standardize if operators.tracing() else _Standardize.apply
    return apply(_flat(x, None)[0], *options).view(x.shape)


def ada_norm(x: Tensor, scale: float = 1.0, k: float = 0.1, eps: float = 1e-5, released: bool = False) -> Tensor:
    """AdaNorm (Xu et al. 2019, section 4): z = C * (1 - k * y) * y, y = (x - mean) / sigma per token, C = ``scale``.

    The factor C * (1 - k * y) is a constant in the backward pass.

    Args:
        x: (..., C).
        released: sigma is the unbiased standard deviation plus ``eps``, not the root of the biased variance plus
            ``eps``, as in the released code.
    """
    return _standardized(x, eps, released, False, False, scale, k)


def standardize(
    x: Tensor, eps: float = 1e-5, released: bool = False, detach_mean: bool = False, detach_sigma: bool = False
) -> Tensor:
    """y = (x - mean) / sigma per token; DetachNorm (Xu et al. 2019, section 3) if a statistic is detached.

    Args:
        x: (..., C).
        released: see :func:`ada_norm`.
        detach_mean, detach_sigma: the statistic is a constant in the backward pass.
    """
    return _standardized(x, eps, released, detach_mean, detach_sigma, 1.0, 0.0)
