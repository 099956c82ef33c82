"""The paired tests against sacreBLEU's command, a second implementation, and where they must not find anything."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from powernorm_fairseq.evaluation.bleu import plain_metric
from powernorm_fairseq.evaluation.significance import compare, in_words, sign_flips
from powernorm_fairseq.processes import UserError
from tests.commands import write_lines
from tests.evaluation.test_tokenised import from_statistics, lines_of, statistics, without

NUMBERS = {"resamples": 200, "trials": 300}


@pytest.fixture(scope="module")
def references():
    return lines_of("test.en", 150)


@pytest.fixture(scope="module")
def systems(references):
    """The second one is better, the third one about as good as the first."""
    return [("seven", without(references, 7)), ("nine", without(references, 9)), ("late", without(references[::-1], 7))]


@pytest.fixture(scope="module")
def three(systems, references):
    systems = [*systems[:2], ("late", systems[2][1][::-1])]
    return compare(systems, references, {"BLEU": BLEU(), "chrF2": CHRF()}, **NUMBERS)


def printed(tmp_path, systems, references, *options):
    write_lines(tmp_path / "references", references)
    for name, hypotheses in systems:
        write_lines(tmp_path / name, hypotheses)
    files = [tmp_path / "references", "-i", *(tmp_path / name for name, _ in systems)]
    command = [sys.executable, "-m", "sacrebleu", *map(str, files), *options, "-w", "10", "-f", "json", "--quiet"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


# sacreBLEU fails to print the bootstrap of chrF as JSON.
@pytest.mark.parametrize(
    "test, seed, metrics", [("bs", 12345, {"bleu": BLEU}), ("ar", 7, {"bleu": BLEU, "chrf": CHRF})], ids=["bs", "ar"]
)
def test_sacrebleus_command_agrees(systems, references, test, seed, metrics, tmp_path, monkeypatch):
    systems = systems[:2]
    found = compare(systems, references, {name: metric() for name, metric in metrics.items()}, seed=seed, **NUMBERS)
    monkeypatch.setenv("SACREBLEU_SEED", str(seed))
    samples = NUMBERS["resamples" if test == "bs" else "trials"]
    options = ["-m", *metrics, f"--paired-{test}", f"--paired-{test}-n", str(samples)]
    rows = printed(tmp_path, systems, references, *options)
    assert len(found["metrics"]) == len(metrics)
    for metric in found["metrics"]:
        for ours, row in zip(metric["systems"], rows):
            theirs = row[metric["metric"]]
            assert ours["score"] == pytest.approx(theirs["score"], abs=1e-9)
            if test == "bs":
                assert (ours["mean"], ours["ci"]) == (pytest.approx(theirs["mean"]), pytest.approx(theirs["ci"]))
        p = metric["systems"][1]["p_bootstrap" if test == "bs" else "p_randomisation"]
        assert p == rows[1][metric["metric"]]["p_value"]
        assert 0 < p < 0.05


def test_a_second_implementation_of_the_bootstrap_agrees(systems, references):
    """Koehn's paired bootstrap around the mean difference, from counts of each line."""
    systems = systems[:2]
    (metric,) = compare(systems, references, {"BLEU": plain_metric(False)}, seed=5, **NUMBERS)["metrics"]
    drawn = np.random.default_rng(5).choice(len(references), size=(200, len(references)), replace=True)
    counts = [np.array([statistics(*pair) for pair in zip(lines, references)]) for _, lines in systems]
    scores = np.array([[from_statistics(lines[sample].sum(0))[0] for sample in drawn] for lines in counts])
    real = metric["systems"][1]["score"] - metric["systems"][0]["score"]
    assert real == pytest.approx(np.subtract(*[from_statistics(lines.sum(0))[0] for lines in counts[::-1]]))
    differences = np.abs(scores[1] - scores[0])
    larger = int(np.sum(differences - differences.mean() > abs(real)))
    assert metric["systems"][1]["p_bootstrap"] == pytest.approx((larger + 1) / 201)
    for row, sampled in zip(metric["systems"], scores):
        assert row["mean"] == pytest.approx(sampled.mean(), rel=1e-6)
        ordered = np.sort(sampled)
        assert row["ci"] == pytest.approx((ordered[-6] - ordered[5]) / 2, rel=1e-6)


