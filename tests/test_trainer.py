"""Running statistics under fairseq's own trainer: workers, accumulation, loss scales, failures."""

import contextlib
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics, progress_bar
from fairseq.optim import AMPOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer

from powernorm_fairseq import trainer
from powernorm_fairseq.experiment.log import statistics
from powernorm_fairseq.norms import create_norm
from powernorm_fairseq.norms.loss_scale import get_gradient_scale
from tests.commands import in_this_process
from tests.forked import run_plan
from tests.trainings import ADAM, SGD, TWO, UPDATES, assert_close, flags, logged, model_of

pytestmark = pytest.mark.slow

PLAIN = SimpleNamespace(model=SimpleNamespace(norm_log_interval=0))

# Norms and options with which a batch of several workers is one joined batch in everything. At the kink of a ReLU
# rounding would decide what a whole row of gradients is.
SMOOTH = ["--activation-fn", "gelu"]
JOINED = {
    "power": ("language_modeling", ["--norm", "power", "--norm-warmup-updates", 0]),
    "power_in_step": ("translation", ["--norm", "power", "--norm-warmup-updates", 5, "--norm-sync", "batch"]),
    "batch_in_step": ("translation", ["--norm", "batch", "--norm-sync", "batch"]),
}
BACKENDS = {
    "c10d": ["--ddp-backend", "c10d"],
    "legacy_ddp": ["--ddp-backend", "legacy_ddp"],
    "c10d_buffers": ["--ddp-backend", "c10d", "--broadcast-buffers"],
    "legacy_recomputing": ["--ddp-backend", "legacy_ddp", "--checkpoint-activations"],
}
PAIRS = [("power", "c10d"), ("power", "legacy_ddp"), ("power_in_step", "c10d_buffers")]
PAIRS += [("power_in_step", "legacy_recomputing"), ("batch_in_step", "c10d"), ("batch_in_step", "legacy_ddp")]
SIZES = {"translation": 20, "language_modeling": 16}  # an odd number of batches per epoch: the last is a dummy batch


@pytest.fixture(scope="module")
def joined_runs(translation_data, language_model_data, tmp_path_factory):
    """Each case by one worker with the joined batch, and by two with half of it."""
    folder = tmp_path_factory.mktemp("joined")
    data = {"translation": translation_data, "language_modeling": language_model_data}
    plan = []
    for case, (task, norm) in JOINED.items():
        more = [*norm, *SMOOTH, "--batch-size", 2 * SIZES[task]]
        plan.append({"args": flags(data[task], task, folder / case, *more), "log": folder / f"{case}.log"})
    for case, backend in PAIRS:
        task, norm = JOINED[case]
        more = [*norm, *SMOOTH, "--batch-size", SIZES[task], *TWO, *BACKENDS[backend]]
        name = f"{case}-{backend}"
        entry = {"args": flags(data[task], task, folder / name, *more), "log": folder / f"{name}.log", "workers": 2}
        plan.append(entry)
    run_plan(plan, folder)
    return folder


@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_two_workers_are_one_with_the_joined_batch(case, backend, joined_runs):
    """Traps 2, 4, 7, 12, 13, 17: parameters, momenta, gradients' norms and statistics after 20 updates, dummy batches
    and another amount of padding included; the warm-up ends after the same update."""
    alone, two = (torch.load(joined_runs / name / "checkpoint_last.pt") for name in (case, f"{case}-{backend}"))
    assert two["optimizer_history"][-1]["num_updates"] == UPDATES
    assert two["extra_state"]["train_iterator"]["epoch"] > 1  # so that there were dummy batches
    assert_close(two["model"], alone["model"], 1e-3)
    assert any(key.endswith("updates_tracked") and value == UPDATES for key, value in two["model"].items())
    for number, momenta in alone["last_optimizer_state"]["state"].items():
        size = momenta["momentum_buffer"].abs().max()
        error = (momenta["momentum_buffer"] - two["last_optimizer_state"]["state"][number]["momentum_buffer"]).abs()
        assert error.max() <= 1e-4 * size.clamp(min=1e-3)
    norms = [logged(joined_runs / name, "gnorm") for name in (f"{case}.log", f"{case}-{backend}.log.0")]
    assert len(norms[0]) == UPDATES
    # The guards are logged, and in ordinary training they do not act.
    for counter in ("norm_skipped", "norm_bounded"):
        assert logged(joined_runs / f"{case}-{backend}.log.0", counter) == [0] * UPDATES
    assert norms[1] == pytest.approx(norms[0], rel=5e-3)


