"""The command ``prepare`` and the scripts that call it."""

import subprocess

import pytest

from powernorm_fairseq import __main__ as command
from powernorm_fairseq.corpora.catalogue import CATALOGUE
from powernorm_fairseq.corpora.prepare import CORPORA
from tests.commands import ROOT
from tests.corpora import archives


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sample-lm", "--subwords", "sentencepiece"], "sample-lm cannot be prepared with --subwords sentencepiece"),
        (["sample-mt", "--workers", "0"], "--workers 0"),
        (["sample-mt", "--archive", "a.tgz"], "takes no --archive"),
        (["sample-mt", "--raw", "nowhere"], "no folder nowhere: run this in the project's folder"),
        (["iwslt14-de-en", "--archive", "nothing.tgz"], "no file nothing.tgz"),
        (["iwslt14-de-en", "--archive", "other.tgz"], "other.tgz is not de-en.tgz of the catalogue: it has"),
    ],
)
def test_what_cannot_be_prepared_is_said(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    archives.tgz(tmp_path / "other.tgz", {"a": b"b"})
    assert command.main(["prepare", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("powernorm_fairseq prepare: ")


def test_corpora_of_the_catalogue():
    for name, corpus in CORPORA.items():
        assert corpus.data in ("", name) and (not corpus.data or CATALOGUE[name].files)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts" / "data").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_pass_their_arguments_on(script):
    done = subprocess.run(
        [script, "--workers", "2"], env={"PYTHON": "echo", "PATH": "/usr/bin:/bin"}, stdout=-1, text=True
    )
    words = done.stdout.split()
    assert words[:3] == ["-m", "powernorm_fairseq", "prepare"] and words[4:] == ["--workers", "2"]
    assert words[3] in CORPORA
