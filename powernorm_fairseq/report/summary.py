"""What records say of each row: mean and deviation over seeds, the paper's number, significance."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from powernorm_fairseq.evaluation.kinds import headline
from powernorm_fairseq.report import published
from powernorm_fairseq.report.table import LABELS

SIGNIFICANT = 0.05
SAMPLE = {
    "mt": ("Sample, translation", "BLEU, sacreBLEU of detokenised text, lower-cased", True),
    "lm": ("Sample, language model", "test perplexity per word", False),
}
ROW_LABELS = {**LABELS, "layer_adanorm_recipe": "LayerNorm, AdaNorm recipe"}


def label_of(name: str) -> str:
    """A row's name as the papers write its norm, with what was changed."""
    norm, joined, changes = name.partition(published.WITH)
    return ROW_LABELS.get(norm, norm) + joined + changes


@dataclass
class Row:
    """One row of a table.

    Attributes:
        values: seed -> reported score of the runs that finished.
        diverged: seeds whose training diverged.
        against: seed -> how the run differs from that of layer normalization with the same seed (``report.records``).
    """

    name: str
    paper: Optional[published.Published] = None
    values: Dict[int, float] = field(default_factory=dict)
    diverged: List[int] = field(default_factory=list)
    against: Dict[int, Dict[str, Any]] = field(default_factory=dict)
    baseline: Optional[str] = None

    @property
    def label(self) -> str:
        """The norm as the papers write it."""
        return label_of(self.name)

    @property
    def mean(self) -> Optional[float]:
        """Over seeds; None where no run finished."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> Optional[float]:
        """Standard deviation over seeds, with n - 1; None for fewer than two, or where a score is not finite."""
        finite = all(map(math.isfinite, self.values.values()))
        return statistics.stdev(self.values.values()) if finite and len(self.values) > 1 else None

    @property
    def p_values(self) -> List[Tuple[int, float]]:
        """(seed, p of the approximate randomisation against layer normalization with that seed)."""
        return [
            (seed, one["p_randomisation"])
            for seed, one in sorted(self.against.items())
            if one.get("p_randomisation") is not None
        ]

    @property
    def verdict(self) -> int:
        """1 or -1 where, with each seed, the score is significantly higher or lower than the baseline's; else 0.

        Scores of perplexity are higher where the loss is.
        """
        signs = {
            0 if one.get("p_randomisation") is None or one["p_randomisation"] >= SIGNIFICANT else
            (one["difference"] > 0) - (one["difference"] < 0)
            for one in self.against.values()
        }  # fmt: skip
        return signs.pop() if len(signs) == 1 and self.against.keys() >= self.values.keys() else 0


@dataclass
class Table:
    """All rows of one data set."""

    task: str
    group: str
    title: str
    unit: str
    higher: bool
    rows: List[Row]
    note: str = ""
    records: List[Dict[str, Any]] = field(default_factory=list)

    @property
    def has_paper(self) -> bool:
        return any(row.paper for row in self.rows)

    @property
    def has_runs(self) -> bool:
        return bool(self.records)


def value_of(record: Dict[str, Any]) -> Optional[float]:
    """The number that a record is reported by; None for a training that diverged.

    BLEU; perplexity; bits per character where characters were scored.
    """
    scores = record["scores"].get(record["reported"])
    if not scores:
        return None
    return headline(scores, record["kind"])


def unit_of(record: Dict[str, Any]) -> str:
    """What ``value_of`` gives, for a data set that no paper has."""
    scores = record["scores"].get(record["reported"]) or {}
    if "bits_per_character" in scores:
        return "bits per character"
    unit = scores.get("label") or scores.get("unit")
    return record["kind"] if unit is None else unit if record["kind"] == "bleu" else f"perplexity per {unit}"


def tables_of(records: Sequence[Dict[str, Any]]) -> List[Table]:
    """A table for each group: those that were run first, then the published ones that were not."""
    found: Dict[Tuple[str, str], Table] = {}
    for group, content in published.GROUPS.items():
        rows = [Row(name, paper, baseline=published.baseline(group, name)) for name, paper in content.rows.items()]
        found[content.task, group] = Table(
            content.task, group, content.title, content.unit, content.higher, rows, content.note
        )
    for record in records:
        key = record["task_kind"], record["group"]
        if key not in found:
            default = (record["group"], unit_of(record), record["kind"] == "bleu")
            title, unit, higher = SAMPLE[key[0]] if key[1] == "sample" else default
            found[key] = Table(*key, title, unit, higher, [])
        table = found[key]
        table.records.append(record)
        row = next((one for one in table.rows if one.name == record["row"]), None)
        if row is None:
            row = Row(record["row"], baseline=published.baseline(key[1], record["row"]))
            table.rows.append(row)
        value = value_of(record)
        if record["outcome"] == "diverged" or value is None:
            row.diverged.append(record["seed"])
        else:
            row.values[record["seed"]] = value
        if record.get("against"):
            row.against[record["seed"]] = record["against"]
    known = list(LABELS)
    for table in found.values():
        if not table.has_paper:
            names = {row.name: row.name.partition(published.WITH)[0] for row in table.rows}
            table.rows.sort(key=lambda row: known.index(names[row.name]) if names[row.name] in known else len(known))
    return sorted(found.values(), key=lambda table: (not table.has_runs, table.task != "mt"))


def ours_in_words(row: Row, digits: int = 2) -> str:
    """``16.30 ± 0.10 (2)``, ``diverged (1 of 2)``, ``not run here``."""
    runs = len(row.values) + len(row.diverged)
    if not runs:
        return "not run here"
    if row.mean is None:
        return f"diverged ({runs})"
    said = f"{row.mean:.{digits}f}"
    if row.deviation is not None:
        said += f" \u00b1 {row.deviation:.{digits}f}"
    said += f" ({len(row.values)})"
    return said + (f", {len(row.diverged)} diverged" if row.diverged else "")


def paper_in_words(row: Row) -> str:
    """The paper's number, ``*`` behind one that is recalled."""
    if row.paper is None:
        return "\u2013"
    if row.paper.value is None:
        return "diverges"
    return f"{row.paper.value:g}" + ("*" if row.paper.recalled else "")


def significance_in_words(row: Row, table: Table) -> str:
    """Better or worse than layer normalization with every seed, and the p-values by seed."""
    if not row.baseline or not row.p_values:
        return "\u2013"
    better = row.verdict if table.higher else -row.verdict
    if row.diverged:
        better = min(better, 0)  # a norm with which training diverged is not better with every seed
    word = {1: "better", -1: "worse", 0: "no clear difference"}[better]
    return f"{word}; p = " + ", ".join(_p(p) for _, p in row.p_values)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