def trained(task, data, folder, *more, optimizer=SGD):
    """One worker in this process; the model's state."""
    in_this_process("fairseq-train", *flags(data, task, folder, *more, optimizer=optimizer))
    return model_of(folder)


@pytest.mark.parametrize("task", ["translation", "language_modeling"])
def test_accumulation_is_one_large_batch(task, translation_data, language_model_data, tmp_path):
    """Traps 12 and 14: --update-freq 4 against a batch four times as large, for all sites of the model."""
    data = translation_data if task == "translation" else language_model_data
    common = ["--norm", "power", "--norm-warmup-updates", 0, "--max-update", 6]
    large = trained(task, data, tmp_path / "large", *common, "--batch-size", 32)
    small = trained(task, data, tmp_path / "small", *common, "--batch-size", 8, "--update-freq", 4)
    assert_close(small, large, 1e-3)


@pytest.mark.parametrize("norm", ["power", "power_v", "batch"])
def test_the_warm_up_is_counted_in_updates(norm, translation_data, tmp_path):
    """Trap 12: validation, accumulation and recomputed forwards are no updates."""
    more = ["--norm", norm, "--batch-size", 50, "--update-freq", 2, "--max-update", 4, "--checkpoint-activations"]
    more += ["--validate-interval-updates", 1] + (["--norm-warmup-updates", 3] if norm == "power" else [])
    arguments = flags(translation_data, "translation", tmp_path, *more)
    arguments.remove("--disable-validation")
    in_this_process("fairseq-train", *arguments)
    counts = [float(value) for key, value in model_of(tmp_path).items() if key.endswith("updates_tracked")]
    assert counts == [4.0] * 12


