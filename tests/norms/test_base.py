"""The call that all norms share: shapes, padding scopes, errors."""

import threading

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import NORMS, create_norm, padding_scope
from tests.norms.helpers import NAMES, RUNNING, with_parameters

every = pytest.mark.parametrize("name", NAMES)


@every
def test_shapes_and_dtype_are_kept(name):
    norm = create_norm(name, 6)
    for shape in [(6,), (4, 6), (5, 3, 6), (2, 3, 4, 6), (0, 6), (0, 3, 6)]:
        x = torch.randn(shape)
        for mode in (True, False):
            y = norm.train(mode)(x)
            assert y.shape == x.shape and y.dtype == x.dtype


@every
def test_memory_layout_does_not_matter(name):
    norm = create_norm(name, 6)
    x = torch.randn(3, 5, 6)
    assert torch.equal(norm(x.transpose(0, 1)), norm(x.transpose(0, 1).contiguous()))


@every
@pytest.mark.parametrize("shape", [(5, 3, 4), (4,), (5, 3, 6)])
def test_a_wrong_number_of_channels_is_refused(name, shape):
    with pytest.raises(ValueError, match="expected 8 channels"):
        create_norm(name, 8)(torch.randn(shape))


@every
@pytest.mark.parametrize(
    "shape, wanted, given", [((5, 3, 4), (3, 5), (5, 3)), ((7, 4), (7,), (6,)), ((2, 3, 5, 4), (2, 3, 5), (3, 2, 5))]
)
def test_a_wrong_mask_is_refused_with_both_shapes(name, shape, wanted, given):
    with pytest.raises(ValueError) as error:
        create_norm(name, 4)(torch.randn(shape), torch.zeros(given, dtype=torch.bool))
    for part in (shape, wanted, given):
        assert str(part) in str(error.value)


@every
def test_integers_are_refused(name):
    with pytest.raises(ValueError, match=r"int64"):
        create_norm(name, 4)(torch.ones(3, 4, dtype=torch.long))


@every
def test_the_mask_is_batch_first_for_time_first_input(name):
    norm = create_norm(name, 4).eval()
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 2] = True
    y = norm(torch.randn(3, 2, 4), mask)
    assert (y == 0).all(-1).t().tolist() == mask.tolist()
    assert torch.equal(norm(torch.ones(3, 2, 4), mask.int()), norm(torch.ones(3, 2, 4), mask))


@pytest.mark.parametrize("name", RUNNING)
def test_the_innermost_scope_counts(name):
    norm = create_norm(name, 4, {"warmup_updates": 10})
    x = torch.randn(3, 2, 4)
    outer = torch.tensor([[False, False, False], [False, False, True]])
    inner = torch.tensor([[False, True, True], [False, False, False]])
    free = norm(x)
    assert not torch.equal(norm(x, outer)[0], free[0])
    with padding_scope(outer):
        assert torch.equal(norm(x), norm(x, outer))
        with padding_scope(inner):
            assert torch.equal(norm(x), norm(x, inner))
            assert not torch.equal(norm(x), norm(x, outer))
            with padding_scope(None):
                assert torch.equal(norm(x), free)
                assert torch.equal(norm(x, outer), norm(x, outer))
        with pytest.raises(KeyError), padding_scope(inner):
            raise KeyError
        assert torch.equal(norm(x), norm(x, outer))
        norm.eval()
        assert (norm(x)[2, 1] == 0).all()
        norm.train()
    assert torch.equal(norm(x), free)


def test_scopes_belong_to_their_thread():
    norm = create_norm("batch", 4)
    x, seen = torch.randn(3, 2, 4), []
    with padding_scope(torch.ones(2, 3, dtype=torch.bool)):
        assert (norm(x) == 0).all()
        thread = threading.Thread(target=lambda: seen.append(norm(x)))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], norm(x))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RUNNING])
def test_token_wise_norms_ignore_scopes_and_honour_masks(name):
    norm = create_norm(name, 4)
    assert norm.token_wise
    x = torch.randn(3, 2, 4)
    mask = torch.tensor([[False, True, True], [False, False, False]])
    with padding_scope(mask):
        assert torch.equal(norm(x), norm(x.clone()))
        assert (norm(x)[1:, 0] != 0).any()
        assert (norm(x, mask)[1:, 0] == 0).all()


def test_token_wise_says_which_norms_look_at_other_tokens():
    assert [name for name in NORMS if not NORMS[name].token_wise] == RUNNING


@every
def test_a_second_derivative_is_refused_rather_than_wrong(name):
    norm = with_parameters(create_norm(name, 4).double(), np.random.default_rng(0))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    if name in ("layer", "layer_simple", "none"):
        assert torch.autograd.gradgradcheck(norm, x)
        return
    (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("inf"), float("nan")])
def test_eps_must_be_positive_and_finite(eps):
    with pytest.raises(ValueError, match="eps must be positive and finite"):
        create_norm("power", 4, {"eps": eps})


@every
def test_repr_names_the_class_and_its_channels(name):
    norm = create_norm(name, 12, {"groups": 3})
    assert repr(norm).startswith(f"{type(norm).__name__}(12")
    for option in ("eps", "groups", "alpha_fwd", "scale", "detach", "momentum"):
        assert (option in repr(norm)) == hasattr(norm, option) or name == "none"
