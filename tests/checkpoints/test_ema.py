"""fairseq's EMA (``--store-ema``) with running statistics: the shadow model, its resume, and what can be made of it.

Trap 19: an EMA decays every buffer, and fails on integers.
"""

import copy

import pytest
import torch

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.average import load_checkpoint, note_of, save_checkpoint
from powernorm_fairseq.experiment.config import train_arguments
from powernorm_fairseq.experiment.run import placed
from powernorm_fairseq.norms import RunningNorm
from tests.commands import in_this_process

UPDATES, DECAY = 5, 0.8
STATISTICS = ("running_psi_sq", "running_nu", "running_mean", "running_var")


def train(folder, data, fp32, updates=UPDATES):
    """Train a language model with one norm of each kind, keeping the checkpoint of each update."""
    config = {
        "common": {"cpu": True, "seed": 1},
        "task": {"_name": "language_modeling", "data": str(data), "tokens_per_sample": 32},
        "model": {
            "_name": "transformer_lm_norm_tiny", "decoder_norm_self": "power", "decoder_norm_ff": "batch",
            "decoder_norm_final": "power_v", "norm_warmup_updates": 2,
            "share_decoder_input_output_embed": False,  # fairseq decays a shared parameter twice
        },
        "criterion": {"_name": "cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.01], "max_update": updates},
        "dataset": {"max_tokens": 256, "num_workers": 0, "disable_validation": True},
        "checkpoint": {"save_interval_updates": 1, "no_epoch_checkpoints": True},
        "ema": {"store_ema": True, "ema_decay": DECAY, "ema_fp32": fp32},
    }  # fmt: skip
    in_this_process("fairseq-train", *train_arguments(placed(config, folder)))
    return folder / "checkpoints"


def by_update(checkpoints):
    """The checkpoints in order of updates."""
    paths = sorted(checkpoints.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))
    return [load_checkpoint(path) for path in paths]


@pytest.fixture(scope="module")
def trained(language_model_data, tmp_path_factory):
    return train(tmp_path_factory.mktemp("ema"), language_model_data, fp32=False)


def assert_shadow_follows(states):
    """Recomputes the shadow model from the models of all updates, in double precision."""
    shadow = {key: value.double() for key, value in states[0]["model"].items()}
    decayed, counters = set(), set()
    for state in states:
        model, saved = state["model"], state["extra_state"]["ema"]
        assert set(saved) == set(model)
        for key, value in model.items():
            entry = key.rpartition(".")[2]
            if entry in RunningNorm.COUNTERS or entry == "version":
                counters.add(entry)
                assert torch.equal(saved[key], value), key
                continue
            shadow[key] = DECAY * shadow[key] + (1 - DECAY) * value.double()
            torch.testing.assert_close(saved[key].double(), shadow[key], rtol=1e-5, atol=1e-7, msg=key)
            decayed.add(entry)
    assert decayed >= {*STATISTICS, "weight", "bias"} and counters >= set(RunningNorm.COUNTERS)
    last = states[-1]
    for entry in STATISTICS:
        key = next(key for key in last["model"] if key.endswith(entry))
        assert not torch.allclose(last["extra_state"]["ema"][key], last["model"][key], rtol=1e-3)
    tracked = [value.item() for key, value in last["extra_state"]["ema"].items() if key.endswith("updates_tracked")]
    assert set(tracked) == {float(UPDATES)}


def test_the_shadow_decays_parameters_and_statistics_and_copies_counters(trained):
    states = by_update(trained)
    assert len(states) == UPDATES
    assert_shadow_follows(states)


