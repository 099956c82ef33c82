"""Real runs of a few updates: both entry points, interruption, failure."""

import json
import math
import signal
import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from powernorm_fairseq.checkpoints.average import load_checkpoint
from powernorm_fairseq.experiment import record, run, training
from powernorm_fairseq.experiment.config import dump, load_config, override, train_arguments, with_norm
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.processes import PACKAGE, UserError, differences, environment, own_program
from tests.commands import ROOT, checked, in_this_process

MT, LM = ROOT / "configs" / "mt" / "sample.yaml", ROOT / "configs" / "lm" / "sample.yaml"
FEW = ["optimization.max_update=3", "checkpoint.save_interval_updates=1", "common.log_interval=1"]

# Groups that are no part of training.
APART = ("generation", "eval_lm", "scoring", "hydra", "job_logging_cfg", "_name")


@pytest.mark.slow
@pytest.mark.parametrize("path, norm", [(MT, "power"), (LM, "batch")], ids=["mt", "lm"])
def test_a_shipped_config_trains_the_same_through_both_entry_points(path, norm, request, tmp_path):
    data = request.getfixturevalue("translation_data" if path is MT else "language_model_data")
    config = override(with_norm(load_config(path), norm), [*FEW, f"task.data={data}", f"common.user_dir={PACKAGE}"])
    by_command = override(config, [f"checkpoint.save_dir={tmp_path / 'command'}"])
    in_this_process("fairseq-train", *train_arguments(by_command))
    by_hydra = override(config, [f"checkpoint.save_dir={tmp_path / 'hydra'}"])
    dump(by_hydra, tmp_path / "experiment.yaml")
    checked("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "experiment", cwd=tmp_path)

    one, other = (load_checkpoint(tmp_path / name / "checkpoint_last.pt") for name in ("command", "hydra"))
    configs = [OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True) for state in (one, other)]
    for each in configs:
        each["checkpoint"].pop("save_dir")
        for group in APART:
            each.pop(group, None)
    assert differences(*configs) == []
    assert one["optimizer_history"][-1]["num_updates"] == other["optimizer_history"][-1]["num_updates"] == 3
    assert set(one["model"]) == set(other["model"])
    for key, value in one["model"].items():
        torch.testing.assert_close(value, other["model"][key], rtol=1e-5, atol=1e-6, msg=key)


@pytest.fixture
def small(language_model_data):
    """A PowerNorm language model that takes some seconds to train and one to score."""
    assignments = [
        "optimization.max_update=120", "checkpoint.save_interval_updates=20", "common.log_interval=10",
        "dataset.batch_size=4", "task.tokens_per_sample=32", "scoring.tokens_per_sample=32", "eval_lm.context_window=8",
        "scoring.subsets=[test]", "scoring.reestimate=3", "lr_scheduler.warmup_updates=30",
        f"task.data={language_model_data}",
    ]  # fmt: skip
    return override(with_norm(load_config(LM), "power"), assignments)


