"""Whose a run's folder is, and what is whole in it."""

import os

import pytest
import torch

from powernorm_fairseq.experiment.config import load_config, override
from powernorm_fairseq.experiment.folder import claim, fingerprint_of_data, is_whole, mend_last_checkpoint
from powernorm_fairseq.processes import UserError
from tests.commands import ROOT


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("powernorm_fairseq.processes.PATIENCE", 0.0)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("the 3\n")
    (tmp_path / "data" / "train.bin").write_bytes(b"1234")
    return override(load_config(ROOT / "configs" / "lm" / "sample.yaml"), [f"task.data={tmp_path / 'data'}"])


def test_the_same_config_continues(config, tmp_path):
    claim(tmp_path / "run", config).close()
    moved = override(config, ["checkpoint.save_dir=elsewhere", "common.user_dir=elsewhere"])
    claim(tmp_path / "run", moved).close()


def test_another_config_is_refused_and_says_what_differs(config, tmp_path):
    claim(tmp_path / "run", config).close()
    changed = override(config, ["optimization.max_update=601", "model.norm=rms"])
    with pytest.raises(UserError) as error:
        claim(tmp_path / "run", changed)
    assert "optimization.max_update: 600 -> 601" in str(error.value)
    assert "model.norm: None -> 'rms'" in str(error.value)
    claim(tmp_path / "run", config).close()  # the refused one has let go of it


def test_other_data_is_refused(config, tmp_path):
    claim(tmp_path / "run", config).close()
    (tmp_path / "data" / "train.bin").write_bytes(b"12345")
    with pytest.raises(UserError, match="is not what it was"):
        claim(tmp_path / "run", config)


def test_no_data(tmp_path):
    with pytest.raises(UserError, match="no text prepared for fairseq"):
        fingerprint_of_data(tmp_path)


def test_two_at_once_are_refused(config, tmp_path):
    with claim(tmp_path / "run", config), pytest.raises(UserError, match="another process is at work"):
        claim(tmp_path / "run", config)


def checkpoint(path, value, age):
    torch.save({"model": {"w": torch.full((1000,), float(value))}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))


def test_half_a_checkpoint_gives_way_to_the_newest_whole_one(tmp_path):
    checkpoint(tmp_path / "checkpoint_1_100.pt", 100, age=30)
    checkpoint(tmp_path / "checkpoint_1_200.pt", 200, age=20)
    checkpoint(tmp_path / "checkpoint_best.pt", 100, age=29)
    content = (tmp_path / "checkpoint_1_200.pt").read_bytes()
    (tmp_path / "checkpoint_last.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "checkpoint_1_300.pt.tmp").write_bytes(content[:100])
    assert not is_whole(tmp_path / "checkpoint_last.pt")
    said = mend_last_checkpoint(tmp_path)
    assert said == ["removed checkpoint_last.pt, which was only half written", "continuing from checkpoint_1_200.pt"]
    assert torch.load(tmp_path / "checkpoint_last.pt")["model"]["w"][0] == 200
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.partial"))
    assert mend_last_checkpoint(tmp_path) == []


def test_whole_checkpoints_stay(tmp_path):
    checkpoint(tmp_path / "checkpoint_last.pt", 300, age=0)
    checkpoint(tmp_path / "checkpoint_1_200.pt", 200, age=20)
    assert mend_last_checkpoint(tmp_path) == []
    assert torch.load(tmp_path / "checkpoint_last.pt")["model"]["w"][0] == 300


def test_without_any_whole_checkpoint_training_starts_anew(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"")
    assert len(mend_last_checkpoint(tmp_path)) == 1
    assert not list(tmp_path.iterdir())