# Half precision is slow on a CPU, and most of it is the width.
NARROW = [
    *("--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64),
    *("--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64),
]


def of_loss_scale(translation_data, folder, scale, kind, window=1000):
    """Updates on one batch, which an overflow repeats; the model's state."""
    common = ["--norm", "power", "--norm-warmup-updates", 2, "--train-subset", "test", "--batch-size", 20]
    common += NARROW
    common += ["--max-update", 3, "--fp16-init-scale", scale, "--fp16-scale-window", window, kind]
    optimizer = ADAM if kind == "--memory-efficient-fp16" else SGD  # not all can do without a copy in single precision
    return trained("translation", translation_data, folder, *common, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["--fp16", "--memory-efficient-fp16"])
def test_statistics_do_not_depend_on_the_loss_scale(kind, translation_data, tmp_path, caplog):
    """Traps 5, 6, 16 and 18: fp16 with two loss scales, and with one that overflows first."""
    if not hasattr(torch, "compile"):
        pytest.skip("this torch multiplies no half-precision matrices on the CPU")
    low, high = (of_loss_scale(translation_data, tmp_path / str(scale), scale, kind) for scale in (2, 64))
    statistics = [key for key in low if "running_" in key]
    assert all(low[key].dtype == torch.float32 for key in statistics)
    for key in statistics:
        assert_close({key: high[key]}, {key: low[key]}, 0.02)  # half precision loses other digits at another scale
    # Doubled after each update.
    changing = of_loss_scale(translation_data, tmp_path / "changing", 2, kind, window=1)
    scales = [torch.load(tmp_path / name / "checkpoint_last.pt")["last_optimizer_state"] for name in ("2", "changing")]
    assert [state["loss_scale"] for state in scales] == [2, 16]
    for key in statistics:
        assert_close({key: changing[key]}, {key: low[key]}, 0.02)
    assert max(float(low[key].abs().max()) for key in statistics if key.endswith("nu")) > 0
    with caplog.at_level("INFO"):
        overflown = of_loss_scale(translation_data, tmp_path / "overflown", 2**11, kind)
    settled = [int(float(found)) for found in re.findall(r"setting loss scale to: ([0-9.]+)", caplog.text)]
    assert settled
    straight = of_loss_scale(translation_data, tmp_path / "straight", settled[-1], kind)
    for key, value in straight.items():
        assert torch.equal(value, overflown[key]), key
    assert all(straight[key] == 3 for key in straight if key.endswith("updates_tracked"))


@pytest.mark.parametrize("norm", ["power", "power_v", "batch"])
def test_distances_are_logged_at_their_interval(norm, translation_data, tmp_path, caplog, monkeypatch):
    """In the log and for TensorBoard: each norm, at updates 2 and 4 alone; parameters stay the same to the bit."""
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})  # fairseq keeps them for the whole process
    common = ["--norm", norm, "--batch-size", 50, "--max-update", 5, "--update-freq", 2]
    plain = trained("translation", translation_data, tmp_path / "plain", *common)
    folder = tmp_path / "watched"
    watched = flags(translation_data, "translation", folder, *common, "--norm-log-interval", 2)
    with caplog.at_level(logging.INFO):
        in_this_process("fairseq-train", *watched, "--tensorboard-logdir", tmp_path / "board")
    lines = [f"INFO:{line.name}:{line.getMessage()}\n" for line in caplog.records]
    (tmp_path / "log").write_text("".join(lines))
    for key, value in model_of(folder).items():
        assert torch.equal(value, plain[key]), key
    found = statistics(tmp_path / "log")
    kinds = {"power": ["fwd_psi_sq", "bkw_psi_sq", "bkw_nu"], "power_v": ["fwd_psi_sq", "bkw_psi_sq"]}
    kinds["batch"] = ["fwd_mean", "fwd_var", "bkw_mean", "bkw_var"]
    norms = {key.rpartition(".")[0] for key in plain if key.endswith("updates_tracked")}
    assert set(found) == {f"{what}/{name}" for what in kinds[norm] for name in norms}
    for name, values in found.items():
        assert [update for update, _ in values] == [2, 4] and all(value > 0 for _, value in values), name
    events = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("*tfevents*"))
    assert all(name.encode() in events for name in found)


def test_bf16(translation_data, tmp_path):
    """Trap 18: statistics in float32, close to those of single precision."""
    common = ["--norm", "power", "--norm-warmup-updates", 2, "--batch-size", 50, "--max-update", 4, "--lr", 0.01]
    plain = trained("translation", translation_data, tmp_path / "plain", *common)
    rounded = trained("translation", translation_data, tmp_path / "rounded", *common, "--bf16")
    for key, value in plain.items():
        if "running_psi" in key:
            assert rounded[key].dtype == torch.float32
            assert float(((rounded[key] - value) / value).abs().median()) < 0.02, key


def test_amp_trains(translation_data, tmp_path):
    """On a CPU the gradient scaler is switched off; that it is asked is tested below."""
    common = ["--norm", "power", "--batch-size", 50, "--max-update", 2]
    assert_close(
        trained("translation", translation_data, tmp_path / "amp", *common, "--amp"),
        trained("translation", translation_data, tmp_path / "plain", *common),
        1e-6,
    )


