"""The fused GPU kernels can be compiled, down to machine code, whether or not there is a GPU."""

import importlib.util
import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted", allow_module_level=True)
if importlib.util.find_spec("triton.backends") is None:
    pytest.skip("this Triton compiles for the device at hand alone", allow_module_level=True)

pytestmark = pytest.mark.slow


class Driver:
    """Stands for the driver of a device of compute capability 8.0, which needs none to compile for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A list of the kernels that calls of the module ``gpu`` compile in place of starting them."""
    from triton.runtime import driver

    from powernorm_fairseq.norms.kernels import gpu

    kernels = []

    def compile_only(kernel, grid, *args, warps=4, **constants):
        assert all(0 < size <= limit for size, limit in zip(grid, (2**31 - 1, 65535)))
        kernels.append(kernel.warmup(*args, grid=grid, num_warps=warps, **constants))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", Driver())
    monkeypatch.setattr(gpu, "_launch", compile_only)
    monkeypatch.setattr(gpu, "_processors", lambda device: 100)
    return kernels


def inputs(rows, channels, dtype):
    x = torch.zeros(rows, channels, dtype=dtype)
    vector = torch.zeros(channels, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return x, torch.zeros_like(x), torch.zeros(rows, dtype=torch.bool), vector


def check(kernels, names):
    assert [kernel.metadata.name for kernel in kernels] == names
    for kernel in kernels:
        assert kernel.asm["cubin"]
        # Two tensors of a block's size need not fit the shared memory; what crosses threads does.
        assert kernel.metadata.shared <= 48 * 1024
        assert "atom." not in kernel.asm["ptx"]


POWER = ["forward_rows", "finish_forward", "backward_rows", "finish_backward"]
WARMUP = ["forward_rows", "finish_forward", "forward_rows", "backward_rows", "finish_backward"]


@pytest.mark.parametrize(
    "shape, groups, dtype, padded, in_warmup",
    [
        ((4096, 512), 8, torch.bfloat16, True, True),
        ((4001, 510), 3, torch.float64, True, False),
        ((300, 8192), 1, torch.float32, False, False),
        ((300, 384), 0, torch.float16, True, False),
    ],
    ids=str,
)
def test_power_norm(compiled, shape, groups, dtype, padded, in_warmup):
    from powernorm_fairseq.norms.kernels import gpu

    x, dy, padding, vector = inputs(*shape, dtype)
    padding = padding if padded else None
    _, s, stats = gpu.power_norm_forward(x, vector, vector, padding, vector, groups, 1e-5, in_warmup, False)
    gpu.power_norm_backward(x, dy, vector, padding, s, stats, vector, 1.0)
    # One kernel over the rows and one that finishes, each way; the warm-up takes one more.
    check(compiled, WARMUP if in_warmup else POWER)
    if shape[1] % 16 == 0:  # threads load and store 16 bytes at a time
        for kernel in (compiled[2 if in_warmup else 0], compiled[-2]):
            assert "ld.global.v4.b32" in kernel.asm["ptx"] and "st.global.v4.b32" in kernel.asm["ptx"]


def test_groups_wider_than_a_tile(compiled):
    from powernorm_fairseq.norms.kernels import gpu

    x, dy, padding, vector = inputs(300, 16384, torch.float32)
    _, s, stats = gpu.power_norm_forward(x, vector, vector, padding, vector, 1, 1e-5, False, True)
    gpu.power_norm_backward(x, dy, vector, padding, s, stats, vector, 1.0)
    check(compiled, ["wide_forward", *POWER[:2], "wide_backward", *POWER[2:]])


def test_passes(compiled):
    from powernorm_fairseq.norms.kernels import gpu

    x, dy, padding, vector = inputs(1000, 512, torch.float32)
    s = gpu.moments(x, padding, 8, 1e-5)[0]
    gpu.forward_pass(x, padding, 8, 1e-5, vector, vector, s, vector)
    gpu.backward_pass(x, dy, padding, s, vector, vector, vector, vector)
    gpu.batch_norm_backward(x, dy, vector, padding, s, torch.zeros(3, 512))
    _, mean, inverse = gpu.standardize_forward(x, 1e-5, True, 1.0, 0.1)
    gpu.standardize_backward(x, dy, mean, inverse, 1e-5, True, False, False, 1.0, 0.1)
    passes = ["moment_rows", "finish_moments", "forward_rows", "finish_sums", "backward_rows", "finish_sums"]
    exact = ["backward_rows", "finish_sums", "backward_rows"]
    check(compiled, [*passes, *exact, "standardize_rows", "standardize_back_rows"])


def test_many_rows_and_many_channels_stay_within_a_grid(compiled):
    from powernorm_fairseq.norms.kernels import gpu

    for count, channels, groups in ((2**31 - 1, 4096, 16), (1, 2**16, 0), (7, 2**16, 2**12)):
        for elements in (gpu.FORWARD_ELEMENTS, gpu.BACKWARD_ELEMENTS):
            tiling = gpu._tiling(torch.empty(count, channels, device="meta"), groups, elements)
            assert 1 <= tiling.strips <= 100 * gpu.WARPS_PER_PROCESSOR and tiling.tiles <= 65535
