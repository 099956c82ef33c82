"""The command line."""

import pytest

from powernorm_fairseq import processes
from powernorm_fairseq.__main__ import COMMANDS, main
from powernorm_fairseq.version import __version__


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command}" in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_version_and_no_command(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    from powernorm_fairseq.report import report

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "main", interrupted)
    assert main(["report"]) == 130
    assert "continues where this one was" in capsys.readouterr().err


def test_tail_shows_the_end_and_cuts_long_lines(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 50_000 + b"\n" + b"\xff last\n")
    shown = processes.tail(log).splitlines()
    assert shown[-1].endswith("last") and all(len(line) <= 404 for line in shown)
    assert "no log" in processes.tail(tmp_path / "none")


def test_differences_are_found_at_every_depth():
    old, new = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [2]}, "e": 3}
    assert processes.differences(old, new) == ["a.c: [1] -> [2]", "d: 2 -> None", "e: None -> 3"]
    assert processes.differences(old, old) == []


def test_a_child_runs_the_package_that_started_it(tmp_path, monkeypatch):
    """An installed package started in a checkout must not go on with the checkout's files."""
    script = tmp_path / "bin" / processes.PACKAGE.name
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr(processes.sys, "executable", str(script.with_name("python")))
    monkeypatch.chdir(tmp_path)
    assert processes.own_program("run")[1:] == ["-m", "powernorm_fairseq", "run"]
    monkeypatch.chdir(processes.PACKAGE.parent)
    assert processes.own_program("run")[1:] == ["-m", "powernorm_fairseq", "run"]
    (tmp_path / "powernorm_fairseq").mkdir()
    monkeypatch.chdir(tmp_path)
    assert processes.own_program("run", 3) == [str(script), "run", "3"]


def test_children_of_a_child_compute_with_their_own_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    changed = processes.environment(2)
    assert changed["OMP_NUM_THREADS"] == changed["MKL_NUM_THREADS"] == "2"
    assert str(processes.PACKAGE.parent) in changed["PYTHONPATH"]
