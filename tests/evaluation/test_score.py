"""The command ``score``, from files and from what fairseq-generate printed."""

import json

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.corpora.text import detokenise, tokenise
from powernorm_fairseq.evaluation.bleu import chrf_score, compound_bleu, sacrebleu_score, tokenised_bleu
from powernorm_fairseq.evaluation.generated import references_of
from powernorm_fairseq.processes import UserError
from tests.commands import write_lines
from tests.evaluation.test_tokenised import lines_of, without


@pytest.fixture(scope="module")
def texts():
    """Raw and tokenised references, and two systems' tokens for them."""
    raw = lines_of("test.de", 120)
    tokens = tokenise(raw, "de", lower=False)
    return {"raw": raw, "tokens": tokens, "seven": without(tokens, 7), "nine": without(tokens, 9)}


@pytest.fixture
def files(texts, tmp_path):
    for name, lines in texts.items():
        write_lines(tmp_path / name, lines)
    for name in ("seven", "nine"):
        output = ["INFO | loading", *generated(texts[name], texts["tokens"]), "Generate test with beam=5: BLEU4 = 1"]
        write_lines(tmp_path / f"{name}.generated", output)
    return tmp_path


def generated(hypotheses, references):
    """In another order than the data set, as fairseq-generate prints it."""
    lines = []
    for number in sorted(range(len(hypotheses)), key=lambda number: len(references[number])):
        lines += [f"S-{number}\tsource", f"T-{number}\t{references[number]}", f"H-{number}\t-0.5\t{hypotheses[number]}"]
        lines += [f"D-{number}\t-0.5\tnot this", f"P-{number}\t-0.5 -0.25"]
    return lines


