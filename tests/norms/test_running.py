"""When running statistics change, and when they do not."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from powernorm_fairseq.norms.running import inside_backward
from tests.norms.helpers import Batches, assert_same_state, close, make, running, some, statistics, step


@running
def test_an_update_is_one_step_at_the_next_set_num_updates(name):
    norm = make(name)
    norm.set_num_updates(0)
    fresh = statistics(norm)
    step(norm, *some(0))
    norm.set_num_updates(0)
    step(norm, *some(1))
    assert_same_state(statistics(norm), fresh)
    norm.set_num_updates(1)
    assert norm.updates_tracked == 1
    after = statistics(norm)
    norm.set_num_updates(1)
    norm.set_num_updates(2)
    assert_same_state(statistics(norm), after)


@running
def test_micro_batches_are_one_joined_batch_whatever_their_padding(name):
    """Token-weighted: micro-batches of different sizes, statistics to rounding, PowerNorm's gradients too."""
    joined, parts = make(name), make(name)
    for update in range(4):
        (x, dy), (more_x, more_dy) = some(2 * update, rows=11), some(2 * update + 1, rows=3)
        for norm in (joined, parts):
            norm.set_num_updates(update)
        _, dx = step(joined, torch.cat([x, more_x]), torch.cat([dy, more_dy]))
        padded = torch.full((5, 6), math.nan, dtype=torch.float64)
        mask = torch.arange(8) >= 3
        _, one = step(parts, x, dy)
        _, other = step(parts, torch.cat([more_x, padded]), torch.cat([more_dy, padded]), mask)
        if name == "power":
            close(torch.cat([one, other[:3]]), dx)
    for (key, actual), wanted in zip(parts.state_dict().items(), joined.state_dict().values()):
        close(actual, wanted, 1e-12), key
    assert parts.updates_tracked == 4


def test_all_micro_batches_of_an_update_see_the_statistics_of_the_last():
    norm = make("power")
    norm.set_num_updates(0)
    x, dy = some(0)
    first = step(norm, x, dy)
    step(norm, *some(1))
    assert all(map(torch.equal, first, step(norm, x, dy)))
    norm.set_num_updates(1)
    assert not any(map(torch.equal, first, step(norm, x, dy)))


@running
def test_outside_fairseq_each_backward_is_an_update_committed_at_the_next_training_forward(name):
    stated, unstated = make(name, warmup_updates=2), make(name, warmup_updates=2)
    for update in range(5):
        stated.set_num_updates(update)
        for wanted, actual in zip(step(stated, *some(update)), step(unstated, *some(update))):
            assert torch.equal(wanted, actual)
        assert unstated.updates_tracked == update
    assert_same_state(unstated.state_dict(), stated.state_dict())


@running
def test_a_forward_without_backward_counts_nothing(name):
    norm = make(name)
    fresh = statistics(norm)
    for _ in range(3):
        norm(some(0)[0])
        with torch.no_grad():
            norm(some(1)[0])
    norm.commit()
    assert_same_state(norm.state_dict(), fresh)


@running
@pytest.mark.parametrize("stated", [False, True])
def test_two_forwards_before_the_backward_passes_both_count(name, stated):
    """As in R-Drop: two forwards of one model, one loss; or two losses, one after the other."""
    together, apart = make(name), make(name)
    (x, dy), (more_x, more_dy) = some(0), some(1, rows=5)
    for norm in (together, apart):
        if stated:
            norm.set_num_updates(0)
    first, second = apart(x.requires_grad_()), apart(more_x.requires_grad_())
    first.backward(dy)
    second.backward(more_dy)
    ((together(x) * dy).sum() + (together(more_x) * more_dy).sum()).backward()
    for norm in (together, apart):
        norm.commit()
        assert norm.updates_tracked == 1
    joined = make(name)
    step(joined, torch.cat([x, more_x]).detach(), torch.cat([dy, more_dy]))
    for wanted, one, other in zip(joined.state_dict().values(), *(n.state_dict().values() for n in (together, apart))):
        close(one, wanted, 1e-12)
        close(other, wanted, 1e-12)


class Twice(torch.nn.Module):
    """One norm used twice, so that recomputation meets contributions that are pending already."""

    def __init__(self, norm, reentrant):
        super().__init__()
        self.norm, self.reentrant = norm, reentrant
        self.middle = torch.nn.Linear(6, 6).double()

    def block(self, x):
        return torch.tanh(self.middle(self.norm(x)))

    def forward(self, x):
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


@running
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stated", [False, True])
def test_activation_checkpointing_changes_nothing(name, reentrant, stated):
    """Trap 13."""
    torch.manual_seed(0)
    plain = Twice(make(name, warmup_updates=2), None)
    recomputing = copy.deepcopy(plain)
    recomputing.reentrant = reentrant
    for update in range(4):
        x, dy = some(update)
        gradients = []
        for model in (plain, recomputing):
            if stated:
                model.norm.set_num_updates(update)
            model.zero_grad()
            y = model(x.clone().requires_grad_())
            y.backward(dy)
            gradients.append([y.detach()] + [parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *gradients))
    assert_same_state(recomputing.state_dict(), plain.state_dict())
    assert plain.norm.updates_tracked == 4


