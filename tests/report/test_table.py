"""The table of norms and tasks."""

import json

import pytest

from powernorm_fairseq.processes import UserError
from powernorm_fairseq.report.runs import report
from powernorm_fairseq.report.table import LABELS, markdown, notes, rows_of

SIGNATURE = "nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2.6.0"
CIRCUMSTANCES = {
    "versions": {"torch": "2.13.0"},
    "hardware": {"processor": "Some CPU", "cores": 2, "threads": 1},
    "seed": 1,
}


def bleu(test, **extra):
    scores = {
        subset: {"bleu": value, "signature": SIGNATURE} for subset, value in (("valid", test + 1), ("test", test))
    }
    return {"kind": "bleu", "scores": scores, "reported": "test", **extra}


def perplexity(test, **extra):
    scores = {
        subset: {"perplexity": value, "tokens": 10, "tokens_per_sample": 64, "context_window": 32}
        for subset, value in (("valid", test + 2), ("test", test))
    }
    return {"kind": "perplexity", "scores": scores, "reported": "test", **extra}


def trained(seconds):
    return {"training": {"seconds": seconds, "updates": 800, "parameters": 5}, **CIRCUMSTANCES}


RESULTS = [
    bleu(17.125, norm="power", **trained(181.4)),
    bleu(16.5, norm="layer", **trained(170)),
    perplexity(120.25, norm="layer", **trained(150)),
    {"kind": "bleu", "scores": {"test": {"bleu": 0.01}}, "reported": "test", "floor": "untrained model"},
    perplexity(429.28, floor="unigram model"),
]


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_norms_by_tasks_with_the_floors_last():
    table = cells(markdown(rows_of(RESULTS)))
    assert table[0] == [
        "norm", "BLEU \u2191 test", "BLEU \u2191 valid", "training, s",
        "perplexity \u2193 test", "perplexity \u2193 valid", "training, s",
    ]  # fmt: skip
    assert table[2] == ["LayerNorm", "16.50", "17.50", "170", "120.25", "122.25", "150"]
    assert table[3] == ["PowerNorm", "17.12", "18.12", "181", "\u2013", "\u2013", "\u2013"]
    assert table[4][0] == "floor (untrained model, unigram model)"
    assert table[4][1:] == ["0.01", "\u2013", "\u2013", "429.28", "431.28", "\u2013"]
    assert len(table) == 5


def test_columns_are_aligned_and_numbers_stand_right():
    lines = markdown(rows_of(RESULTS)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(cell.endswith("-:") for cell in cells(lines[1])[0][1:])


def test_one_task_alone_gets_no_empty_columns():
    assert cells(markdown(rows_of([perplexity(9.0, norm="rms")])))[0][1:] == [
        "perplexity \u2193 test",
        "perplexity \u2193 valid",
        "training, s",
    ]


def test_every_norm_has_a_name_in_print():
    from powernorm_fairseq.norms import NORMS

    assert set(LABELS) == set(NORMS)


def test_notes_say_how_to_read_it():
    said = " ".join(notes(RESULTS))
    assert SIGNATURE in said
    assert "rank norms" in said and "not comparable with published" in said
    assert "windows of 64 tokens, 32 of them context" in said
    assert "1 thread(s)" in said and "2 cores of Some CPU" in said and "torch 2.13.0" in said
    assert "PowerNorm and BatchNorm are in the encoder" in said
    assert "in the encoder" not in " ".join(notes([perplexity(9.0, norm="power")]))


@pytest.fixture
def runs(tmp_path):
    for number, result in enumerate(RESULTS):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result))
        records = [
            {"valid_loss": str(9 - n), "valid_nll_loss": str(8 - n), "valid_num_updates": str(100 * n)} for n in (1, 2)
        ]
        (folder / "train.log").write_text("".join(f"x | INFO | valid | {json.dumps(one)}\n" for one in records))
    return tmp_path / "runs"


def test_what_is_printed_is_written(runs, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    report(runs, tmp_path / "out")
    printed = capsys.readouterr().out
    table = markdown(rows_of(RESULTS))
    assert table in printed and table in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    data = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    assert [row["norm"] for row in data["rows"]] == ["layer", "power", "floor"]
    assert data["rows"][1]["bleu"]["scores"] == {"valid": 18.125, "test": 17.125}
    assert data["rows"][1]["bleu"]["folder"] == str(runs / "0")
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_half_a_result_is_no_result(runs):
    for folder in runs.iterdir():
        text = (folder / "result.json").read_text()
        (folder / "result.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="no finished run below"):
        report(runs, runs)
