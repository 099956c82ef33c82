"""The norms as operators of ``torch.library``, so that ``torch.compile`` takes them into its graph without a break.

An operator is opaque to the compiler: its passes are already fused, and what a backward pass adds to the running
statistics must not happen while a graph is being made. A norm with running statistics is named in a graph by its
token, a number in a tensor; the operators that change the norm find it by that, and say that they change the token, so
that they are neither left out nor moved.

Without ``torch.compile`` the functions of ``norms.functional`` are used as they are, which costs less per call.
"""

import itertools
import weakref
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.norms import formulas
from powernorm_fairseq.norms.loss_scale import get_gradient_scale
from powernorm_fairseq.norms.rows import (
    compute_dtype,
    standardize_backward,
    standardize_forward,
)

NAMESPACE = "powernorm_fairseq"
AVAILABLE = hasattr(torch, "library") and hasattr(torch.library, "register_autograd")  # torch 2.4

_owners: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def tracing() -> bool:
    """Whether ``torch.compile`` is making a graph, and operators are to be put into it."""
    return AVAILABLE and torch.compiler.is_compiling()


def token_of(norm: Any) -> Tensor:
    """A new token of ``norm``: () int64."""
    number = next(_numbers)
    _owners[number] = norm
    return torch.tensor(number)


def _none_of_nothing(tensor: Tensor) -> Optional[Tensor]:
    """Operators return no None: a tensor without elements stands for it."""
    return tensor if tensor.numel() else None


