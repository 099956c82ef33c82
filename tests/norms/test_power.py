"""PowerNorm and PN-V against the released code and against the formulas."""

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import PowerNorm, PowerNormV
from tests.norms import references
from tests.norms.helpers import Batches, assert_same_state, close, step, with_parameters

SAVED = ["x", "grad_y", "y", "grad_x", "grad_weight", "grad_bias"]


@pytest.mark.parametrize("case", ["pn_g1_warm3", "pn_g2_warm0"])
def test_released_numerics_are_those_of_the_released_code(golden, case):
    time, batch, channels, groups, warmup, steps, padded = (int(v) for v in golden[f"{case}/meta"])
    assert not padded
    norm = PowerNorm(channels, groups, warmup_updates=warmup, numerics="released").double()
    with torch.no_grad():
        norm.weight.copy_(torch.as_tensor(golden[f"{case}/weight"]))
        norm.bias.copy_(torch.as_tensor(golden[f"{case}/bias"]))
    for index in range(steps):
        wanted = {key: golden[f"{case}/{index}/{key}"] for key in [*SAVED, "running_phi", "ema_gz"]}
        assert wanted["x"].shape == (time, batch, channels)
        y, dx = step(norm, wanted["x"], wanted["grad_y"])
        norm.commit()
        # The released code keeps nu / (1 - alpha_bkw).
        actual = [y, dx, norm.weight.grad, norm.bias.grad, norm.running_psi_sq, norm.running_nu / 0.1]
        for value, key in zip(actual, list(wanted)[2:]):
            close(value, wanted[key], 1e-9)
    close(norm.eval()(torch.as_tensor(golden[f"{case}/eval/x"])), golden[f"{case}/eval/y"], 1e-9)
    assert norm.updates_tracked == steps and norm.updates_skipped == 0 and norm.updates_bounded == 0