def run(capsys, *arguments):
    assert main(["score", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert main(["score", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def as_json(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.mark.parametrize("kind, scored", [("tokenised", tokenised_bleu), ("compound", compound_bleu)])
def test_files_of_tokens(files, texts, capsys, kind, scored):
    result = as_json(
        capsys, "--hypotheses", files / "seven", files / "nine", "--references", files / "tokens", "--kind", kind
    )
    assert [system["name"] for system in result["systems"]] == [str(files / "seven"), str(files / "nine")]
    for system, name in zip(result["systems"], ("seven", "nine")):
        assert system["bleu"] == scored(texts[name], texts["tokens"])
    assert result["kind"] == kind and "tokenised BLEU" in result["label"]
    assert ("compounds" in result["label"]) is (kind == "compound")
    assert result["preparation"] is None or "sacremoses" in result["preparation"]
    assert "comparison" not in result


def test_what_fairseq_generate_printed(files, texts, capsys):
    result = as_json(capsys, "--generated", files / "seven.generated", "--kind", "tokenised")
    assert result["systems"][0]["bleu"] == tokenised_bleu(texts["seven"], texts["tokens"])


def test_detokenised(files, texts, capsys):
    result = as_json(
        capsys, "--generated", files / "seven.generated", "--references", files / "raw", "--kind", "sacrebleu",
        "--detokenise", "--language", "de", "--lowercase", "--chrf",
    )  # fmt: skip
    (system,) = result["systems"]
    hypotheses = detokenise(texts["seven"], "de")
    assert system["bleu"] == sacrebleu_score(hypotheses, texts["raw"], lowercase=True)
    assert system["chrf"] == chrf_score(hypotheses, texts["raw"], lowercase=True)
    assert "case:lc" in system["bleu"]["signature"] and result["lowercase"] is True


def test_words(files, capsys):
    words = run(
        capsys, "--hypotheses", files / "seven", files / "nine", "--references", files / "tokens",
        "--kind", "compound", "--compare", "--resamples", 30, "--trials", 20, "--seed", 9,
    )  # fmt: skip
    assert words.startswith("tokenised BLEU, compounds split, no smoothing, case counts (sacremoses ")
    for expected in ("seven: BLEU ", "nine: BLEU ", "signature: nrefs:1|", "brevity penalty 0.", "120 lines"):
        assert expected in words
    assert f"compared with {files / 'seven'} on 120 lines, seed 9" in words and "30 resamples" in words


@pytest.mark.parametrize("kind", ["tokenised", "compound"])
def test_language_and_case_reach_the_scores_and_the_comparison(files, capsys, kind):
    """English apostrophes are tokenised in another way than German ones."""
    references = tokenise(lines_of("test.en", 120), "en", lower=False)
    write_lines(files / "english", references)
    write_lines(files / "first", [line.lower() for line in without(references, 7)])
    write_lines(files / "second", [line.lower() for line in without(references, 9)])
    files_given = ["--hypotheses", files / "first", files / "second", "--references", files / "english"]
    comparing = ["--compare", "--resamples", 5, "--trials", 5]
    scores = set()
    for options in (["--language", "en", "--lowercase"], ["--language", "en"], ["--language", "de", "--lowercase"]):
        result = as_json(capsys, *files_given, "--kind", kind, *options, *comparing)
        found = [system["bleu"]["bleu"] for system in result["systems"]]
        (metric,) = result["comparison"]["metrics"]
        assert [system["score"] for system in metric["systems"]] == pytest.approx(found, rel=1e-12)
        scores.add(found[0])
    assert len(scores) == (3 if kind == "compound" else 2)


@pytest.mark.parametrize("kind", ["tokenised", "compound", "sacrebleu"])
def test_the_comparison_is_of_the_scores(files, capsys, kind):
    """The first file is the baseline, and the scores compared are those printed."""
    result = as_json(
        capsys, "--hypotheses", files / "nine", files / "seven", "--references", files / "tokens", "--kind", kind,
        "--compare", "--resamples", 40, "--trials", 30, *(["--chrf"] if kind == "sacrebleu" else []),
    )  # fmt: skip
    comparison = result["comparison"]
    assert comparison["baseline"] == str(files / "nine")
    for metric, name in zip(comparison["metrics"], ("bleu", "chrf")):
        scores = [system[name][name] for system in result["systems"]]
        assert [system["score"] for system in metric["systems"]] == pytest.approx(scores, rel=1e-12)
        assert metric["systems"][1]["difference"] < 0
    assert len(comparison["metrics"]) == (2 if kind == "sacrebleu" else 1)


def test_files_that_cannot_be_scored(files, texts, capsys):
    (files / "empty").touch()
    (files / "latin1").write_bytes("für\n".encode("latin-1"))
    write_lines(files / "short", texts["seven"][:-1])
    write_lines(files / "pieces", ["con@@ nected", *texts["seven"][1:]])
    for name, message in (
        ("empty", "empty is empty"),
        ("missing", "cannot read"),
        ("latin1", "is not UTF-8"),
        ("short", "short: 119 hypotheses for 120 references"),
        ("pieces", "pieces: line 1 still has subword marks"),
    ):
        for kind in ("tokenised", "compound", "sacrebleu"):
            error = refused(capsys, "--hypotheses", files / name, "--references", files / "tokens", "--kind", kind)
            assert error.startswith("powernorm_fairseq score: ") and message in error
    error = refused(capsys, "--hypotheses", files / "seven", "--references", files / "empty", "--kind", "tokenised")
    assert "empty is empty" in error


def test_options_that_do_not_go_together(files, capsys):
    hypotheses, references = ["--hypotheses", files / "seven"], ["--references", files / "raw"]
    for arguments, message in (
        ([*hypotheses, "--kind", "tokenised"], "--hypotheses need --references"),
        ([*hypotheses, *references, "--kind", "tokenised", "--chrf"], "--chrf is for text as people write it"),
        ([*hypotheses, *references, "--kind", "compound", "--detokenise"], "--detokenise is for text"),
        ([*hypotheses, *references, "--kind", "sacrebleu", "--detokenise"], "--detokenise needs --language"),
        ([*hypotheses, *references, "--kind", "tokenised", "--compare"], "two files"),
        (["--generated", files / "seven.generated", "--kind", "sacrebleu"], "as people wrote them: give --references"),
    ):
        assert message in refused(capsys, *arguments)


def test_tokens_are_not_taken_for_text(files, texts, capsys):
    assert any("&quot;" in line for line in texts["seven"])
    error = refused(capsys, "--hypotheses", files / "seven", "--references", files / "raw", "--kind", "sacrebleu")
    assert "is tokenised, the references are not" in error and "--detokenise" in error


def test_references_that_fairseq_printed(files, texts, capsys):
    write_lines(files / "bare", [line for line in generated(texts["seven"], texts["tokens"]) if line[0] != "T"])
    assert "no references" in refused(capsys, "--generated", files / "bare", "--kind", "tokenised")
    others = ["something else", *texts["tokens"][1:]]
    write_lines(files / "others", generated(texts["nine"], others))
    error = refused(capsys, "--generated", files / "seven.generated", files / "others", "--kind", "tokenised")
    assert "other references than" in error
    write_lines(files / "unknown", generated(texts["nine"], ["with <<unk>> inside", *texts["tokens"][1:]]))
    assert "lack words" in refused(capsys, "--generated", files / "unknown", "--kind", "compound")
    assert run(capsys, "--generated", files / "unknown", "--kind", "tokenised")
    write_lines(files / "cut", generated(texts["nine"], texts["tokens"])[:-3])
    assert "119 hypotheses for 120 lines" in refused(capsys, "--generated", files / "cut", "--kind", "tokenised")


def test_references_come_back_in_the_order_of_the_data_set():
    assert references_of("T-1\tb\nH-1\t-1\tx\nT-0\ta\u2028a\nT-A\tno\n") == ["a\u2028a", "b"]
    assert references_of("H-0\t-1\tx\n") is None
    for broken in ("T-1\tb\n", "T-0\ta\nT-0\ta\n"):
        with pytest.raises(UserError, match="not one for each line"):
            references_of(broken)
