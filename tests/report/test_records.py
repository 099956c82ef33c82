"""Records of finished runs: what is in them, where they lie, and what they are compared with."""

import json

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.processes import UserError
from powernorm_fairseq.report.records import add, load, record_of
from powernorm_fairseq.report.summary import tables_of
from tests.report.runs import finished_run


def test_a_record_has_all_that_tables_and_figures_need(tmp_path):
    record = record_of(finished_run(tmp_path, "power", 3, statistics=True))
    assert (record["task_kind"], record["group"], record["row"], record["seed"]) == ("mt", "sample", "power", 3)
    assert record["scores"]["test"]["bleu"] == 20.0
    assert record["curve"] == [[50, 6.0, 5.5], [100, 6.0, 5.0]]
    assert record["statistics"]["bkw_nu/encoder.layer_norm"] == [[50, 0.0005], [100, 0.001]]
    assert record["config"]["common"] == {"seed": 3}
    assert record["training"]["git_commit"] == "fedcba9876543210"


def test_a_record_tells_nothing_of_the_machines_folders(tmp_path):
    text = json.dumps(record_of(finished_run(tmp_path, "power")))
    assert str(tmp_path) not in text and "/home" not in text and "somebody" not in text
    record = json.loads(text)
    assert record["command"] == ["__main__.py", "run", "configs/mt/sample.yaml", "--dir", "runs/mt/a"]
    assert record["config_file"] == "configs/mt/sample.yaml"


def test_a_row_of_its_own_file_bears_its_name(tmp_path):
    """Two rows may use the same norm; each is called by its YAML."""
    path = "configs/mt/iwslt14_de_en/layer_adanorm_recipe.yaml"
    folder = finished_run(tmp_path, "layer", group="iwslt14_de_en", config_file=path)
    assert record_of(folder)["row"] == "layer_adanorm_recipe"


def test_a_run_with_other_values_is_a_row_of_its_own(tmp_path):
    """It neither takes the place of the row's record nor stands beside the paper's number."""
    few, half = ["optimization.max_update=9"], ["common.fp16=true"]
    records = tmp_path / "records"
    for place, norm, changes in (
        ("a", "layer", []), ("a", "power", []), ("b", "power", few), ("b", "layer", few), ("c", "layer", half),
    ):  # fmt: skip
        add(finished_run(tmp_path / place, norm, group="ptb", task="lm", set=changes), records)
    folder = finished_run(tmp_path / "c", "power", group="ptb", task="lm", set=few)  # beside one of other changes
    assert add(folder, records)["against"] is None
    shortened = " with optimization.max_update=9"
    found = {one["row"]: one for one in load(records)}
    assert list(found) == ["layer", "layer with common.fp16=true", "layer" + shortened, "power", "power" + shortened]
    assert found["power"]["against"]["row"] == "layer" and found["layer" + shortened]["against"] is None
    rows = {row.label: row for row in tables_of(list(found.values()))[0].rows}
    assert rows["PowerNorm"].paper and rows["PowerNorm"].values
    assert rows["PowerNorm" + shortened].paper is None and rows["PowerNorm" + shortened].values


def test_records_are_replaced_and_keep_the_order_of_the_tables(tmp_path):
    records = tmp_path / "records"
    for norm, seed in [("power", 2), ("layer", 1), ("power", 1), ("none", 1)]:
        add(finished_run(tmp_path, norm, seed), records)
    add(finished_run(tmp_path / "again", "power", 1, score=33.0), records)
    assert [path.name for path in records.glob("*.jsonl")] == ["mt-sample.jsonl"]
    found = [(one["row"], one["seed"], one["scores"]["test"]["bleu"]) for one in load(records)]
    assert found == [("layer", 1, 20.0), ("power", 1, 33.0), ("power", 2, 20.0), ("none", 1, 20.0)]


