"""Steps of a preparation: whole or not at all, repeated only where something changed."""

import subprocess
import sys
import textwrap
import time

import pytest

from powernorm_fairseq.corpora import steps
from powernorm_fairseq.corpora.steps import STAMP, Preparation, digest_of_files, stamp_of
from powernorm_fairseq.processes import PACKAGE, UserError, hold


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("powernorm_fairseq.processes.PATIENCE", 0.0)


@pytest.fixture
def preparation(tmp_path):
    return Preparation(tmp_path / "corpus", say=lambda words: None)


def writer(text, calls):
    def make(folder):
        calls.append(text)
        (folder / "text").write_text(text)

    return make


def test_a_step_is_made_once(preparation):
    calls = []
    first = preparation.step("words", writer("a", calls), {"size": 3})
    second = preparation.step("words", writer("a", calls), {"size": 3})
    assert first == second and (first / "text").read_text() == "a"
    assert calls == ["a"]


def test_other_settings_make_it_again_and_what_follows_too(preparation):
    calls = []
    words = preparation.step("words", writer("a", calls), {"size": 3})
    preparation.step("pieces", writer("b", calls), {"words": words})
    words = preparation.step("words", writer("c", calls), {"size": 4})
    preparation.step("pieces", writer("d", calls), {"words": words})
    assert calls == ["a", "b", "c", "d"]
    assert (words / "text").read_text() == "c"


def test_killed_while_the_old_folder_goes_the_rest_is_not_taken_for_whole(preparation, monkeypatch):
    preparation.step("words", writer("old", []), {"size": 3})
    remove = steps.shutil.rmtree

    def killed(folder, **options):
        if folder.name == "words":
            (folder / "text").unlink()
            raise KeyboardInterrupt
        remove(folder, **options)

    monkeypatch.setattr(steps.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        preparation.step("words", writer("new", []), {"size": 4})
    monkeypatch.setattr(steps.shutil, "rmtree", remove)
    made = preparation.step("words", writer("old", []), {"size": 3})
    assert (made / "text").read_text() == "old"


def test_a_failed_step_leaves_no_folder_and_is_tried_again(preparation):
    def fail(folder):
        (folder / "text").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        preparation.step("words", fail, {})
    assert not (preparation.root / "words").exists()
    made = preparation.step("words", writer("whole", []), {})
    assert (made / "text").read_text() == "whole"
    assert sorted(path.name for path in made.iterdir()) == [STAMP, "text"]


def test_a_folder_without_a_stamp_is_not_taken_for_whole(preparation):
    (preparation.root / "words").mkdir(parents=True)
    (preparation.root / "words" / "text").write_text("half")
    made = preparation.step("words", writer("whole", []), {})
    assert (made / "text").read_text() == "whole"


def test_what_follows_refuses_an_unfinished_folder(preparation):
    (preparation.root / "words").mkdir(parents=True)
    with pytest.raises(UserError, match="not the finished output"):
        preparation.step("pieces", writer("b", []), {"words": preparation.root / "words"})


def test_killed_in_the_middle(tmp_path):
    """A process killed inside a step leaves nothing under the step's name."""
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pathlib, sys, time, types
            package = types.ModuleType("powernorm_fairseq"); package.__path__ = [{str(PACKAGE)!r}]
            sys.modules["powernorm_fairseq"] = package  # without fairseq, which takes seconds to import
            from powernorm_fairseq.corpora.steps import Preparation
            def make(folder):
                (folder / "text").write_text("half")
                print("half", flush=True)
                time.sleep(60)
            Preparation(pathlib.Path({str(tmp_path / "corpus")!r})).step("words", make, {{}})
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"half\n"
    process.kill()
    process.communicate()
    assert stamp_of(tmp_path / "corpus" / "words") is None
    made = Preparation(tmp_path / "corpus", say=lambda words: None).step("words", writer("whole", []), {})
    assert (made / "text").read_text() == "whole"


def test_digest_sees_names_contents_and_missing_files(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("one")
    digests = {digest_of_files([tmp_path / name]) for name in "ab"}
    assert len(digests) == 2
    (tmp_path / "a").write_text("two")
    assert digest_of_files([tmp_path / "a"]) not in digests
    with pytest.raises(UserError, match="no file"):
        digest_of_files([tmp_path / "c"])


def test_one_process_at_a_time(tmp_path):
    with hold(tmp_path), pytest.raises(UserError, match="another process"):
        hold(tmp_path)
    hold(tmp_path).close()


def test_a_lock_is_held_by_the_children_too(tmp_path):
    lock = hold(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        lock.close()
        with pytest.raises(UserError, match="another process"):
            hold(tmp_path)
    finally:
        child.kill()
        child.wait()
    deadline = time.monotonic() + 5
    while True:
        try:
            hold(tmp_path).close()
            break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
