"""The fused GPU kernels: on the device where there is one, and through Triton's interpreter on CPU tensors.

Kernels are made for the device or for the interpreter when they are imported. So the interpreter has a process of its
own, in which the tests of this file run again.
"""

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import create_norm, formulas, kernels, rows
from tests.commands import ROOT
from tests.norms.helpers import NAMES, step, with_parameters

ON_DEVICE = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_DEVICE else "cpu"
TRITON = importlib.util.find_spec("triton") is not None

runs = pytest.mark.skipif(not TRITON or not (ON_DEVICE or INTERPRETED), reason="no GPU: the interpreter runs it")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Sums are of a few hundred numbers of size 1; a result in low precision is off by half a unit of its last place.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
# (The interpreter cuts bfloat16 off instead of rounding it.)
ROUNDING = {
    torch.float64: 0.0,
    torch.float32: 0.0,
    torch.bfloat16: 2**-7 if INTERPRETED else 2**-8,
    torch.float16: 2**-11,
}
EPS = 1e-3


@pytest.fixture
def gpu(monkeypatch):
    """The module, with tiles so small that a few rows make several strips of several blocks."""
    from powernorm_fairseq.norms.kernels import gpu

    monkeypatch.setattr(gpu, "FORWARD_ELEMENTS", 128)
    monkeypatch.setattr(gpu, "BACKWARD_ELEMENTS", 128)
    monkeypatch.setattr(gpu, "COLUMNS", 16)
    monkeypatch.setattr(gpu, "WARPS_PER_PROCESSOR", 12)
    monkeypatch.setattr(gpu, "_processors", lambda device: 2)
    monkeypatch.setattr(gpu, "BLOCK", 64)
    monkeypatch.setattr(gpu, "DEPTH", 2)
    with kernels.use("torch"):  # for what results are compared with
        yield gpu


def close(actual, wanted, dtype=None):
    """Asserts equality with a float64 result of plain PyTorch, up to the error of ``dtype``."""
    dtype = actual.dtype if dtype is None else dtype
    actual = actual.detach().double().cpu()
    assert actual.shape == wanted.shape
    assert torch.isfinite(actual).all()
    size = wanted.abs().max().clamp(min=1e-300) if wanted.numel() else 1.0
    error = (actual - wanted).abs() - wanted.abs() * ROUNDING[dtype]
    assert (error <= TOLERANCE.get(dtype, TOLERANCE[torch.float32]) * size).all(), float(error.max() / size)


class Data:
    """Inputs in ``dtype`` on the device, full of nonsense at padding, and ``plain``: the same in float64 on the CPU."""

    def __init__(self, shape, dtype=torch.float64, padded="some", seed=1):
        rng = np.random.default_rng(seed)
        count, channels = shape
        sizes = 0.5 + rng.random(channels)
        padding = {
            "no": None, "none": np.zeros(count, bool), "some": rng.random(count) < 0.3, "all": np.ones(count, bool)
        }[padded]  # fmt: skip
        self.dtype = dtype
        self.padding = None if padding is None else torch.as_tensor(padding)
        self.x = torch.as_tensor((rng.standard_normal(shape) + 0.3) * sizes).to(dtype)
        self.dy = torch.as_tensor(rng.standard_normal(shape) + 0.2).to(dtype)
        kind = rows.compute_dtype(self.x)
        self.vectors = [torch.as_tensor(0.5 + rng.random(channels)).to(kind) for _ in range(6)]
        self.real = torch.ones(count, dtype=torch.bool) if self.padding is None else ~self.padding
        for matrix in (self.x, self.dy):
            matrix[~self.real] = float("nan")

    def on(self, *tensors):
        return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]

    def plain(self, *tensors):
        return [None if tensor is None else tensor.double() for tensor in tensors]


SHAPES = [((19, 12), 3), ((19, 12), 1), ((11, 21), 0), ((5, 150), 3), ((1, 5), 5), ((0, 6), 2)]
shapes = pytest.mark.parametrize("shape, groups", SHAPES, ids=str)