@pytest.mark.parametrize("task", ["mt", "lm"])
def test_the_comparison_with_layer_normalization(task, tmp_path):
    """All sentences worse, none, and no layer normalization with that seed."""
    worse = finished_run(tmp_path, "power", 1, task=task, wrong=12)
    same = finished_run(tmp_path, "ada", 1, task=task)
    other_seed = finished_run(tmp_path, "ada", 2, task=task)
    finished_run(tmp_path, "layer", 1, task=task)
    records = tmp_path / "records"
    for folder in (worse, same, other_seed):
        add(folder, records)
    found = {(one["row"], one["seed"]): one["against"] for one in load(records)}
    assert found["ada", 2] is None
    assert found["ada", 1]["difference"] == 0 and found["ada", 1]["p_randomisation"] == 1
    against = found["power", 1]
    assert against["row"] == "layer"
    if task == "mt":
        assert against["difference"] < -10 and against["p_randomisation"] < 0.05 and against["p_bootstrap"] < 0.05
    else:
        assert against["difference"] == pytest.approx(12 * 0.5 / 24) and against["units"] == 12
        # Of 2^12 choices of signs two have a sum as far from 0.
        assert against["p_randomisation"] == pytest.approx(2 / 2**12, abs=6e-4)


def test_layer_normalization_that_comes_last_is_compared_with_what_is_there(tmp_path):
    records = tmp_path / "records"
    add(finished_run(tmp_path, "power", 1, wrong=3), records)
    assert load(records)[0]["against"] is None
    add(finished_run(tmp_path, "layer", 1), records)
    assert [bool(one["against"]) for one in load(records)] == [False, True]


def test_another_way_to_cut_the_text_is_not_compared(tmp_path):
    folder = finished_run(tmp_path, "power", 1, task="lm")
    layer = finished_run(tmp_path, "layer", 1, task="lm")
    (layer / "hypotheses" / "test.eval-lm.txt").write_text("| fairseq_cli.eval_lm | 0 x [-1.000000]\n")
    assert add(folder, tmp_path / "records")["against"] is None


def test_another_seed_in_a_folder_of_that_name_is_not_compared(tmp_path):
    layer = finished_run(tmp_path, "layer", 1) / "result.json"
    layer.write_text(json.dumps({**json.loads(layer.read_text()), "seed": 2}))
    assert add(finished_run(tmp_path, "power", 1), tmp_path / "records")["against"] is None


def test_a_model_without_probabilities_stops_nothing(tmp_path):
    folder = finished_run(tmp_path, "none", 1, task="lm")
    finished_run(tmp_path, "layer", 1, task="lm")
    scores = folder / "hypotheses" / "test.eval-lm.txt"
    for wrong in ("[nan]", "[-inf]"):
        scores.write_text(scores.read_text().replace("[-1.000000]", wrong, 1))
        against = add(folder, tmp_path / "records")["against"]
        assert against["difference"] is None and against["p_randomisation"] is None


def test_whatever_characters_a_record_holds_it_is_one_line(tmp_path):
    folder = finished_run(tmp_path, "power", model="a\u2028b\x85c\x0cd\r")
    add(folder, tmp_path / "records")
    assert [one["model"] for one in load(tmp_path / "records")] == ["a\u2028b\x85c\x0cd\r"]


def test_the_command_records_all_runs_below_a_folder(tmp_path, capsys):
    finished_run(tmp_path, "layer")
    finished_run(tmp_path, "power", scores={}, outcome="diverged")
    finished_run(tmp_path, "layer", task="lm")
    floor = tmp_path / "mt" / "sample" / "floor"
    floor.mkdir()
    (floor / "result.json").write_text(json.dumps({"floor": "untrained model", "kind": "bleu", "scores": {}}))
    records = tmp_path / "records"
    assert main(["record", str(tmp_path), "--records", str(records)]) == 0
    assert [(one["task_kind"], one["row"], one["outcome"]) for one in load(records)] == [
        ("lm", "layer", "finished"), ("mt", "layer", "finished"), ("mt", "power", "diverged"),
    ]  # fmt: skip
    assert main(["record", str(tmp_path / "nothing"), "--records", str(records)]) == 1
    assert "no finished run" in capsys.readouterr().err


def test_what_cannot_be_recorded(tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        record_of(tmp_path)
    folder = finished_run(tmp_path, "power")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "group": None}))
    with pytest.raises(UserError, match="which row"):
        record_of(folder)
    (tmp_path / "mt-sample.jsonl").write_text('{"half')
    with pytest.raises(UserError, match="line 1"):
        load(tmp_path)
