"""Measured statistics against sums over all tokens in NumPy, and what measuring leaves alone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from powernorm_fairseq.norms import padding_scope
from powernorm_fairseq.norms.measuring import measuring
from tests.norms.helpers import RUNNING, Batches, assert_same_state, close, make, running, some, statistics, step

MEASURED = {"power": ["running_psi_sq"], "power_v": ["running_psi_sq"], "batch": ["running_mean", "running_var"]}


def batches(padded):
    """Batches of different sizes, and their real tokens."""
    drawn = []
    for seed, (time, batch) in enumerate([(5, 3), (2, 2), (9, 4), (1, 1)]):
        source = Batches(seed, time, batch, padded=padded)
        drawn.append(source.draw())
    return drawn


def layer_scaled(rows, groups, eps=1e-5):
    parts = rows.reshape(len(rows), groups, -1)
    return (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)).reshape(rows.shape)


@running
@pytest.mark.parametrize("padded", [True, False])
def test_each_token_weighs_the_same(name, padded):
    """Against NumPy: over batches of 1 to 36 tokens, the statistics are those of all real tokens together."""
    norm = make(name)
    with measuring(norm) as meter, torch.no_grad():
        rows = []
        for x, _, mask, real_x, _, _ in batches(padded):
            norm(x, mask)
            rows.append(real_x)
        assert meter.tokens == {"": sum(map(len, rows))}
        meter.assign()
    h = layer_scaled(np.concatenate(rows), groups=2)
    if name == "batch":
        close(norm.running_mean, h.mean(0))
        close(norm.running_var, h.var(0, ddof=1))
    else:
        close(norm.running_psi_sq, (h**2).mean(0))


@running
def test_the_next_norm_sees_batches_normalized_by_their_own_statistics(name):
    """Three norms in a row: what reaches the second and third is what the batch's own statistics make of it."""
    model = nn.Sequential(*(make(name, groups=1) for _ in range(3)))
    drawn = batches(padded=True)
    with measuring(model) as meter, torch.no_grad():
        for x, _, mask, *_ in drawn:
            with padding_scope(mask):
                model(x)
        assert meter.tokens == dict.fromkeys("012", sum(len(real_x) for _, _, _, real_x, _, _ in drawn))
        meter.assign()
    tokens = [real_x for _, _, _, real_x, _, _ in drawn]
    for norm in model:
        gain, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
        scaled = [layer_scaled(rows, groups=1) for rows in tokens]
        everything = np.concatenate(scaled)
        tokens = []
        for h in scaled:
            mean = h.mean(0) if name == "batch" else 0.0
            xhat = (h - mean) / np.sqrt(((h - mean) ** 2).mean(0) + 1e-5)
            tokens.append(xhat * gain + bias)
        if name == "batch":
            close(norm.running_mean, everything.mean(0))
            close(norm.running_var, everything.var(0, ddof=1))
        else:
            close(norm.running_psi_sq, (everything**2).mean(0))


def test_running_statistics_do_not_take_part_in_what_is_measured():
    """PowerNorm after its warm-up divides by running statistics in training; of an average they may be far off."""
    results = []
    for psi_sq in (1.0, 400.0):
        model = nn.Sequential(make("power", warmup_updates=0), nn.Tanh(), make("power"))
        model[0].running_psi_sq.fill_(psi_sq)
        with measuring(model) as meter, torch.no_grad():
            model(some(1)[0])
            meter.assign()
        results.append(model[2].running_psi_sq.clone())
    assert torch.equal(*results)


@running
def test_nothing_changes_without_assign(name):
    norm = make(name)
    step(norm, *some(1))
    norm.commit()
    before = statistics(norm)
    with measuring(norm), torch.no_grad():
        norm(some(2)[0])
        norm(some(3)[0])
    assert_same_state(statistics(norm), before)
    assert norm.tally is None and not norm.measuring


@running
def test_only_what_evaluation_uses_changes(name):
    norm = make(name)
    for seed in range(3):
        step(norm, *some(seed))
    norm.commit()
    before = statistics(norm)
    with measuring(norm) as meter, torch.no_grad():
        norm(some(9)[0])
        meter.assign()
    after = statistics(norm)
    changed = [key for key, value in after.items() if not torch.equal(value, before[key])]
    assert changed == MEASURED[name]


