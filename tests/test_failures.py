"""Workers that fail, run out of memory or differ, under fairseq's own trainer."""

import os
import re
import signal

import pytest
import torch

from powernorm_fairseq.norms import RunningNorm
from tests.forked import run_plan
from tests.trainings import TWO, flags, model_of

pytestmark = pytest.mark.slow


def at_update(number, act, worker="1", micro_batch=0):
    """Before the forward pass of a micro-batch of an update (both counted from 0), ``act(trainer)`` in one worker."""
    from fairseq.trainer import Trainer

    prepare = Trainer._prepare_sample
    calls = []

    def prepared(self, *args, **kwargs):
        if self.get_num_updates() == number and os.environ.get("RANK", "1") == worker:
            calls.append(True)
            if len(calls) == micro_batch + 1:
                act(self)
        return prepare(self, *args, **kwargs)

    Trainer._prepare_sample = prepared


def tamper_with_statistics():
    def act(trainer):
        norms = [module for module in trainer.get_model().modules() if isinstance(module, RunningNorm)]
        norms[3].running_psi_sq[1] += 0.5

    at_update(2, act)


def die():
    at_update(2, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))


def raise_an_error(worker):
    def act(trainer):
        raise ValueError("this worker fails")

    at_update(2, act, worker)


def first_raises():
    raise_an_error("0")


def second_raises():
    raise_an_error("1")


def out_of_memory():
    """In the backward pass of the second micro-batch, when some norms have recorded already.

    After a failure in the first, fairseq's legacy_ddp never adds up gradients again.
    """

    def act(trainer):
        layer = trainer.get_model().encoder.layers[0].fc1
        handles = []

        def fail(*_):
            handles[0].remove()
            raise RuntimeError("out of memory, says the test")

        handles.append(layer.register_full_backward_hook(fail))

    at_update(2, act, micro_batch=1)


def without_an_update():
    """The batches of an update are left out altogether."""
    from fairseq.trainer import Trainer

    train_step = Trainer.train_step
    left_out = []

    def step(self, *args, **kwargs):
        if self.get_num_updates() == 2 and not left_out:
            left_out.append(True)
            return None
        return train_step(self, *args, **kwargs)

    Trainer.train_step = step


def not_finite():
    """The loss of an update in single precision is infinite, which ends training."""

    def act(trainer):
        from fairseq.criterions.fairseq_criterion import FairseqCriterion

        forward = type(trainer.criterion).forward

        def infinite(self, *args, **kwargs):
            loss, *rest = forward(self, *args, **kwargs)
            return (loss * float("inf"), *rest)

        assert isinstance(trainer.criterion, FairseqCriterion)
        type(trainer.criterion).forward = infinite

    at_update(2, act)


FAILURES = {
    # name: (hook, flags, workers)
    "tampered": (tamper_with_statistics, ["--ddp-backend", "legacy_ddp"], 2),
    "died": (die, ["--ddp-backend", "c10d"], 2),
    "first_raises": (first_raises, ["--ddp-backend", "legacy_ddp"], 2),
    "second_raises": (second_raises, ["--ddp-backend", "c10d", "--norm-sync", "batch"], 2),
    # With one micro-batch per update fairseq's workers no longer agree on what to log.
    "out_of_memory": (out_of_memory, ["--ddp-backend", "legacy_ddp", "--update-freq", 2], 2),
    "out_of_memory_alone": (out_of_memory, ["--update-freq", 2], 1),
    "left_out_alone": (without_an_update, ["--update-freq", 2], 1),
    "out_of_memory_in_step": (out_of_memory, ["--ddp-backend", "c10d", "--update-freq", 2, "--norm-sync", "batch"], 2),
    "not_finite": (not_finite, ["--save-interval-updates", 2], 1),
    "shared_by_nobody": (None, ["--ddp-backend", "c10d", "--norm-sync", "none"], 2),
}


