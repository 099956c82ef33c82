"""Gradients that are exact, against finite differences."""

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import create_norm
from powernorm_fairseq.norms import functional as F
from tests.norms.helpers import NAMES

MASK = torch.tensor([False, False, True, False, False, True, False])
masked = pytest.mark.parametrize("padding", [None, MASK])


def inputs(*shapes):
    rng = np.random.default_rng(0)
    return [torch.as_tensor(rng.standard_normal(shape) + 0.3).requires_grad_() for shape in shapes]


def check(function, *tensors):
    assert torch.autograd.gradcheck(function, tensors)


@masked
@pytest.mark.parametrize("groups", [0, 1, 2, 6])
def test_group_rms_scale(groups, padding):
    check(lambda x, w, b: F.group_rms_scale(x, groups, 1e-3, w, b, padding), *inputs((7, 6), 6, 6))
    check(lambda x: F.group_rms_scale(x, groups, 1e-3, padding=padding), *inputs((7, 6)))


@masked
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_power_norm_v(groups, padding):
    check(lambda x, w, b: F.power_norm_v(x, w, b, padding, groups, 1e-3), *inputs((7, 6), 6, 6))
    check(lambda x: F.power_norm_v(x, None, None, padding, groups, 1e-3), *inputs((7, 6)))


@masked
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_batch_norm(groups, padding):
    check(lambda x, w, b: F.batch_norm(x, w, b, padding, groups, 1e-3), *inputs((7, 6), 6, 6))
    check(lambda x: F.batch_norm(x, None, None, padding, groups, 1e-3), *inputs((7, 6)))


@pytest.mark.parametrize("padding", [None, MASK.view(7, 1).expand(7, 2)])
def test_leading_dimensions_are_free(padding):
    for function in (F.power_norm_v, F.batch_norm):
        check(lambda x, w, b, norm=function: norm(x, w, b, padding, 1, 1e-3), *inputs((7, 2, 4), 4, 4))


def test_layer_norm():
    check(lambda x, w, b: F.layer_norm(x, w, b), *inputs((7, 6), 6, 6))


@pytest.mark.parametrize("released", [False, True])
def test_standardize(released):
    check(lambda x: F.standardize(x, 1e-3, released), *inputs((7, 6)))
    check(lambda x: F.ada_norm(x, 2.0, 0.0, 1e-3, released), *inputs((7, 6)))


def test_power_norm_has_the_gradient_of_a_constant_psi_while_nu_is_zero():
    zero, psi_sq = torch.zeros(6).double(), torch.rand(6).double() + 0.5
    check(lambda x, w, b: F.power_norm(x, w, b, psi_sq, zero, MASK, 2, 1e-3), *inputs((7, 6), 6, 6))


def test_power_norm_with_the_exact_nu_has_the_gradient_of_power_norm_v():
    """The approximation's only fault is that nu is a running statistic: with the batch's own it is exact."""
    x, weight, bias, dy = inputs((7, 6), 6, 6, (7, 6))
    eps = 1e-9
    y = F.power_norm_v(x, weight, bias, MASK, 2, eps)
    wanted = torch.autograd.grad(y, (x, weight, bias), dy.detach())
    real = ~MASK
    h = F.group_rms_scale(x, 2, eps)[real].detach()
    xhat = h / h.square().mean(0).sqrt()
    nu = (weight * dy[real] * xhat).mean(0).detach()
    y = F.power_norm(x, weight, bias, torch.ones(6).double(), nu, MASK, 2, eps, use_batch_psi=True)
    for one, other in zip(torch.autograd.grad(y, (x, weight, bias), dy.detach()), wanted):
        assert torch.allclose(one, other, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_an_input_that_was_changed_in_place_has_no_gradient_any_more(name):
    """The backward pass needs it as it was: as with torch's own layers, an error and no wrong gradient."""
    norm = create_norm(name, 6, {"groups": 2})
    for shape in ((4, 6), (3, 2, 6)):
        x = torch.randn(shape, requires_grad=True) * 1.0
        y = norm(x)
        x += 1
        if name == "none":
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_torch_jit_computes(name):
    norm = create_norm(name, 6, {"groups": 2}).eval()
    norm(torch.randn(4, 6))  # keeps what it computed of the statistics
    traced = torch.jit.trace(norm, torch.randn(4, 6), check_trace=False)
    for statistic in norm.buffers():
        statistic += 1  # it is the trace's, too
    x = torch.randn(30, 6)
    assert torch.allclose(traced(x), norm(x), atol=1e-6)


@pytest.mark.parametrize("name, channel_vectors", [("power", 6), ("power_v", 4), ("batch", 5), ("rms", 1), ("ada", 0)])
def test_backward_keeps_the_input_a_number_per_token_and_group_and_channel_vectors(name, channel_vectors):
    norm = create_norm(name, 64, {"groups": 4})
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(50, 20, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    assert kept.pop(x.data_ptr()) == x.numel()
    assert sum(kept.values()) <= 1000 * 4 + channel_vectors * 64 + 1