@running
def test_training_goes_on_as_if_nothing_had_been_measured(name):
    """What was pending is absorbed first, and later updates do not count what was measured."""
    measured = make(name)
    plain = copy.deepcopy(measured)
    for norm in (measured, plain):
        step(norm, *some(1))
    with measuring(measured), torch.no_grad():
        measured(some(2)[0])
    for norm in (measured, plain):
        step(norm, *some(3))
        norm.eval()
    assert_same_state(measured.state_dict(), plain.state_dict())


@running
def test_evaluation_mode_measures_nothing(name):
    """In evaluation mode a norm uses its statistics as always; assign() names it and changes nothing."""
    model = nn.Sequential(make(name), make(name))
    model[1].eval()
    x = some(1)[0]
    wanted = model[1](x)
    before = statistics(model)
    with measuring(model) as meter, torch.no_grad():
        assert torch.equal(model[1](x), wanted)
        model(x)
        assert meter.tokens == {"0": len(x), "1": 0}
        with pytest.raises(ValueError, match="no tokens were measured at 1:"):
            meter.assign()
    assert_same_state(statistics(model), before)
    model.eval()
    with measuring(model) as meter, torch.no_grad():
        model(x)
        with pytest.raises(ValueError, match="no tokens were measured at 0, 1:"):
            meter.assign()


@running
def test_what_was_pending_before_is_absorbed_first(name):
    """Else it would be absorbed afterwards, on top of what was measured."""
    plain, measured = make(name), make(name)
    for norm in (plain, measured):
        step(norm, *some(2))
    plain.commit()
    with measuring(measured) as meter, torch.no_grad():
        measured(some(1)[0])
        meter.assign()
    assigned = copy.deepcopy(measured.state_dict())
    measured.commit()
    assert_same_state(measured.state_dict(), assigned)
    assert measured.updates_tracked == plain.updates_tracked == 1


@running
def test_batches_that_are_not_finite_are_counted_and_left_out(name):
    norm = make(name)
    wanted = copy.deepcopy(norm)
    good, bad = some(1)[0], some(2)[0]
    bad[3, 2] = float("inf")
    with measuring(norm) as meter, torch.no_grad():
        norm(bad)
        with pytest.raises(ValueError, match="no batch with finite activations was measured at"):
            meter.assign()
        norm(good)
        assert meter.tokens == {"": len(good)} and meter.dropped == {"": 1}
        meter.assign()
    with measuring(wanted) as meter, torch.no_grad():
        wanted(good)
        meter.assign()
    assert_same_state(statistics(norm), statistics(wanted))


@running
def test_padding_alone_counts_nothing(name):
    norm = make(name)
    x = some(1)[0]
    with measuring(norm) as meter, torch.no_grad():
        norm(x, torch.ones(len(x), dtype=torch.bool))
        assert meter.tokens == {"": 0}
        with pytest.raises(ValueError, match="no tokens"):
            meter.assign()


def test_an_error_ends_measuring_and_nesting_is_refused():
    model = nn.Sequential(*map(make, RUNNING))
    with pytest.raises(ZeroDivisionError), measuring(model):
        raise ZeroDivisionError
    assert not any(norm.measuring for norm in model)
    with measuring(model) as meter, torch.no_grad():
        model(some(1)[0])
        with pytest.raises(RuntimeError, match="being measured already: 1"), measuring(
            nn.Sequential(make("power"), model[1])
        ):
            pass
        assert meter.tokens == dict.fromkeys("012", 8)
        meter.assign()


def test_single_precision_keeps_its_type_and_sums_in_double():
    """Many small batches: the sum over batches is exact to float32's last bits."""
    norm = make("power", groups=0).float()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(3000, 6, generator=generator) + 1
    with measuring(norm) as meter, torch.no_grad():
        for row in data.split(3):
            norm(row)
        meter.assign()
    assert norm.running_psi_sq.dtype == torch.float32
    close(norm.running_psi_sq, data.double().square().mean(0).numpy(), 3e-7)