@pytest.fixture(scope="module")
def failed_runs(translation_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    plan = []
    for name, (hook, more, workers) in FAILURES.items():
        more = ["--norm", "power", "--norm-warmup-updates", 1, "--batch-size", 15, "--max-update", 4, *more]
        args = flags(translation_data, "translation", folder / name, *more, *(TWO if workers == 2 else []))
        entry = {"args": args, "log": folder / f"{name}.log", "workers": workers, "expect": None}
        plan.append({**entry, "hook": hook and f"tests.test_failures:{hook.__name__}"})
    codes = run_plan(plan, folder)
    return folder, dict(zip(FAILURES, codes))


def output(failed_runs, name, worker=0):
    return (failed_runs[0] / f"{name}.log.{worker}").read_text()


def test_workers_that_differ_are_found_before_a_checkpoint_is_saved(failed_runs):
    """Trap 17: each worker ends with an error that names the norm; the first keeps its state as crash.pt."""
    folder, codes = failed_runs
    assert codes["tampered"] == [1, 1]
    for worker in (0, 1):
        assert "Running statistics differ between workers" in output(failed_runs, "tampered", worker)
        assert re.search(r"running_psi_sq by 0\.\d", output(failed_runs, "tampered", worker))
    assert [path.name for path in (folder / "tampered").iterdir()] == ["crash.pt"]


@pytest.mark.parametrize("name", ["died", "first_raises", "second_raises"])
def test_when_a_worker_fails_the_others_end_with_an_error(name, failed_runs):
    """Nobody ends the others here; torchrun does."""
    assert 0 not in failed_runs[1][name]
    assert -signal.SIGKILL not in failed_runs[1][name] or name == "died"
    assert failed_runs[1][name].count(-signal.SIGKILL) <= 1


def test_an_update_that_ran_out_of_memory(failed_runs):
    """Trap 16: the worker gives up what it gathered, nobody waits, and the workers stay equal."""
    folder, codes = failed_runs
    assert codes["out_of_memory"] == [0, 0] and codes["out_of_memory_alone"] == [0]
    assert "attempting to recover from OOM" in output(failed_runs, "out_of_memory", 1)
    for name in ("out_of_memory", "out_of_memory_alone"):
        state = model_of(folder / name)
        assert all(value == 4 for key, value in state.items() if key.endswith("updates_tracked"))
    # The micro-batch before it, and what of its own was gathered, are gone.
    left_out = model_of(folder / "left_out_alone")
    for key, value in model_of(folder / "out_of_memory_alone").items():
        assert torch.equal(value, left_out[key]), key


def test_out_of_memory_in_step_ends_training(failed_runs):
    """The others wait in their forward passes for this worker's share, so that it cannot leave out the batch."""
    assert 0 not in failed_runs[1]["out_of_memory_in_step"]
    assert -signal.SIGKILL not in failed_runs[1]["out_of_memory_in_step"]
    said = output(failed_runs, "out_of_memory_in_step", 1)
    assert "with --norm-sync batch a worker cannot leave out a batch" in said and "out of memory, says the test" in said


def test_a_crash_keeps_the_statistics_of_finished_updates(failed_runs):
    """Traps 6 and 16: gradients that are not finite end training; crash.pt has nothing of that update."""
    folder, codes = failed_runs
    assert codes["not_finite"] == [1]
    crashed = model_of(folder / "not_finite", "crash.pt")
    (saved,) = (folder / "not_finite").glob("checkpoint_*_2.pt")
    for key, value in model_of(folder / "not_finite", saved.name).items():
        assert torch.equal(value, crashed[key]), key


def test_workers_that_share_nothing_are_told_so(failed_runs):
    folder, codes = failed_runs
    assert codes["shared_by_nobody"] == [0, 0]
    assert "each of the 2 workers keeps statistics of its own" in output(failed_runs, "shared_by_nobody")
    assert (folder / "shared_by_nobody" / "checkpoint_last.pt").exists()
