"""The state of norms with running statistics: resumed, converted, copied, scaled, and counted in updates."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch

from powernorm_fairseq.norms import create_norm, gradient_scale, set_gradient_scale
from powernorm_fairseq.norms.loss_scale import get_gradient_scale
from tests.norms.helpers import ASSIGNS, assert_same_state, close, make, running, some, statistics, step


@running
def test_eval_commits_and_uses_committed_statistics_only(name):
    norm, other = make(name), make(name)
    for one in (norm, other):
        one.set_num_updates(0)
        step(one, *some(0))
    norm.eval()
    assert norm.updates_tracked == 1
    x, _ = some(1)
    y = norm(x)
    assert torch.equal(norm(x[:3]), y[:3])
    assert_same_state(other.state_dict(), statistics(norm))
    assert torch.equal(norm.train().eval()(x), y)


@running
def test_gradients_in_eval_mode_are_exact_and_record_nothing(name):
    norm = make(name)
    step(norm, *some(0))
    norm.eval()
    before = statistics(norm)
    assert torch.autograd.gradcheck(norm, some(1, rows=3)[0].requires_grad_())
    norm.commit()
    assert_same_state(statistics(norm), before)


@running
@pytest.mark.parametrize("stated", [False, True])
def test_a_resumed_run_is_the_uninterrupted_run(name, stated):
    def update(norm, index):
        if stated:
            norm.set_num_updates(index)
        return step(norm, *some(index))

    through = make(name, warmup_updates=5)
    for index in range(8):
        update(through, index)
    first = make(name, warmup_updates=5)
    for index in range(3):
        update(first, index)
    second = make(name, warmup_updates=5)
    step(second, *some(77))  # pending when the state comes: no part of it
    second.load_state_dict(first.state_dict())
    for index in range(3, 8):
        update(second, index)
    assert_same_state(second.state_dict(), through.state_dict())


@pytest.mark.parametrize("numerics", ["paper", "released"])
def test_the_warm_up_counts_updates_not_forwards(numerics):
    norm = make("power", warmup_updates=2, numerics=numerics)
    by_batch = []
    for update in range(4):
        for micro_batch in range(3):
            norm.set_num_updates(update)
            x, dy = some(10 * update + micro_batch)
            y, _ = step(norm, 3 * x, dy)
            by_batch.append(y)
        norm.eval()
        norm(some(0)[0])
        norm.train()
    centred = [((y - norm.bias) / norm.weight).square().mean(0).detach() for y in by_batch]
    divided_by_batch = [torch.allclose(c, torch.ones(6).double(), atol=1e-4) for c in centred]
    assert divided_by_batch == [True] * 6 + [False] * 6


def test_a_warm_up_started_again_averages_anew():
    """Fine-tuning sets the number of updates back to 0: the old statistics weigh nothing then."""
    norm = make("power", warmup_updates=3)
    for update in range(6):
        norm.set_num_updates(update)
        step(norm, *some(update))
    fresh = make("power", warmup_updates=3)
    for one in (norm, fresh):
        one.set_num_updates(0)
        step(one, *some(50))
        one.set_num_updates(1)
    close(norm.running_psi_sq, fresh.running_psi_sq)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_changing_gradient_scale_leaves_no_trace_in_the_statistics(warmup):
    plain, scaled = make("power", warmup_updates=warmup), make("power", warmup_updates=warmup)
    for update in range(5):
        x, dy = some(update)
        y, dx = step(plain, x, dy)
        scale = (128, 64, 2, 4096, 0.5)[update]
        with gradient_scale(scale):
            scaled_y, scaled_dx = step(scaled, x, scale * dy)
        close(scaled_y, y, 1e-14)
        close(scaled_dx / scale, dx, 1e-14)
    for actual, wanted in zip(scaled.state_dict().values(), plain.state_dict().values()):
        close(actual, wanted, 1e-14)


def test_the_gradient_scale_can_be_set_and_comes_back():
    set_gradient_scale(4)
    try:
        with pytest.raises(KeyError), gradient_scale(2):
            assert get_gradient_scale() == 2
            raise KeyError
        assert get_gradient_scale() == 4
    finally:
        set_gradient_scale(1)
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            set_gradient_scale(bad)


@running
@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.bfloat16, lambda n: n.to(torch.bfloat16)])
def test_statistics_stay_float32_in_low_precision(name, change):
    """Trap 18."""
    norm = create_norm(name, 6)
    x, dy = some(0)
    step(norm, x.float(), dy)
    norm.commit()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    assert change(norm) is norm
    assert_same_state(dict(norm.named_buffers()), before)
    assert all(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in norm.parameters())
    y, dx = step(norm, x.to(norm.weight.dtype), dy)
    assert y.dtype == dx.dtype == norm.weight.dtype
    norm.commit()
    assert all(buffer.dtype == torch.float32 for buffer in norm.buffers())
    assert norm.updates_tracked == 2
    assert all(buffer.dtype == torch.float64 for buffer in norm.double().buffers())


@running
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_copies_have_the_state_and_nothing_pending(name, copied):
    norm = make(name)
    step(norm, *some(0))
    norm.commit()
    committed = statistics(norm)
    norm(some(1)[0]).sum().backward()
    other = copied(norm)
    assert_same_state(other.state_dict(), committed)
    norm.commit()
    assert norm.updates_tracked == 2 and other.updates_tracked == 1
    step(other, *some(2))
    assert other.state_dict()["updates_tracked"] == 2 and norm.updates_tracked == 2


@running
def test_a_norm_that_keeps_its_output_can_be_collected(name):
    norm = make(name)
    norm.last = norm(some(0)[0])
    gone = weakref.ref(norm)
    del norm
    gc.collect()
    assert gone() is None


@running
def test_all_buffers_are_floating_point(name):
    """Scripts that average checkpoints, and moving averages of models, multiply and divide every buffer."""
    assert all(buffer.is_floating_point() for buffer in make(name).state_dict().values())


def test_own_count_of_updates_leaves_out_what_counted_nothing():
    norm = create_norm("power", 4, {"groups": 2, "warmup_updates": 3})
    for number in range(3):
        x, dy = some(number, rows=5)
        step(norm, x[:, :4].float(), torch.zeros_like(dy[:, :4]).float())
    norm.commit()
    assert norm.num_updates == 0
    other = create_norm("power", 4, {"groups": 2, "warmup_updates": 3})
    other.load_state_dict(norm.state_dict())
    assert other.num_updates == norm.num_updates


@running
def test_a_loaded_state_forgets_what_a_trainer_had_said(name):
    fresh = copy.deepcopy(make(name).state_dict())
    norm = make(name)
    norm.set_num_updates(7)
    step(norm, *some(0))
    norm.load_state_dict(fresh)
    for number in range(3):
        step(norm, *some(number))
    norm.commit()
    assert norm.num_updates == norm.updates_tracked == 3


@pytest.mark.skipif(not ASSIGNS, reason="needs torch 2.1")
@running
def test_statistics_stay_float32_when_half_ones_are_assigned(name):
    norm = make(name).float()
    half = {key: value.half() for key, value in norm.state_dict().items()}
    norm.load_state_dict(half, assign=True)
    assert all(buffer.dtype == torch.float32 for buffer in norm.buffers())
