"""Averaging against an independent computation, and what must not be averaged."""

import math

import pytest
import torch

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints import loading
from powernorm_fairseq.checkpoints.average import (
    average_checkpoints,
    average_states,
    last_checkpoints,
    load_checkpoint,
    note_of,
    save_checkpoint,
)
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.experiment.run import placed
from powernorm_fairseq.processes import UserError
from tests.commands import in_this_process


@pytest.fixture(scope="module")
def checkpoints(language_model_data, tmp_path_factory):
    """Three checkpoints of a PowerNorm language model: other seeds, and statistics as after some updates."""
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(7)
    for number in (1, 2, 3):
        config = {
            "common": {"cpu": True, "seed": number},
            "task": {"_name": "language_modeling", "data": str(language_model_data), "tokens_per_sample": 128},
            "model": {"_name": "transformer_lm_pn_tiny"},
            "criterion": {"_name": "cross_entropy"},
            "optimizer": {"_name": "adam"},
            "lr_scheduler": {"_name": "fixed"},
            "dataset": {"batch_size": 2},
        }
        path = folder / f"checkpoint{number}.pt"
        save_untrained(placed(config, folder), path)
        state = load_checkpoint(path)
        for key, value in state["model"].items():
            if "running" in key:
                value.copy_(torch.rand(value.shape, generator=generator) * 3)
            if key.endswith("updates_tracked"):
                value.fill_(100 * number)
            if key.endswith("updates_skipped"):
                value.fill_(number)
        state["optimizer_history"][-1]["num_updates"] = 101 * number
        save_checkpoint(state, path)
    return folder