def check_passes(gpu, data, groups, vectors=True):
    """forward_pass, backward_pass and moments against those of ``rows``."""
    x, dy, padding = data.on(data.x, data.dy, data.padding)
    plain_x, plain_dy = data.plain(data.x, data.dy)
    if data.padding is not None:
        plain_x[data.padding] = plain_dy[data.padding] = 0
    a, b, shift, d, a_back, b_back = data.vectors if vectors else [None] * 6
    wanted = rows.forward_pass(plain_x, data.padding, groups, EPS, *data.plain(a, b), None, *data.plain(shift))
    actual = gpu.forward_pass(x, padding, groups, EPS, *data.on(a, b), None, *data.on(shift))
    assert actual.y.dtype == data.dtype and (actual.y[~data.real] == 0).all()
    close(actual.y, wanted.y)
    close(actual.sum_sq, wanted.sum_sq)
    assert (actual.s is None) == (groups == 0)
    if groups:
        close(actual.s, wanted.s)
    wanted_back = rows.backward_pass(plain_x, plain_dy, data.padding, wanted.s, *data.plain(a_back, b_back, d, shift))
    back = gpu.backward_pass(x, dy, padding, actual.s, *data.on(a_back, b_back, d, shift))
    assert back.dx.dtype == data.dtype and (back.dx[~data.real] == 0).all()
    for one, other in zip(back, wanted_back):
        close(one, other)
    s, count, mean, deviation = gpu.moments(x, padding, groups, EPS)
    _, wanted_count, wanted_mean, wanted_deviation = rows.moments(plain_x, data.padding, groups, EPS)
    assert count.shape == () and count == wanted_count
    close(mean, wanted_mean)
    close(deviation, wanted_deviation)
    assert s is None or torch.equal(s, actual.s)


@runs
@shapes
def test_passes(gpu, shape, groups):
    check_passes(gpu, Data(shape), groups)


@runs
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_passes_in_other_types(gpu, dtype):
    check_passes(gpu, Data((19, 12), dtype), 3)


@runs
def test_passes_without_vectors(gpu):
    check_passes(gpu, Data((19, 12)), 2, vectors=False)


@runs
@pytest.mark.parametrize("padded", ["no", "none", "all"])
def test_passes_where_all_or_nothing_is_padding(gpu, padded):
    check_passes(gpu, Data((11, 12), padded=padded), 2)


@runs
@pytest.mark.parametrize("groups, padded", [(1, "some"), (2, "no")])
def test_groups_wider_than_a_tile(gpu, monkeypatch, groups, padded):
    monkeypatch.setattr(gpu, "WIDEST_GROUP", 16)
    check_passes(gpu, Data((3, 42), padded=padded), groups)
    check_power(gpu, Data((3, 42), padded=padded), groups)


@runs
def test_what_is_not_wanted_is_left_out(gpu):
    data = Data((11, 12))
    x, dy, padding, a, b, d, shift = data.on(data.x, data.dy, data.padding, *data.vectors[:4])
    everything = gpu.forward_pass(x, padding, 2, EPS, a, b, None, shift)
    gained = gpu.forward_pass(x, padding, 2, EPS, 2 * a, b, None, shift, gain=torch.full_like(a, 0.5))
    assert torch.equal(gained.y, everything.y)
    again = gpu.forward_pass(x, padding, 2, EPS, a, b, everything.s, shift, want_sum_sq=False)
    assert torch.equal(again.y, everything.y) and again.s is everything.s and again.sum_sq is None
    sums = gpu.forward_pass(x, padding, 2, EPS, want_y=False)
    assert torch.equal(sums.sum_sq, everything.sum_sq) and sums.y is None

    back = gpu.backward_pass(x, dy, padding, everything.s, a, b, d, shift)
    passed = gpu.backward_pass(x, dy, padding, everything.s, a, b, d, shift, want_sums=False)
    assert torch.equal(passed.dx, back.dx) and passed.sum_dy is None and passed.sum_dy_h is None
    sums = gpu.backward_pass(x, dy, padding, everything.s, shift=shift, want_dx=False)
    assert torch.equal(sums.sum_dy_h, back.sum_dy_h) and torch.equal(sums.sum_dy, back.sum_dy) and sums.dx is None

    whole, without = (power(gpu, data, 2, want_dx=want_dx)[1] for want_dx in (True, False))
    assert without[0] is None and all(torch.equal(one, other) for one, other in zip(whole[1:], without[1:]))


