"""RMSNorm and ScaleNorm against their formulas."""

import pytest
import torch

from powernorm_fairseq.norms import RMSNorm, ScaleNorm
from tests.norms import references
from tests.norms.helpers import Batches, close, step, with_parameters


@pytest.mark.parametrize("padded", [False, True])
def test_rms_norm_is_its_formula(padded):
    batches = Batches(0, padded=padded)
    norm = with_parameters(RMSNorm(6, eps=1e-3).double(), batches.rng)
    x, dy, mask, real_x, real_dy, real = batches.draw()
    y, dx = step(norm, x, dy, mask)
    wanted_y, wanted_dx, dgamma = references.rms(real_x, real_dy, norm.weight.detach().numpy(), 1e-3)
    close(Batches.real(y, real), wanted_y)
    close(Batches.real(dx, real), wanted_dx)
    close(norm.weight.grad, dgamma)


@pytest.mark.parametrize("padded", [False, True])
def test_scale_norm_is_its_formula(padded):
    batches = Batches(1, padded=padded)
    norm = with_parameters(ScaleNorm(6, eps=1e-3).double(), batches.rng)
    x, dy, mask, real_x, real_dy, real = batches.draw()
    y, dx = step(norm, x, dy, mask)
    wanted_y, wanted_dx, dg = references.length(real_x, real_dy, norm.g.item(), 1e-3)
    close(Batches.real(y, real), wanted_y)
    close(Batches.real(dx, real), wanted_dx)
    close(norm.g.grad, dg)


def test_parameters():
    assert not list(RMSNorm(6, affine=False).parameters())
    assert [name for name, _ in RMSNorm(6).named_parameters()] == ["weight"]
    scale = ScaleNorm(6)
    assert [name for name, _ in scale.named_parameters()] == ["g"] and scale.g.shape == ()
    x = torch.randn(4, 6)
    assert torch.allclose(scale(x), RMSNorm(6, eps=1e-12)(x), atol=1e-5)
