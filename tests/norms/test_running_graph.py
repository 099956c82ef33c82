"""Running statistics under unusual graphs: used twice, recomputed, unfinished, frozen.

The reference is always a norm of the same kind that takes plain forward and backward passes, one after the other.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from powernorm_fairseq.norms import padding_scope
from tests.norms.helpers import assert_same_state, close, make, running, some, statistics, step


def plainly(norm, pairs):
    """Plain passes of (x, dy) in one update; returns each dx. Gradients of parameters add up."""
    gradients = []
    for x, dy in pairs:
        x = x.detach().clone().requires_grad_()
        norm(x).backward(dy)
        gradients.append(x.grad)
    return gradients


def assert_close_gradients(norm, reference):
    for parameter, wanted in zip(norm.parameters(), reference.parameters()):
        close(parameter.grad, wanted.grad, 1e-12)


def assert_close_state(norm, reference):
    actual, wanted = norm.state_dict(), reference.state_dict()
    assert list(actual) == list(wanted)
    for key in wanted:
        close(actual[key], wanted[key], 1e-12)


@running
@pytest.mark.parametrize("warmup", [0, 2])
def test_two_forwards_and_one_backward_of_a_loss_that_joins_them(name, warmup):
    """Trap 15, two forwards before one backward: R-Drop's divergence between two passes with other dropout."""
    norm, reference = make(name, warmup_updates=warmup), make(name, warmup_updates=warmup)
    for update in range(4):
        for one in (norm, reference):
            one.zero_grad()
            one.set_num_updates(update)
        x = some(update)[0].requires_grad_()
        torch.manual_seed(update)
        passes = [x * (torch.rand_like(x) > 0.2) for _ in range(2)]
        outputs = [norm(one) for one in passes]
        for tensor in outputs:
            tensor.retain_grad()
        first, second = (torch.log_softmax(y, -1) for y in outputs)
        ((first.exp() - second.exp()) * (first - second)).sum().backward()
        gradients = plainly(reference, [(one, y.grad) for one, y in zip(passes, outputs)])
        close(x.grad, sum(gradient * (one != 0) for gradient, one in zip(gradients, passes)), 1e-12)
        assert_close_gradients(norm, reference)
    assert_close_state(norm, reference)
    assert norm.updates_tracked == 4


@running
@pytest.mark.parametrize("stated", [False, True])
def test_one_module_used_twice_in_a_graph(name, stated):
    """Trap 15, one module used twice: each use counts as it would alone, in one update."""
    norm, reference = make(name, warmup_updates=2), make(name, warmup_updates=2)
    for update in range(4):
        for one in (norm, reference):
            one.zero_grad()
            one.set_num_updates(update)
        if not stated:
            norm._update.stated = None
        x, dy = some(update)
        x.requires_grad_()
        inner = norm(x)
        between = torch.tanh(inner) * 2
        outer = norm(between)
        for tensor in (inner, between):
            tensor.retain_grad()
        outer.backward(dy)
        wanted_between, wanted = plainly(reference, [(between, dy), (x, inner.grad)])
        close(between.grad, wanted_between, 1e-12)
        close(x.grad, wanted, 1e-12)
        assert_close_gradients(norm, reference)
    assert_close_state(norm, reference)
    assert norm.updates_tracked == 4


@running
@pytest.mark.parametrize("stated", [False, True])
def test_forwards_whose_backward_never_comes_change_nothing(name, stated):
    """Trap 16, a forward that is run again or thrown away: before, between and after the passes of an update."""
    norm, reference = make(name, warmup_updates=2), make(name, warmup_updates=2)
    for update in range(4):
        x, dy = some(update)
        for one, disturbed in ((norm, True), (reference, False)):
            if stated:
                one.set_num_updates(update)
            one.zero_grad()
            if disturbed:
                one(some(100)[0])
            y = one(x.clone().requires_grad_())
            if disturbed:
                lost = one(some(101, rows=3)[0].requires_grad_())
                with torch.no_grad():
                    one(some(102)[0])
            y.backward(dy)
            if disturbed:
                del lost
                one(some(103)[0])
    assert_same_state(norm.state_dict(), reference.state_dict())
    assert norm.updates_tracked == 4


class Block(nn.Module):
    """What a layer does: a padding scope, dropout, and one norm for two places."""

    def __init__(self, name):
        super().__init__()
        self.norm = make(name, warmup_updates=2)
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x, mask):
        with padding_scope(mask):
            x = x + nn.functional.dropout(self.linear(self.norm(x)), 0.2)
            return torch.tanh(self.norm(x)) + x


class Stack(nn.Module):
    """Two blocks, recomputed in the backward pass unless ``reentrant`` is None."""

    def __init__(self, name, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([Block(name), Block(name)])
        self.reentrant = reentrant

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask) if self.reentrant is None else checkpoint(block, x, mask, use_reentrant=self.reentrant)
        return x