@runs
def test_moments_do_not_cancel(gpu):
    """A mean that is ten thousand standard deviations away from zero."""
    x = torch.as_tensor(1e4 + np.random.default_rng(3).standard_normal((60, 20))).float()
    wanted = x.double().var(0, unbiased=False) * 60
    _, _, mean, deviation = gpu.moments(*Data((1, 1)).on(x), None, 0, EPS)
    torch.testing.assert_close(mean.cpu(), x.double().mean(0).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(deviation.cpu(), wanted.float(), rtol=1e-3, atol=0)


def plain_power(x, dy, weight, bias, real, psi_sq, nu, groups, use_batch_psi, released, scale):
    """PowerNorm's forward and backward pass on real rows, whole tensors: y, s, stats, dx, dweight, dbias, sums."""
    x, dy = x[real], dy[real]
    s = None
    h = x
    if groups:
        s = torch.rsqrt((x * x).view(len(x), groups, x.shape[1] // groups).mean(-1) + EPS)
        h = (x.view(len(x), groups, x.shape[1] // groups) * s.unsqueeze(-1)).view(x.shape)
    sum_sq = (h * h).sum(0)
    of_batch = torch.rsqrt(sum_sq / max(len(x), 1) + EPS)
    r = of_batch if use_batch_psi else torch.rsqrt(psi_sq + EPS)
    r_back = of_batch if released or use_batch_psi else r
    xhat = h * r
    gain = torch.ones_like(r) if weight is None else weight
    dh = (dy * gain - nu * scale * xhat * bool((dy != 0).any())) * r_back
    dx = dh
    if groups:
        along = (dh * h).view(len(x), groups, x.shape[1] // groups).mean(-1, keepdim=True)
        dx = (
            (dh.view(len(x), groups, x.shape[1] // groups) - h.view(len(x), groups, x.shape[1] // groups) * along)
            * s.unsqueeze(-1)
        ).view(x.shape)
    dweight, dbias = (dy * xhat).sum(0), dy.sum(0)
    sums = torch.cat([sum_sq, (xhat * xhat).sum(0), dweight * gain / scale])
    y = xhat * gain + (0 if bias is None else bias)
    return y, s, torch.stack([sum_sq, r, r_back]), dx, dweight, dbias, sums


def power(gpu, data, groups, use_batch_psi=False, released=False, affine=True, scale=1.0, want_dx=True):
    x, dy, padding, weight, bias, psi_sq, nu = data.on(data.x, data.dy, data.padding, *data.vectors[:4])
    if not affine:
        weight = bias = None
    y, s, stats = gpu.power_norm_forward(x, weight, bias, padding, psi_sq, groups, EPS, use_batch_psi, released)
    return (y, s, stats), gpu.power_norm_backward(x, dy, weight, padding, s, stats, nu, scale, want_dx)


def check_power(gpu, data, groups, use_batch_psi=False, released=False, affine=True, scale=1.0):
    options = groups, use_batch_psi, released
    (y, s, stats), (dx, dweight, dbias, row) = power(gpu, data, *options, affine, scale)
    x, dy, weight, bias, psi_sq, nu = data.plain(data.x, data.dy, *data.vectors[:4])
    if not affine:
        weight = bias = None
    wanted = plain_power(x, dy, weight, bias, data.real, psi_sq, nu, *options, scale)
    for matrix, right in ((y, wanted[0]), (dx, wanted[3])):
        assert matrix.dtype == data.dtype and (matrix[~data.real] == 0).all()
        close(matrix[data.real], right)
    if groups:
        close(s[data.real], wanted[1])
    for vector, right in ((stats, wanted[2]), (dweight, wanted[4]), (dbias, wanted[5])):
        close(vector, right)
    assert row.dtype == torch.float64
    count = int(data.real.sum())
    live = count > 0 and bool((dy[data.real] != 0).any())
    assert row[0] == 0 and row[1] == count * live
    close(row[2:], wanted[6] * live, rows.compute_dtype(data.x))


NUMERICS = [(False, False), (True, False), (False, True), (True, True)]
numerics = pytest.mark.parametrize("use_batch_psi, released", NUMERICS)


@runs
@shapes
def test_power_norm(gpu, shape, groups):
    check_power(gpu, Data(shape), groups, scale=0.3)


@runs
@numerics
@pytest.mark.parametrize("affine, padded", [(True, "some"), (False, "no"), (True, "all")])
def test_power_norm_numerics(gpu, use_batch_psi, released, affine, padded):
    check_power(gpu, Data((11, 12), padded=padded), 2, use_batch_psi, released, affine, scale=1000.1)


@runs
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("use_batch_psi", [False, True])
def test_power_norm_in_other_types(gpu, dtype, use_batch_psi):
    check_power(gpu, Data((11, 24), dtype), 4, use_batch_psi, released=True, scale=128.0)


@runs
@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_parameters_and_statistics_of_another_type(gpu, kind):
    data = Data((19, 12), torch.float32)
    data.vectors = [vector.to(kind) for vector in data.vectors]
    check_power(gpu, data, 2)


@runs
@pytest.mark.parametrize("groups", [0, 3])
def test_nothing_comes_of_an_upstream_gradient_of_zero(gpu, groups):
    data = Data((19, 12))
    data.dy[data.real] = 0
    dx, dweight, dbias, row = power(gpu, data, groups)[1]
    for result in (dx, dweight, dbias, row):
        assert (result == 0).all()


@runs
@pytest.mark.parametrize("place", [0, 7, 18])
def test_one_number_is_enough_to_be_live(gpu, place):
    data = Data((19, 12), torch.float32, padded="no")
    data.dy[:] = 0
    data.dy[place, 11] = 1e-30
    dx, _, _, row = power(gpu, data, 3)[1]
    assert row[1] == 19 and (dx != 0).any(1).all()


@runs
@pytest.mark.parametrize("what", ["dy", "x"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_sums_that_are_not_finite_are_dropped(gpu, what, value):
    data = Data((19, 12), torch.float32, padded="no")
    getattr(data, what)[17, 5] = value
    row = power(gpu, data, 3)[1][3]
    assert row[0] == 1 and (row[1:] == 0).all()
    data.dy[:] = 0
    if what == "x":
        assert (power(gpu, data, 3)[1][3] == 0).all()


@runs
def test_sums_too_large_are_dropped(gpu):
    """Each strip's sum can be held, but not that of all."""
    data = Data((19, 12), torch.float32, padded="no")
    data.dy[:] = torch.where(data.x > 0, 3e37, -3e37)
    row = power(gpu, data, 0)[1][3]
    assert row[0] == 1 and (row[1:] == 0).all()


@runs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("released", [False, True])
def test_standardize(gpu, dtype, released):
    for detach_mean, detach_sigma, scale, k in ((False, False, 1.7, 0.1), (True, False, 1.0, 0.0), (False, True, 1, 0)):
        for shape in ((19, 12), (0, 6)):
            data = Data(shape, dtype, padded="no")
            data.x[:1] = 2.0  # sigma is 0
            x, dz = data.on(data.x, data.dy)
            z, mean, inverse = gpu.standardize_forward(x, EPS, released, scale, k)
            plain_x, plain_dz = data.plain(data.x, data.dy)
            wanted, *statistics = rows.standardize_forward(plain_x, EPS, released, scale, k)
            close(z, wanted)
            options = EPS, released, detach_mean, detach_sigma, scale, k
            wanted = rows.standardize_backward(plain_x, plain_dz, *statistics, *options)
            close(gpu.standardize_backward(x, dz, mean, inverse, *options), wanted)


@runs
@pytest.mark.parametrize("name", ["power_norm_v", "batch_norm"])
@pytest.mark.parametrize("zero", [False, True])
def test_exact_gradients(gpu, name, zero):
    """Also where the upstream gradient is zero: it contributes nothing to the running statistics."""
    data = Data((11, 12))
    if zero:
        data.dy[data.real] = 0
    forward, backward = (getattr(formulas, f"{name}_{way}") for way in ("forward", "backward"))
    results = []
    for choice, device in (("torch", "cpu"), ("gpu", DEVICE)):
        tensors = (data.x, data.dy, data.padding, *data.vectors[:2])
        x, dy, padding, weight, bias = (tensor.to(device) for tensor in tensors)
        with kernels.use(choice):
            y, s, stats = forward(x, weight, bias, padding, 3, EPS)[:3]
            results.append([y, stats, *backward(x, dy, weight, padding, s, stats)])
    for wanted, actual in zip(*results):
        close(actual, wanted)
    assert bool((results[1][-1] == 0).all()) == zero


@runs
@pytest.mark.parametrize("name", NAMES)
def test_norms(gpu, name):
    """Two updates of each norm: outputs, gradients and state, then evaluation."""
    results = []
    for choice, device, dtype in (("torch", "cpu", torch.float64), ("gpu", DEVICE, torch.float32)):
        norm = with_parameters(create_norm(name, 12), np.random.default_rng(1)).to(device, dtype)
        values = []
        with kernels.use(choice):
            for seed in range(2):
                data = Data((5, 12), torch.float32, seed=seed)
                values += step(
                    norm, *(tensor.to(device, dtype) for tensor in (data.x, data.dy)), data.padding.to(device)
                )
                values += [parameter.grad for parameter in norm.parameters()]
            values += norm.eval().state_dict().values()
            values.append(norm(Data((5, 12), torch.float32, "no", seed=9).x.to(device, dtype)))
        results.append([value.detach() for value in values])
    for actual, wanted in zip(results[1], results[0]):
        close(actual, wanted.double())


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_all_of_this_through_the_interpreter():
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 60
