"""Means over seeds, the paper's numbers beside them, and what is said of significance."""

import statistics

import pytest

from powernorm_fairseq.report import published
from powernorm_fairseq.report.page import cells_of, circumstances
from powernorm_fairseq.report.summary import ours_in_words, paper_in_words, significance_in_words, tables_of

NONE = "\u2013"


def record(row, seed=1, score=20.0, *, group="sample", task="mt", p=None, difference=0.0, **changes):
    kind = "bleu" if task == "mt" else "perplexity"
    return {
        "task_kind": task, "group": group, "row": row, "seed": seed, "kind": kind, "outcome": "finished",
        "reported": "test", "scores": {"test": {kind: score}}, "training": {"updates": 9},
        "against": None if p is None else {"p_randomisation": p, "difference": difference}, **changes,
    }  # fmt: skip


def rows(records, group="sample", task="mt"):
    table = next(table for table in tables_of(records) if (table.task, table.group) == (task, group))
    return {row.name: row for row in table.rows}, table


def test_mean_and_deviation_over_seeds():
    found, _ = rows([record("power", seed, score) for seed, score in ((1, 10.0), (2, 12.0), (3, 17.0))])
    assert found["power"].mean == 13
    assert found["power"].deviation == pytest.approx(statistics.stdev([10, 12, 17]))
    assert ours_in_words(found["power"]) == "13.00 \u00b1 3.61 (3)"


def test_a_score_that_is_not_finite_has_no_deviation():
    for score in (float("inf"), float("nan")):
        found, _ = rows([record("none", 1, score, task="lm"), record("none", 2, 9.0, task="lm")], task="lm")
        assert ours_in_words(found["none"]) == f"{score} (2)"


def test_one_seed_has_no_deviation_and_no_run_no_number():
    found, _ = rows([record("power", group="iwslt14_de_en")], "iwslt14_de_en")
    assert ours_in_words(found["power"]) == "20.00 (1)"
    assert ours_in_words(found["batch"]) == "not run here"


def test_divergence():
    gone = {"outcome": "diverged", "scores": {}}
    found, _ = rows([record("none", 1, **gone), record("none", 2, **gone), record("ada", 1), record("ada", 2, **gone)])
    assert ours_in_words(found["none"]) == "diverged (2)"
    assert ours_in_words(found["ada"]) == "20.00 (1), 1 diverged"


def test_the_papers_numbers():
    tables = {table.group: {row.name: paper_in_words(row) for row in table.rows} for table in tables_of([])}
    assert tables["iwslt14_de_en"] == {
        "layer": "35.5", "batch": "34.4*", "power_v": "35.5*", "power": "35.9", "layer_adanorm_recipe": "35.5",
        "layer_simple": "35.5", "detach": "33.9", "ada": "35.6", "none": "34",
    }  # fmt: skip
    assert tables["wmt14_en_de"] == {"layer": "29.5", "batch": "28.2*", "power_v": "29.7*", "power": "30.1"}
    assert tables["ptb"] == {"layer": "53.2*", "batch": "60.7*", "power_v": "55.3*", "power": "47.6*"}
    assert tables["wikitext103"] == {"layer": "20.9", "batch": "27.2*", "power_v": "21.3*", "power": "17.9*"}
    assert tables["iwslt15_en_vi"] == {
        "layer": "31.2", "layer_simple": "31.6", "detach": "27.7", "ada": "31.4", "none": "28.4"
    }  # fmt: skip
    assert tables["enwik8"] == {
        "layer": "1.07",
        "layer_simple": "1.07",
        "detach": "1.12",
        "ada": "1.07",
        "none": "1.04",
    }


@pytest.mark.parametrize(
    ("task", "found", "said"),
    [
        ("mt", [(0.01, 1.5), (0.02, 0.5)], "better; p = 0.010, 0.020"),
        ("mt", [(0.01, -1.5), (0.0001, -2)], "worse; p = 0.010, < 0.001"),
        ("mt", [(0.01, -1.5), (0.02, 0.5)], "no clear difference; p = 0.010, 0.020"),
        ("mt", [(0.049, 1.5)], "better; p = 0.049"),
        ("mt", [(0.05, 1.5)], "no clear difference; p = 0.050"),
        ("mt", [(0.01, 1.5), (0.2, 0.5)], "no clear difference; p = 0.010, 0.200"),
        ("lm", [(0.01, 0.1), (0.02, 0.2)], "worse; p = 0.010, 0.020"),
        ("lm", [(0.01, -0.1), (0.02, -0.2)], "better; p = 0.010, 0.020"),
    ],
)
def test_significance_needs_every_seed(task, found, said):
    records = [record("power", seed, task=task, p=p, difference=d) for seed, (p, d) in enumerate(found)]
    by_name, table = rows(records, task=task)
    assert significance_in_words(by_name["power"], table) == said


