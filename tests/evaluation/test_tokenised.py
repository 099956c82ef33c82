"""BLEU of tokens against a second implementation, sacreBLEU's command and fairseq's own scorer; compounds."""

import math
import subprocess
import sys

import numpy as np
import pytest

from powernorm_fairseq.corpora.text import tokenise
from powernorm_fairseq.evaluation.bleu import compound_bleu, split_compounds, tokenised_bleu
from tests.commands import write_lines
from tests.conftest import SAMPLE


def counted(tokens, order):
    found = {}
    for start in range(len(tokens) - order + 1):
        gram = " ".join(tokens[start : start + order])
        found[gram] = found.get(gram, 0) + 1
    return found


def statistics(hypothesis, reference):
    """Matches and n-grams of each order, and the two lengths, of one line."""
    ours, theirs = hypothesis.split(), reference.split()
    matches, totals = [], []
    for order in (1, 2, 3, 4):
        known = counted(theirs, order)
        matches.append(sum(min(count, known.get(gram, 0)) for gram, count in counted(ours, order).items()))
        totals.append(max(0, len(ours) - order + 1))
    return np.array([*matches, *totals, len(ours), len(theirs)], dtype=np.float64)


def from_statistics(summed):
    """BLEU by its definition, precisions and brevity penalty."""
    matches, totals, (ours, theirs) = summed[:4], summed[4:8], summed[8:]
    precisions = [match / total if total else 0.0 for match, total in zip(matches, totals)]
    brevity = min(1.0, math.exp(1 - theirs / ours))
    geometric = float(np.prod(precisions)) ** 0.25
    return 100 * brevity * geometric, [100 * precision for precision in precisions], brevity


def second_opinion(hypotheses, references):
    return from_statistics(sum(map(statistics, hypotheses, references)))


def lines_of(name, count=300):
    with open(SAMPLE / "ui-de-en" / name, encoding="utf-8") as lines:
        return [next(lines).rstrip("\n") for _ in range(count)]


def without(lines, every, twice=False):
    """The lines without every so many-th word, or with it twice."""
    return [
        " ".join(
            word
            for place, word in enumerate(line.split(), start=number)
            for _ in range(1 if place % every != 3 else 2 * twice)
        )
        for number, line in enumerate(lines)
    ]


@pytest.fixture(scope="module")
def references():
    return tokenise(lines_of("test.de"), "de", lower=False)


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("longer", [False, True], ids=["shorter", "longer"])
def test_a_second_implementation_agrees(references, lowercase, longer):
    hypotheses = [line.lower() for line in without(references, 6, twice=longer)]
    score = tokenised_bleu(hypotheses, references, lowercase)
    compared = [line.lower() for line in references] if lowercase else references
    bleu, precisions, brevity = second_opinion(hypotheses, compared)
    assert score["bleu"] == pytest.approx(bleu, rel=1e-12)
    assert score["precisions"] == pytest.approx(precisions, rel=1e-12)
    assert score["brevity_penalty"] == pytest.approx(brevity, rel=1e-12)
    assert (brevity == 1) is longer and 3 < bleu < 90
    assert "tok:none|smooth:none" in score["signature"]
    assert ("case:lc" if lowercase else "case:mixed") in score["signature"]
    assert score["reference_length"] == sum(len(line.split()) for line in references)


@pytest.mark.parametrize("lowercase", [False, True])
def test_sacrebleus_command_agrees(references, lowercase, tmp_path):
    hypotheses = without(references, 6)
    write_lines(tmp_path / "hypotheses", hypotheses)
    write_lines(tmp_path / "references", references)
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "references"), "-i", str(tmp_path / "hypotheses")]
    options = ["-b", "-w", "10", "-tok", "none", "-s", "none", "--force", *(["-lc"] if lowercase else [])]
    printed = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert tokenised_bleu(hypotheses, references, lowercase)["bleu"] == pytest.approx(float(printed), abs=1e-9)


