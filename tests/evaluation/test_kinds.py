"""Several scores of one translation, and which is the headline."""

import pytest

from powernorm_fairseq.evaluation import bleu
from powernorm_fairseq.evaluation.kinds import check_kinds, scores_by_kind
from powernorm_fairseq.experiment.config import load_config, override, scoring_of
from powernorm_fairseq.processes import UserError
from tests.commands import ROOT

TOKENS = ["the well-known file is open .", "no file could be found here ."]
TEXT = ["the well-known file is open.", "no file could be found here."]
REFERENCE_TOKENS = ["the well-known file is open now .", "no file can be found here ."]
REFERENCE_TEXT = ["The well-known file is open now.", "No file can be found here."]
ALL = ["tokenised", "compound", "sacrebleu", "chrf"]


def test_all_kinds_are_kept_and_labelled_and_the_first_is_the_headline():
    for kinds in (ALL, ["compound", "tokenised"], ["sacrebleu"]):
        found = scores_by_kind(kinds, TOKENS, TEXT, REFERENCE_TOKENS, REFERENCE_TEXT, lowercase=True, language="en")
        assert list(found["kinds"]) == kinds and found["kind"] == kinds[0]
        assert {key: value for key, value in found.items() if key != "kinds"} == found["kinds"][kinds[0]]
        assert all(one["label"] and one["signature"] and one["lowercase"] for one in found["kinds"].values())
    found = scores_by_kind(ALL, TOKENS, TEXT, REFERENCE_TOKENS, REFERENCE_TEXT, lowercase=True, language="en")["kinds"]
    assert found["tokenised"]["bleu"] == bleu.tokenised_bleu(TOKENS, REFERENCE_TOKENS)["bleu"]
    assert found["compound"]["bleu"] == bleu.compound_bleu(TOKENS, REFERENCE_TOKENS, language="en")["bleu"]
    assert found["sacrebleu"]["bleu"] == bleu.sacrebleu_score(TEXT, REFERENCE_TEXT, True)["bleu"]
    assert found["chrf"]["chrf"] == bleu.chrf_score(TEXT, REFERENCE_TEXT, True)["chrf"]
    assert found["tokenised"]["bleu"] != found["compound"]["bleu"]


def test_tokenised_references_are_needed():
    with pytest.raises(UserError, match="tokenised BLEU needs tokenised references"):
        scores_by_kind(ALL, TOKENS, TEXT, None, REFERENCE_TEXT)
    with pytest.raises(UserError, match="compound BLEU needs tokenised references"):
        scores_by_kind(["compound"], TOKENS, TEXT, None, REFERENCE_TEXT)
    for kind in ("tokenised", "compound"):  # and nothing else
        alone, beside = (scores_by_kind([kind], TOKENS, text, REFERENCE_TOKENS, text) for text in (TEXT, ["x", "y"]))
        assert alone == beside
    assert scores_by_kind(["sacrebleu", "chrf"], TOKENS, TEXT, None, REFERENCE_TEXT)["bleu"] > 0


@pytest.mark.parametrize(
    "kinds, complaint",
    [
        ([], "must be a list of"),
        ("sacrebleu", "must be a list of"),
        (["rouge"], "tokenised, compound, sacrebleu, chrf"),
        (["chrf", "sacrebleu"], "begins with chrf"),
        (["sacrebleu", "sacrebleu"], "names one twice"),
    ],
)
def test_kinds_that_cannot_be(kinds, complaint):
    with pytest.raises(UserError, match=complaint):
        check_kinds(kinds)


def test_a_config_asks_for_kinds():
    config = load_config(ROOT / "configs" / "mt" / "sample.yaml")
    assert scoring_of(config).kinds == ["sacrebleu"]
    assert scoring_of(override(config, ["scoring.kinds=[compound, chrf]"])).kinds == ["compound", "chrf"]
    with pytest.raises(UserError, match="must be a list of"):
        scoring_of(override(config, ["scoring.kinds=[bleu]"]))
