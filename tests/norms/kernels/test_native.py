"""The fused CPU kernels against the plain passes."""

import logging
import shutil
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from powernorm_fairseq.norms import RunningNorm, create_norm, formulas, gradient_scale, kernels, rows
from powernorm_fairseq.norms import functional as F
from tests.norms.helpers import RUNNING, Batches, close, make, step

native = kernels.available("native")
pytestmark = pytest.mark.skipif(native is None, reason="the CPU kernels are not built")

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (3, 6, 2), (67, 12, 3), (301, 96, 6), (0, 8, 2)]
instructions = pytest.mark.parametrize("name", ["portable", "avx2", "avx512"])


@contextmanager
def running_with(name):
    before = native.instructions()
    if not native.use_instructions(name):
        pytest.skip(f"this processor or build has no {name}")
    try:
        yield
    finally:
        assert native.use_instructions(before)


def both(function, *args, **kwargs):
    """What ``function`` gives, fused and plain, as pairs of tensors."""
    results = []
    for choice in ("native", "torch"):
        with kernels.use(choice):
            result = function(*args, **kwargs)
            results.append(result if isinstance(result, tuple) else (result,))
    for fused, plain in zip(*results):
        assert (fused is None) == (plain is None)
        if fused is not None:
            assert fused.dtype == plain.dtype and fused.shape == plain.shape
            yield fused.double(), plain.double()


def agree(pairs, tolerance):
    """Equal up to ``tolerance``, of the largest number or of 1, which is the size of the inputs."""
    for fused, plain in pairs:
        assert torch.isfinite(fused).all()
        error, scale = (float(t.abs().max()) if t.numel() else 0.0 for t in (fused - plain, plain))
        assert error <= tolerance * max(scale, 1.0), (error, scale)


def inputs(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count, channels, _ = shape
    x, dy = (torch.randn(count, channels, generator=generator, dtype=torch.float64) + 0.3 for _ in range(2))
    padding = torch.rand(count, generator=generator) < 0.3
    x[padding], dy[padding] = float("nan"), float("inf")  # of no account
    vectors = [torch.randn(channels, generator=generator, dtype=torch.float64) + 1 for _ in range(6)]
    computing = torch.float64 if dtype == torch.float64 else torch.float32
    return x.to(dtype), dy.to(dtype), padding, [v.to(computing) for v in vectors]


def tolerance(dtype):
    # Both round once to the type; a value may fall to either side of a boundary. Sums of float32 come in another order.
    return {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)


def check_passes(shape, dtype):
    x, dy, padding, (a, b, d, shift, gain, _) = inputs(shape, dtype)
    real_x, real_dy = (torch.where(padding.unsqueeze(1), torch.zeros_like(t), t) for t in (x, dy))
    limit = tolerance(dtype)
    for groups in (0, 1, shape[2]):
        for mask, u, g in ((None, real_x, real_dy), (padding, x, dy)):
            agree(both(rows.forward_pass, u, mask, groups, 1e-5, a, b, gain=gain), limit)
            agree(both(rows.forward_pass, u, mask, groups, 1e-5, None, None, None, shift, want_sum_sq=False), limit)
            agree(both(rows.forward_pass, u, mask, groups, 1e-5, want_y=False), limit)
            agree(both(rows.moments, u, mask, groups, 1e-5), limit)
            s = rows.forward_pass(u, mask, groups, 1e-5, want_y=False).s
            agree(both(rows.forward_pass, u, mask, groups, 1e-5, a, b, s, want_sum_sq=False), limit)
            agree(both(rows.backward_pass, u, g, mask, s, a, b), limit)
            agree(both(rows.backward_pass, u, g, mask, s), limit)
            agree(both(rows.backward_pass, u, g, mask, s, a, b, d, shift, want_sums=False), limit)
            agree(both(rows.backward_pass, u, g, mask, s, a, b, d, want_sums=False), limit)
            agree(both(rows.backward_pass, u, g, mask, s, shift=shift, want_dx=False), limit)
    for released in (False, True):
        agree(both(rows.standardize_forward, real_x, 1e-3, released, 1.5, 0.1), 3 * limit)
        _, mean, inverse = rows.standardize_forward(real_x, 1e-3, released, 1.5, 0.1)
        for detached in ((False, False), (True, False), (False, True)):
            options = (1e-3, released, *detached, 1.5, 0.1)
            agree(both(rows.standardize_backward, real_x, real_dy, mean, inverse, *options), 3 * limit)


@instructions
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_passes(name, dtype, shape):
    with running_with(name):
        check_passes(shape, dtype)


@instructions
@pytest.mark.parametrize("dtype", TYPES)
def test_passes_over_more_rows_than_the_cache_holds(name, dtype):
    """There the kernels take one row at a time."""
    with running_with(name):
        x, dy, padding, (a, b, *_) = inputs((9001, 120, 4), dtype)
        agree(both(rows.forward_pass, x, padding, 4, 1e-5, a, b), 4 * tolerance(dtype))
        s = rows.forward_pass(x, padding, 4, 1e-5, want_y=False).s
        agree(both(rows.backward_pass, x, dy, padding, s, a, b), 4 * tolerance(dtype))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("batch_psi", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_whole_norms(dtype, batch_psi, released, padded):
    shape = (67, 12, 3)
    x, dy, padding, (weight, bias, psi, nu, _, _) = inputs(shape, dtype)
    padding, x, dy = (padding, x, dy) if padded else (None, x.nan_to_num(0), dy.nan_to_num(0, 1, 1))
    limit, psi_sq = 4 * tolerance(dtype), psi.square() + 0.1
    for groups in (0, 3):
        for gain, shift in ((weight, bias), (None, None), (weight.to(dtype), None)):
            forward = (x, gain, shift, padding, psi_sq, groups, 1e-5, batch_psi, released)
            agree(both(formulas.power_norm_forward, *forward), limit)
            _, s, stats = formulas.power_norm_forward(*forward)
            agree(both(formulas.power_norm_backward, x, dy, gain, padding, s, stats, nu, 8.0), limit)
            for name in ("power_norm_v", "batch_norm"):
                forward = (x, gain, shift, padding, groups, 1e-5)
                agree(both(getattr(formulas, f"{name}_forward"), *forward), limit)
                _, s, stats, *_ = getattr(formulas, f"{name}_forward")(*forward)
                agree(both(getattr(formulas, f"{name}_backward"), x, dy, gain, padding, s, stats), limit)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("name", RUNNING)
def test_gradients_that_must_not_count(name, bad):
    norm = make(name)
    x, dy, mask, *_ = Batches(3).draw()
    if bad:
        dy[0, 0] = bad  # a real token
    else:
        dy[:] = -0.0
    contributions = []
    for choice in ("native", "torch"):
        with kernels.use(choice):
            _, dx = step(norm, x, dy, mask)
        assert bad or (dx == 0).all()
        contributions.append(norm._update.pending)
        norm.discard_pending()
    close(*contributions, 1e-12)
    assert contributions[0][1] == 0 or (bad and name != "power")


@pytest.mark.parametrize("name", [*RUNNING, "ada", "rms"])
def test_results_do_not_depend_on_the_number_of_threads(name):
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            norm = create_norm(name, 128, {"groups": 4})
            values = []
            for seed in range(2):
                x, dy, *_ = inputs((1003, 128, 4), torch.float32, seed)
                values += step(norm, x.nan_to_num(0), dy.nan_to_num(0, 1, 1))
            results.append([*values, *[p.grad for p in norm.parameters()], *norm.state_dict().values()])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(one, wanted) for one, wanted in zip(other, results[0]))


@instructions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_of_16_bits_pass_unchanged_and_products_are_rounded_to_the_nearest(name, dtype):
    with running_with(name), kernels.use("native"):
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, 64)
        y = F.group_rms_scale(x, 0)
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y[~x.isnan()], x[~x.isnan()])  # where -0.0 is 0.0: the sign of zeros is not kept
        weight = torch.exp(torch.linspace(-12, 12, 64))
        y, wanted = F.group_rms_scale(x, 0, weight=weight), (x.float() * weight).to(dtype)
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y[~y.isnan()], wanted[~y.isnan()])