def test_parameters_and_statistics_are_means_counters_are_the_last(checkpoints, tmp_path):
    paths = last_checkpoints(checkpoints, 3)
    assert [path.name for path in paths] == ["checkpoint1.pt", "checkpoint2.pt", "checkpoint3.pt"]
    average_checkpoints(paths, tmp_path / "mean.pt")
    models = [torch.load(path, map_location="cpu")["model"] for path in paths]
    mean = torch.load(tmp_path / "mean.pt", map_location="cpu")["model"]
    assert set(mean) == set(models[0])
    counters, statistics = 0, 0
    for key, value in mean.items():
        if "updates_" in key:
            counters += 1
            assert value.item() == models[2][key].item()
            continue
        statistics += "running" in key
        for place in range(0, value.numel(), max(1, value.numel() // 50)):
            exact = math.fsum(model[key].flatten()[place].item() for model in models) / 3
            assert value.flatten()[place].item() == pytest.approx(exact, rel=1e-7, abs=1e-12), key
    assert counters >= 2 and statistics >= 2


def test_half_precision_is_added_up_in_double_precision():
    """4096 + 1 is not in half precision; a sum in that type would lose every small addend."""
    states = [{"w": torch.tensor([value], dtype=torch.float16)} for value in (4096.0, 3.0, 3.0, 2.0)]
    averaged = average_states(states)["w"]
    assert averaged.dtype == torch.float16 and averaged.item() == 1026.0
    many = [{"w": torch.tensor([value])} for value in (1e8, 1.0, -1e8, 1.0)]
    assert average_states(many)["w"].item() == 0.5
    double = ({"w": torch.tensor([value], dtype=torch.float64)} for value in (1.0, 2.0))
    assert average_states(double)["w"].item() == 1.5


def test_integers_are_taken_from_the_last():
    states = [{"num": torch.tensor(value), "x.num_batches_tracked": torch.tensor(float(value))} for value in (3, 8)]
    averaged = average_states(states)
    assert averaged["num"].item() == 8 and averaged["num"].dtype == torch.int64
    assert averaged["x.num_batches_tracked"].item() == 8


def test_one_checkpoint_averages_to_itself(checkpoints, tmp_path):
    average_checkpoints([checkpoints / "checkpoint2.pt"], tmp_path / "mean.pt")
    before, after = (load_checkpoint(path)["model"] for path in (checkpoints / "checkpoint2.pt", tmp_path / "mean.pt"))
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_fairseq_validates_an_averaged_checkpoint(checkpoints, language_model_data, tmp_path):
    average_checkpoints(last_checkpoints(checkpoints, 2), tmp_path / "mean.pt")
    validate(tmp_path / "mean.pt", language_model_data)


def test_checkpoints_by_update_come_before_those_by_epoch(tmp_path):
    for name in ("checkpoint1.pt", "checkpoint_1_90.pt", "checkpoint_1_100.pt", "checkpoint_2_110.pt", "averaged.pt"):
        (tmp_path / name).touch()
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_2_120.pt.tmp"):
        (tmp_path / name).touch()
    assert [path.name for path in last_checkpoints(tmp_path, 2)] == ["checkpoint_1_100.pt", "checkpoint_2_110.pt"]
    with pytest.raises(UserError, match="3 checkpoints by epoch or update; 4 are needed"):
        last_checkpoints(tmp_path, 4)
    with pytest.raises(UserError, match="at least one"):
        last_checkpoints(tmp_path, 0)


def test_other_keys_and_shapes_are_named(checkpoints, tmp_path):
    with pytest.raises(UserError, match=r"only one of two has decoder\.bias"):
        average_states([{"w": torch.ones(2)}, {"w": torch.ones(2), "decoder.bias": torch.ones(1)}])
    with pytest.raises(UserError, match=r"w is \(3,\) in checkpoint 2, \(2,\) in the first"):
        average_states([{"w": torch.ones(2)}, {"w": torch.ones(3)}])


def test_missing_and_half_written_files(checkpoints, tmp_path, capsys):
    output = tmp_path / "mean.pt"
    command = ["average", "--inputs", str(checkpoints / "checkpoint1.pt")]
    assert main([*command, str(tmp_path / "no.pt"), "--output", str(output)]) == 1
    assert "no checkpoint" in capsys.readouterr().err
    whole = (checkpoints / "checkpoint2.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    assert main([*command, str(tmp_path / "half.pt"), "--output", str(output)]) == 1
    assert "half.pt cannot be read as a checkpoint" in capsys.readouterr().err
    torch.save({"state": 1}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "array.pt").write_bytes(b"\x93NUMPY\x01")
    for name in ("other", "text", "empty", "array"):
        assert main([*command, str(tmp_path / f"{name}.pt"), "--output", str(output)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{name}.pt cannot be read as a checkpoint: it is broken or something else (" in line
    assert not output.exists() and not list(tmp_path.glob("*.partial"))


def test_a_file_that_cannot_be_written_is_one_line(checkpoints, tmp_path, capsys, monkeypatch):
    def save(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch, "save", save)
    assert main(["average", "--folder", str(checkpoints), "--last", "2", "--output", str(tmp_path / "mean.pt")]) == 1
    assert "mean.pt cannot be written: no space left" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("mean.pt*"))


def test_the_command(checkpoints, tmp_path, capsys):
    output = tmp_path / "mean.pt"
    assert main(["average", "--folder", str(checkpoints), "--last", "2", "--output", str(output)]) == 0
    assert "checkpoint2.pt, checkpoint3.pt" in capsys.readouterr().out
    assert load_checkpoint(output)["last_optimizer_state"] is None
    assert main(["average", "--output", str(output)]) == 1
    assert "either --folder or --inputs" in capsys.readouterr().err
    before = output.read_bytes()
    assert main(["average", "--inputs", str(checkpoints / "checkpoint1.pt"), str(output), "--output", str(output)]) == 1
    assert "the output would replace" in capsys.readouterr().err and output.read_bytes() == before


def average_as_fairseq(paths, output):
    """What ``scripts/average_checkpoints.py`` of fairseq's repository makes of checkpoints, which no wheel contains.

    Every entry of the model is averaged, in single precision where it was in half; all else is the first file's, and
    the script is given the newest first.
    """
    states = [torch.load(path, map_location="cpu") for path in paths]
    result, model = states[0], {}
    for key, value in states[0]["model"].items():
        total = sum(
            state["model"][key].float() if value.dtype == torch.float16 else state["model"][key] for state in states
        )
        model[key] = total / len(states) if total.is_floating_point() else total // len(states)
    result["model"] = model
    torch.save(result, output)


def validate(path, data):
    in_this_process(
        "fairseq-validate", data, "--path", path, "--task", "language_modeling", "--tokens-per-sample", 128,
        "--batch-size", 16, "--cpu", "--valid-subset", "valid", "--num-workers", 0,
    )  # fmt: skip


def test_an_average_of_fairseqs_own_script_loads_and_is_warned_of(
    checkpoints, language_model_data, tmp_path, monkeypatch
):
    """Trap 19: the script averages statistics and counters too; the result works, and a warning says what it is."""
    monkeypatch.setattr(loading, "_warned", set())
    said = []  # fairseq's programs set up logging anew
    monkeypatch.setattr(loading.logger, "warning", lambda text, *args: said.append(text % args))
    path = tmp_path / "script.pt"
    average_as_fairseq([checkpoints / f"checkpoint{number}.pt" for number in (3, 2)], path)
    for _ in range(2):
        validate(path, language_model_data)
    assert len(said) == 1 and said[0].startswith(f"{path}: ") and "--reestimate" in said[0]
    validate(checkpoints / "checkpoint3.pt", language_model_data)
    # Our own commands speak for themselves.
    assert main(["reestimate", str(path), "--output", str(tmp_path / "mended.pt"), "--batches", "2"]) == 0
    validate(tmp_path / "mended.pt", language_model_data)
    assert len(said) == 1


def test_what_is_no_checkpoint_of_a_model_is_handed_on():
    for state in (None, {}, {"model": None}, [1]):
        assert loading.around_load_checkpoint_to_cpu(lambda path, state=state: state, "x.pt") is state


def test_averaged_statistics_without_reestimation_are_warned_of(checkpoints, tmp_path, capsys):
    output = tmp_path / "mean.pt"
    inputs = [str(checkpoints / f"checkpoint{number}.pt") for number in (2, 3)]
    assert main(["average", "--inputs", *inputs, "--output", str(output)]) == 0
    assert "warning: the running statistics are the mean" in capsys.readouterr().err
    assert note_of(load_checkpoint(output)) == {"averaged": ["checkpoint2.pt", "checkpoint3.pt"]}
    assert main(["average", "--inputs", inputs[0], "--output", str(output)]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["average", "--inputs", *inputs, "--output", str(tmp_path / "no" / "mean.pt")]) == 1
    assert "no folder" in capsys.readouterr().err