def test_inside_backward_is_known():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append(inside_backward())
            return dy

    Look.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [True] and not inside_backward()


@running
def test_zero_upstream_gradient_counts_nothing_and_gives_exactly_zero(name):
    """Trap 4: fairseq's dummy batches: a forward in training mode whose loss is multiplied by zero."""
    norm = make(name)
    for seed in range(3):
        step(norm, *some(seed))
    norm.commit()
    before = statistics(norm)
    x, dy = some(7)
    mask = torch.arange(8) > 5
    dy[:], dy[mask] = 0, math.nan
    for _ in range(2):
        _, dx = step(norm, x, dy, mask)
        assert torch.equal(dx, torch.zeros_like(dx))
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in norm.parameters())
    norm.commit()
    assert_same_state(norm.state_dict(), before)


@running
def test_a_dummy_batch_beside_a_real_one_changes_nothing(name):
    real, both = make(name), make(name)
    for norm in (real, both):
        norm.set_num_updates(0)
        step(norm, *some(0))
    step(both, some(1)[0], torch.zeros(8, 6))
    assert_same_state(both.state_dict(), real.state_dict())


@running
def test_a_failed_try_is_discarded(name):
    plain, retried = make(name), make(name)
    for norm in (plain, retried):
        norm.set_num_updates(0)
    step(retried, *some(5))
    retried.discard_pending()
    retried.set_num_updates(0)
    for norm in (plain, retried):
        step(norm, *some(0))
        norm.set_num_updates(1)
    assert_same_state(retried.state_dict(), plain.state_dict())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name, where", [("power", "dy"), ("power", "x"), ("power_v", "x"), ("batch", "x")])
def test_sums_that_are_not_finite_are_dropped_and_counted(name, bad, where):
    """Trap 6."""
    plain, hit = make(name), make(name)
    x, dy = some(3)
    (x if where == "x" else dy)[2, 1] = bad
    for update in range(3):
        for norm in (plain, hit):
            norm.set_num_updates(update)
            step(norm, *some(update))
        step(hit, x, dy)  # a second micro-batch: only this one is dropped
    wanted, actual = plain.state_dict(), hit.state_dict()
    assert actual.pop("updates_skipped") == 3 and wanted.pop("updates_skipped") == 0
    assert_same_state(actual, wanted)


@running
def test_an_update_with_two_bad_micro_batches_is_skipped_once_and_dummies_never(name):
    norm = make(name)
    norm.set_num_updates(0)
    x, dy = some(0)
    x[0, 0] = math.inf
    for _ in range(2):
        step(norm, x, dy)
    norm.set_num_updates(1)
    assert norm.updates_skipped == 1
    step(norm, x, torch.zeros_like(dy))
    norm.set_num_updates(2)
    assert norm.updates_skipped == 1 and norm.updates_tracked == 0


@running
def test_an_update_of_bad_sums_only_is_no_update(name):
    norm = make(name)
    step(norm, torch.full((4, 6), math.nan, dtype=torch.float64), torch.ones(4, 6))
    fresh = make(name).state_dict()
    state = norm.state_dict()
    assert state["updates_skipped"] == 1 and state["updates_tracked"] == 0
    state["updates_skipped"] *= 0
    assert_same_state(state, fresh)


@running
@pytest.mark.parametrize("warmup", [0, 5])
def test_batches_without_a_token_are_no_update(name, warmup):
    """Trap 8."""
    norm = make(name, warmup_updates=warmup)
    fresh = statistics(norm)
    x, dy = some(0)
    y, dx = step(norm, x * math.nan, dy, torch.ones(8, dtype=torch.bool))
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(dx, torch.zeros_like(dx))
    y, dx = step(norm, x[:0], dy[:0])
    assert y.shape == dx.shape == (0, 6)
    y, dx = step(norm, torch.zeros(0, 3, 6).double(), torch.zeros(0, 3, 6), torch.zeros(3, 0, dtype=torch.bool))
    assert y.shape == dx.shape == (0, 3, 6)
    assert_same_state(norm.state_dict(), fresh)


@running
def test_committed_statistics_do_not_disturb_a_graph_that_waits(name):
    norm = make(name)
    norm.set_num_updates(0)
    x, dy = some(0)
    waiting = norm(x.requires_grad_())
    step(norm, *some(1))
    norm.set_num_updates(1)
    waiting.backward(dy)
    assert torch.isfinite(x.grad).all()


@running
def test_statistics_count_even_where_only_a_parameter_wants_a_gradient(name):
    norm = make(name)
    x, dy = some(0)
    norm(x).backward(dy)
    wanted = make(name)
    step(wanted, x, dy)
    assert_same_state(norm.state_dict(), wanted.state_dict())


@running
def test_real_padded_batches_of_three_dimensions_pool_like_their_tokens(name):
    batches = Batches(4)
    padded, flat = make(name), make(name)
    for _ in range(3):
        x, dy, mask, real_x, real_dy, _ = batches.draw()
        step(padded, x, dy, mask)
        step(flat, real_x, real_dy)
    for actual, wanted in zip(padded.state_dict().values(), flat.state_dict().values()):
        close(actual, wanted, 1e-12)
