"""Tables, figures and the page from records; and that those in results/ are of the records there."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from powernorm_fairseq.report import figures
from powernorm_fairseq.report.records import add, load, store
from powernorm_fairseq.report.report import report
from powernorm_fairseq.report.summary import tables_of
from tests.commands import ROOT
from tests.report.runs import finished_run

VOID = {"meta", "path", "rect", "use", "circle", "line", "br"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with runs, their records and a report on them."""
    root = tmp_path_factory.mktemp("report")
    for seed in (1, 2):
        add(finished_run(root, "layer", seed), root / "records")
        for number, norm in enumerate(("power", "power_v", "batch")):
            run = finished_run(root, norm, seed, score=20 + number + seed, statistics=True, wrong=number)
            add(run, root / "records")
    add(finished_run(root, "none", 1, outcome="diverged", scores={}), root / "records")
    add(finished_run(root, "layer", 1, task="lm", score=120.5), root / "records")
    report(root / "records", root / "out")
    return root


def test_tables_and_figures_in_files(root):
    assert {path.name for path in (root / "out").rglob("*.*")} == {
        "tables.md", "report.html", "curves-mt-sample.svg", "boxes-mt-sample.svg", "layers-mt-sample.svg",
        "curves-lm-sample.svg",
    }  # fmt: skip
    text = (root / "out" / "tables.md").read_text(encoding="utf-8")
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    assert ["PowerNorm", "21.50 \u00b1 0.71 (2)"] in [row[:2] for row in cells]
    assert ["LayerNorm", "120.50 (1)", "\u2013"] in cells
    assert ["PowerNorm", "not run here", "35.9", "\u2013"] in cells
    assert any(row[:2] == ["no norm", "diverged (1)"] for row in cells)
    assert "trained at commit fedcba987; scored at commit 012345678" in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (root / "out" / link).is_file(), link


class Checker(HTMLParser):
    """Counts what is open, and collects what would be loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.outside, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.outside += [v for k, v in given.items() if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(root):
    text = (root / "out" / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and checker.outside == []
    assert text.count("<svg") == 4 and "url(http" not in text and "@import" not in text
    assert "not run here" in text and "21.50 \u00b1 0.71 (2)" in text


def test_names_are_no_markup(tmp_path):
    add(finished_run(tmp_path, 'a<b>"&', group="own<i>&"), tmp_path / "records")
    report(tmp_path / "records", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in text and "<i>" not in text and 'id="mt-own&lt;i&gt;&amp;"' in text


def test_statistics_of_a_training_that_does_not_know_its_updates():
    record = {"row": "power", "statistics": {"fwd_psi_sq/x": [[20, 0.5], [41, 1.0], [100, 2.0]]}}
    for updates in (0, None, 100):
        [series] = figures._statistics([{**record, "training": {"updates": updates}}]).values()
        assert series == {"fwd_psi_sq/x": [(0, 0.5), (2, 1.0), (4, 2.0)]}


def test_figures_show_the_data(root):
    by_name = {figure.name: figure for figure in figures.figures_of(tables_of(load(root / "records")))}
    curves = by_name["curves-mt-sample"].data["curves"]
    assert set(curves) == {"layer", "power", "power_v", "batch", "none"}
    assert (
        curves["layer"]
        == [[(50, pytest.approx(5.5 * 0.6931, abs=1e-3)), (100, pytest.approx(5 * 0.6931, abs=1e-3))]] * 2
    )
    panels = by_name["boxes-mt-sample"].data
    assert [(direction, label.split(":")[0]) for direction, label, _ in panels] == [
        ("forward", "BatchNorm"), ("forward", "BatchNorm"), ("forward", "PN-V"), ("forward", "PowerNorm"),
        ("backward", "BatchNorm"), ("backward", "BatchNorm"), ("backward", "PN-V"), ("backward", "PowerNorm"),
        ("backward", "PowerNorm"),
    ]  # fmt: skip
    # Updates 50 and 100 of 100, two seeds: the third and the last fifth.
    assert panels[0][2] == [[], [], [0.0005] * 2, [], [0.001] * 2]
    layers = by_name["layers-mt-sample"].data
    assert layers["places"] == ["enc 0 self", "enc final"]
    assert layers["series"][0][3] == [[0.001] * 3] * 2


def test_places_in_the_order_in_which_data_flows():
    names = [
        "decoder.layers.0.encoder_attn_layer_norm", "encoder.layer_norm", "encoder.layers.10.self_attn_layer_norm",
        "encoder.layers.2.final_layer_norm", "decoder.layernorm_embedding", "encoder.layers.2.self_attn_layer_norm",
    ]  # fmt: skip
    in_order = sorted((f"x/{name}" for name in names), key=figures.place_of)
    assert [figures.short_place(name[2:]) for name in in_order] == [
        "enc 2 self", "enc 2 ffn", "enc 10 self", "enc final", "dec emb", "dec 0 cross",
    ]  # fmt: skip


def test_only_what_has_changed_is_drawn_again(root, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(root / "out", out)
    names = ["curves-mt-sample.svg", "curves-lm-sample.svg"]
    for name in names:
        path = out / "figures" / name
        path.write_text("old " + path.read_text(encoding="utf-8"), encoding="utf-8")
    (out / "figures" / "curves-mt-gone.svg").write_text("of records that are gone")
    changed = load(root / "records")
    next(one for one in changed if one["task_kind"] == "mt")["curve"].append([150, 3.0, 2.0])
    store(changed, tmp_path / "records")
    report(tmp_path / "records", out)
    old = [(out / "figures" / name).read_text(encoding="utf-8").startswith("old") for name in names]
    assert old == [False, True]
    assert not (out / "figures" / "curves-mt-gone.svg").exists()


def test_results_are_of_the_records(tmp_path):
    """Tables, page and figures in results/ are those that the records there give: else `make report`."""
    results = ROOT / "results"
    shutil.copytree(results / "figures", tmp_path / "figures")
    written = report(results / "records", tmp_path)
    assert load(results / "records")
    for path in written:
        committed = results / path.relative_to(tmp_path)
        assert committed.is_file() and committed.read_bytes() == path.read_bytes(), f"{committed.name} is stale"
    assert {path.name for path in (results / "figures").glob("*")} == {p.name for p in (tmp_path / "figures").glob("*")}