def test_what_is_better_and_what_is_not(three):
    assert (three["baseline"], three["lines"], three["seed"]) == ("seven", 150, 12345)
    assert (three["resamples"], three["trials"]) == (200, 300)
    assert [metric["metric"] for metric in three["metrics"]] == ["BLEU", "chrF2"]
    for metric in three["metrics"]:
        baseline, better, similar = metric["systems"]
        assert "difference" not in baseline
        assert better["difference"] == pytest.approx(better["score"] - baseline["score"]) and better["difference"] > 1
        assert better["p_bootstrap"] < 0.05 and better["p_randomisation"] < 0.05
        assert similar["p_bootstrap"] > 0.05 and similar["p_randomisation"] > 0.05
        assert 100 < better["lines_differing"] <= 150
        assert abs(baseline["mean"] - baseline["score"]) < baseline["ci"] < 5
        assert "bs:200|seed:12345" in metric["signatures"]["bootstrap"]
        assert "ar:300|seed:12345" in metric["signatures"]["randomisation"]


def test_it_is_plain_data_and_words(three):
    assert json.loads(json.dumps(three)) == three
    words = in_words(three)
    for expected in ("compared with seven on 150 lines, seed 12345", "200 resamples", "300 trials", "chrF2", "late ("):
        assert expected in words


def test_a_system_does_not_differ_from_itself(systems, references):
    """sacreBLEU gives the smallest p that there is."""
    name, lines = systems[0]
    (metric,) = compare([(name, lines), ("copy", lines)], references, {"BLEU": BLEU()}, **NUMBERS)["metrics"]
    row = metric["systems"][1]
    assert (row["difference"], row["lines_differing"]) == (0, 0)
    assert (row["p_bootstrap"], row["p_randomisation"]) == (1, 1)


@pytest.mark.parametrize("differing, least", [(1, 1), (2, 0.5), (4, 0.125)])
def test_few_lines_that_differ_are_no_significant_difference(systems, references, differing, least):
    """Exchanging k lines at random gives the very difference seen in 2 of 2^k cases."""
    name, lines = systems[0]
    worse = [*(["nothing"] * differing), *lines[differing:]]
    (metric,) = compare([(name, lines), ("worse", worse)], references, {"BLEU": BLEU()}, **NUMBERS)["metrics"]
    row = metric["systems"][1]
    assert row["lines_differing"] == differing and row["difference"] < 0
    assert least <= row["p_randomisation"] <= 1


def test_the_seed_decides_and_is_put_back(systems, references, monkeypatch):
    def outcome(seed):
        found = compare(systems[:2], references, {"BLEU": BLEU()}, seed=seed, resamples=50, trials=20)
        return found["metrics"][0]["systems"][1]["mean"]

    monkeypatch.setenv("SACREBLEU_SEED", "none")
    assert outcome(3) == outcome(3) != outcome(4)
    assert os.environ["SACREBLEU_SEED"] == "none"
    monkeypatch.delenv("SACREBLEU_SEED")
    outcome(3)
    assert "SACREBLEU_SEED" not in os.environ


def test_what_is_refused(systems, references):
    with pytest.raises(UserError, match="two systems"):
        compare(systems[:1], references, {"BLEU": BLEU()})
    with pytest.raises(UserError, match="nine: 149 hypotheses for 150 references"):
        compare([systems[0], ("nine", systems[1][1][:-1])], references, {"BLEU": BLEU()})
    for name in ("seed", "resamples", "trials"):
        with pytest.raises(UserError, match=f"{name} must be at least 1, not 0"):
            compare(systems, references, {"BLEU": BLEU()}, **{name: 0})


@pytest.mark.parametrize("seed", [1, 2])
def test_signs_of_differences_against_all_choices(seed):
    """Against the exact share of all 2^12 choices of signs."""
    differences = np.random.default_rng(seed).standard_normal(12) + 0.4
    signs = 1 - 2 * ((np.arange(2**12)[:, None] >> np.arange(12)) & 1)
    exact = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12).mean()
    assert sign_flips(differences) == pytest.approx(exact, abs=5 * np.sqrt(exact / 10_000))
    assert sign_flips(differences, seed=5) == sign_flips(differences, seed=5) != sign_flips(differences, seed=6)


def test_differences_that_leave_no_doubt():
    assert sign_flips([1.0] * 40) == 1 / 10_001  # the least there is
    assert sign_flips([0.0] * 5) == 1
    assert sign_flips([1.0, -1.0] * 20) == 1
    assert sign_flips([0.1] * 3) == pytest.approx(2 / 8, abs=0.03)  # sums in another order round differently
    assert sign_flips(np.ones(3_000_000), trials=3) == 1 / 4  # in blocks


def test_differences_that_are_none():
    for wrong in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(UserError, match="finite"):
            sign_flips(wrong)
