"""How a training ends: divergence is a result, every other failure is an error."""

import sys

import pytest

from powernorm_fairseq.checkpoints.average import load_checkpoint, save_checkpoint
from powernorm_fairseq.checkpoints.patience import STATE
from powernorm_fairseq.experiment import record, run, training
from powernorm_fairseq.experiment.config import load_config, override
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.processes import UserError
from powernorm_fairseq.report import table
from tests.commands import ROOT

MT = ROOT / "configs" / "mt" / "sample.yaml"
FLOATING = "Traceback (most recent call last):\n  ...\nFloatingPointError: "
WORKERS = (
    FLOATING + "Fatal error: gradients are inconsistent between workers. Try --ddp-backend=legacy_ddp.\n"
    "-----\ngrad_norm across the workers:\nrank   0 = {}\nrank   1 = {}\n-----\n"
)


@pytest.mark.parametrize(
    "log, reason",
    [
        (FLOATING + "gradients are Nan/Inf\n", "NaN or infinite"),
        (FLOATING + "Minimum loss scale reached (0.0001). Your loss is probably exploding.", "smallest loss scale"),
        (FLOATING + "AMP: Minimum loss scale reached (0.0001).", "smallest loss scale"),
        (WORKERS.format("nan", "nan"), "NaN or infinite"),
        (WORKERS.format("0.50000000", "inf"), "NaN or infinite"),
        (WORKERS.format("0.50000000", "0.70000000"), None),
        ("RuntimeError: CUDA out of memory", None),
        ("a sentence with gradients are Nan/Inf in it", None),
    ],
)
def test_what_counts_as_divergence(log, reason):
    found = training.reason_of_divergence(log)
    assert (found is None) if reason is None else reason in found


@pytest.fixture
def config(translation_data):
    return override(load_config(MT), ["optimization.max_update=4", f"task.data={translation_data}"])


@pytest.mark.slow
def test_a_training_that_diverges_is_a_result_and_is_not_repeated(config, tmp_path, monkeypatch):
    """fairseq-train itself, at a learning rate that makes infinity of the parameters in the first update."""
    said = []
    wild = override(config, ["optimization.lr=[1e38]", "lr_scheduler.warmup_updates=1", "common.log_interval=1"])
    result = run.run(wild, tmp_path, norm="layer", path=MT, say=said.append)
    assert (result["outcome"], result["scores"], result["checkpoint"]) == ("diverged", {}, None)
    assert result["training"]["reason"] == "gradients are NaN or infinite"
    assert 1 <= result["training"]["updates"] < 4 and result["training"]["parameters"] > 0
    assert (result["group"], result["task_kind"], result["config_file"]) == ("sample", "mt", str(MT))
    assert said[-1] == f"finished: diverged after {result['training']['updates']} updates"

    monkeypatch.setattr(training, "command", lambda *args: pytest.fail("trained twice"))
    assert run.run(wild, tmp_path, norm="layer", path=MT, say=said.append) == result
    (tmp_path / record.RESULT).unlink()
    assert run.run(wild, tmp_path, norm="layer", path=MT, say=said.append)["outcome"] == "diverged"

    # A table of it and of another run has the row, without a score.
    other = {**result, "norm": "power", "scores": {"test": {"bleu": 3.0}}, "outcome": "finished"}
    rows = table.markdown(table.rows_of([result, other])).splitlines()
    assert len(rows) == 4 and rows[2].startswith("| LayerNorm") and "3.00" in rows[3]
    assert table.notes([result, other])


def test_a_validation_loss_that_is_no_number_is_divergence(config, tmp_path, monkeypatch):
    """Nothing stops such a training; it ends as if all were well, at worst without a best checkpoint."""
    line = 'x | INFO | valid | {"valid_loss": "nan", "valid_num_updates": "4"}'
    monkeypatch.setattr(training, "command", lambda *args: [sys.executable, "-c", f"print({line!r})"])
    monkeypatch.setattr(training, "_end_of_training", lambda *args: {"updates": 4})
    result = run.run(config, tmp_path, say=lambda words: None)
    assert result["training"]["reason"] == "the validation loss is nan" and result["training"]["valid_loss"] is None
    assert "diverged" in run.in_words(result)


@pytest.mark.parametrize("updates, count, ended", [(4, 0, True), (3, 0, False), (3, 2, True), (3, 1, False)], ids=str)
def test_a_training_at_its_end_is_not_trained_on(config, tmp_path, monkeypatch, updates, count, ended):
    """It was killed between its last checkpoint and the note that it has ended."""
    config = override(config, ["checkpoint.patience=2"])
    last = tmp_path / "checkpoints" / "checkpoint_last.pt"
    last.parent.mkdir()
    save_untrained(run.placed(config, tmp_path), last)
    state = load_checkpoint(last)
    state["optimizer_history"][-1]["num_updates"] = updates
    state["extra_state"].update({"previous_training_time": 1.5, STATE: {"best": 1.0, "num_runs": count}})
    save_checkpoint(state, last)
    (tmp_path / "train.log").write_text('x | INFO | valid | {"valid_loss": "5.5", "valid_num_updates": "4"}\n')
    started, said = [], []
    monkeypatch.setattr(training, "command", lambda *args: started.append(args) or [sys.executable, "-c", ""])
    found = training.train(config, tmp_path, 1, said.append)
    assert ("training had come to its end" in said) == ended and bool(started) != ended
    assert (found["outcome"], found["updates"], found["valid_loss"]) == ("finished", updates, 5.5)


def test_other_failures_stay_errors(config, tmp_path, monkeypatch):
    program = [sys.executable, "-c", "print('RuntimeError: no space left'); raise SystemExit(1)"]
    monkeypatch.setattr(training, "command", lambda *args: program)
    (tmp_path / "train.log").write_text(FLOATING + "gradients are Nan/Inf\n")  # of an earlier start
    with pytest.raises(UserError, match="no space left"):
        run.run(config, tmp_path, say=lambda words: None)
    assert record.read(tmp_path) is None


@pytest.mark.parametrize(
    "path, group", [("mt/sample.yaml", "sample"), ("lm/ptb/power.yaml", "ptb"), ("elsewhere/my.yaml", "my")]
)
def test_the_group_of_a_config(path, group):
    assert run.group_of(ROOT / "configs" / path) == group
