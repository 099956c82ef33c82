"""What evaluation keeps of the statistics, and everything that may make it stale."""

import copy
import pickle

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import create_norm
from tests.norms.helpers import ASSIGNS, make, running, some, step


def trained(name, seed=0):
    norm = make(name)
    norm.set_num_updates(0)
    step(norm, *some(seed))
    return norm.eval()


@torch.enable_grad()
def commit(norm):
    norm.train()
    step(norm, *some(5))
    norm.eval()


@torch.enable_grad()
def commit_in_evaluation(norm):
    """As a trainer does that validates before it says that the update is over."""
    norm.train()
    step(norm, *some(5))
    pending, norm._update.pending = norm._update.pending, None
    norm.eval()
    norm(some(1)[0])
    norm._update.pending = pending
    norm.commit()


@torch.enable_grad()
def other_state(norm):
    return trained(make_name(norm), 7).state_dict()


def to_another_device_and_back(norm):
    state = other_state(norm)
    norm.to("meta")
    norm(some(1)[0].to("meta"))
    norm.to_empty(device="cpu")
    norm.load_state_dict(state)


CHANGES = {
    "train, an update, eval": commit,
    "commit": commit_in_evaluation,
    "load_state_dict": lambda norm: norm.load_state_dict(other_state(norm)),
    "load_state_dict(assign=True)": lambda norm: norm.load_state_dict(other_state(norm), assign=True),
    "another device": to_another_device_and_back,
    "another dtype": lambda norm: norm.float().double(),
    "statistics in place": lambda norm: statistics(norm).mul_(3.0),
    "statistics through data": lambda norm: statistics(norm).data.mul_(3.0),
    "statistics under their data": lambda norm: setattr(statistics(norm), "data", statistics(norm) * 3.0),
    "statistics in an array": lambda norm: np.multiply(statistics(norm).numpy(), 3.0, out=statistics(norm).numpy()),
    "statistics by name": lambda norm: norm.register_buffer(
        statistics_name(norm), statistics(norm).detach().clone() * 3.0
    ),
    "measured anew": lambda norm: norm.assign(*norm.measure(some(9)[0], None)),
    "a parameter in place": lambda norm: norm.weight.data.mul_(2.0),
    "a parameter by name": lambda norm: setattr(norm, "bias", torch.nn.Parameter(norm.bias + 1.0)),
}


def make_name(norm):
    return {"PowerNorm": "power", "PowerNormV": "power_v", "BatchNorm": "batch"}[type(norm).__name__]


def statistics_name(norm):
    return "running_var" if make_name(norm) == "batch" else "running_psi_sq"


def statistics(norm):
    return getattr(norm, statistics_name(norm))


@running
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stale_is_used(name, change):
    if "assign" in change and not ASSIGNS:
        pytest.skip("needs torch 2.1")
    norm, (x, _) = trained(name), some(1)
    with torch.no_grad():
        before = norm(x)
        CHANGES[change](norm)
        after = norm(x)
        wanted = create_norm(name, 6, {"groups": 2}).double()
        wanted.load_state_dict(norm.state_dict())
        assert torch.equal(after, wanted.eval()(x))
    assert change == "another dtype" or not torch.equal(before, after)


@running
def test_an_update_leaves_the_gradients_of_an_earlier_evaluation_alone(name):
    gradients = []
    for between in (False, True):
        norm, (x, dy) = trained(name), some(1)
        y = norm(x)
        if between:
            commit(norm)
        norm.zero_grad()
        y.backward(dy)
        gradients.append(norm.weight.grad)
    assert torch.equal(*gradients)


@running
def test_constants_are_computed_once_while_nothing_changes(monkeypatch, name):
    norm, (x, _) = trained(name), some(1)
    calls = []
    compute = norm.constants_of_statistics
    monkeypatch.setattr(norm, "constants_of_statistics", lambda: calls.append(1) or compute())
    with torch.no_grad():
        for _ in range(3):
            norm(x)
    norm(x.requires_grad_()).sum().backward()
    assert len(calls) == 1
    norm.train()
    assert norm._update.constants is None  # nothing is held in training


@running
def test_constants_made_in_inference_mode_serve_training_too(name):
    norm, (x, dy) = trained(name), some(1)
    with torch.inference_mode():
        inferred = norm(x)
    y, _ = step(norm, x, dy)  # still in evaluation: frozen statistics, trained gain and bias
    assert torch.equal(y, inferred)


@running
def test_copies_keep_nothing_of_the_original(name):
    norm, (x, _) = trained(name), some(1)
    y = norm(x)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert other._update.constants is None
        assert torch.equal(other(x), y)
        statistics(other).mul_(2.0)
        assert not torch.equal(other(x), y) and torch.equal(norm(x), y)
