"""BatchNorm over real tokens against torch, the released baseline, and the formula."""

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import BatchNorm
from tests.norms import references
from tests.norms.helpers import Batches, close, step, with_parameters

SAVED = ["x", "grad_y", "y", "grad_x", "grad_weight", "grad_bias"]


def test_the_released_baseline(golden):
    norm = BatchNorm(8, momentum=0.05, groups=1).double()
    with torch.no_grad():
        norm.weight.copy_(torch.as_tensor(golden["bn_nopad/weight"]))
        norm.bias.copy_(torch.as_tensor(golden["bn_nopad/bias"]))
    steps = len({key.split("/")[1] for key in golden if key.startswith("bn_nopad/")} - {"weight", "bias", "eval"})
    assert steps > 1
    for index in range(steps):
        wanted = {key: golden[f"bn_nopad/{index}/{key}"] for key in [*SAVED, "running_mean", "running_var"]}
        y, dx = step(norm, wanted["x"], wanted["grad_y"])
        norm.commit()
        actual = [y, dx, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
        for value, key in zip(actual, list(wanted)[2:]):
            close(value, wanted[key], 1e-9)
    close(norm.eval()(torch.as_tensor(golden["bn_nopad/eval/x"])), golden["bn_nopad/eval/y"], 1e-9)


@pytest.mark.parametrize("momentum", [0.1, 0.3, None, "cumulative"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("groups", [0, 2])
def test_batch_norm_is_its_formula_over_20_updates(momentum, padded, groups):
    batches = Batches(groups, time=4, padded=padded)
    norm = with_parameters(BatchNorm(6, momentum, groups, eps=1e-3).double(), batches.rng)
    gamma, beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    running_mean, running_var = np.zeros(6), np.ones(6)
    for update in range(20):
        x, dy, mask, real_x, real_dy, real = batches.draw()
        y, dx = step(norm, x, dy, mask)
        wanted_y, wanted_dx, dgamma, dbeta, mean, variance = references.batch(
            real_x, real_dy, gamma, beta, groups, 1e-3
        )
        weight = momentum if isinstance(momentum, float) else 1 / (update + 1)
        running_mean = (1 - weight) * running_mean + weight * mean
        running_var = (1 - weight) * running_var + weight * variance
        close(Batches.real(y, real), wanted_y)
        close(Batches.real(dx, real), wanted_dx)
        close(norm.weight.grad, dgamma)
        close(norm.bias.grad, dbeta)
        norm.commit()
        close(norm.running_mean, running_mean)
        close(norm.running_var, running_var)
    x, _, mask, real_x, _, real = batches.draw()
    h = references.layer_scale(real_x, groups, 1e-3)
    wanted_y = gamma * (h - running_mean) / np.sqrt(running_var + 1e-3) + beta
    close(Batches.real(norm.eval()(x, mask), real), wanted_y)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [False, True])
def test_without_padding_it_is_torch_batch_norm(momentum, affine):
    rng = np.random.default_rng(5)
    ours = BatchNorm(6, momentum, affine=affine).double()
    theirs = torch.nn.BatchNorm1d(6, momentum=momentum, affine=affine).double()
    for _ in range(5):
        x, dy = rng.standard_normal((30, 6)) + 2, rng.standard_normal((30, 6))
        for actual, wanted in zip(step(ours, x, dy), step(theirs, x, dy)):
            close(actual, wanted)
    ours.eval(), theirs.eval()
    close(ours.running_mean, theirs.running_mean)
    close(ours.running_var, theirs.running_var)
    close(ours(torch.as_tensor(x)), theirs(torch.as_tensor(x)))


def test_a_large_mean_costs_no_more_precision_than_in_torch():
    rng = np.random.default_rng(6)
    x, dy = rng.standard_normal((5000, 3)) + 1e3, rng.standard_normal((5000, 3))
    exact = step(torch.nn.BatchNorm1d(3).double(), torch.as_tensor(x), dy)
    x32 = torch.as_tensor(x, dtype=torch.float32)
    ours, theirs = BatchNorm(3), torch.nn.BatchNorm1d(3)
    for actual, plain, wanted in zip(step(ours, x32, dy), step(theirs, x32, dy), exact):
        assert (actual - wanted).abs().max() <= 2 * (plain - wanted).abs().max()
    ours.commit()
    deviation = torch.as_tensor(x).var(0)
    assert torch.allclose(ours.running_var.double(), 0.9 + 0.1 * deviation, rtol=1e-5)


def test_one_token_has_variance_zero():
    norm = BatchNorm(3)
    y, dx = step(norm, torch.randn(1, 3), torch.randn(1, 3))
    norm.commit()
    assert torch.equal(y, torch.zeros(1, 3)) and dx.abs().max() < 1e-4
    assert torch.allclose(norm.running_var, torch.full((3,), 0.9))


@pytest.mark.parametrize("momentum", [0, -0.1, 1.5, "sliding"])
def test_bad_momentum_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum must be above 0"):
        BatchNorm(4, momentum)


def test_cumulative_wins_over_momentum():
    assert BatchNorm(4, 0.1, cumulative=True).momentum is None
    assert "cumulative" in repr(BatchNorm(4, "cumulative"))
