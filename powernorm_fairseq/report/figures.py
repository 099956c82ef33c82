"""Figures from records: learning curves, and how far batch statistics are from the running ones.

The latter are the PowerNorm paper's figures 2 and 3, from what ``norm_log_interval`` has logged (``norms.watching``).
"""

import hashlib
import io
import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from powernorm_fairseq.report.curves import STYLES, TITLES, UNITS
from powernorm_fairseq.report.summary import Table, label_of

# Norm -> the distances that the figures compare, forward and backward, with what they are.
FORWARD = {
    "batch": [("fwd_mean", "BatchNorm: \u03bc"), ("fwd_var", "BatchNorm: \u03c3\u00b2")],
    "power_v": [("fwd_psi_sq", "PN-V: \u03c8\u00b2")],
    "power": [("fwd_psi_sq", "PowerNorm: \u03c8\u00b2")],
}
BACKWARD = {
    "batch": [("bkw_mean", "BatchNorm: mean of g"), ("bkw_var", "BatchNorm: mean of g x\u0302")],
    "power_v": [("bkw_psi_sq", "PN-V: mean of g x\u0302")],
    "power": [("bkw_psi_sq", "PowerNorm: \u039b"), ("bkw_nu", "PowerNorm: \u039b \u2212 \u0393\u03bd")],
}
# Of a norm's two quantities, the one that is drawn hollow.
SECOND = ("\u03bc", "of g", "\u0393\u03bd")
PARTS = 5  # of training: the paper's 20, 40, 60, 80 and 100 %
Series = Dict[str, List[Tuple[int, float]]]


