"""Records of measurements, and tables, figures and the README's block made of them."""

import copy
import json
import re

import pytest

from benchmarks import figures, records, tables
from benchmarks.targets import SHAPES, target
from powernorm_fairseq.processes import UserError
from tests.commands import ROOT

SPREAD = {"median": 1.0, "low": 0.9, "high": 1.2}


def around(cores=2, date="2026-01-01", gpus=()):
    return {
        "hardware": {"processor": "A Processor", "cores": cores, "threads": 1, "gpus": list(gpus)},
        "versions": {"torch": "2.9", "python": "3.11.7", "fairseq": "0.12.3"},
        "instructions": "avx512", "git_commit": "0123456789abcdef", "date": date, "load": 0.1,
    }  # fmt: skip


def norm_record(norm="power", path="native", rows=4096, channels=512, ratio=0.9, limit=0.95, **changes):
    made = {
        "family": "norms", "norm": norm, "path": path, "variant": "", "mode": "train", "rows": rows,
        "channels": channels, "itemsize": 4, "device": "cpu", "threads": 1,
        "seconds": {**SPREAD, "median": 2e-3 * ratio}, "rounds": 9,
        "ratio": {**SPREAD, "median": ratio}, "against": {}, "passes": 5, "roofline": 0.77,
        "bandwidth": 1e10, "peak_memory": 2.02, "circumstances": around(),
        "targets": [target("time / LayerNorm", limit, ratio)] if limit else [],
    }  # fmt: skip
    return {**made, **changes}


def all_families():
    step = {
        "family": "step", "setting": "PowerNorm everywhere", "size": "tiny", "tokens": 64, "threads": 1,
        "seconds": SPREAD, "rounds": 3, "tokens_per_second": 64.0, "rate": {**SPREAD, "median": 0.9},
        "norms": 10, "norms_seconds": 0.05, "share": 0.05, "circumstances": around(),
        "targets": [target("tokens/s of LayerNorm's", 0.97, 0.9, at_most=False)],
    }  # fmt: skip
    decoding = {
        "family": "decoding", "setting": "PowerNorm, folded", "size": "tiny", "batch": 64, "beam": 5, "steps": 9,
        "threads": 1, "seconds": SPREAD, "rounds": 3, "ratio": {**SPREAD, "median": 0.8},
        "rate": {"sentences_per_second": 12.5}, "tokens_per_second": 99.0,
        "against": {"not folded": {**SPREAD, "median": 0.75}}, "circumstances": around(),
    }  # fmt: skip
    watching = {
        "family": "watching", "norm": "power", "size": "tiny", "tokens": 64, "threads": 1, "interval": 20,
        "seconds": SPREAD, "rounds": 3, "adds": {"median": 0.004, "low": 0.001, "high": 0.01},
        "circumstances": around(),
    }  # fmt: skip
    startup = {
        "family": "startup", "what": "import", "seconds": SPREAD, "adds": {**SPREAD, "median": 0.4}, "rounds": 7,
        "loaded": [], "targets": [target("seconds", 0.3, 0.4)], "circumstances": around(),
    }  # fmt: skip
    norms = [norm_record(rows=rows, channels=channels, ratio=ratio) for (rows, channels), ratio in
             zip(SHAPES, (0.9, 0.95, 1.02, 0.8))]  # fmt: skip
    norms += [norm_record("layer", "pytorch", ratio=1.0, limit=None), norm_record(mode="eval", ratio=1.5, limit=1.05)]
    norms += [norm_record(rows=rows, sweep=True, ratio=5.0) for rows in (64, 512)]
    return [*norms, step, watching, decoding, startup]


@pytest.fixture
def folder(tmp_path):
    for record in all_families():
        records.Run(record["family"], tmp_path).add([record])
    return tmp_path


def test_records_are_kept_and_replaced(folder):
    assert len(records.load(folder)) == len(all_families())
    again = records.Run("norms", folder)
    again.add([norm_record(ratio=0.5)])
    kept = records.load(folder)
    assert len(kept) == len(all_families())  # interrupted here, nothing is lost
    elsewhere = norm_record(circumstances=around(cores=64))
    records.Run("norms", folder).add([elsewhere])
    again.finish()
    norms = [record for record in records.load(folder) if record["family"] == "norms"]
    assert sorted(record["ratio"]["median"] for record in norms) == [0.5, 0.9]
    assert elsewhere in norms


