"""A run that is killed and started again is the run that nothing happened to, bit for bit."""

import contextlib
import json
import os
import signal

import pytest
import torch

from powernorm_fairseq.checkpoints import patience
from powernorm_fairseq.norms import NORMS
from tests.commands import PLUGIN
from tests.forked import run_plan

pytest.importorskip("fairseq")
pytestmark = pytest.mark.slow

SAVED_EVERY, KILLED_AFTER, UPDATES = 2, 3, 6  # checkpoints after updates 2, 4 and 6; the third is lost

TASKS = {
    "translation": ["power", "layer", "ada", "batch", "scale", "none"],
    "language_modeling": ["power", "power_v", "layer_simple", "detach", "rms"],
}

TIMES = ("wps", "ups", "train_wall", "wall", "gb_free")


def flags(task, data):
    translation = task == "translation"
    arch = "transformer_norm_tiny" if translation else "transformer_lm_norm_tiny"
    common = [data, "--user-dir", PLUGIN, "--task", task, "--arch", arch]
    common += ["--optimizer", "adam", "--lr", 0.002, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", 3]
    common += ["--dropout", 0.1, "--attention-dropout", 0.1, "--clip-norm", 1.0, "--update-freq", 2]
    common += ["--max-update", UPDATES, "--save-interval-updates", SAVED_EVERY, "--no-epoch-checkpoints", "--seed", 1]
    common += ["--log-format", "json", "--log-interval", 1, "--required-batch-size-multiple", 1, "--num-workers", 0]
    # The loss falls, so that validations are counted as no better; the count is part of the checkpoint.
    common += ["--patience", 9, "--maximize-best-checkpoint-metric"]
    common += ["--max-tokens", 450] if translation else ["--tokens-per-sample", 32, "--batch-size", 5]
    return [str(flag) for flag in common]


def killed_inside_an_update():
    """Kill -9 when all gradients and statistics are gathered, and nothing of them is in the parameters yet."""
    from fairseq.trainer import Trainer

    clip_grad_norm = Trainer.clip_grad_norm

    def killed(self, *args, **kwargs):
        if self.get_num_updates() == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return clip_grad_norm(self, *args, **kwargs)

    Trainer.clip_grad_norm = killed


def logged(log):
    """What fairseq logged as JSON, by update and kind of line, without what depends on time."""
    lines = {}
    for line in log.read_text().splitlines():
        start = line.find("{")
        with contextlib.suppress(ValueError):
            values = json.loads(line[start:]) if start >= 0 else None
            if isinstance(values, dict) and any(key.endswith("loss") for key in values):
                kind = next(key for key in values if key.endswith("loss"))
                number = next(int(values[key]) for key in values if key.endswith("num_updates"))
                times = [key for key in values if key.split("train_")[-1] in TIMES or key.split("valid_")[-1] in TIMES]
                lines[number, kind] = {key: value for key, value in values.items() if key not in times}
    return lines


def without_times(state):
    """All of a checkpoint but the config, which names the folder, and what depends on time."""
    state = {key: state[key] for key in ("model", "last_optimizer_state", "optimizer_history", "extra_state")}
    state["extra_state"] = {
        key: value for key, value in state["extra_state"].items() if key != "previous_training_time"
    }
    state["extra_state"]["metrics"] = {
        kind: [meter for meter in meters if meter[1] not in TIMES]
        for kind, meters in state["extra_state"]["metrics"].items()
        if kind != "default"  # counts from the start of the process; nothing reads it
    }
    state["optimizer_history"] = state["optimizer_history"][-1]  # fairseq adds an entry with each start
    return state


def differences(one, other, place=""):
    """Where two nested states differ, to the bit."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [place]
    if type(one) is not type(other):
        return [place]
    if isinstance(one, (list, tuple)):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if not isinstance(one, dict):
        return [] if one == other else [f"{place}: {one} {other}"]
    if set(one) != set(other):
        return [f"{place}: {sorted(map(str, set(one) ^ set(other)))}"]
    return [found for key in one for found in differences(one[key], other[key], f"{place}/{key}")]


def test_every_norm_is_here():
    assert {norm for norms in TASKS.values() for norm in norms} == set(NORMS)


def test_killed_and_continued_is_uninterrupted(translation_data, language_model_data, tmp_path):
    """Trap 20, a checkpoint resumed in the middle of an epoch, after kill -9: all but times is equal to the bit.

    Parameters, optimiser, statistics, counters and logged numbers, with dropout. Trap 12 too, the warm-up: two
    micro-batches are one update of it, and it ends after the resume.
    """
    plan = []
    for task, norms in TASKS.items():
        data = translation_data if task == "translation" else language_model_data
        args = flags(task, data)
        plan += [{"args": args, **run} for norm in norms for run in runs_of(norm, tmp_path / f"{task}-{norm}")]
    run_plan(plan, tmp_path)
    found = {
        f"{task} {norm}": differences_of(norm, tmp_path / f"{task}-{norm}")
        for task, norms in TASKS.items()
        for norm in norms
    }
    assert found == {run: [] for run in found}
    states = [torch.load(str(path))["extra_state"] for path in tmp_path.glob("*/rest/checkpoint_last.pt")]
    counts = [state[patience.STATE]["num_runs"] for state in states]
    assert len(counts) == len(found)
    # Some norms get better with each validation; with others the count has gone on over the interruption.
    assert max(counts) >= UPDATES // SAVED_EVERY - 1


def runs_of(norm, folder):
    """A run that nothing happens to, one that is killed, and the killed one started again."""
    folder.mkdir()
    runs = []
    for name, save_dir in (("whole", "whole"), ("killed", "rest"), ("continued", "rest")):
        changes = {"model.norm": norm, "checkpoint.save_dir": str(folder / save_dir)}
        if norm == "power":
            changes["model.norm_warmup_updates"] = SAVED_EVERY + 1  # ends after the resume
        runs.append({"changes": changes, "log": str(folder / f"{name}.log")})
    runs[1].update(hook="tests.test_resume:killed_inside_an_update", expect=-signal.SIGKILL)
    return runs


def differences_of(norm, folder):
    """Where the continued run differs from the whole one, after a look at whether both are what they should be."""
    logs = {name: logged(folder / f"{name}.log") for name in ("whole", "killed", "continued")}
    updates = {name: [number for number, kind in logs[name] if kind == "loss"] for name in logs}
    assert updates["killed"] == list(range(1, KILLED_AFTER + 1))
    assert updates["continued"] == list(range(SAVED_EVERY + 1, UPDATES + 1))
    first = logs["whole"][SAVED_EVERY + 1, "loss"]
    assert first["epoch"] == 1 and first["update"] < 1, "resumed in the middle of an epoch"
    assert len({values["loss"] for key, values in logs["whole"].items() if key[1] == "loss"}) > UPDATES // 2

    whole, continued = (
        without_times(torch.load(str(folder / save_dir / "checkpoint_last.pt"))) for save_dir in ("whole", "rest")
    )
    assert whole["optimizer_history"]["num_updates"] == UPDATES
    assert patience.STATE in whole["extra_state"]
    assert whole["extra_state"]["train_iterator"]["iterations_in_epoch"] > 0, "an epoch ends and another begins"
    assert len(whole["last_optimizer_state"]["state"]) > 10
    if norm == "power":
        counters = [value for key, value in whole["model"].items() if key.endswith("updates_tracked")]
        assert counters and all(value == UPDATES for value in counters)
        assert all(value.any() for key, value in whole["model"].items() if key.endswith("running_nu"))
    logged_of_both = {key: logs["whole"].get(key) for key in logs["continued"]}
    return differences(whole, continued) + differences(logged_of_both, logs["continued"])