@pytest.mark.parametrize("amp", [True, False])
def test_backward_passes_know_the_loss_scale(amp):
    """Trap 5: what --amp asks its gradient scaler, and --fp16 its own, is divided out of nu."""
    names = {"get_scale": lambda: 64.0} if amp else {"loss_scale": 64.0}
    norms = []
    for scale in (1.0, 64.0):
        optimizer = SimpleNamespace(scaler=SimpleNamespace(**names) if scale > 1 else None)
        norm = create_norm("power", 6).double()
        torch.manual_seed(0)
        for _ in range(3):
            x, dy = torch.randn(2, 9, 6, dtype=torch.float64)
            loss = (norm(x.requires_grad_()) * dy).sum()
            trainer.backward(lambda _, loss, scale=scale: (loss * scale).backward(), optimizer, loss)
        norm.commit()
        norms.append(norm)
    assert norms[0].running_nu.abs().max() > 0
    torch.testing.assert_close(norms[1].state_dict(), norms[0].state_dict(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [AMPOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer])
def test_optimizers_that_scale_the_loss_say_so(kind):
    optimizer = kind.__new__(kind)
    scaler = SimpleNamespace(scale=lambda loss: loss * 8, loss_scale=8.0, get_scale=lambda: 8.0)
    setattr(optimizer, "_grad_scaler" if kind is AMPOptimizer else "scaler", scaler)
    seen = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append((float(gradient[0]), get_gradient_scale())))
    optimizer.backward(weight.sum())
    assert seen == [(8.0, 8.0)] and get_gradient_scale() == 1


def test_statistics_go_where_gradients_go():
    """Trap 16, within a step: AMP's second try, and the micro-batches before one that ran out of memory."""
    batches = torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    norm, alone = create_norm("power", 4), create_norm("power", 4)
    stand_in = SimpleNamespace(get_model=lambda: norm, cfg=PLAIN)
    (norm(batches[0][0].requires_grad_()) * batches[0][1]).sum().backward()
    trainer.zero_grad(lambda _: None, stand_in)
    for module in (norm, alone):
        (module(batches[1][0].requires_grad_()) * batches[1][1]).sum().backward()
    trainer.set_num_updates(lambda *_: None, stand_in, 1)
    alone.commit()
    assert norm.updates_tracked == 1 and norm.running_nu.any()
    assert torch.equal(norm.running_psi_sq, alone.running_psi_sq) and torch.equal(norm.running_nu, alone.running_nu)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_step_leaves_pending_is_thrown_away(fails):
    """Trap 16: AMP skips a batch after its last retry without a word, and a validation may follow before the next."""
    norm = create_norm("power", 4)

    def step(*_):
        norm(torch.ones(3, 4, requires_grad=True)).sum().backward()
        if fails:
            raise ValueError("the step fails")
        return "output"

    stand_in = SimpleNamespace(get_model=lambda: norm, _wrapped_model=None, cfg=PLAIN)
    with pytest.raises(ValueError, match="the step fails") if fails else contextlib.nullcontext():
        assert trainer.train_step(step, stand_in, []) == "output"
    norm.eval()
    assert norm.updates_tracked == 0


def test_counters_are_logged():
    model = torch.nn.ModuleList([create_norm("power", 4), create_norm("layer", 4), create_norm("batch", 4)])
    model[0].updates_skipped += 2
    model[2].updates_skipped += 1
    model[0].updates_bounded += 5
    given = []
    stand_in = SimpleNamespace(get_model=lambda: model, cfg=PLAIN)
    with metrics.aggregate() as logged_values:
        trainer.set_num_updates(lambda _, number: given.append(number), stand_in, 7)
    assert given == [7]
    assert logged_values.get_smoothed_values() == {"norm_skipped": 3, "norm_bounded": 5}
    with metrics.aggregate() as logged_values:
        trainer.set_num_updates(lambda *_: None, SimpleNamespace(get_model=lambda: model[1], cfg=PLAIN), 7)
    assert logged_values.get_smoothed_values() == {}
