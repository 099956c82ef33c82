"""LayerNorm against its formula."""

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import LayerNorm
from tests.norms import references
from tests.norms.helpers import Batches, close, step, with_parameters


@pytest.mark.parametrize("padded", [False, True])
def test_layer_norm_is_its_formula(padded):
    batches = Batches(0, padded=padded)
    norm = with_parameters(LayerNorm(6, eps=1e-3).double(), batches.rng)
    gamma, beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    x, dy, mask, real_x, real_dy, real = batches.draw()
    y, dx = step(norm, x, dy, mask)
    wanted_y, wanted_dx, dgamma, dbeta = references.layer(real_x, real_dy, gamma, beta, 1e-3)
    close(Batches.real(y, real), wanted_y)
    close(Batches.real(dx, real), wanted_dx)
    close(norm.weight.grad, dgamma)
    close(norm.bias.grad, dbeta)


def test_its_state_is_that_of_torch_layer_norm():
    ours, theirs = LayerNorm(6), torch.nn.LayerNorm(6)
    with_parameters(theirs, np.random.default_rng(0))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 2, 6)
    assert torch.equal(ours(x), theirs(x))


def test_affine_false_has_no_parameters():
    norm = LayerNorm(6, affine=False)
    x = torch.randn(3, 6)
    assert not norm.state_dict() and torch.equal(norm(x), torch.nn.functional.layer_norm(x, (6,)))
