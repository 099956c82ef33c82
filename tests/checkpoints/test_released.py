"""Files of the released PowerNorm code are read, others are refused, and no code in a file runs."""

import os
import pickle
import zipfile
from argparse import Namespace

import pytest
import torch

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.released import load_released
from powernorm_fairseq.processes import UserError
from tests.checkpoints.released import checkpoint, options, save


class Trap:
    """Unpickled as usual, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"state_dict": {}}, "no fairseq checkpoint"),
        ([1], "no fairseq checkpoint"),
        ({"model": {}, "args": None, "cfg": {}}, "written by fairseq 0.10 or later"),
        ({"model": {}, "args": Namespace(arch="transformer")}, "another fairseq than the released PowerNorm code"),
    ],
)
def test_files_of_other_programs_are_refused(state, message, tmp_path):
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match=message):
        load_released(tmp_path / "other.pt")


def dotted(code):
    """A pickle that calls eval, found by a path of names that begins with one that is allowed."""

    def text(word):
        return pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode()

    def call(argument):
        return text(argument) + pickle.TUPLE1 + pickle.REDUCE

    name = text("torch._utils") + text("_rebuild_tensor.__builtins__.__getitem__") + pickle.STACK_GLOBAL
    return pickle.PROTO + bytes([4]) + name + call("eval") + call(code) + pickle.STOP


def test_broken_files_are_refused_and_no_code_in_a_file_runs(tmp_path, capsys):
    with pytest.raises(UserError, match="no checkpoint"):
        load_released(tmp_path / "none.pt")
    old = checkpoint(options())
    whole = save({**old, "trap": Trap(tmp_path / "trapped")}, tmp_path / "old.pt")
    assert load_released(whole)["args"] == old["args"]
    assert not (tmp_path / "trapped").exists()
    with zipfile.ZipFile(tmp_path / "path.pt", "w") as archive:
        archive.writestr("a/data.pkl", dotted(f"open({str(tmp_path / 'trapped')!r}, 'w')"))
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")
    with pytest.raises(UserError):
        load_released(tmp_path / "path.pt")
    assert not (tmp_path / "trapped").exists()
    (tmp_path / "half.pt").write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        load_released(tmp_path / "half.pt")
    before = whole.read_bytes()
    assert main(["convert", str(whole), "--output", str(whole)]) == 1
    assert main(["convert", str(whole), "--output", str(tmp_path / "no" / "new.pt")]) == 1
    errors = capsys.readouterr().err
    assert "the output would replace" in errors and "no folder" in errors
    assert whole.read_bytes() == before


def test_both_of_torchs_file_formats(tmp_path):
    old = checkpoint(options())
    torch.save(old, tmp_path / "zip.pt")
    loaded = load_released(tmp_path / "zip.pt")
    assert all(torch.equal(value, loaded["model"][key]) for key, value in old["model"].items())