def _nothing_of_none(tensor: Optional[Tensor], like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _scales(x: Tensor, groups: int) -> Tensor:
    return x.new_empty(x.shape[0] if groups else 0, groups, dtype=compute_dtype(x))


def _vectors(x: Tensor, *number: int) -> Tensor:
    return x.new_empty(*number, x.shape[1], dtype=compute_dtype(x))


def _gradients(x: Tensor, sums: int, want_dx: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a backward pass returns, without values."""
    row = x.new_empty(2 + sums * x.shape[1], dtype=torch.float64)
    return torch.empty_like(x) if want_dx else x.new_empty(0), _vectors(x), _vectors(x), row


def _like(grad: Tensor, parameter: Optional[Tensor]) -> Optional[Tensor]:
    return None if parameter is None else grad.to(parameter.dtype)


if AVAILABLE:
    _library = torch.library.Library(NAMESPACE, "DEF")


def _operator(
    schema: str, fake: Optional[Callable[..., Any]] = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as an operator, with ``fake`` for what it returns without values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not AVAILABLE:
            return function
        _library.define(schema)
        name = schema.split("(")[0]
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake or (lambda *args: None), lib=_library)
        return getattr(getattr(torch.ops, NAMESPACE), name)

    return register


def _differentiable(name: str, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    if AVAILABLE:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=save, lib=_library)


@_operator("begin(Tensor(a!) token, Tensor(b!)[] statistics) -> ()")
def begin(token: Tensor, statistics: List[Tensor]) -> None:
    """Lets a norm absorb the last update into its ``statistics``, if there is one; see RunningNorm.begin_forward."""
    norm = _owners[int(token)]
    norm.begin_forward()
    # In a graph they may be copies, which the graph writes back over the norm's own when it ends.
    for statistic, own in zip(statistics, norm.buffers(recurse=False)):
        if statistic is not own:
            statistic.copy_(own)


@_operator("record(Tensor(a!) token, Tensor contribution) -> ()")
def record(token: Tensor, contribution: Tensor) -> None:
    """RunningNorm.record for the norm of ``token``."""
    _owners[int(token)].record(contribution)


# ---- layer scale, gain and bias ----


@_operator(
    "group_rms_scale(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding, int groups, float eps, Tensor? factor, "
    "Tensor? shift) -> (Tensor, Tensor)",
    lambda x, weight, bias, padding, groups, *_: (torch.empty_like(x), _scales(x, groups)),
)
def _group_rms_scale(
    x: Tensor, weight: Any, bias: Any, padding: Any, groups: int, eps: float, factor: Any, shift: Any
) -> Tuple[Tensor, Tensor]:
    y, s = formulas.group_rms_scale_forward(x, weight, bias, padding, groups, eps, factor, shift)
    return y, _scales(x, 0) if s is None else s


@_operator(
    "group_rms_scale_backward(Tensor x, Tensor dy, Tensor? weight, Tensor? padding, Tensor s, Tensor? factor, "
    "Tensor? shift, bool want_dx) -> (Tensor, Tensor, Tensor)",
    lambda x, dy, weight, padding, s, factor, shift, want_dx: _gradients(x, 0, want_dx)[:3],
)
def _group_rms_scale_backward(
    x: Tensor, dy: Tensor, weight: Any, padding: Any, s: Tensor, factor: Any, shift: Any, want_dx: bool
) -> Tuple[Tensor, ...]:
    grads = formulas.group_rms_scale_backward(x, dy, weight, padding, _none_of_nothing(s), factor, shift, want_dx)
    return tuple(_nothing_of_none(part, x) for part in grads)


def _save_group_rms_scale(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, padding, _, _, factor, shift = inputs
    ctx.save_for_backward(x, weight, bias, padding, output[1], factor, shift)


def _backward_group_rms_scale(ctx: Any, dy: Tensor, _: Any) -> Any:
    x, weight, bias, padding, s, factor, shift = ctx.saved_tensors
    dx, dweight, dbias = _group_rms_scale_backward(x, dy, weight, padding, s, factor, shift, ctx.needs_input_grad[0])
    return (_none_of_nothing(dx), _like(dweight, weight), _like(dbias, bias), *[None] * 5)


_differentiable("group_rms_scale", _save_group_rms_scale, _backward_group_rms_scale)


def group_rms_scale(x: Tensor, *args: Any) -> Tensor:
    """See :func:`norms.functional.group_rms_scale`; x (N, C), the other arguments as in the operator's schema."""
    return _group_rms_scale(x, *args)[0]


# ---- PowerNorm ----


@_operator(
    "power_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding, Tensor psi_sq, Tensor nu, Tensor? token, "
    # With a token the norm is asked whether to use the batch's psi, so that no graph depends on the number of updates.
    "int groups, float eps, bool use_batch_psi, bool released) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, weight, bias, padding, psi_sq, nu, token, groups, *_: (
        torch.empty_like(x), _scales(x, groups), _vectors(x, 3), _vectors(x)
    ),
)  # fmt: skip
def _power_norm(
    x: Tensor, weight: Any, bias: Any, padding: Any, psi_sq: Tensor, nu: Tensor, token: Any,
    groups: int, eps: float, use_batch_psi: bool, released: bool,
) -> Tuple[Tensor, ...]:  # fmt: skip
    if token is not None:
        use_batch_psi = _owners[int(token)].divides_by_batch_psi()
    y, s, stats = formulas.power_norm_forward(x, weight, bias, padding, psi_sq, groups, eps, use_batch_psi, released)
    # A copy: until the backward pass the norm may have absorbed another update.
    return y, _scales(x, 0) if s is None else s, stats, nu.to(stats.dtype, copy=True)


@_operator(
    "power_norm_backward(Tensor x, Tensor dy, Tensor? weight, Tensor? padding, Tensor s, Tensor stats, Tensor nu, "
    "bool want_dx) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, dy, weight, padding, s, stats, nu, want_dx: _gradients(x, 3, want_dx),
)
def _power_norm_backward(
    x: Tensor, dy: Tensor, weight: Any, padding: Any, s: Tensor, stats: Tensor, nu: Tensor, want_dx: bool
) -> Tuple[Tensor, ...]:
    grads = formulas.power_norm_backward(
        x, dy, weight, padding, _none_of_nothing(s), stats, nu, get_gradient_scale(), want_dx
    )
    return (_nothing_of_none(grads.dx, x), *grads[1:])


def _save_power_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, padding, _, _, token = inputs[:7]
    ctx.save_for_backward(x, weight, bias, padding, token, *output[1:])


def _backward_power_norm(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, padding, token, s, stats, nu = ctx.saved_tensors
    grads = _power_norm_backward(x, dy, weight, padding, s, stats, nu, ctx.needs_input_grad[0])
    return _recorded(token, grads, weight, bias, 8)


def _recorded(token: Any, grads: Any, weight: Any, bias: Any, others: int) -> Any:
    dx, dweight, dbias, row = grads
    if token is not None:
        record(token, row)
    return (_none_of_nothing(dx), _like(dweight, weight), _like(dbias, bias), *[None] * others)


_differentiable("power_norm", _save_power_norm, _backward_power_norm)


def power_norm(x: Tensor, *args: Any) -> Tensor:
    """See :func:`norms.functional.power_norm`; x (N, C), the other arguments as in the operator's schema."""
    return _power_norm(x, *args)[0]


# ---- PN-V and BatchNorm ----


def _save_batch_statistics(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])


@_operator(
    "power_norm_v(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding, Tensor? token, int groups, float eps) -> "
    "(Tensor, Tensor, Tensor)",
    lambda x, weight, bias, padding, token, groups, eps: (torch.empty_like(x), _scales(x, groups), _vectors(x, 2)),
)
def _power_norm_v(
    x: Tensor, weight: Any, bias: Any, padding: Any, token: Any, groups: int, eps: float
) -> Tuple[Tensor, ...]:
    y, s, stats, _ = formulas.power_norm_v_forward(x, weight, bias, padding, groups, eps)
    return y, _scales(x, 0) if s is None else s, stats


@_operator(
    "power_norm_v_backward(Tensor x, Tensor dy, Tensor? weight, Tensor? padding, Tensor s, Tensor stats, bool want_dx) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, dy, weight, padding, s, stats, want_dx: _gradients(x, 1, want_dx),
)
def _power_norm_v_backward(
    x: Tensor, dy: Tensor, weight: Any, padding: Any, s: Tensor, stats: Tensor, want_dx: bool
) -> Tuple[Tensor, ...]:
    grads = formulas.power_norm_v_backward(x, dy, weight, padding, _none_of_nothing(s), stats, want_dx)
    return (_nothing_of_none(grads.dx, x), *grads[1:])


def _backward_power_norm_v(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, padding, token, s, stats = ctx.saved_tensors
    grads = _power_norm_v_backward(x, dy, weight, padding, s, stats, ctx.needs_input_grad[0])
    return _recorded(token, grads, weight, bias, 4)


_differentiable("power_norm_v", _save_batch_statistics, _backward_power_norm_v)


def power_norm_v(x: Tensor, *args: Any) -> Tensor:
    """See :func:`norms.functional.power_norm_v`; x (N, C), the other arguments as in the operator's schema."""
    return _power_norm_v(x, *args)[0]


@_operator(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding, Tensor? token, int groups, float eps) -> "
    "(Tensor, Tensor, Tensor)",
    lambda x, weight, bias, padding, token, groups, eps: (torch.empty_like(x), _scales(x, groups), _vectors(x, 3)),
)
def _batch_norm(
    x: Tensor, weight: Any, bias: Any, padding: Any, token: Any, groups: int, eps: float
) -> Tuple[Tensor, ...]:
    y, s, stats, _, _ = formulas.batch_norm_forward(x, weight, bias, padding, groups, eps)
    return y, _scales(x, 0) if s is None else s, stats


@_operator(
    "batch_norm_backward(Tensor x, Tensor dy, Tensor? weight, Tensor? padding, Tensor s, Tensor stats, bool want_dx) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, dy, weight, padding, s, stats, want_dx: _gradients(x, 2, want_dx),
)
def _batch_norm_backward(
    x: Tensor, dy: Tensor, weight: Any, padding: Any, s: Tensor, stats: Tensor, want_dx: bool
) -> Tuple[Tensor, ...]:
    grads = formulas.batch_norm_backward(x, dy, weight, padding, _none_of_nothing(s), stats, want_dx)
    return (_nothing_of_none(grads.dx, x), *grads[1:])


def _backward_batch_norm(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, padding, token, s, stats = ctx.saved_tensors
    grads = _batch_norm_backward(x, dy, weight, padding, s, stats, ctx.needs_input_grad[0])
    return _recorded(token, grads, weight, bias, 4)


_differentiable("batch_norm", _save_batch_statistics, _backward_batch_norm)


def batch_norm(x: Tensor, *args: Any) -> Tensor:
    """See :func:`norms.functional.batch_norm`; x (N, C), the other arguments as in the operator's schema."""
    return _batch_norm(x, *args)[0]


# ---- AdaNorm and DetachNorm ----


@_operator(
    "standardize(Tensor x, float eps, bool released, bool detach_mean, bool detach_sigma, float scale, float k) -> "
    "(Tensor, Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(x), _scales(x, 1), _scales(x, 1)),
)
def _standardize(
    x: Tensor, eps: float, released: bool, detach_mean: bool, detach_sigma: bool, scale: float, k: float
) -> Tuple[Tensor, ...]:
    return standardize_forward(x, eps, released, scale, k)


@_operator(
    "standardize_backward(Tensor x, Tensor dz, Tensor mean, Tensor inverse, float eps, bool released, "
    "bool detach_mean, bool detach_sigma, float scale, float k) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _standardize_backward(x: Tensor, *args: Any) -> Tensor:
    return standardize_backward(x, *args)


def _save_standardize(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.options = inputs[1:]


def _backward_standardize(ctx: Any, dz: Tensor, *_: Any) -> Any:
    x, mean, inverse = ctx.saved_tensors
    return (_standardize_backward(x, dz, mean, inverse, *ctx.options), *[None] * 6)


_differentiable("standardize", _save_standardize, _backward_standardize)


def standardize(x: Tensor, *args: Any) -> Tensor:
    """See :class:`norms.functional._Standardize`; x (N, C), the other arguments as in the operator's schema."""
    return _standardize(x, *args)[0]
