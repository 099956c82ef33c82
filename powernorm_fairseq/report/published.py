"""What the two papers report, row by row. None of these numbers was measured by this project."""

from dataclasses import dataclass
from typing import Dict, List, Optional

POWERNORM = "Shen et al., ICML 2020"
ADANORM = "Xu et al., NeurIPS 2019 (poster)"

# Joins a row's name and what was changed in it, in records of runs with other values than the row's.
WITH = " with "


@dataclass(frozen=True)
class Published:
    """One published score.

    Attributes:
        value: None where the paper says that training diverges.
        source: the paper.
        recalled: it could not be checked against its source.
        note: what else is known of it.
    """

    value: Optional[float]
    source: str
    recalled: bool = False
    note: str = ""


@dataclass(frozen=True)
class Group:
    """The rows of one data set.

    Attributes:
        task: ``mt`` or ``lm``.
        title: the data set.
        unit: what the published numbers are.
        higher: whether more is better.
        rows: name of the row (its YAML) -> published score, in the papers' order.
        baselines: row -> the layer-normalization row of the same recipe, where that is not ``layer``.
        note: what a reader of the numbers must know.
    """

    task: str
    title: str
    unit: str
    higher: bool
    rows: Dict[str, Optional[Published]]
    baselines: Dict[str, str]
    note: str = ""


def _power(value: float, recalled: bool = False, note: str = "") -> Published:
    return Published(value, POWERNORM, recalled, note)


def _xu(value: float) -> Published:
    return Published(value, ADANORM)


NOT_CAUSAL = (
    "The paper's perplexities stand on code that builds a causal mask and never applies it, so they are most likely "
    "not those of a causal language model. The models here are causal, and fairseq's Transformer stands in place "
    "of the paper's Tensorized Transformer."
)
XU_ROWS = ("layer_simple", "detach", "ada", "none")

GROUPS: Dict[str, Group] = {
    "iwslt14_de_en": Group(
        "mt",
        "IWSLT14 De-En, small",
        "BLEU, tokenised, lower-cased",
        True,
        {
            "layer": _power(35.5, note="its distance to PowerNorm is in the abstract"),
            "batch": _power(34.4, recalled=True),
            "power_v": _power(35.5, recalled=True),
            "power": _power(35.9, note="35.87 in the authors' log"),
            "layer_adanorm_recipe": _xu(35.5),
            "layer_simple": _xu(35.5),
            "detach": _xu(33.9),
            "ada": _xu(35.6),
            "none": _xu(34.0),
        },
        dict.fromkeys(XU_ROWS, "layer_adanorm_recipe"),
    ),
    "wmt14_en_de": Group(
        "mt",
        "WMT14 En-De, big",
        "BLEU, tokenised, compounds split",
        True,
        {
            "layer": _power(29.5, note="its distance to PowerNorm is in the abstract"),
            "batch": _power(28.2, recalled=True),
            "power_v": _power(29.7, recalled=True),
            "power": _power(30.1),
        },
        {},
    ),
    "iwslt15_en_vi": Group(
        "mt",
        "IWSLT15 En-Vi",
        "BLEU",
        True,
        {"layer": _xu(31.2), "layer_simple": _xu(31.6), "detach": _xu(27.7), "ada": _xu(31.4), "none": _xu(28.4)},
        {},
        "The code of these rows was not released. A user of the authors' translation code reports 26.0.",
    ),
    "ptb": Group(
        "lm",
        "Penn Treebank",
        "test perplexity",
        False,
        {
            "layer": _power(53.2, recalled=True, note="Ma et al. print 57.9 for the same model"),
            "batch": _power(60.7, recalled=True),
            "power_v": _power(55.3, recalled=True),
            "power": _power(47.6, recalled=True, note="its distance to LayerNorm, 5.6, is in the abstract"),
        },
        {},
        NOT_CAUSAL,
    ),
    "wikitext103": Group(
        "lm",
        "WikiText-103",
        "test perplexity",
        False,
        {
            "layer": _power(20.9, note="as Ma et al. print it"),
            "batch": _power(27.2, recalled=True),
            "power_v": _power(21.3, recalled=True),
            "power": _power(17.9, recalled=True, note="its distance to LayerNorm, 3.0, is in the abstract"),
        },
        {},
        NOT_CAUSAL,
    ),
    "enwik8": Group(
        "lm",
        "enwik8",
        "bits per character",
        False,
        {"layer": _xu(1.07), "layer_simple": _xu(1.07), "detach": _xu(1.12), "ada": _xu(1.07), "none": _xu(1.04)},
        {},
        "The code of these rows was not released, so the recipe is chosen here.",
    ),
}


def score(group: str, row: str) -> Optional[Published]:
    """The published score of a row; None where none is."""
    return GROUPS[group].rows.get(row) if group in GROUPS else None


def baseline(group: str, row: str) -> Optional[str]:
    """The layer-normalization row that a row is compared with; None for one that is itself such a row."""
    row = row.partition(WITH)[0]
    found = GROUPS[group].baselines.get(row, "layer") if group in GROUPS else "layer"
    return None if row in (found, "layer") or found == row or row.startswith("layer_adanorm") else found


def in_words(group: str, row: str) -> str:
    """The published score with its source, for a line of text; empty where there is none."""
    published = score(group, row)
    if published is None:
        return ""
    value = "diverges" if published.value is None else f"{published.value:g}"
    said = f"{value} {GROUPS[group].unit} ({published.source}{', recalled' if published.recalled else ''})"
    return said + (f"; {published.note}" if published.note else "")


def names() -> List[str]:
    """All published rows, ``GROUP/ROW``."""
    return [f"{group}/{row}" for group, content in GROUPS.items() for row in content.rows]