def test_fairseqs_own_scorer_agrees(references):
    """What fairseq-generate prints; a word that the dictionary lacks matches nothing in either."""
    pytest.importorskip("fairseq.libbleu")
    from fairseq.data import Dictionary
    from fairseq.scoring.bleu import BleuConfig, Scorer

    hypotheses = [*without(references, 6), "an <unk> word of the four", "and nothing more"]
    references = [*references, "an <<unk>> word of the four", "and nothing more or less"]
    dictionary = Dictionary()
    scorer = Scorer(BleuConfig(pad=dictionary.pad(), eos=dictionary.eos(), unk=dictionary.unk()))
    for hypothesis, reference in zip(hypotheses, references):
        encoded = [dictionary.encode_line(line, add_if_not_exist=True) for line in (reference, hypothesis)]
        scorer.add(*encoded)
    score = tokenised_bleu(hypotheses, references)
    assert score["bleu"] == pytest.approx(scorer.score(), rel=1e-9)
    assert score["precisions"] == pytest.approx([100 * precision for precision in scorer.precision()], rel=1e-9)
    assert score["brevity_penalty"] == pytest.approx(scorer.brevity(), rel=1e-9)
    assert (score["hypothesis_length"], score["reference_length"]) == (scorer.stat.predlen, scorer.stat.reflen)


@pytest.mark.parametrize(
    "hypotheses", [["one two three five six seven"], ["one two three"]], ids=["no match", "too short"]
)
def test_without_smoothing_an_order_that_never_matches_makes_it_0(hypotheses):
    references = ["one two three four five six"]
    score = tokenised_bleu(hypotheses, references)
    assert score["bleu"] == 0 and score["precisions"][:3] != [0, 0, 0] and score["precisions"][3] == 0
    assert second_opinion(hypotheses, references)[0] == 0


def test_tokens_are_not_split_again():
    """As sacreBLEU's default does."""
    hypotheses, references = ["&quot; gut-e , Idee&#93; ."], ["&quot; gut-es , Idee&#91; ."]
    assert tokenised_bleu(hypotheses, references)["precisions"][0] == pytest.approx(60)
    assert tokenised_bleu(hypotheses, references)["hypothesis_length"] == 5


def test_compounds_as_published():
    """Joined, tokenised without -a, and each hyphen that touches no space a token of its own."""
    assert split_compounds(["Das ist ein E-Mail-Programm ."], "de") == [
        "Das ist ein E ##AT##-##AT## Mail ##AT##-##AT## Programm ."
    ]
    assert split_compounds(["Ein- und Ausgabe - &quot; Rot-Grün &quot; : 2010-2020 ."], "de") == [
        "Ein- und Ausgabe - &quot; Rot ##AT##-##AT## Grün &quot; : 2010 ##AT##-##AT## 2020 ."
    ]
    # The letter between two hyphens is used up by the first.
    assert split_compounds(["X-Y-Z , XX-YY-ZZ"], "de") == ["X ##AT##-##AT## Y-Z , XX ##AT##-##AT## YY ##AT##-##AT## ZZ"]


def test_how_hyphens_were_split_before_does_not_matter(references):
    hyphenated = [line for line in references if "-" in line]
    split = split_compounds(hyphenated, "de")
    assert sum("##AT##-##AT##" in line for line in split) > 30
    assert split_compounds([line.replace("##AT##-##AT##", "@-@") for line in split], "de") == split
    assert split_compounds(split, "de") == split
    # Without the marks it is the text that was there before.
    assert [line.replace(" ##AT##-##AT## ", "-") for line in split] == hyphenated


def test_compound_bleu_is_bleu_of_split_tokens(references):
    hypotheses = without(references, 6)
    score = compound_bleu(hypotheses, references, language="de")
    bleu, _, brevity = second_opinion(split_compounds(hypotheses, "de"), split_compounds(references, "de"))
    assert score["bleu"] == pytest.approx(bleu, rel=1e-12)
    assert score["brevity_penalty"] == pytest.approx(brevity, rel=1e-12)
    plain = tokenised_bleu(hypotheses, references)
    assert score["bleu"] > plain["bleu"] + 0.5
    assert score["reference_length"] > plain["reference_length"]


def test_case_counts_in_compounds_unless_told(references):
    lower = [line.lower() for line in references]
    assert compound_bleu(lower, references)["bleu"] < 50
    # Not 100: which full stops are part of an abbreviation depends on case.
    assert compound_bleu(lower, references, lowercase=True)["bleu"] > 99