@pytest.mark.slow
@pytest.mark.parametrize("fp32", [False, True], ids=["", "fp32"])
def test_a_resumed_run_is_the_uninterrupted_one(trained, language_model_data, tmp_path, fp32):
    """Parameters, statistics and shadow, to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = train(tmp_path / "whole", language_model_data, fp32)
        train(tmp_path / "parts", language_model_data, fp32, updates=3)
        parts = train(tmp_path / "parts", language_model_data, fp32)
    finally:
        torch.set_num_threads(threads)
    states = by_update(whole)
    if fp32:
        assert_shadow_follows(states)
    one, other = states[-1], by_update(parts)[-1]
    pairs = [(one["model"], other["model"])]
    names = ["ema", "ema_fp32_params"] if fp32 else ["ema"]
    pairs += [(one["extra_state"][name], other["extra_state"][name]) for name in names]
    for whole_part, resumed in pairs:
        assert set(whole_part) == set(resumed)
        # A buffer of old fairseq that never gets a value.
        odd = [key for key, value in whole_part.items() if not torch.equal(value, resumed[key])]
        assert not odd


def validate(path, data):
    in_this_process(
        "fairseq-validate", data, "--path", path, "--task", "language_modeling", "--tokens-per-sample", 32,
        "--batch-size", 16, "--cpu", "--valid-subset", "valid", "--num-workers", 0,
    )  # fmt: skip


def test_the_shadow_becomes_a_model_of_its_own(trained, language_model_data, tmp_path, capsys):
    """By ``reestimate --ema``, with statistics measured for its parameters, and by fairseq's own function."""
    from fairseq import checkpoint_utils

    last = trained / "checkpoint_last.pt"
    before = load_checkpoint(last)
    shadow = copy.deepcopy(before["extra_state"]["ema"])
    assert main(["reestimate", str(last), "--ema", "--output", str(tmp_path / "ours.pt"), "--batches", "3"]) == 0
    assert "the shadow model, statistics measured on 3 batches" in capsys.readouterr().out
    ours = load_checkpoint(tmp_path / "ours.pt")
    assert set(ours["model"]) == set(before["model"])
    changed = [key for key, value in shadow.items() if not torch.equal(value, ours["model"][key])]
    assert any(key.startswith("decoder.layer_norm.") for key in shadow)
    wanted = [key for key in shadow if key.endswith(("running_psi_sq", "running_mean", "running_var"))]
    assert sorted(changed) == sorted(wanted)
    assert "ema" not in ours["extra_state"] and ours["last_optimizer_state"] is None
    assert note_of(ours)["ema"] is True and note_of(ours)["reestimated"]["sources"] == [last.name]
    validate(tmp_path / "ours.pt", language_model_data)

    checkpoint_utils.save_ema_as_checkpoint(str(last), str(tmp_path / "fairseqs.pt"))
    theirs = load_checkpoint(tmp_path / "fairseqs.pt")["model"]
    assert all(torch.equal(value, theirs[key]) for key, value in shadow.items())
    validate(tmp_path / "fairseqs.pt", language_model_data)


def test_a_shadow_that_fairseq_alone_has_kept_has_lost_its_final_norm(trained, language_model_data, tmp_path, capsys):
    """What a run without the plugin's mend leaves: version 1, and no final norm. The model's own is taken instead."""
    state = load_checkpoint(trained / "checkpoint_last.pt")
    shadow = state["extra_state"]["ema"]
    shadow["decoder.version"] = torch.ones(1)
    for key in [key for key in shadow if key.startswith("decoder.layer_norm.")]:
        del shadow[key]
    save_checkpoint(state, tmp_path / "damaged.pt")
    output = tmp_path / "new.pt"
    assert main(["reestimate", str(tmp_path / "damaged.pt"), "--ema", "--output", str(output), "--batches", "2"]) == 0
    assert "the shadow model has no decoder.layer_norm.bias, " in capsys.readouterr().err
    model = load_checkpoint(output)["model"]
    assert model["decoder.version"].item() == 3
    assert torch.equal(model["decoder.layer_norm.weight"], state["model"]["decoder.layer_norm.weight"])
    assert not torch.equal(
        model["decoder.layer_norm.running_psi_sq"], state["model"]["decoder.layer_norm.running_psi_sq"]
    )


def test_statistics_of_norms_that_a_loaded_model_lacks_are_refused(trained, tmp_path, capsys):
    """fairseq loads such a file without a word, and leaves the final norm out."""
    state = load_checkpoint(trained / "checkpoint_last.pt")
    state["model"]["decoder.version"] = torch.ones(1)
    save_checkpoint(state, tmp_path / "old.pt")
    assert main(["reestimate", str(tmp_path / "old.pt"), "--output", str(tmp_path / "new.pt"), "--batches", "2"]) == 1
    assert "decoder.layer_norm.running_psi_sq" in capsys.readouterr().err