def train(norm, updates=3):
    values = []
    for update in range(updates):
        norm.set_num_updates(update) if isinstance(norm, RunningNorm) else None
        x, dy, mask, *_ = Batches(update).draw()
        with gradient_scale(4.0):
            values += step(norm, x, dy, mask)
        values += [p.grad for p in norm.parameters()]
    norm.eval()
    frozen = step(norm, x.nan_to_num(0), dy.nan_to_num(0), None)
    return [*values, *frozen, *[p.grad for p in norm.parameters()], *norm.state_dict().values()]


@pytest.mark.skipif(native is None or native.binding is None, reason="the binding is not built")
@pytest.mark.parametrize("name", [*RUNNING, "ada", "detach", "rms", "scale"])
@pytest.mark.parametrize("groups", [0, 2])
def test_the_binding_gives_the_bits_of_the_functions_in_python(monkeypatch, name, groups):
    with kernels.use("native"):
        bound = train(make(name, groups=groups))
        monkeypatch.setattr(native, "binding", None)
        for one, wanted in zip(bound, train(make(name, groups=groups))):
            assert torch.equal(one, wanted)


@pytest.mark.skipif(native is None or native.binding is None, reason="the binding is not built")
@pytest.mark.parametrize("name", [*RUNNING, "ada", "rms"])
def test_gradients_of_gradients_are_an_error_in_the_binding_too(name):
    norm = make(name)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with kernels.use("native"):
        (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiat"):
            dx.sum().backward()


@pytest.mark.skipif(native is None or native.binding is None, reason="the binding is not built")
def test_an_error_while_recording_reaches_the_caller_of_backward(monkeypatch):
    norm = make("power")
    monkeypatch.setattr(norm, "record", lambda row: 1 / 0)
    with kernels.use("native"):
        y = norm(torch.randn(4, 6, dtype=torch.float64, requires_grad=True))
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()


@pytest.mark.parametrize("bound", [False, True])
def test_vectors_and_masks_that_do_not_fit_are_refused(monkeypatch, bound):
    """The library would read beyond their ends, or at an address that is none."""
    if not bound:
        monkeypatch.setattr(native, "binding", None)
    x, few, elsewhere = torch.zeros(3, 6), torch.ones(4), torch.ones(6, device="meta")
    with kernels.use("native"):
        for wrong in (few, elsewhere):
            for name in ("weight", "bias", "factor", "shift"):
                with pytest.raises((ValueError, RuntimeError), match="expected a vector of 6 channels on cpu"):
                    F.group_rms_scale(x, **{name: wrong})
            with pytest.raises((ValueError, RuntimeError), match="expected a vector of 6 channels on cpu"):
                F.power_norm(x, None, None, wrong, torch.zeros(6))
        with pytest.raises((ValueError, RuntimeError), match=r"expected a .*mask of"):
            F.group_rms_scale(x, padding=torch.zeros(4, dtype=torch.bool))
        with pytest.raises((ValueError, RuntimeError), match="4 groups of 6 channels"):
            F.group_rms_scale(x, groups=4)


def test_without_channels_nothing_is_counted():
    with kernels.use("native"):
        count, mean, _ = F.moment_sums(torch.zeros(3, 0), None, 0, 1e-5)
    assert count == 3 and mean.numel() == 0


@pytest.mark.skipif(native is None or native.binding is None, reason="the binding is not built")
@pytest.mark.parametrize("function", [F.group_rms_scale, F.ada_norm])
def test_other_threads_run_while_the_library_works(function):
    def another_ran():
        gate, ran = threading.Lock(), []
        gate.acquire()
        thread = threading.Thread(target=lambda: gate.acquire() and ran.append(True))
        thread.start()
        gate.release()
        y = function(x)  # kept: what frees its memory lets others run
        meanwhile = bool(ran)
        thread.join()
        return meanwhile and y is not None

    x, before = torch.randn(300_000, 6), sys.getswitchinterval()
    sys.setswitchinterval(60)  # longer than the call: the other thread runs only where this one lets it
    try:
        with kernels.use("native"), torch.no_grad():
            function(x)
            assert any(another_ran() for _ in range(50))  # on a busy machine it may wait for a core meanwhile
    finally:
        sys.setswitchinterval(before)


def test_strides_do_not_matter():
    norm = make("power", dim=6)
    norm.set_num_updates(0)
    wide, mask = torch.randn(5, 3, 12).double(), torch.rand(3, 10) < 0.5
    x, padding = wide[..., ::2], mask[:, ::2]
    with kernels.use("native"):
        wanted, dx = step(norm, x.contiguous(), torch.ones(5, 3, 6).double(), padding.clone())
        leaf = wide.clone().requires_grad_()
        y = norm(leaf[..., ::2], padding)
        assert torch.equal(y, wanted)
        y.sum().backward()  # its gradient is one number seen many times
        assert torch.equal(leaf.grad[..., ::2], dx)
        # Gradients of gain and bias are tensors of their own: each begins a storage.
        gradients = (norm.weight.grad, norm.bias.grad)
        assert all(gradient.storage_offset() == 0 for gradient in gradients)
        assert gradients[0].data_ptr() != gradients[1].data_ptr()


def test_what_the_library_cannot_take_is_left_to_pytorch():
    with kernels.use("native"):
        assert kernels.fused(torch.zeros(2, 2)) is native
        assert kernels.fused(torch.zeros(2, 2, device="meta")) is None
        assert kernels.fused(torch.zeros(2, 2, dtype=torch.complex64)) is None
        norm = create_norm("power", 4).to("meta")
        assert norm(torch.zeros(3, 4, device="meta")).shape == (3, 4)


def test_a_missing_or_foreign_library_is_one_line_in_the_log(tmp_path, caplog, monkeypatch):
    (tmp_path / "broken.so").write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert native.load(tmp_path / "missing.so") is None
        assert native.load(tmp_path / "broken.so") is None
        monkeypatch.setattr(native, "ABI", -1)
        assert native.load() is None and native.load_binding() is None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and all("\n" not in line and "plain PyTorch is used" in line for line in lines)
    assert "not built" in lines[0] and "broken.so" in lines[1] and "another version" in lines[2]
    with monkeypatch.context() as without:
        without.setitem(kernels._loaded, "native", None)
        assert kernels.fused(torch.zeros(2, 2)) is None
        with pytest.raises(RuntimeError, match="cannot be used here"), kernels.use("native"):
            pass


def test_a_checkout_takes_the_libraries_of_an_install_of_its_sources(tmp_path, monkeypatch):
    checkout, installed = tmp_path / "checkout", tmp_path / "site" / "powernorm_fairseq" / "norms" / "kernels"
    for folder in (checkout, installed):
        shutil.copytree(native.HERE / "csrc", folder / "csrc")
    (installed / native.NAME).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert native.built(checkout) == installed
    (checkout / "csrc" / "native.h").write_text("// changed since\n")
    assert native.built(checkout) == checkout
    (checkout / native.NAME).touch()
    assert native.built(checkout) == checkout


def test_a_choice_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"there are auto, torch, native, gpu"), kernels.use("cuda"):
        pass
