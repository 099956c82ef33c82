"""What watched updates show, against NumPy; and that watching changes nothing."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from powernorm_fairseq.norms import gradient_scale
from powernorm_fairseq.norms.watching import seen, watch
from tests.norms.helpers import Batches, assert_same_state, close, make, running, step, with_parameters

CHANNELS = 6


def updated(norm, batches, watched):
    """Updates with the given batches, of which the last is watched; returns what was seen."""
    for number, batch in enumerate(batches):
        norm.set_num_updates(number)
        watch(norm, watched and number == len(batches) - 1)
        x, dy, mask, *_ = batch
        step(norm, x, torch.nan_to_num(dy), mask)
    norm.commit()
    return seen(norm)


def size(vector):
    return np.sqrt((np.asarray(vector) ** 2).sum()) / CHANNELS


@running
@pytest.mark.parametrize("padded", [True, False])
def test_distances_are_those_of_the_definition(name, padded):
    """One watched update after three others, every quantity from real tokens alone in float64."""
    norm = with_parameters(make(name, groups=0), np.random.default_rng(3))
    batches = [Batches(seed, padded=padded).draw() for seed in range(4)]
    updated(norm, batches[:3], watched=False)
    before = {key: value.numpy() for key, value in copy.deepcopy(norm).state_dict().items()}
    gain = norm.weight.detach().numpy().copy()
    norm.set_num_updates(3)
    watch(norm)
    x, dy, mask, h, real_dy, _ = batches[3]
    step(norm, x, torch.nan_to_num(dy), mask)
    norm.commit()
    found = {key.rstrip("/"): float(value) for key, value in seen(norm).items()}
    g = real_dy * gain
    if name == "batch":
        xhat = (h - h.mean(0)) / np.sqrt(h.var(0) + norm.eps)
        wanted = {
            "fwd_mean": h.mean(0) - before["running_mean"],
            "fwd_var": h.var(0, ddof=1) - before["running_var"],
            "bkw_mean": g.mean(0),
            "bkw_var": (g * xhat).mean(0),
        }
    else:
        batch_psi_sq = (h**2).mean(0)
        psi_sq = before["running_psi_sq"] if name == "power" else batch_psi_sq
        xhat = h / np.sqrt(psi_sq + norm.eps)
        wanted = {"fwd_psi_sq": batch_psi_sq - before["running_psi_sq"], "bkw_psi_sq": (g * xhat).mean(0)}
        if name == "power":
            wanted["bkw_nu"] = (g * xhat).mean(0) - (xhat**2).mean(0) * before["running_nu"]
    assert set(found) == set(wanted)
    for what, vector in wanted.items():
        close(np.array(found[what]), size(vector))


@running
def test_watching_changes_nothing(name):
    """Outputs, gradients and statistics of a watched norm are those of another to the bit."""
    plain, watched = make(name), make(name)
    watch(watched)
    for seed in range(3):
        x, dy, mask, *_ = Batches(seed).draw()
        for one in (plain, watched):
            one.set_num_updates(seed)
        for ours, theirs in zip(
            step(plain, x, torch.nan_to_num(dy), mask), step(watched, x, torch.nan_to_num(dy), mask)
        ):
            assert torch.equal(ours, theirs)
    assert_same_state(watched.state_dict(), plain.state_dict())
    assert seen(watched) and not seen(plain)


@running
def test_micro_batches_and_loss_scales(name):
    """Two micro-batches of an update are one large batch (gradients of the summed loss), whatever the loss scale."""
    joined, parts = make(name, groups=0), make(name, groups=0)
    rng = np.random.default_rng(0)
    if name != "power":
        # Norms that use batch statistics see the same batch twice, since micro-batches are normalised on their own.
        x, dy = (torch.as_tensor(rng.standard_normal((4, 3, CHANNELS))) for _ in range(2))
        batches = [(x, dy), (x, dy)]
    else:
        batches = [tuple(torch.as_tensor(rng.standard_normal((4, 3, CHANNELS))) for _ in range(2)) for _ in range(2)]
    for norm in (joined, parts):
        watch(norm)
    step(joined, *(torch.cat(side) for side in zip(*batches)))
    joined.set_num_updates(1)
    for scale, (x, dy) in zip((4.0, 0.5), batches):
        parts.set_num_updates(0)
        with gradient_scale(scale):
            step(parts, x, dy * scale)
    parts.commit()
    found, wanted = seen(parts), seen(joined)
    assert set(found) == set(wanted) and wanted
    for key, value in wanted.items():
        close(found[key], value, 1e-9)


@running
def test_a_failed_try_leaves_nothing(name):
    norm, again = make(name), make(name)
    for one in (norm, again):
        one.set_num_updates(0)
        watch(one)
    x, dy, mask, *_ = Batches(1).draw()
    step(norm, x, torch.nan_to_num(dy) * 7, mask)
    norm.discard_pending()
    for one in (norm, again):
        step(one, x, torch.nan_to_num(dy), mask)
        one.commit()
    for key, value in seen(again).items():
        assert torch.equal(seen(norm)[key], value)


def test_names_are_those_of_the_modules():
    model = nn.ModuleDict({"first": make("power"), "other": make("layer"), "last": make("batch")})
    watch(model)
    x, dy, mask, *_ = Batches(1).draw()
    for norm in model.values():
        step(norm, x, torch.nan_to_num(dy), mask)
    model.eval()
    assert {key.split("/")[1] for key in seen(model)} == {"first", "last"}
    watch(model, on=False)
    assert seen(model) == {}
