"""The benchmark's stand-in for the released code does what the released code did; the formulas to compile too."""

import numpy as np
import pytest
import torch

from benchmarks import compiled
from benchmarks.naive import NaiveAdaNorm, NaivePowerNorm
from powernorm_fairseq.norms import AdaNorm, PowerNorm


def close(actual, wanted, tolerance=1e-9):
    np.testing.assert_allclose(actual.detach().numpy(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["pn_g1_warm3", "pn_g2_warm0"])
def test_power(golden, case):
    _, _, channels, groups, warmup, steps, _ = (int(v) for v in golden[f"{case}/meta"])
    norm = NaivePowerNorm(channels, groups, warmup).double()
    with torch.no_grad():
        norm.weight.copy_(torch.as_tensor(golden[f"{case}/weight"]))
        norm.bias.copy_(torch.as_tensor(golden[f"{case}/bias"]))
    for index in range(steps):
        wanted = {name: golden[f"{case}/{index}/{name}"] for name in ("x", "grad_y", "y", "grad_x", "grad_weight",
                  "grad_bias", "running_phi", "ema_gz")}  # fmt: skip
        x = torch.as_tensor(wanted["x"]).requires_grad_()
        norm.zero_grad(set_to_none=True)
        y = norm(x)
        y.backward(torch.as_tensor(wanted["grad_y"]))
        close(y, wanted["y"])
        close(x.grad, wanted["grad_x"])
        close(norm.weight.grad, wanted["grad_weight"])
        close(norm.bias.grad, wanted["grad_bias"])
        close(norm.running_phi.flatten(), wanted["running_phi"].flatten())
        close(norm.ema_gz.flatten(), wanted["ema_gz"].flatten())
    close(norm.eval()(torch.as_tensor(golden[f"{case}/eval/x"])), golden[f"{case}/eval/y"])


def test_padding_is_left_out_of_the_forward_statistics():
    x, mask = torch.randn(5, 3, 4).double(), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    one, other = NaivePowerNorm(4, 2).double(), NaivePowerNorm(4, 2).double()
    one(x, mask)
    other(x[~mask.t()].unsqueeze(1))
    close(one.running_phi, other.running_phi)


def test_ada(golden):
    x = torch.as_tensor(golden["ada_c2/x"]).requires_grad_()
    y = NaiveAdaNorm(x.shape[-1], scale=2.0)(x)
    y.backward(torch.as_tensor(golden["ada_c2/grad_y"]))
    close(y, golden["ada_c2/y"])
    close(x.grad, golden["ada_c2/grad_x"])


def run(module, x, dy):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return y, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)


def test_formulas_to_compile_are_those_of_the_norms():
    ours, plain = PowerNorm(8, 2).double(), compiled.CompiledPowerNorm(8, 2, lambda formula: formula).double()
    for _ in range(4):
        x, dy = torch.randn(6, 8).double(), torch.randn(6, 8).double()
        ours.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        for one, other in zip(run(ours, x, dy), run(plain, x, dy)):
            close(other, one.detach().numpy())
        ours.commit()
        close(plain.psi_sq, ours.running_psi_sq)
        close(plain.nu, ours.running_nu)
    close(plain.eval()(x), ours.eval()(x).detach().numpy())
    for one, other in zip(run(AdaNorm(8), x, dy), run(torch.nn.Identity(), x, dy)):
        assert one.shape == other.shape
    y = x.clone().requires_grad_()
    z = compiled.ada(y)
    z.backward(dy)
    wanted, dx = run(AdaNorm(8), x, dy)
    close(z, wanted.detach().numpy())
    close(y.grad, dx.numpy())