def test_a_damaged_line_is_named(folder):
    with open(folder / "step.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match=r"step.jsonl, line 2"):
        records.load(folder)


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_tables(folder):
    text = tables.page(records.load(folder))
    rows = cells(text)
    assert ["PowerNorm (fused C++)", "0.90", "0.95", "**1.02** (\u2264 0.95)", "0.80"] in rows
    assert ["PowerNorm (fused C++)", "**1.50** (\u2264 1.05)"] in rows
    assert ["PowerNorm everywhere", "64", "1", "64", "**0.90** (\u2265 0.97)", "0.90\u20131.20", "5.0 %"] in rows
    assert ["PowerNorm, folded", "64", "12.5", "99", "0.80", "0.90\u20131.20", "0.75"] in rows
    assert ["PowerNorm", "tiny", "1000", "20", "+0.40 %", "+0.10 %", "+1.00 %"] in rows
    assert ["import", "1.00", "**0.40** (\u2264 0.3)", "0.90\u20131.20", "none"] in rows
    assert "Targets: 3 of 7 met. Missed:" in text
    assert "- PowerNorm (fused C++), train, time / LayerNorm \u2264 0.95: 4096 x 1024: 1.02" in text
    assert "5.00" not in text  # what figures are made of
    assert tables.NO_GPU in text and "at commit 012345678, 2026-01-01" in text
    widths = {len(row) for row in rows if row[0] == "PowerNorm (fused C++)"}
    assert widths == {2, 5}


def on_another_machine(low, high):
    there = norm_record(ratio=0.7, device="cuda", path="gpu", circumstances=around(date="2026-02-02", gpus=["A GPU"]))
    return {**there, "seconds": {"median": 1.0, "low": low, "high": high}}


def test_the_readme_shows_the_steadiest_machine(folder):
    assert tables.spread_of(records.load(folder)) == pytest.approx(0.3 / 2e-3 * (1 / 0.95 + 1 / 1.0) / 2)  # of six
    records.Run("norms", folder).add([on_another_machine(0.99, 1.01)])
    text = tables.summary(records.load(folder))
    assert "Missed" not in text and "0.70" in text and tables.NO_GPU not in text
    assert "Measured on 2 cores of A Processor, A GPU" in text
    assert "On 2 cores of A Processor, with times less steady: Targets: 3 of 7 met." in text
    assert "are 2 % apart" in tables.page(records.load(folder))

    records.Run("norms", folder).add([on_another_machine(-1e3, 1e3)])
    text = tables.summary(records.load(folder))
    assert "Measured on 2 cores of A Processor (" in text and "0.70" not in text
    assert "On 2 cores of A Processor, A GPU, with times less steady: Targets: 1 of 1 met." in text


def test_the_block_of_the_readme():
    readme = tables.put_into(f"a\n{tables.BEGIN}\nold\n{tables.END}\nb\n", "new")
    assert readme == f"a\n{tables.BEGIN}\n\nnew\n\n{tables.END}\nb\n"
    assert tables.put_into(readme, "new") == readme
    with pytest.raises(UserError, match="no block"):
        tables.put_into("nothing", "new")


def test_figures_and_files(folder):
    readme = folder / "README.md"
    readme.write_text(f"{tables.BEGIN}\n{tables.END}\n")
    written = tables.write(folder, readme)
    assert {path.name for path in written} == {"tables.md", "norms-rows.svg", "step-share.svg", "README.md"}
    for link in re.findall(r"\]\((figures[^)]+)\)", (folder / "tables.md").read_text()):
        assert (folder / link).exists()
    drawing = (folder / "figures" / "norms-rows.svg").read_text()
    assert "time of a training step, ms" in drawing and "PowerNorm, fused C++" in drawing
    changed = copy.deepcopy(records.load(folder))
    assert figures.figures_of(changed)[0].digest in drawing
    changed[0]["ratio"]["median"] = 9.0
    next(one for one in changed if one.get("sweep"))["seconds"]["median"] = 9.0
    assert figures.figures_of(changed)[0].digest not in drawing


def test_results_and_readme_are_of_the_records(tmp_path):
    """Else `make bench`, or `python -m benchmarks.tables` where the records are right."""
    found = records.load(records.RESULTS)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.put_into(readme, tables.summary(found)) == readme
    if not found:
        pytest.skip("nothing has been measured yet")
    assert (records.RESULTS / "tables.md").read_text(encoding="utf-8") == tables.page(found)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (records.RESULTS / "figures").glob("*.svg")}
    wanted = figures.figures_of(tables.by_machine(found)[0][1])
    assert set(drawn) == {f"{figure.name}.svg" for figure in wanted}
    for figure in wanted:
        assert figures.digest_of(drawn[f"{figure.name}.svg"]) == figure.digest
    assert all("/" not in json.dumps(one["circumstances"]["hardware"]) for one in found)