@pytest.mark.parametrize("numerics", ["paper", "released"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("groups, warmup", [(0, 0), (1, 0), (2, 7), (3, 1), (6, 7)])
def test_power_is_algorithm_2_over_20_updates(numerics, padded, groups, warmup):
    batches = Batches(groups + warmup, padded=padded)
    channels = batches.shape[-1]
    norm = PowerNorm(channels, groups, 0.8, 0.85, warmup, numerics, eps=1e-3).double()
    with_parameters(norm, batches.rng)
    reference = references.Power(
        norm.weight.detach().numpy(),
        norm.bias.detach().numpy(),
        groups,
        1e-3,
        0.8,
        0.85,
        warmup,
        numerics == "released",
    )
    for _ in range(20):
        x, dy, mask, real_x, real_dy, real = batches.draw()
        y, dx = step(norm, x, dy, mask)
        wanted_y, wanted_dx, dgamma, dbeta = reference.step(real_x, real_dy)
        close(Batches.real(y, real), wanted_y)
        close(Batches.real(dx, real), wanted_dx)
        close(norm.weight.grad, dgamma)
        close(norm.bias.grad, dbeta)
        norm.commit()
        close(norm.running_psi_sq, reference.psi_sq)
        close(norm.running_nu, reference.nu)
    assert norm.updates_bounded == 0
    x, _, mask, real_x, _, real = batches.draw()
    h = references.layer_scale(real_x, groups, 1e-3)
    wanted_y = reference.gamma * h / np.sqrt(reference.psi_sq + 1e-3) + reference.beta
    close(Batches.real(norm.eval()(x, mask), real), wanted_y)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_power_v_is_its_formula_with_exact_gradient_over_20_updates(padded, groups):
    batches = Batches(groups, padded=padded)
    norm = with_parameters(PowerNormV(6, groups, alpha_fwd=0.7, eps=1e-3).double(), batches.rng)
    gamma, beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    psi_sq = np.ones(6)
    for _ in range(20):
        x, dy, mask, real_x, real_dy, real = batches.draw()
        y, dx = step(norm, x, dy, mask)
        wanted_y, wanted_dx, dgamma, dbeta, batch_psi_sq = references.power_v(
            real_x, real_dy, gamma, beta, groups, 1e-3
        )
        psi_sq = 0.7 * psi_sq + 0.3 * batch_psi_sq
        close(Batches.real(y, real), wanted_y)
        close(Batches.real(dx, real), wanted_dx)
        close(norm.weight.grad, dgamma)
        close(norm.bias.grad, dbeta)
        norm.commit()
        close(norm.running_psi_sq, psi_sq)
    x, _, mask, real_x, _, real = batches.draw()
    wanted_y = gamma * references.layer_scale(real_x, groups, 1e-3) / np.sqrt(psi_sq + 1e-3) + beta
    close(Batches.real(norm.eval()(x, mask), real), wanted_y)


@pytest.mark.parametrize("norm", [PowerNorm, PowerNormV])
def test_affine_false_is_a_gain_of_one_and_no_bias(norm):
    batches = Batches(3)
    plain, trained = norm(6, 2, affine=False).double(), norm(6, 2).double()
    assert not list(plain.parameters())
    for _ in range(3):
        x, dy, mask, _, _, _ = batches.draw()
        for one, other in zip(step(plain, x, dy, mask), step(trained, x, dy, mask)):
            assert torch.equal(one, other)
    wanted = trained.state_dict()
    del wanted["weight"], wanted["bias"]
    assert_same_state(plain.state_dict(), wanted)


def test_warm_up_statistics_of_the_two_numerics_differ_as_documented():
    """Mean squares 4 and 6: the cumulative mean is 5; with the moving average on top the released code holds 5.1."""
    held = {}
    for numerics in ("paper", "released"):
        norm = PowerNorm(1, 0, warmup_updates=10, numerics=numerics).double()
        for mean_square in (4.0, 6.0):
            step(norm, torch.full((3, 1), mean_square**0.5).double(), torch.ones(3, 1))
        norm.commit()
        held[numerics] = norm.running_psi_sq.item()
    assert held["paper"] == pytest.approx(5)
    assert held["released"] == pytest.approx(0.9 * (4 + 6) / 2 + 0.1 * 6)


def test_power_after_the_warm_up_does_not_see_other_tokens():
    """Trap 11."""
    norm = PowerNorm(4, 2)
    x = torch.randn(5, 2, 4)
    changed = x.clone()
    changed[3:] += 1
    assert torch.equal(norm(x)[:3], norm(changed)[:3])


def test_the_bound_on_nu_stops_the_recursion_where_it_overflows():
    """Trap 6: a channel active in one batch of 16: Gamma > 2 / (1 - alpha) there, and without a bound nu explodes."""
    rng = np.random.default_rng(0)
    norm = PowerNorm(1, 0).double()
    psi_sq, nu, largest, overflowed = 1.0, 0.0, 0.0, False
    for update in range(1500):
        size = 1.0 if update % 16 == 0 else 1e-3
        x = size * rng.standard_normal((32, 1))
        dy = rng.standard_normal((32, 1))
        step(norm, x, dy)
        norm.commit()
        largest = max(largest, abs(norm.running_nu.item()))
        if not overflowed:
            xhat = x / np.sqrt(psi_sq + 1e-5)
            nu = nu * (1 - 0.1 * (xhat**2).mean()) + 0.1 * (dy * xhat).mean()
            psi_sq = 0.9 * psi_sq + 0.1 * (x**2).mean()
            overflowed = abs(nu) > 1e30
    assert overflowed
    assert largest < 1
    assert norm.updates_bounded > 50 and norm.updates_skipped == 0


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("name", ["alpha_fwd", "alpha_bkw"])
def test_alphas_outside_their_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        PowerNorm(4, **{name: value})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"groups": 3}, "divisor of the 4 channels"),
        ({"groups": -1}, "groups"),
        ({"numerics": "papers"}, "paper, released"),
        ({"warmup_updates": -1}, "warmup_updates"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_other_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PowerNorm(4, **options)
