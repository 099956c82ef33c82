"""The figures of the benchmarks, from their records: ``results/benchmarks/figures/*.svg``."""

from pathlib import Path
from typing import Any, Dict, List, Sequence

from powernorm_fairseq.processes import write_atomically
from powernorm_fairseq.report.figures import Figure, digest_of

# Norm and path -> label, colour, marker; the colours of the norms are those of all figures here.
LINES = {
    ("layer", "pytorch"): ("LayerNorm (torch.nn)", "#000000", "o"),
    ("power", "native"): ("PowerNorm, fused C++", "#d55e00", "s"),
    ("power", "gpu"): ("PowerNorm, fused Triton", "#d55e00", "s"),
    ("power", "torch"): ("PowerNorm, plain PyTorch", "#e69f00", "D"),
    ("power", "naive"): ("PowerNorm, naive", "#999999", "x"),
}


def figures_of(records: Sequence[Dict[str, Any]]) -> List[Figure]:
    """The figures that the records of one machine give."""
    found = []
    for device in ("cpu", "cuda"):
        sweep = [one for one in records if one["family"] == "norms" and one.get("sweep") and one["device"] == device]
        sweep = [one for one in sweep if one["threads"] == 1]
        for axis, other, fixed in (("rows", "channels", 512), ("channels", "rows", 4096)):
            lines = _lines([one for one in sweep if one[other] == fixed], axis)
            if lines:
                suffix = "" if device == "cpu" else "-cuda"
                found.append(
                    Figure(
                        f"norms-{axis}{suffix}",
                        f"Training step of a norm against {axis}",
                        f"Forward and backward pass with what an update of the statistics costs, {fixed} {other}, "
                        "float32; medians, the band from quartile to quartile.",
                        {"axis": axis, "fixed": f"{fixed} {other}", "lines": lines},
                        _draw_lines,
                    )
                )
    steps = [one for one in records if one["family"] == "step" and one["threads"] == 1]
    if steps:
        tokens = max(one["tokens"] for one in steps)
        data = [
            [one["setting"], one["seconds"]["median"], one["norms_seconds"]] for one in steps if one["tokens"] == tokens
        ]
        found.append(
            Figure(
                "step-share",
                "Norms as a part of the training step",
                f"6 + 6 layers of 512 channels, {tokens} tokens, one thread: forward and backward pass, loss and Adam; "
                "coloured, the norms, timed by themselves.",
                {"tokens": tokens, "bars": data},
                _draw_share,
            )
        )
    return found


def _lines(records: Sequence[Dict[str, Any]], axis: str) -> List[List[Any]]:
    found = []
    for kind in LINES:
        points = sorted(
            [one[axis], *(one["seconds"][name] for name in ("median", "low", "high"))]
            for one in records
            if (one["norm"], one["path"]) == kind
        )
        if points:
            found.append([*kind, points])
    return found


def _draw_lines(canvas: Any, data: Any) -> None:
    canvas.set_size_inches(6.4, 4.2)
    axes = canvas.add_subplot()
    for norm, path, points in data["lines"]:
        label, colour, marker = LINES[norm, path]
        at = [point[0] for point in points]
        median, low, high = ([point[column] * 1e3 for point in points] for column in (1, 2, 3))
        axes.plot(at, median, color=colour, marker=marker, markersize=4.5, linewidth=1.4, label=label)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({point[0] for _, _, points in data["lines"] for point in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"{data['axis']} ({data['fixed']})")
    axes.set_ylabel("time of a training step, ms")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def _draw_share(canvas: Any, data: Any) -> None:
    bars = data["bars"]
    canvas.set_size_inches(7.2, 0.55 * len(bars) + 1.2)
    axes = canvas.add_subplot()
    at = list(range(len(bars)))[::-1]
    rest = [seconds - norms for _, seconds, norms in bars]
    norms = [norms for _, _, norms in bars]
    axes.barh(at, rest, color="#bbbbbb", height=0.6, label="all else")
    axes.barh(at, norms, left=rest, color="#d55e00", height=0.6, label="norms")
    widest = max(seconds for _, seconds, _ in bars)
    for y, (_, seconds, part) in zip(at, bars):
        axes.text(seconds + 0.01 * widest, y, f"{100 * part / seconds:.1f} %", va="center", fontsize=8)
    axes.set_yticks(at, [name.replace(", ", ",\n") for name, _, _ in bars])
    axes.set_xlim(0, 1.12 * widest)
    axes.set_xlabel(f"time of a training step of {data['tokens']} tokens, s (and the norms' share)")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    axes.grid(axis="x", alpha=0.3)


def write(figures: Sequence[Figure], folder: Path) -> List[Path]:
    """Writes the figures; one that shows the same data already is not drawn again, one of no records is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        path = folder / f"{figure.name}.svg"
        if not path.exists() or digest_of(path.read_text(encoding="utf-8")) != figure.digest:
            write_atomically(path, figure.svg())
        written.append(path)
    for path in set(folder.glob("*.svg")) - set(written):
        path.unlink()
    return written
