"""Curves of the validation loss, one line for each norm."""

import math
from pathlib import Path
from typing import Any, Dict, List, Sequence

from powernorm_fairseq.experiment.log import Validation, validations
from powernorm_fairseq.report.table import LABELS

TITLES = {"bleu": "Translation", "perplexity": "Language model"}
UNITS = {"bleu": "nats per BPE token", "perplexity": "nats per word"}

# A norm looks the same in every figure, whichever others are drawn; the markers tell lines apart without colour.
STYLES = {
    "layer": ("#000000", "o"),
    "power": ("#d55e00", "s"),
    "batch": ("#0072b2", "^"),
    "ada": ("#009e73", "D"),
    "power_v": ("#cc79a7", "v"),
    "rms": ("#e69f00", "P"),
    "scale": ("#56b4e9", "X"),
}


def curves_of(results: Sequence[Dict[str, Any]]) -> Dict[str, Dict[str, List[Validation]]]:
    """Kind of score -> norm -> validations, from the logs beside the results."""
    found: Dict[str, Dict[str, List[Validation]]] = {}
    for norm in [*LABELS, *sorted({result["norm"] for result in results if "norm" in result} - set(LABELS))]:
        for result in results:
            if result.get("norm") == norm:
                history = validations(Path(result["folder"]) / "train.log")
                if history:
                    found.setdefault(result["kind"], {})[norm] = history
    return found


def draw(curves: Dict[str, Dict[str, List[Validation]]], path: Path) -> None:
    """Write a PNG with one panel for each kind of model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = [kind for kind in TITLES if kind in curves]
    figure = Figure(figsize=(5.6 * max(1, len(kinds)), 4.0), dpi=150, layout="constrained") if kinds else Figure()
    FigureCanvasAgg(figure)
    for position, kind in enumerate(kinds, start=1):
        axes = figure.add_subplot(1, len(kinds), position)
        for norm, history in curves[kind].items():
            colour, marker = STYLES.get(norm, (None, "."))
            axes.plot(
                [one.update for one in history],
                [one.nll * math.log(2) for one in history],
                color=colour, marker=marker, markersize=4, linewidth=1.4, label=LABELS.get(norm, norm),
            )  # fmt: skip
        axes.set_title(TITLES[kind])
        axes.set_xlabel("Updates")
        axes.set_ylabel(f"Validation loss (NLL, {UNITS[kind]})")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
