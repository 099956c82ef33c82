"""What the fused GPU kernels do on a device only: real sizes, no waiting, equal results each time, graphs, streams."""

import importlib.util

import pytest
import torch

from powernorm_fairseq.norms import create_norm, formulas, kernels

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(GPUS == 0 or importlib.util.find_spec("triton") is None, reason="there is no GPU, or no Triton"),
]

SIZES = [
    (512, 512, 8),
    (4096, 1024, 1),
    (16384, 512, 0),
    (4001, 510, 3),
    (300, 8192, 1),
    (300, 16384, 1),
    (7, 16384, 16),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(rows, channels, dtype=torch.float32, device="cuda", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    x, dy = (torch.randn(rows, channels, generator=generator, device=device).to(dtype) for _ in range(2))
    weight, bias, psi_sq, nu = (torch.rand(channels, generator=generator, device=device) + 0.5 for _ in range(4))
    padding = torch.rand(rows, generator=generator, device=device) < 0.2
    x[padding], dy[padding] = float("nan"), float("nan")
    return x, dy, weight, bias, padding, psi_sq, nu


def power(x, dy, weight, bias, padding, psi_sq, nu, groups, use_batch_psi=False, released=False):
    """Everything that a forward and a backward pass gives, in one list."""
    y, s, stats = formulas.power_norm_forward(
        x, weight, bias, padding, psi_sq, groups, 1e-5, use_batch_psi, released
    )  # fmt: skip
    return [y, stats, *formulas.power_norm_backward(x, dy, weight, padding, s, stats, nu, 8.0)]


def close(actual, wanted, tolerance):
    """Equality up to ``tolerance``, relative to the largest number of each row of results."""
    actual, wanted = actual.double(), wanted.double().to(actual.device)
    assert torch.isfinite(actual).all()
    assert (actual - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_the_fused_kernels_are_used():
    assert kernels.fused(torch.ones(1, 1, device="cuda")) is kernels.available("gpu") is not None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, channels, groups", SIZES)
def test_real_sizes(rows, channels, groups, dtype):
    inputs = draw(rows, channels, dtype)
    for options in ((False, False), (True, False), (False, True)):
        actual = power(*inputs, groups, *options)
        with kernels.use("torch"):
            wanted = power(*(part if part.dtype == torch.bool else part.double() for part in inputs), groups, *options)
        assert actual[0].dtype == actual[2].dtype == dtype
        for one, other in zip(actual[:1] + actual[2:3], wanted[:1] + wanted[2:3]):
            close(one, other, TOLERANCE[dtype])
        sums = [*actual[1], *actual[3:5], *actual[5][2:].view(3, -1)]
        for one, other in zip(sums, [*wanted[1], *wanted[3:5], *wanted[5][2:].view(3, -1)]):
            close(one, other, 1e-4)
        assert torch.equal(actual[5][:2], wanted[5][:2])


def test_a_matrix_of_more_elements_than_32_bits_count():
    rows, channels = 2**21 + 5, 1024
    if torch.cuda.mem_get_info()[0] < 4 * rows * channels * 2 + 2**30:
        pytest.skip("the device has not the memory for four matrices of 4 GB")
    x = torch.randn(8, channels, device="cuda").half().repeat(rows // 8 + 1, 1)[:rows]
    vector = torch.ones(channels, device="cuda")
    y, s, stats = formulas.power_norm_forward(x, vector, None, None, vector, 8, 1e-5, False, False)
    dx = formulas.power_norm_backward(x, y, vector, None, s, stats, vector, 1.0).dx
    few = x[-16:].contiguous()
    y_few, s_few, stats_few = formulas.power_norm_forward(few, vector, None, None, vector, 8, 1e-5, False, False)
    dx_few = formulas.power_norm_backward(few, y_few, vector, None, s_few, stats_few, vector, 1.0).dx
    assert torch.equal(y[-16:], y_few) and torch.equal(dx[-16:], dx_few)


@pytest.mark.parametrize("groups", [0, 8])
def test_an_upstream_gradient_of_zero(groups):
    x, dy, *others = draw(5000, 512)
    grads = power(x, torch.zeros_like(dy), *others, groups)[2:]
    assert all((part == 0).all() for part in grads)


def test_results_are_always_the_same():
    inputs = draw(16384, 512)
    first = power(*inputs, 8)
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, power(*inputs, 8)))


@pytest.mark.parametrize("name", ["power", "power_v", "batch", "rms", "ada", "detach"])
def test_nothing_waits_for_the_device(name):
    norm = create_norm(name, 64, {"groups": 4, "warmup_updates": 2}).cuda()
    x, dy = (torch.randn(8, 16, 64, device="cuda") for _ in range(2))
    mask = torch.zeros(16, 8, dtype=torch.bool, device="cuda")

    def train(update):
        if hasattr(norm, "set_num_updates"):
            norm.set_num_updates(update)
        norm(x.clone().requires_grad_(), mask).backward(dy)

    for update in range(4):  # kernels are compiled
        train(update)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in range(4, 8):
            train(update)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("use_batch_psi", [False, True])
def test_cuda_graph(use_batch_psi):
    """A graph that is captured once gives the results of other data, and of an upstream gradient of zero."""
    inputs = draw(1000, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        power(*inputs, 8, use_batch_psi)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = power(*inputs, 8, use_batch_psi)
    others = draw(1000, 512, seed=1)
    for zero in (False, True):
        for part, other in zip(inputs, others):
            part.copy_(other)
        if zero:
            inputs[1].zero_()
        graph.replay()
        for one, other in zip(captured, power(*inputs, 8, use_batch_psi)):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert (captured[2] == 0).all()


def test_another_stream():
    inputs = draw(4096, 512)
    wanted = power(*inputs, 8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # were the kernels on the default stream, they would read x before it is there
        late = [part.clone() for part in inputs]
        actual = power(*late, 8)
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(actual, wanted))


@pytest.mark.skipif(GPUS < 2, reason="there are not two GPUs")
def test_a_device_that_is_not_the_current_one():
    inputs = draw(1000, 512)
    elsewhere = power(*(part.to("cuda:1") for part in inputs), 8)
    assert all(part.device.index == 1 for part in elsewhere)
    for one, other in zip(elsewhere, power(*inputs, 8)):
        close(one.cpu(), other.cpu(), 1e-4)