@pytest.fixture
def one_thread():
    """As the children compute; sums in another order would differ in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_killed_and_started_again_is_the_run_that_was_never_interrupted(small, tmp_path):
    folder = tmp_path / "run"
    dump(small, tmp_path / "small.yaml")
    command = own_program("run", tmp_path / "small.yaml", "--dir", folder, "--threads", 1)
    process = subprocess.Popen(command, env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 150
        while not (folder / "checkpoints" / "checkpoint_last.pt").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.stdout.read().decode()
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert not (folder / "trained.json").exists()
    assert record.read(folder) is None

    said = []
    result = run.run(small, folder, norm="power", threads=1, say=said.append)
    assert "training goes on" in said
    assert result["training"]["updates"] == 120
    assert 1 < result["scores"]["test"]["perplexity"] < math.inf
    assert result["checkpoint"] == "reestimated.pt" and result["reestimated"]["batches"] == 3
    assert result["reestimated"]["sources"] == ["checkpoint_best.pt"]
    assert {"seed", "versions", "hardware", "command", "git_commit", "config"} <= set(result)

    whole = run.placed(small, tmp_path / "whole")
    in_this_process("fairseq-train", *train_arguments(whole))
    continued, uninterrupted = (
        load_checkpoint(path / "checkpoints" / "checkpoint_last.pt")["model"] for path in (folder, tmp_path / "whole")
    )
    for key, value in uninterrupted.items():
        assert torch.equal(value, continued[key]), key

    # Again: nothing is done twice.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pt")}
    assert run.run(small, folder, norm="power", threads=1, say=said.append) == result
    assert said[-1] == "finished before"
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.pt")}


def test_statistics_are_measured_once_and_where_there_are_any(small, tmp_path):
    said = []
    for norm, has_some in (("power", True), ("layer", False)):
        folder = tmp_path / norm
        config = override(small, [f"model._name=transformer_lm_{'pn' if has_some else 'norm'}_tiny"])
        config = run.placed(config, folder)
        (folder / "checkpoints").mkdir(parents=True)
        checkpoint = folder / "checkpoints" / "checkpoint_best.pt"
        save_untrained(config, checkpoint)
        path, note = run.with_new_statistics(config, folder, checkpoint, 1, said.append)
        assert path == (folder / "checkpoints" / "reestimated.pt" if has_some else checkpoint)
        assert path.exists() and has_some == (note is not None)
        off = override(config, ["scoring.reestimate=0"])
        assert run.with_new_statistics(off, folder, checkpoint, 1, said.append) == (checkpoint, None)
        if has_some:
            checkpoint.unlink()  # not needed again
            spoken = len(said)
            assert run.with_new_statistics(config, folder, checkpoint, 1, said.append) == (path, note)
            assert len(said) == spoken > 0 and note["seed"] == 1


def test_a_failing_program_shows_the_end_of_its_log(small, tmp_path, monkeypatch):
    failing = [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"]
    monkeypatch.setattr(training, "command", lambda *args: failing)
    with pytest.raises(UserError) as error:
        run.run(small, tmp_path / "run", say=lambda words: None)
    assert "fairseq-train ended with code 3" in str(error.value) and "what went wrong" in str(error.value)
    assert record.read(tmp_path / "run") is None and not (tmp_path / "run" / "trained.json").exists()


def test_as_many_checkpoints_are_averaged_as_the_config_says(small, tmp_path):
    """The last ones; fewer are an error, and an average that is there is not made again."""
    config, said = override(small, ["scoring.average=2"]), []
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    history = [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 1}]
    state = {"args": None, "cfg": None, "optimizer_history": history, "task_state": {}, "last_optimizer_state": None}
    state["extra_state"] = {"train_iterator": {"epoch": 1}}
    for epoch in (1, 9, 10):
        if epoch == 9:
            with pytest.raises(UserError, match="2 are needed"):
                run.final_checkpoint(config, tmp_path, said.append)
        torch.save({**state, "model": {"w": torch.tensor([float(epoch)])}}, checkpoints / f"checkpoint{epoch}.pt")
    run.final_checkpoint(config, tmp_path, said.append)
    found = torch.load(str(checkpoints / "averaged.pt"))
    assert found["model"]["w"].item() == 9.5
    assert found["extra_state"]["powernorm_fairseq"]["averaged"] == ["checkpoint9.pt", "checkpoint10.pt"]
    (checkpoints / "checkpoint9.pt").unlink()
    assert run.final_checkpoint(config, tmp_path, said.append) == checkpoints / "averaged.pt"
    for name in ("best", "last"):
        chosen = override(small, [f"scoring.checkpoint={name}"])
        assert run.final_checkpoint(chosen, tmp_path, said.append) == checkpoints / f"checkpoint_{name}.pt"


def test_the_last_subset_is_the_one_reported(small, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train", lambda *args: {"outcome": "finished", "updates": 1})
    monkeypatch.setattr(run, "word_perplexity", lambda *args: {"perplexity": 9.0 + len(args[3])})
    config = override(small, ["scoring.subsets=[valid, test]", "scoring.reestimate=0"])
    result = run.run(config, tmp_path, changes=["model.norm=rms"], say=lambda words: None)
    assert (result["reported"], result["scores"]["test"], result["set"]) == (
        "test",
        {"perplexity": 13.0},
        ["model.norm=rms"],
    )


def test_scoring_does_not_see_what_a_job_left_in_the_environment(small, tmp_path, monkeypatch):
    """fairseq-eval-lm would wait for the other workers."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    program = [sys.executable, "-c", "import os; print(os.environ.get('WORLD_SIZE'))"]
    monkeypatch.setattr(run, "fairseq_program", lambda name: program)
    output = run._program_output("eval-lm", run.placed(small, tmp_path), tmp_path, tmp_path / "c.pt", "test", 1)
    assert output.endswith("None\n")


def test_half_an_output_is_not_scored(small, tmp_path, monkeypatch):
    """A decoder that is killed leaves its output under another name; the next start decodes again."""
    folder, whole = tmp_path / "run", "H-0\t-1\tx\n"
    (folder / "hypotheses").mkdir(parents=True)
    (folder / "hypotheses" / "test.generate.txt.partial").write_text("H-0\t-1")
    monkeypatch.setattr(run, "fairseq_program", lambda name: [sys.executable, "-c", f"print({whole!r}, end='')"])
    config = override(load_config(MT), [f"task.data={small['task']['data']}"])
    output = run._program_output("generate", config, folder, tmp_path / "c.pt", "test", 1)
    assert output.endswith(whole) and output.count("H-0\t-1\tx") <= 2 and "H-0\t-1$" not in output
    monkeypatch.setattr(run, "fairseq_program", lambda name: pytest.fail("decoded twice"))
    assert run._program_output("generate", config, folder, tmp_path / "c.pt", "test", 1) == output


def test_the_record_names_the_circumstances(tmp_path):
    written = record.write(tmp_path, {"kind": "bleu"}, threads=1)
    assert written == record.read(tmp_path)
    assert set(written["versions"]) >= {"python", "torch", "fairseq", "sacrebleu", "powernorm_fairseq"}
    assert written["hardware"]["threads"] == 1 and written["hardware"]["cores"] >= 1
    assert written["git_commit"] is None or len(written["git_commit"].rstrip("+")) == 40


def test_the_commit_of_an_installed_package_is_that_of_an_equal_checkout(tmp_path, monkeypatch):
    """In a virtual environment the package is in no checkout; that in the current folder counts if it is the same."""
    checkout, installed = tmp_path / "checkout" / PACKAGE.name, tmp_path / "installed" / PACKAGE.name
    for folder in (checkout, installed):
        folder.mkdir(parents=True)
        (folder / "version.py").write_text("1")
    monkeypatch.setattr(record, "PACKAGE", installed)
    monkeypatch.chdir(checkout.parent)
    assert record.git_commit() is None
    for command in ("init", "add .", "-c user.name=a -c user.email=a@b commit -m c"):
        subprocess.run(["git", *command.split()], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    commit = record.git_commit()
    assert commit is not None and len(commit) == 40
    for folder in (checkout, installed):
        (folder / "version.py").write_text("2")
    assert record.git_commit() == commit + "+"
    (installed / "version.py").write_text("3")
    assert record.git_commit() is None


def test_results_are_found_by_folder_and_half_ones_are_not(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"norm": name}))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "result.json").write_text('{"norm": ')
    assert [result["norm"] for result in record.read_all(tmp_path)] == ["a", "b"]
