"""What only a GPU can show; skipped where there is none."""

import re

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import create_norm
from tests.commands import checked
from tests.norms.helpers import NAMES, RUNNING, assert_same_state, step, tokens, with_parameters
from tests.trainings import ADAM, SGD, flags, model_of

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(GPUS == 0, reason="there is no GPU")]


def on_gpu(name, **options):
    return with_parameters(create_norm(name, 64, options), np.random.default_rng(1)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_computes_what_the_cpu_does(name, dtype):
    """Outputs, gradients and statistics over some updates, against float64 on the CPU."""
    gpu, cpu = on_gpu(name).to(dtype), with_parameters(create_norm(name, 64), np.random.default_rng(1)).double()
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    rng = np.random.default_rng(2)
    for _ in range(3):
        x, dy = (torch.as_tensor(tokens(rng, 200, 64)).to(dtype) for _ in range(2))
        mask = torch.as_tensor(rng.random(200) < 0.3)
        results = zip(step(gpu, x.cuda(), dy.cuda(), mask.cuda()), step(cpu, x.double(), dy.double(), mask))
        for actual, wanted in results:
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double().cpu(), wanted, rtol=tolerance, atol=tolerance)
    for key, value in cpu.eval().state_dict().items():
        torch.testing.assert_close(gpu.eval().state_dict()[key].double().cpu(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", RUNNING)
def test_training_never_waits_for_the_device(name):
    """No value of a tensor is asked for in forward, backward or commit, so that the CPU runs ahead of the GPU."""
    norm = on_gpu(name)
    x, dy = (torch.randn(8, 16, 64, device="cuda") for _ in range(2))
    mask = torch.zeros(16, 8, dtype=torch.bool, device="cuda")
    step(norm, x, dy, mask)
    norm.set_num_updates(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in range(2, 4):
            norm(x.clone().requires_grad_(), mask).backward(dy)
            norm.set_num_updates(update)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.updates_tracked == 3


@pytest.mark.parametrize("kind", ["--fp16", "--memory-efficient-fp16", "--amp", "--bf16"])
def test_mixed_precision(kind, translation_data, tmp_path):
    """Traps 5, 6, 16 and 18: statistics in float32, close to those of single precision, after overflows too."""
    optimizer = ADAM if kind == "--memory-efficient-fp16" else SGD
    # One batch, so that a try that overflowed is repeated with the same sentences.
    common = ["--norm", "power", "--norm-warmup-updates", 2, "--train-subset", "test", "--batch-size", 20]
    common += ["--max-update", 6]
    states = {}
    for name, more in {"plain": [], "rounded": [kind], "overflown": [kind, "--fp16-init-scale", 2**20]}.items():
        arguments = flags(translation_data, "translation", tmp_path / name, *common, *more, optimizer=optimizer)
        output = checked("fairseq-train", *arguments)
        if name == "overflown" and kind != "--bf16":
            assert re.search("overflow detected", output)
        states[name] = model_of(tmp_path / name)
    for name in ("rounded", "overflown"):
        for key, wanted in states["plain"].items():
            if "running_" in key:
                assert states[name][key].dtype == torch.float32
                size = wanted.abs().max()
                assert (states[name][key] - wanted).abs().median() <= 0.1 * size, (name, key)
            if key.endswith("updates_tracked"):
                assert states[name][key] == 6


@pytest.mark.skipif(GPUS < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("backend", ["c10d", "legacy_ddp"])
@pytest.mark.parametrize("kind", [[], ["--fp16"], ["--amp"]])
def test_two_gpus(backend, kind, translation_data, tmp_path):
    """NCCL: both workers end with equal statistics, or saving would fail, and with those of one worker."""
    common = ["--norm", "power", "--norm-sync", "batch", "--norm-warmup-updates", 2, "--max-update", 6, *kind]
    one = flags(translation_data, "translation", tmp_path / "one", *common, "--batch-size", 40)
    checked("fairseq-train", *one, "--distributed-world-size", 1)
    two = flags(translation_data, "translation", tmp_path / "two", *common, "--batch-size", 20)
    checked("fairseq-train", *two, "--distributed-world-size", 2, "--ddp-backend", backend)
    one_state, two_state = model_of(tmp_path / "one"), model_of(tmp_path / "two")
    for key, wanted in one_state.items():
        if "running_" in key:
            assert (two_state[key] - wanted).abs().median() <= (0.1 if kind else 0.01) * wanted.abs().max(), key


def test_a_state_moves_between_devices():
    norm = on_gpu("power")
    step(norm, torch.randn(9, 64, device="cuda"), torch.randn(9, 64, device="cuda"))
    moved = norm.eval().cpu()
    assert_same_state({key: value.cpu() for key, value in norm.state_dict().items()}, moved.state_dict())
