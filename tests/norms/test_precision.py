"""Low precision: at most twice the error of the plain formula in that precision, both against float64; and extremes."""

import math

import pytest
import torch
import torch.nn.functional as F

from powernorm_fairseq.norms import create_norm
from tests.norms.helpers import NAMES, RUNNING, step

every = pytest.mark.parametrize("name", NAMES)
NORMS_WITH_FORMULA = [name for name in NAMES if name != "none"]
EPS = 1e-5


def half_works_on_this_cpu():
    try:
        torch.rsqrt(torch.ones(2, 2, dtype=torch.float16)).mean(0)
    except RuntimeError:
        return False
    return True


TYPES = [torch.float32, torch.bfloat16] + [torch.float16] * half_works_on_this_cpu()


def plain(name, x, weight, bias, psi_sq, nu):
    """The formula as one writes it, in the type of its arguments; y and a function from dy to all gradients."""
    if name == "scale":
        y = weight[0] * x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
    elif name == "layer" and x.dtype in (torch.float32, torch.float64):
        y = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)  # torch's own is the plain one
    elif name in ("layer", "layer_simple", "ada", "detach"):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        if name == "detach":
            mean, variance = mean.detach(), variance.detach()
        y = (x - mean) * torch.rsqrt(variance + EPS)
        if name == "ada":
            y = 1 * (1 - 0.1 * y.detach()) * y
        if name == "layer":
            y = y * weight + bias
    elif name == "batch":
        y = (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + EPS) * weight + bias
    else:
        h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
        if name == "rms":
            y = h * weight
        elif name == "power_v":
            y = h * torch.rsqrt((h * h).mean(0) + EPS) * weight + bias
        else:
            r = torch.rsqrt(psi_sq + EPS)
            y = h * r * weight + bias
            # The term that the approximation subtracts, as part of the gradient of h.
            h.register_hook(lambda dh: dh - nu * (h * r).detach() * r)
    return y


def exact_and_plain(name, dtype, x, dy, vectors):
    results = []
    for kind in (torch.float64, dtype):
        leaf = x.to(kind, copy=True).requires_grad_()
        weight, bias, psi_sq, nu = (v.to(kind, copy=True) for v in vectors)
        weight.requires_grad_(), bias.requires_grad_()
        y = plain(name, leaf, weight, bias, psi_sq, nu)
        y.backward(dy.to(kind))
        gradients = {"dx": leaf.grad, "weight": weight.grad, "bias": bias.grad}
        results.append({"y": y.detach(), **{key: value for key, value in gradients.items() if value is not None}})
    return results


@pytest.mark.parametrize("rows, channels", [(3, 5), (257, 64), (2048, 96)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NORMS_WITH_FORMULA)
def test_the_error_is_at_most_twice_that_of_the_plain_formula(name, dtype, rows, channels):
    torch.manual_seed(rows)
    x, dy = (torch.randn(rows, channels) * 2 + 0.5).to(dtype), (torch.randn(rows, channels) + 0.1).to(dtype)
    vectors = [(v + 0.2 * torch.randn(channels)).to(dtype) for v in (1, 0)]
    vectors += [(0.5 + torch.rand(channels)).to(dtype), torch.randn(channels).to(dtype)]
    exact, low = exact_and_plain(name, dtype, x, dy, vectors)
    norm = create_norm(name, channels).to(dtype)
    with torch.no_grad():
        for key, value in zip(("weight", "bias"), vectors):
            if getattr(norm, key, None) is not None:
                getattr(norm, key).copy_(value)
        if name == "scale":
            norm.g.copy_(vectors[0][0])
        if name == "power":
            norm.running_psi_sq.copy_(vectors[2])
            norm.running_nu.copy_(vectors[3])
    y, dx = step(norm, x, dy)
    actual = {"y": y, "dx": dx}
    for key in ("weight", "bias"):
        if getattr(norm, key, None) is not None:
            actual[key] = getattr(norm, key).grad
    if name == "scale":
        actual["weight"], exact["weight"] = norm.g.grad, exact["weight"][0]
        low["weight"] = low["weight"][0]
    for key, value in actual.items():
        assert value.dtype == dtype
        wanted = exact[key]
        allowed = (low[key].double() - wanted).abs().max()
        # One rounding to the type is granted: by luck the plain result may have none.
        # By luck the plain result may have no error: one rounding of it is granted, and where it is a single number,
        # so that luck decides, one rounding of each term of the sum.
        size = (dy * y).double().abs().sum() / norm.g.double() if value.dim() == 0 else wanted.abs().max()
        allowed = 2 * max(allowed, torch.finfo(dtype).eps / 2 * size)
        error = (value.double() - wanted).abs().max()
        assert error <= allowed, (key, float(error), float(allowed))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", RUNNING)
def test_statistics_are_those_of_float32(name, dtype):
    """Whatever the input's type: the error against float64 statistics of the same numbers is one of float32."""
    torch.manual_seed(0)
    low, exact = create_norm(name, 32, {"groups": 4}).to(dtype), create_norm(name, 32, {"groups": 4}).double()
    for _ in range(5):
        x, dy = (torch.randn(4096, 32) + 0.3).to(dtype), torch.randn(4096, 32).to(dtype)
        step(low, x, dy)
        step(exact, x.double(), dy.double())
    wanted = dict(exact.state_dict())
    for key, value in low.state_dict().items():
        if key.startswith("running"):
            assert value.dtype == torch.float32
            assert (value - wanted[key]).abs().max() < 2e-6, key


@every
@pytest.mark.parametrize("content", ["equal", "alternating", "random"])
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_values_of_1e4_in_half_precision_give_finite_results(name, content, groups):
    """Squares overflow in float16 above 256."""
    torch.manual_seed(0)
    x = torch.full((7, 8), 1e4)
    if content == "alternating":
        x[::2, ::3] *= -1
    elif content == "random":
        x *= torch.rand(7, 8) * 2 - 1
    x = x.half()
    norm = create_norm(name, 8, {"groups": groups, "warmup_updates": 2}).half()
    for update in range(5):
        y, dx = step(norm.train(), x, torch.randn(7, 8))
        for value in (y, dx, *(p.grad for p in norm.parameters()), norm.eval()(x), *norm.state_dict().values()):
            assert torch.isfinite(value).all(), update
        assert name in ("layer", "layer_simple", "detach", "ada", "batch") or y.abs().max() > 0


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_one_token_of_one_channel(name, dtype, value):
    norm = create_norm(name, 1, {"warmup_updates": 1}).to(dtype)
    for _ in range(3):
        y, dx = step(norm, torch.full((1, 1), value, dtype=dtype), torch.full((1, 1), 0.1))
        assert y.shape == dx.shape == (1, 1) and y.dtype == dx.dtype == dtype
        assert math.isfinite(y.item()) and math.isfinite(dx.item())
    assert all(torch.isfinite(buffer).all() for buffer in norm.state_dict().values())


@every
def test_parameters_and_input_may_differ_in_type(name):
    """As under automatic mixed precision: activations in half, parameters in full precision, and the other way."""
    for parameters, given in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]:
        norm = create_norm(name, 6).to(parameters)
        y, dx = step(norm, torch.randn(4, 6, dtype=given), torch.ones(4, 6))
        assert y.dtype == dx.dtype == given
        assert all(parameter.grad.dtype == parameters for parameter in norm.parameters())
