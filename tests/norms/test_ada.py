"""AdaNorm, LayerNorm-simple and DetachNorm against the released code and the formulas."""

import pytest
import torch

from powernorm_fairseq.norms import AdaNorm, DetachNorm, LayerNormSimple
from tests.norms import references
from tests.norms.helpers import Batches, close, step


@pytest.mark.parametrize(
    "case, make",
    [
        ("ada_c2", lambda: AdaNorm(16, scale=2.0, numerics="released")),
        ("simple", lambda: LayerNormSimple(16, numerics="released")),
        ("detach_both", lambda: DetachNorm(16, numerics="released")),
    ],
)
def test_released_numerics_are_those_of_the_released_code(golden, case, make):
    y, dx = step(make(), golden[f"{case}/x"], golden[f"{case}/grad_y"])
    close(y, golden[f"{case}/y"], 1e-9)
    close(dx, golden[f"{case}/grad_x"], 1e-9)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("numerics", ["paper", "released"])
@pytest.mark.parametrize(
    "make, formula",
    [
        (AdaNorm, {"scale": 1.0, "k": 0.1}),
        (lambda dim, **kw: AdaNorm(dim, scale=2.0, k=0.3, **kw), {"scale": 2.0, "k": 0.3}),
        (lambda dim, **kw: AdaNorm(dim, scale=1.5, k=0.0, **kw), {"scale": 1.5}),
        (LayerNormSimple, {}),
        (DetachNorm, {"detach_mean": True, "detach_sigma": True}),
        (lambda dim, **kw: DetachNorm(dim, "mean", **kw), {"detach_mean": True}),
        (lambda dim, **kw: DetachNorm(dim, "sigma", **kw), {"detach_sigma": True}),
    ],
)
def test_norms_without_parameters_are_their_formulas(make, formula, numerics, padded):
    batches = Batches(1, padded=padded)
    norm = make(6, numerics=numerics, eps=1e-3)
    assert not norm.state_dict()
    x, dy, mask, real_x, real_dy, real = batches.draw()
    y, dx = step(norm, x, dy, mask)
    wanted_y, wanted_dx, _ = references.standardized(real_x, real_dy, 1e-3, numerics == "released", **formula)
    close(Batches.real(y, real), wanted_y)
    close(Batches.real(dx, real), wanted_dx)


@pytest.mark.parametrize("numerics", ["paper", "released"])
def test_a_constant_token_gives_zero_and_a_finite_gradient(numerics):
    for norm in (AdaNorm(4, numerics=numerics), LayerNormSimple(4, numerics), DetachNorm(4, numerics=numerics)):
        y, dx = step(norm, torch.full((2, 4), 3.0), torch.randn(2, 4))
        assert torch.equal(y, torch.zeros(2, 4)) and torch.isfinite(dx).all()


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="both, mean, sigma"):
        DetachNorm(4, detach="variance")
    for norm in (AdaNorm, LayerNormSimple, DetachNorm):
        with pytest.raises(ValueError, match="paper, released"):
            norm(4, numerics="code")
