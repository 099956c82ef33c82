"""The demo: several jobs side by side, and the whole of it on a little text."""

import json
import sys

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.corpora.translation import read_lines, write_lines
from powernorm_fairseq.experiment.demo import Job, overview, work
from tests.conftest import SAMPLE


def job(name, code, after=(), kind="mt"):
    return Job(name, kind, [sys.executable, "-c", code], after)


def test_order_failure_and_the_number_at_a_time(tmp_path):
    """Each job notes when it starts and ends; at no time are there more than two."""
    notes = tmp_path / "notes"
    run = "import time; p = open({0!r}, 'a', 1); p.write('+{1}\\n'); time.sleep(0.3); p.write('-{1}\\n')"
    jobs = [
        job("a", run.format(str(notes), "a")),
        job("b", run.format(str(notes), "b") + "; raise SystemExit(3)"),
        job("c", run.format(str(notes), "c"), after=["a"]),
        job("d", run.format(str(notes), "d"), after=["b"]),
        job("e", run.format(str(notes), "e"), after=["a"]),
    ]
    said = []
    work(jobs, slots=2, threads=1, say=said.append)
    assert {one.name: one.code for one in jobs} == {"a": 0, "b": 3, "c": 0, "d": -1, "e": 0}
    assert "b failed; the others go on" in said and "d is left out, as b failed" in said
    events = notes.read_text().split()
    running = 0
    for event in events:
        running += 1 if event[0] == "+" else -1
        assert running <= 2
    assert "+d" not in events
    assert events.index("+c") > events.index("-a") and events.index("+e") > events.index("-a")


def test_an_interrupt_ends_the_children(tmp_path):
    def interrupt(words):
        raise KeyboardInterrupt

    jobs = [job("fails", "raise SystemExit(1)"), job("long", "import time; time.sleep(60)")]
    with pytest.raises(KeyboardInterrupt):
        work(jobs, slots=2, threads=1, say=interrupt)
    assert jobs[1].process.poll() is not None


def test_the_overview_guesses_from_what_was_measured():
    """Three trainings of usually 280 s; the first took half of that, and the second has been at work for 40 s."""
    jobs = [job("a", ""), job("b", ""), job("c", "")]
    assert overview(jobs, 1, 0) == "0 of 3 jobs done, at work on nothing; 0:00 gone, about 14:00 left"
    assert overview(jobs, 2, 0).endswith("about 7:00 left")
    jobs[0].code, jobs[0].seconds = 0, 140.0
    jobs[1].process, jobs[1].seconds = object(), 40.0
    assert overview(jobs, 1, 180) == "1 of 3 jobs done, at work on b; 3:00 gone, about 4:00 left"


def test_wrong_names_and_folders(tmp_path, capsys):
    assert main(["demo", "--tasks", "tm"]) == 1
    assert "no task tm; there are mt, lm" in capsys.readouterr().err
    assert main(["demo", "--sample", str(tmp_path / "no")]) == 1
    assert "start this in the project's folder" in capsys.readouterr().err
    assert main(["demo", "--norms", "powr", "--output", str(tmp_path)]) == 1
    assert "no norm 'powr'" in capsys.readouterr().err


@pytest.fixture
def little(tmp_path):
    """Some sentences of data/sample."""
    sample = tmp_path / "sample"
    (sample / "ui-de-en").mkdir(parents=True)
    for split, count in (("train", 300), ("valid", 8), ("test", 8)):
        for language in ("de", "en"):
            name = f"ui-de-en/{split}.{language}"
            write_lines(sample / name, read_lines(SAMPLE / name)[:count])
    return sample


@pytest.mark.slow
def test_the_whole_demo_on_a_little_text(little, tmp_path, capfd):
    arguments = [
        "demo",
        "--norms",
        "power",
        "--tasks",
        "mt",
        "--sample",
        str(little),
        "--output",
        str(tmp_path / "out"),
    ]
    few = ["optimization.max_update=3", "checkpoint.save_interval_updates=1", "scoring.subsets=[test]"]
    assert main([*arguments, "--set", *few]) == 0, capfd.readouterr()
    printed = capfd.readouterr().out
    assert "| PowerNorm" in printed and "floor (untrained model)" in printed
    rows = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))["rows"]
    assert [row["norm"] for row in rows] == ["power", "floor"]
    assert (rows[0]["bleu"]["updates"], rows[0]["bleu"]["model"]) == (3, "transformer_pn_tiny")
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    assert len(read_lines(tmp_path / "out" / "mt" / "power" / "hypotheses" / "test.en")) == 8

    # Started again, everything is there; with other values it is another run, which is refused.
    assert main([*arguments, "--set", *few]) == 0
    printed = capfd.readouterr().out
    assert printed.count("finished before") == 2 and "| PowerNorm" in printed
    assert main([*arguments, "--set", *few[1:]]) == 1
    said = capfd.readouterr()
    assert "optimization.max_update: 3 -> 800" in said.out and "failed: mt/power, mt/floor" in said.err