@running
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stated", [False, True])
def test_recomputed_layers_with_dropout_and_padding(name, reentrant, stated):
    """Trap 13, activation checkpointing runs the forward twice; and trap 12, its warm-up: whole state and gradients.

    The last update has a forward without backward, a second micro-batch, and a dummy batch whose gradient is zero.
    """
    torch.manual_seed(0)
    plain = Stack(name, None)
    recomputing = copy.deepcopy(plain)
    recomputing.reentrant = reentrant
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    for update in range(5):
        seen = []
        for model in (plain, recomputing):
            torch.manual_seed(update)
            model.zero_grad()
            for module in model.modules():
                if stated and hasattr(module, "set_num_updates"):
                    module.set_num_updates(update)
            for micro_batch in range(2 if stated else 1):
                x, dy = (t.reshape(4, 2, 6) for t in some(10 * update + micro_batch))
                x.requires_grad_()
                if update == 4:
                    model(x, mask)
                y = model(x, mask)
                y.backward(dy)
                if update == 4:
                    model(x.detach().requires_grad_(), mask).backward(torch.zeros_like(dy))
                seen.append([y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())])
        half = len(seen) // 2
        for one, other in zip(seen[:half], seen[half:]):
            assert all(map(torch.equal, one, other))
        assert_same_state(statistics(recomputing), statistics(plain))
    assert_same_state(recomputing.state_dict(), plain.state_dict())
    assert all(block.norm.updates_tracked == 5 for block in recomputing.blocks)


@running
def test_frozen_parameters_leave_the_statistics_alive(name):
    """``requires_grad_(False)``: statistics belong to the data, so they are those of a norm that trains."""
    frozen, reference = make(name), make(name)
    frozen.requires_grad_(False)
    for update in range(3):
        x, dy = some(update)
        for one in (frozen, reference):
            one.set_num_updates(update)
        for actual, wanted in zip(step(frozen, x, dy), step(reference, x, dy)):
            assert torch.equal(actual, wanted)
        assert all(parameter.grad is None for parameter in frozen.parameters())
    assert_same_state(frozen.state_dict(), reference.state_dict())
    assert frozen.updates_tracked == 3


@running
def test_no_backward_reaches_a_frozen_norm_over_frozen_input(name):
    """Nothing trains below or in the norm: nothing is gathered, and in training it still gives what it gave."""
    norm = make(name)
    step(norm, *some(0))
    norm.requires_grad_(False)
    norm.commit()
    before = statistics(norm)
    head = nn.Linear(6, 2).double()
    for update in range(1, 3):
        norm.set_num_updates(update)
        y = norm(some(update)[0])
        assert not y.requires_grad
        head(y).sum().backward()
    norm.commit()
    assert_same_state(statistics(norm), before)


@running
def test_without_parameters_it_gathers_where_a_gradient_passes_through(name):
    norm, reference = make(name, affine=False), make(name)
    with torch.no_grad():
        reference.weight.fill_(1)
        reference.bias.zero_()
    assert not list(norm.parameters())
    for update in range(3):
        x, dy = some(update)
        for actual, wanted in zip(step(norm, x, dy), step(reference, x, dy)):
            close(actual, wanted, 1e-12)
        assert not norm(x).requires_grad  # no parameters and no input gradient: no graph, no statistics
    wanted = reference.state_dict()
    for key, value in norm.state_dict().items():
        close(value, wanted[key], 1e-12)
    assert norm.updates_tracked == 3


@running
@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_eval_of_one_norm_inside_a_model_in_training(name, stated, reentrant):
    """A norm frozen by ``eval()`` neither uses nor changes by the batch, until the model is told to train again."""
    torch.manual_seed(1)
    model = Stack(name, reentrant)
    live, frozen = model.blocks[0].norm, model.blocks[1].norm

    def update(number):
        model.zero_grad()
        if stated:
            live.set_num_updates(number)
            frozen.set_num_updates(number)
        x, dy = (t.reshape(4, 2, 6) for t in some(number))
        model(x.requires_grad_(), None).backward(dy)

    for number in range(3):
        update(number)
    frozen.eval()
    assert model.training and frozen.updates_tracked == 3
    before = {key: value.clone() for key, value in frozen.named_buffers()}
    x = some(50)[0]
    one_by_one = torch.cat([frozen(row[None]) for row in x])
    for number in range(3, 6):
        update(number)
        assert all(parameter.grad.any() for parameter in frozen.parameters())
        close(torch.cat([frozen(row[None]) for row in x]), frozen(x), 1e-12)
        close(frozen(x), one_by_one, 1e-12)
        frozen.commit()
        assert_same_state(dict(frozen.named_buffers()), before)
    model.train()
    update(6)
    live.commit()
    frozen.commit()
    assert (live.updates_tracked, frozen.updates_tracked) == (7, 4)
