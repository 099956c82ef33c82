"""Trainings whose updates can be compared, of tests of the trainer."""

import json

import torch

from tests.commands import PLUGIN

UPDATES = 20
QUIET = ["--dropout", 0, "--attention-dropout", 0, "--activation-dropout", 0]
TWO = ["--distributed-world-size", 2, "--distributed-backend", "gloo"]

SGD = ["--optimizer", "sgd", "--momentum", 0.9, "--lr", 0.05]
ADAM = ["--optimizer", "adam", "--lr", 0.001]


def flags(data, task, folder, *more, optimizer=SGD):
    """A plain optimiser, since Adam makes large steps of rounding errors; batches in the order of the data set, so
    that those of two workers are one of twice the size."""
    arch = "transformer_norm_tiny" if task == "translation" else "transformer_lm_norm_tiny"
    common = [data, "--user-dir", PLUGIN, "--task", task, "--arch", arch, "--save-dir", folder, *QUIET]
    common += [*optimizer, "--lr-scheduler", "fixed", "--clip-norm", 1.0]
    common += ["--max-update", UPDATES, "--seed", 1, "--curriculum", 1000, "--disable-validation"]
    common += ["--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints", "--num-workers", 0]
    common += ["--required-batch-size-multiple", 1]
    if task == "language_modeling":
        common += ["--tokens-per-sample", 32, "--sample-break-mode", "none"]
    return [*common, *more]


def model_of(folder, name="checkpoint_last.pt"):
    return torch.load(folder / name, map_location="cpu")["model"]


def logged(log, key):
    """A value of each of fairseq's log lines in JSON."""
    lines = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if '"num_updates": ' in line]
    return [float(line[key]) for line in lines if key in line]


def assert_close(one, other, tolerance):
    """All tensors of two states, relative to the largest number of each; nu is made of small differences."""
    assert list(one) == list(other)
    for key, value in one.items():
        size = float(other[key].double().abs().max()) if other[key].numel() else 0.0
        error = float((value.double() - other[key].double()).abs().max()) if value.numel() else 0.0
        allowed = 5 * tolerance if key.endswith("running_nu") else tolerance
        assert error <= allowed * max(size, 1e-3), (key, error, size)
