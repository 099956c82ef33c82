"""The grid of norms and seeds as Hydra runs it."""

import json
import os
import sys

import pytest
from omegaconf import OmegaConf

from powernorm_fairseq.experiment import grid, reproduce, run
from powernorm_fairseq.processes import UserError
from tests.commands import ROOT


@pytest.fixture
def multirun(monkeypatch, tmp_path):
    """Runs the application in this process, in an empty folder."""
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)

    def call(*words):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["grid", *map(str, words)])
        grid.main()

    yield call
    GlobalHydra.instance().clear()


def test_each_combination_is_a_run(multirun, monkeypatch, tmp_path):
    done = []

    def one(args):
        done.append((args.row, args.seeds, args.override, os.getcwd()))
        return [{"training": {"valid_loss": None}}]

    monkeypatch.setattr(reproduce, "reproduce", one)
    multirun("--multirun", "group=mt/sample", "norm=layer,power", "seed=1,2", "set=['optimization.max_update=3']")
    few = ["optimization.max_update=3"]
    expected = [(f"mt/sample/{norm}", [seed], few, str(tmp_path)) for norm in ("layer", "power") for seed in (1, 2)]
    assert done == expected
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}


def test_a_combination_that_fails_says_why(monkeypatch, tmp_path, capsys):
    point = {"group": "mt/sample", "norm": "layer", "seed": 3, "configs": None, "raw": None, "set": []}
    cfg = OmegaConf.create({**point, **dict.fromkeys(("gpus", "threads", "runs", "records"))})
    monkeypatch.setattr(grid.hydra.utils, "get_original_cwd", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def failing(args):
        raise UserError("no text")

    monkeypatch.setattr(reproduce, "reproduce", failing)
    with pytest.raises(UserError):
        grid.run_point(cfg)
    assert capsys.readouterr().err == "mt/sample/layer, seed 3: no text\n"
    for loss, returned in ((None, float("inf")), (4.5, 4.5)):
        monkeypatch.setattr(reproduce, "reproduce", lambda args, loss=loss: [{"training": {"valid_loss": loss}}])
        assert grid.run_point(cfg) == returned


def test_what_is_no_option_is_refused(multirun, capfd):
    with pytest.raises(SystemExit):
        multirun("group=mt/sample", "nrom=layer")
    assert "nrom" in capfd.readouterr().err


@pytest.mark.slow
def test_a_grid_of_two_norms_leaves_a_record_of_each(multirun, language_model_data, tmp_path, monkeypatch):
    """Trained by fairseq-train; scoring, which takes as long, is left out here."""
    monkeypatch.setattr(run, "score", lambda *args: {"valid": {"perplexity": 9.0}})
    few = [
        "optimization.max_update=2", "checkpoint.save_interval_updates=2", "dataset.batch_size=4",
        "task.tokens_per_sample=32", "scoring.tokens_per_sample=32", "eval_lm.context_window=8",
        "scoring.subsets=[valid]", f"task.data={language_model_data}",
    ]  # fmt: skip
    settings = ["seed=4", f"configs={ROOT / 'configs'}", "threads=1", f"records={tmp_path / 'records'}"]
    words = ",".join(f"'{assignment}'" for assignment in few)
    multirun("--multirun", "group=lm/sample", "norm=layer,power", *settings, f"set=[{words}]")
    lines = (tmp_path / "records" / "lm-sample.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [(one["norm"], one["seed"], one["training"]["updates"]) for one in found] == [
        ("layer", 4, 2),
        ("power", 4, 2),
    ]
    for norm in ("layer", "power"):
        assert (tmp_path / "runs" / "lm" / "sample" / norm / "seed4" / "result.json").exists()