@dataclass
class Figure:
    """One figure.

    Attributes:
        name: of its file.
        data: what is drawn; its digest tells whether a drawing is of these data.
    """

    name: str
    title: str
    caption: str
    data: Any
    draw: Callable[[Any, Any], None]

    @property
    def digest(self) -> str:
        """SHA-256 of what is drawn."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()

    def svg(self) -> str:
        """The drawing, ending with its digest as a comment."""
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas

        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name, "font.size": 9}):
            canvas = Canvas(layout="constrained")
            FigureCanvasSVG(canvas)
            self.draw(canvas, self.data)
            output = io.StringIO()
            canvas.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
        text = output.getvalue()
        text = re.sub(r"[ \t]+$", "", text[text.index("<svg") :], flags=re.MULTILINE)
        return text.rstrip() + f"\n<!-- data {self.digest} -->\n"


def digest_of(svg: str) -> Optional[str]:
    """The digest that a drawing says it was made from."""
    match = re.search(r"<!-- data ([0-9a-f]{64}) -->\s*$", svg)
    return match.group(1) if match else None


def figures_of(tables: Sequence[Table]) -> List[Figure]:
    """All figures that the records of these tables give."""
    found = []
    for table in tables:
        curves = _curves(table.records)
        if curves:
            found.append(_curve_figure(table, curves))
        watched = {row: series for row, series in _statistics(table.records).items() if series and row in FORWARD}
        if watched:
            found += [_box_figure(table, watched), _layer_figure(table, watched)]
    return found


def _curves(records: Iterable[Dict[str, Any]]) -> Dict[str, List[List[Tuple[int, float]]]]:
    """Row -> for each seed the validations (update, NLL in nats)."""
    found: Dict[str, List[List[Tuple[int, float]]]] = {}
    for record in records:
        points = [(int(u), round(nll * math.log(2), 4)) for u, _, nll in record.get("curve", ()) if math.isfinite(nll)]
        if points:
            found.setdefault(record["row"], []).append(points)
    return found


def _curve_figure(table: Table, curves: Dict[str, List[List[Tuple[int, float]]]]) -> Figure:
    kind = "bleu" if table.task == "mt" else "perplexity"
    return Figure(
        f"curves-{table.task}-{table.group}",
        f"{table.title}: validation loss",
        "Loss of the validation text without label smoothing after each validation; a line is the mean over seeds, the "
        "band their range.",
        {"kind": kind, "curves": curves},
        _draw_curves,
    )


def _draw_curves(canvas: Any, data: Any) -> None:
    canvas.set_size_inches(7.2, 4.2)
    axes = canvas.add_subplot()
    for row, seeds in data["curves"].items():
        colour, marker = STYLES.get(row, ("#777777", "."))
        by_update: Dict[int, List[float]] = defaultdict(list)
        for points in seeds:
            for update, value in points:
                by_update[update].append(value)
        updates = sorted(by_update)
        mean = [sum(by_update[update]) / len(by_update[update]) for update in updates]
        axes.plot(updates, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.2, label=label_of(row))
        low, high = ([f(by_update[update]) for update in updates] for f in (min, max))
        axes.fill_between(updates, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("updates")
    axes.set_ylabel(f"validation NLL, {UNITS[data['kind']]}")
    axes.set_title(TITLES[data["kind"]])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=2, fontsize=8)


def _statistics(records: Iterable[Dict[str, Any]]) -> Dict[str, Series]:
    """Row -> ``WHAT/PLACE`` -> (share of training, value) of all seeds together."""
    found: Dict[str, Series] = {}
    for record in records:
        logged = record.get("statistics", {})
        # A training that was interrupted and then diverged may not know of all of its updates.
        updates = max(
            record["training"].get("updates") or 1, *(update for values in logged.values() for update, _ in values), 1
        )
        for name, values in logged.items():
            series = found.setdefault(record["row"], {}).setdefault(name, [])
            series += [(min(PARTS - 1, (update - 1) * PARTS // updates), value) for update, value in values]
    return found


def place_of(name: str) -> Tuple[str, int, int, str]:
    """Sorts places of norms as data flows through them."""
    place = name.split("/")[1]
    layer = re.search(r"layers\.(\d+)\.", place)
    within = [
        "layernorm_embedding",
        "self_attn_layer_norm",
        "encoder_attn_layer_norm",
        "final_layer_norm",
        "layer_norm",
    ]
    leaf = place.rsplit(".", 1)[-1]
    position = within.index(leaf) if leaf in within else len(within)
    number = int(layer.group(1)) if layer else (-1 if leaf == "layernorm_embedding" else 10_000)
    return "decoder" if place.startswith("decoder") else "", number, position, place


def _places(watched: Dict[str, Series]) -> List[str]:
    names = {name for series in watched.values() for name in series}
    return list(dict.fromkeys(name.split("/")[1] for name in sorted(names, key=place_of)))


def short_place(place: str) -> str:
    """``enc 0 self`` for ``encoder.layers.0.self_attn_layer_norm``."""
    stack = "enc" if place.startswith("encoder") else "dec"
    layer = re.search(r"layers\.(\d+)\.", place)
    names = {"self_attn_layer_norm": "self", "encoder_attn_layer_norm": "cross", "layernorm_embedding": "emb"}
    leaf = place.rsplit(".", 1)[-1]
    kind = names.get(leaf, "ffn" if layer else "final")
    return f"{stack} {layer.group(1)} {kind}" if layer else f"{stack} {kind}"


def _box_figure(table: Table, watched: Dict[str, Series]) -> Figure:
    first = _places(watched)[0]
    panels = []
    for direction, kinds in (("forward", FORWARD), ("backward", BACKWARD)):
        for row, names in kinds.items():
            for what, label in names:
                points = watched.get(row, {}).get(f"{what}/{first}")
                if points:
                    parts = [[value for part, value in points if part == number] for number in range(PARTS)]
                    panels.append([direction, label, parts])
    return Figure(
        f"boxes-{table.task}-{table.group}",
        f"{table.title}: batch and running statistics of the first norm",
        f"At {first}, by fifths of training, all seeds together: upper row, how far the statistics of an update's "
        "batch are from the running ones; lower row, the gradient statistics. Euclidean norms over the channels, "
        "divided by their number, on a logarithmic scale; boxes: quartiles and median, whiskers: 1.5 times their "
        "distance. The quantities are those of the PowerNorm paper's figures 2 and 3 (docs/statistics.md).",
        panels,
        _draw_boxes,
    )


def _draw_boxes(canvas: Any, panels: Any) -> None:
    rows = [[panel for panel in panels if panel[0] == direction] for direction in ("forward", "backward")]
    columns = max(map(len, rows))
    canvas.set_size_inches(2.3 * columns, 5.2)
    for number, row in enumerate(rows):
        shared = None
        for column, (direction, label, parts) in enumerate(row):
            axes = canvas.add_subplot(2, columns, number * columns + column + 1, sharey=shared)
            shared = shared or axes
            axes.boxplot(parts, widths=0.6, flierprops={"markersize": 2}, medianprops={"color": "#d55e00"})
            axes.set_yscale("log")
            axes.set_xticks(range(1, PARTS + 1), [f"{20 * part}" for part in range(1, PARTS + 1)])
            axes.set_title(label, fontsize=9)
            axes.grid(axis="y", alpha=0.3)
            if column == 0:
                axes.set_ylabel(direction)
            if number == 1:
                axes.set_xlabel("% of training")


def _layer_figure(table: Table, watched: Dict[str, Series]) -> Figure:
    places = _places(watched)
    data = []
    for direction, kinds in (("forward", FORWARD), ("backward", BACKWARD)):
        for row, names in kinds.items():
            for what, label in names:
                points: List[Optional[List[float]]] = []
                for place in places:
                    late = sorted(v for part, v in watched.get(row, {}).get(f"{what}/{place}", ()) if part >= PARTS - 2)
                    points.append([_quantile(late, q) for q in (0.25, 0.5, 0.75)] if late else None)
                if any(points):
                    data.append([direction, row, label, points])
    return Figure(
        f"layers-{table.task}-{table.group}",
        f"{table.title}: batch and running statistics by layer",
        "The same quantities at each norm in the last two fifths of training: median and quartiles, all seeds.",
        {"places": [short_place(place) for place in places], "series": data},
        _draw_layers,
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(f"{ordered[low] + (at - low) * (ordered[high] - ordered[low]):.4g}")


def _draw_layers(canvas: Any, data: Any) -> None:
    canvas.set_size_inches(max(7.2, 0.62 * len(data["places"])), 6.0)
    for number, direction in enumerate(("forward", "backward")):
        axes = canvas.add_subplot(2, 1, number + 1)
        series = [one for one in data["series"] if one[0] == direction]
        for shift, (_, row, label, points) in enumerate(series):
            colour, marker = STYLES.get(row, ("#777777", "."))
            at = [place + 0.12 * (shift - (len(series) - 1) / 2) for place, point in enumerate(points) if point]
            kept = [point for point in points if point]
            bars = [[p[1] - p[0] for p in kept], [p[2] - p[1] for p in kept]]
            hollow = {"markerfacecolor": "none"} if label.endswith(SECOND) else {}
            axes.errorbar(
                at, [p[1] for p in kept], bars, color=colour, marker=marker, markersize=4, linestyle="none",
                label=label, **hollow,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_xticks(range(len(data["places"])), data["places"], rotation=30, ha="right")
        axes.set_ylabel(direction)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
