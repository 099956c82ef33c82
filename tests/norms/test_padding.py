"""Padding has no influence: any shape, any mask, any content at padding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from powernorm_fairseq.norms import create_norm
from tests.norms.helpers import NAMES, assert_same_state, close, step, with_parameters

every = pytest.mark.parametrize("name", NAMES)
JUNK = [0.0, math.nan, math.inf, -math.inf, 1e30, -7.0]


@st.composite
def padded_batches(draw):
    """x, dy (T, B, C), a mask (B, T) and a number of groups; from empty to odd sizes."""
    time, batch = draw(st.integers(0, 6)), draw(st.integers(0, 4))
    groups, width = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    mask = torch.as_tensor(rng.random((batch, time)) < share)
    x = torch.as_tensor(rng.standard_normal((time, batch, groups * width)) + 0.3)
    return x, torch.as_tensor(rng.standard_normal(x.shape)), mask, groups


def make(name, dim, groups, dtype=torch.float64):
    options = {"groups": groups, "warmup_updates": 1, "eps": 1e-3, "affine": groups != 3}
    return with_parameters(create_norm(name, dim, options), np.random.default_rng(1)).to(dtype)


def run(norm, x, dy, mask, junk=None):
    """Three updates, one evaluation: outputs and gradients of each, then the state."""
    results = []
    for update in range(3):
        now, upstream = x * (1 + update), dy + 0.1 * update
        if junk is not None:
            padding = mask.t().unsqueeze(-1)
            now, upstream = now.masked_fill(padding, junk[0]), upstream.masked_fill(padding, junk[1])
        results += step(norm, now, upstream, mask)
        results += [parameter.grad.clone() for parameter in norm.parameters()]
    norm.eval()
    results += step(norm, now, upstream, mask)
    return results, norm.state_dict()


@every
@settings(max_examples=25, deadline=None)
@given(data=padded_batches(), junk=st.tuples(st.sampled_from(JUNK), st.sampled_from(JUNK)))
def test_what_stands_at_padding_has_no_influence(name, data, junk):
    """Bitwise: outputs, gradients of the input and of parameters, statistics."""
    x, dy, mask, groups = data
    clean, clean_state = run(make(name, x.shape[-1], groups), x, dy, mask)
    dirty, dirty_state = run(make(name, x.shape[-1], groups), x, dy, mask, junk)
    assert all(torch.isfinite(value).all() for value in clean)
    assert all(map(torch.equal, clean, dirty))
    assert_same_state(dirty_state, clean_state)
    for value in clean:
        if value.shape == x.shape:
            assert (value[mask.t()] == 0).all()


@every
@settings(max_examples=25, deadline=None)
@given(data=padded_batches())
def test_a_padded_batch_is_the_list_of_its_real_tokens(name, data):
    """Trap 7."""
    x, dy, mask, groups = data
    real = ~mask.t()
    padded, padded_state = run(make(name, x.shape[-1], groups), x, dy, mask)
    compact, compact_state = run(make(name, x.shape[-1], groups), x[real], dy[real], None)
    for one, other in zip(padded, compact):
        close(one[real] if one.shape == x.shape else one, other)
    for one, other in zip(padded_state.values(), compact_state.values()):
        close(one, other)


@every
@settings(max_examples=15, deadline=None)
@given(data=padded_batches(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_mask_without_padding_is_bitwise_no_mask(name, data, dtype):
    x, dy, mask, groups = data
    results = [
        run(make(name, x.shape[-1], groups, dtype), x.to(dtype), dy, given) for given in (None, torch.zeros_like(mask))
    ]
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert_same_state(results[1][1], results[0][1])


@every
def test_what_is_no_number_at_a_token_stays_out_of_padding(name):
    x, dy = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    mask = torch.tensor([[False, False, False, True]] * 3)
    norm = make(name, 6, 2)
    for bad in (x, dy, None):
        if bad is not None:
            bad[0, 0] = math.nan
        for value in step(norm, x, dy, mask):
            assert (value[-1] == 0).all()
        norm.eval()
