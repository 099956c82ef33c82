"""Whose a run's folder is."""

import pytest

from powernorm_fairseq.experiment.config import load_config, override
from powernorm_fairseq.experiment.folder import claim, fingerprint_of_data
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