def test_a_norm_with_which_a_seed_diverged_is_not_better():
    gone = record("power", 2, outcome="diverged", scores={})
    for difference, said in ((2, "no clear difference; p = 0.001"), (-2, "worse; p = 0.001")):
        by_name, table = rows([record("power", 1, p=0.001, difference=difference), gone])
        assert significance_in_words(by_name["power"], table) == said


def test_a_seed_that_was_not_compared_leaves_no_verdict():
    by_name, table = rows([record("power", 1, p=0.001, difference=2), record("power", 2)])
    assert significance_in_words(by_name["power"], table).startswith("no clear difference")
    by_name, table = rows([record("layer", 1)])
    assert significance_in_words(by_name["layer"], table) == NONE


def test_bits_per_character_where_there_are_some():
    scores = {"test": {"perplexity": 2.1, "bits_per_character": 1.0704}}
    found, table = rows([record("ada", task="lm", group="enwik8", scores=scores)], "enwik8", "lm")
    assert found["ada"].values == {1: 1.0704}
    assert cells_of(table)[1][3][:3] == ["AdaNorm", "1.070 (1)", "1.07"]


def test_the_unit_of_a_data_set_that_no_paper_has():
    scores = {
        "bits per character": {"perplexity": 2.1, "bits_per_character": 1.0704, "unit": "character"},
        "perplexity per token": {"perplexity": 2.1, "unit": "token"},
        "perplexity": {"perplexity": 2.1},
    }
    for unit, score in scores.items():
        _, table = rows([record("ada", task="lm", group="own", scores={"test": score})], "own", "lm")
        assert (table.unit, table.higher) == (unit, False)
    for score, unit in (({"bleu": 1.0, "label": "tokenised BLEU, no smoothing"}, "tokenised BLEU, no smoothing"),
                        ({"bleu": 1.0}, "bleu")):  # fmt: skip
        _, table = rows([record("ada", group="own", scores={"test": score})], "own")
        assert (table.unit, table.higher) == (unit, True)


def test_more_is_better_in_translation_and_worse_in_language_models():
    assert {table.group: table.higher for table in tables_of([])} == {
        "iwslt14_de_en": True, "wmt14_en_de": True, "iwslt15_en_vi": True,
        "ptb": False, "wikitext103": False, "enwik8": False,
    }  # fmt: skip


def test_scores_of_different_kinds_are_told():
    circumstance = {"versions": {}, "hardware": {"processor": "P", "cores": 1, "threads": 1}, "git_commit": None}
    for kinds, told in ((("tokenised", "sacrebleu"), True), (("sacrebleu", "sacrebleu"), False)):
        scores = [{"test": {"bleu": 1.0, "kind": kind}} for kind in kinds]
        _, table = rows([record("ada", seed, scores=one, **circumstance) for seed, one in enumerate(scores)])
        assert any("do not compare" in sentence for sentence in circumstances(table)) == told


def test_what_was_run_comes_first():
    order = [table.group for table in tables_of([record("power", task="lm", group="ptb")])]
    assert order[0] == "ptb" and set(order[1:]) == set(published.GROUPS) - {"ptb"}


def test_each_variant_is_compared_with_the_layer_normalization_of_its_recipe():
    assert published.baseline("iwslt14_de_en", "power") == "layer"
    assert published.baseline("iwslt14_de_en", "ada") == "layer_adanorm_recipe"
    assert published.baseline("iwslt14_de_en", "layer") is None
    assert published.baseline("iwslt14_de_en", "layer_adanorm_recipe") is None
    assert published.baseline("sample", "ada") == "layer"
    assert published.in_words("ptb", "layer") == (
        "53.2 test perplexity (Shen et al., ICML 2020, recalled); Ma et al. print 57.9 for the same model"
    )
    assert published.in_words("sample", "layer") == ""
