"""BLEU against sacreBLEU's own command, and text that must not be scored."""

import json
import subprocess
import sys

import pytest

from powernorm_fairseq.evaluation.bleu import (
    chrf_score,
    compound_bleu,
    hypotheses_of,
    sacrebleu_score,
    tokenised_bleu,
)
from powernorm_fairseq.processes import UserError
from tests.commands import write_lines
from tests.conftest import SAMPLE


@pytest.fixture(scope="module")
def references():
    with open(SAMPLE / "ui-de-en" / "test.en", encoding="utf-8") as lines:
        return [next(lines).rstrip("\n") for _ in range(200)]


@pytest.fixture(scope="module")
def hypotheses(references):
    """The references with every seventh word left out and all in lower case."""
    kept = [" ".join(word for place, word in enumerate(line.split()) if place % 7 != 3) for line in references]
    return [line.lower() for line in kept]


@pytest.mark.parametrize("lowercase", [False, True])
def test_the_same_as_sacrebleu_on_the_command_line(hypotheses, references, lowercase, tmp_path):
    write_lines(tmp_path / "hypotheses", hypotheses)
    write_lines(tmp_path / "references", references)
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "references"), "-i", str(tmp_path / "hypotheses")]
    options = ["-b", "-w", "10", *(["-lc"] if lowercase else [])]
    printed = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, text=True).stdout
    score = sacrebleu_score(hypotheses, references, lowercase=lowercase)
    assert score["bleu"] == pytest.approx(float(printed), abs=1e-9)
    assert 20 < score["bleu"] < 95
    assert ("case:lc" if lowercase else "case:mixed") in score["signature"] and "tok:13a" in score["signature"]
    assert score["sentences"] == 200 and len(score["precisions"]) == 4


def test_equal_text_scores_100(references):
    assert sacrebleu_score(references, references)["bleu"] == pytest.approx(100)


@pytest.mark.parametrize("mark", ["con@@ nected now", "now con@@", "\u2581connected \u2581now"])
def test_subword_marks_are_refused(references, mark):
    with pytest.raises(UserError, match=r"line 3 still has subword marks.*\n.*--remove-bpe"):
        sacrebleu_score([*references[:2], mark], references[:3])


@pytest.mark.parametrize("mark", ["con@@ nected now", "now con@@", "\u2581connected \u2581now"])
@pytest.mark.parametrize("score", [sacrebleu_score, tokenised_bleu, compound_bleu, chrf_score])
def test_subword_marks_in_references_are_refused(references, mark, score):
    with pytest.raises(UserError, match="reference in line 3 still has subword marks"):
        score(references[:3], [*references[:2], mark])


@pytest.mark.parametrize("text", ["@@ -1,2 +3 @@ in a patch", "a bar \u2581\u2582\u2583 of blocks"])
def test_what_people_write_is_no_subword_mark(references, text):
    assert sacrebleu_score(references[:2], [references[0], text])["bleu"] > 0


def test_an_address_is_no_subword_mark():
    assert (
        sacrebleu_score(["mail user@@host or a@b.c today please"], ["mail user@@host or a@b.c today please"])["bleu"]
        > 99
    )


@pytest.mark.parametrize("score", [sacrebleu_score, tokenised_bleu, compound_bleu, chrf_score])
def test_lines_must_pair_up(references, score):
    with pytest.raises(UserError, match="9 hypotheses for 10 references"):
        score(references[:9], references[:10])


@pytest.mark.parametrize("score", [sacrebleu_score, tokenised_bleu, compound_bleu, chrf_score])
def test_nothing_to_score_is_refused(references, score):
    with pytest.raises(UserError, match="no lines"):
        score([], [])
    with pytest.raises(UserError, match="reference in line 2 is empty"):
        score(["a", "b"], ["a", " "])
    with pytest.raises(UserError, match="every hypothesis is empty"):
        score(["", " "], references[:2])


@pytest.mark.parametrize("score", [sacrebleu_score, tokenised_bleu, compound_bleu])
def test_a_model_that_says_nothing_scores_0(references, score):
    assert score([""] * 10, references[:10], allow_empty=True)["bleu"] == 0


@pytest.mark.parametrize("lowercase", [False, True])
def test_chrf_is_that_of_sacrebleus_command(hypotheses, references, lowercase, tmp_path):
    write_lines(tmp_path / "hypotheses", hypotheses)
    write_lines(tmp_path / "references", references)
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "references"), "-i", str(tmp_path / "hypotheses")]
    options = ["-m", "chrf", "-w", "10", "-f", "json", *(["--chrf-lowercase"] if lowercase else [])]
    printed = json.loads(subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, text=True).stdout)
    score = chrf_score(hypotheses, references, lowercase)
    assert score["chrf"] == pytest.approx(printed["score"], abs=1e-9)
    assert score["signature"] == printed["signature"] and score["sentences"] == 200
    assert 50 < score["chrf"] < 95


OUTPUT = "S-1\tx\nH-1\t-0.5\tsecond line\nD-1\t-0.5\tno\nINFO done\nH-0\t-0.1\tfirst\u2028line\nH-2\t-1\t\n"


def test_hypotheses_come_back_in_the_order_of_the_data_set():
    assert hypotheses_of(OUTPUT, 3) == ["first\u2028line", "second line", ""]


def test_every_line_needs_exactly_one_hypothesis():
    with pytest.raises(UserError, match="3 hypotheses for 4 lines"):
        hypotheses_of(OUTPUT, 4)
    with pytest.raises(UserError, match="3 hypotheses for 2 lines"):
        hypotheses_of(OUTPUT, 2)
    with pytest.raises(UserError, match="two hypotheses"):
        hypotheses_of(OUTPUT + "H-1\t-0.7\tanother\n", 3)
