"""Tables and figures from the records, and the README's part of them.

python -m benchmarks.tables
"""

import logging
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from benchmarks import figures, records
from benchmarks.records import RESULTS, ROOT, machine_of
from benchmarks.targets import SHAPES
from benchmarks.timing import quantile
from powernorm_fairseq.processes import UserError, write_atomically
from powernorm_fairseq.report.table import NOTHING, markdown_lines

README = ROOT / "README.md"
BEGIN, END = "<!-- speed: begin, made by `make bench` -->", "<!-- speed: end -->"
NOT_YET = "Not measured yet: `make bench` does."
NO_GPU = "Not measured on a GPU."

NORMS = {
    "layer": "LayerNorm", "power": "PowerNorm", "power_v": "PN-V", "batch": "BatchNorm", "ada": "AdaNorm",
    "rms": "RMSNorm",
}  # fmt: skip
PATHS = {
    "native": "fused C++", "gpu": "fused Triton", "torch": "plain PyTorch", "compile": "torch.compile",
    "naive": "naive", "pytorch": "torch.nn", "apex": "Apex",
}  # fmt: skip
IN_README = [
    ("layer", "pytorch"),
    ("power", "native"), ("power", "gpu"), ("ada", "native"), ("batch", "native"), ("rms", "native"),
    ("power", "torch"), ("power", "compile"), ("power", "naive"), ("batch", "pytorch"), ("rms", "pytorch"),
]  # fmt: skip

Record = Dict[str, Any]


def by_machine(found: Sequence[Record]) -> List[Tuple[str, List[Record]]]:
    """The records of each machine, the one with the steadiest times first: others slow down what shares a machine."""
    machines: Dict[str, List[Record]] = {}
    for record in found:
        machines.setdefault(machine_of(record), []).append(record)
    return sorted(machines.items(), key=lambda item: spread_of(item[1]))


def spread_of(part: Sequence[Record]) -> float:
    """How far apart the quartiles of the times of single norms are, as a share of the median; the median of all."""
    times = [one["seconds"] for one in part if one["family"] == "norms" and not one.get("sweep")]
    return quantile([(one["high"] - one["low"]) / one["median"] for one in times], 0.5) if times else float("inf")


def _date(record: Record) -> str:
    return record["circumstances"]["date"]


def label(record: Record) -> str:
    """What a line of ``benchmarks.norms`` is of."""
    inner = ", ".join(part for part in (PATHS[record["path"]], record["variant"]) if part)
    return f"{NORMS[record['norm']]} ({inner})"


def cell(
    record: Optional[Record], value: Callable[[Record], Optional[float]] = lambda one: one["ratio"]["median"]
) -> str:
    """A number; in bold with its target where that is missed."""
    number = None if record is None else value(record)
    if record is None or number is None:
        return NOTHING
    missed = [one for one in record["targets"] if not one["met"] and abs(one["value"] - number) < 1e-9]
    text = f"{number:.2f}"
    if missed:
        sign = "\u2264" if missed[0]["at_most"] else "\u2265"
        return f"**{text}** ({sign} {missed[0]['limit']:g})"
    return text


def _norms(found: Sequence[Record], mode: str, threads: int, device: str) -> List[Record]:
    return [
        one
        for one in found
        if one["family"] == "norms" and one["mode"] == mode and one["threads"] == threads
        and one["device"] == device and not one.get("sweep")
    ]  # fmt: skip


def _rows(part: Sequence[Record]) -> Dict[str, Dict[Tuple[int, int], Record]]:
    rows: Dict[str, Dict[Tuple[int, int], Record]] = {}
    for record in part:
        rows.setdefault(label(record), {})[record["rows"], record["channels"]] = record
    return rows


def norm_tables(found: Sequence[Record], mode: str, threads: int, device: str) -> List[str]:
    """Time as a multiple of LayerNorm's, of torch's own norm, roofline share and peak memory, by shape."""
    rows = _rows(_norms(found, mode, threads, device))
    if not rows:
        return []
    shapes = sorted({shape for by_shape in rows.values() for shape in by_shape}, key=lambda s: (s not in SHAPES, s))
    heading = [f"{a} x {b}" for a, b in shapes]
    milliseconds = [[name, *(_ms(at.get(shape)) for shape in shapes)] for name, at in rows.items()]
    ratio = [[name, *(cell(at.get(shape)) for shape in shapes)] for name, at in rows.items()]
    share = [
        [name, *(cell(at.get(shape), lambda one: one["roofline"]) for shape in shapes)] for name, at in rows.items()
    ]
    memory = [
        [name, *(cell(at.get(shape), lambda one: one.get("peak_memory")) for shape in shapes)]
        for name, at in rows.items()
    ]
    against = [
        [
            f"{name}, to {other}",
            *(cell(at.get(shape), lambda one, other=other: _against(one, other)) for shape in shapes),
        ]
        for name, at in rows.items()
        for other in sorted({key for record in at.values() for key in record["against"]})
    ]
    parts = [
        ("Time as a multiple of LayerNorm's (same type, same round; median)", ratio),
        ("Time as a multiple of another norm's (`fused`: the fused PowerNorm of the same setting)", against),
        ("Milliseconds, median (quartiles)", milliseconds),
        ("Share of the memory roofline; above 1 where a cache is faster than memory", share),
        ("Peak memory, in units of the input", memory),
    ]
    text = []
    for title, body in parts:
        if body:
            text += [f"{title}:", "", markdown_lines([f"{mode}, {threads} thread(s)", *heading], body), ""]
    return text


def _against(record: Record, other: str) -> Optional[float]:
    found = record["against"].get(other)
    return None if found is None else found["median"]


def _ms(record: Optional[Record]) -> str:
    if record is None:
        return NOTHING
    time = {name: value * 1e3 for name, value in record["seconds"].items()}
    return f"{time['median']:.3g} ({time['low']:.3g}\u2013{time['high']:.3g})"


def step_table(found: Sequence[Record]) -> List[str]:
    """Whole training steps."""
    part = [one for one in found if one["family"] == "step"]
    body = [
        [one["setting"], str(one["tokens"]), str(one["threads"]), f"{one['tokens_per_second']:.0f}",
         cell(one, lambda record: record["rate"]["median"]), f"{one['rate']['low']:.2f}\u2013{one['rate']['high']:.2f}",
         f"{100 * one['share']:.1f} %"]
        for one in part
    ]  # fmt: skip
    heading = ["training step", "tokens", "threads", "tokens/s", "of LayerNorm's", "quartiles", "norms' share"]
    return [markdown_lines(heading, body), ""] if body else []


def decoding_table(found: Sequence[Record]) -> List[str]:
    """Beam search."""
    part = [one for one in found if one["family"] == "decoding"]
    body = [
        [one["setting"], str(one["batch"]), f"{one['rate']['sentences_per_second']:.3g}",
         f"{one['tokens_per_second']:.0f}", f"{one['ratio']['median']:.2f}",
         f"{one['ratio']['low']:.2f}\u2013{one['ratio']['high']:.2f}",
         f"{one['against']['not folded']['median']:.2f}" if "against" in one else NOTHING]
        for one in part
    ]  # fmt: skip
    heading = [
        f"decoding, beam {part[0]['beam']}" if part else "", "batch", "sentences/s", "tokens/s", "time / LayerNorm",
        "quartiles", "time / not folded",
    ]  # fmt: skip
    return [markdown_lines(heading, body), ""] if body else []


def watching_table(found: Sequence[Record]) -> List[str]:
    """The cost of ``--norm-log-interval``."""
    body = [
        [NORMS[one["norm"]], one["size"], f"{1e3 * one['seconds']['median']:.0f}", str(one["interval"]),
         *(f"{100 * one['adds'][name]:+.2f} %" for name in ("median", "low", "high"))]
        for one in found
        if one["family"] == "watching"
    ]  # fmt: skip
    heading = ["norm everywhere", "model", "ms per update", "--norm-log-interval", "adds", "lower quartile", "upper"]
    return [markdown_lines(heading, body), ""] if body else []


def startup_table(found: Sequence[Record]) -> List[str]:
    """Start-up."""
    body = [
        [one["what"], f"{one['seconds']['median']:.2f}", cell(one, lambda record: record["adds"]["median"]),
         f"{one['adds']['low']:.2f}\u2013{one['adds']['high']:.2f}", ", ".join(one["loaded"]) or "none"]
        for one in found
        if one["family"] == "startup"
    ]  # fmt: skip
    heading = ["start-up", "fairseq's own, s", "the plugin adds, s", "quartiles", "kernels loaded"]
    return [markdown_lines(heading, body), ""] if body else []


def around(found: Sequence[Record]) -> str:
    """Where and with what the records of a machine were measured."""
    first = found[-1]["circumstances"]

    def listed(values: Sequence[Any]) -> str:
        return ", ".join(sorted({str(value) for value in values if value}))

    def version(name: str) -> str:
        return listed([one["circumstances"]["versions"][name] for one in found])

    commits = listed([(one["circumstances"]["git_commit"] or "")[:9].rstrip("+") for one in found])
    changed = any((one["circumstances"]["git_commit"] or "").endswith("+") for one in found)
    return (
        f"Measured on {machine_of(found[-1])}"
        + (f" (instructions used: {first['instructions']})" if first["instructions"] else "")
        + f", torch {version('torch')}, Python {version('python')}, fairseq {version('fairseq')}, "
        f"at commit {commits or 'unknown'}"
        + (" with changes" if changed else "")
        + f", {listed([_date(one) for one in found])}."
    )


def reached(found: Sequence[Record]) -> str:
    """How many targets are met."""
    met = [target["met"] for record in found if not record.get("sweep") for target in record.get("targets", ())]
    return f"Targets: {sum(met)} of {len(met)} met."


def misses(found: Sequence[Record]) -> List[str]:
    """One line for each target that is missed, by what it is of."""
    lines: Dict[str, List[str]] = {}
    for record in found:
        if record.get("sweep"):
            continue
        for target in record.get("targets", ()):
            if not target["met"]:
                sign = "\u2264" if target["at_most"] else "\u2265"
                if record["family"] == "norms":
                    name, place = f"{label(record)}, {record['mode']}", f"{record['rows']} x {record['channels']}: "
                else:
                    name, place = record.get("setting", record["family"]), ""
                wanted = f"{name}, {target['name']} {sign} {target['limit']:g}"
                lines.setdefault(wanted, []).append(f"{place}{target['value']:.3g}")
    return [
        reached(found) + (" Missed:" if lines else ""),
        *([""] if lines else []),
        *(f"- {wanted}: {', '.join(values)}" for wanted, values in lines.items()),
    ]


def page(found: Sequence[Record]) -> str:
    """``tables.md``."""
    lines = [
        "# Speed",
        "",
        "Made by `make bench` from the records beside it; [docs/performance.md](../../docs/performance.md) says how it "
        "was measured and how to read it. Bold: a target missed, with the target.",
        "",
    ]
    if not found:
        return "\n".join([*lines, NOT_YET, ""])
    for machine, part in by_machine(found):
        lines += [f"## {machine}", "", around(part), ""]
        if spread_of(part) < float("inf"):
            lines += [f"Quartiles of times of single norms are {100 * spread_of(part):.0f} % apart (median).", ""]
        lines += [*misses(part), ""]
        for device in ("cpu", "cuda"):
            for threads in sorted({one["threads"] for one in part if one["family"] == "norms"}):
                for mode, title in (("train", "Training"), ("eval", "Evaluation")):
                    tables = norm_tables(part, mode, threads, device)
                    if tables:
                        lines += [f"### {title} of single norms, {device}, {threads} thread(s)", "", *tables]
        for title, table in (
            ("Whole training step", step_table), ("Decoding", decoding_table),
            ("Comparing statistics (`--norm-log-interval`)", watching_table), ("Start-up", startup_table),
        ):  # fmt: skip
            if table(part):
                lines += [f"### {title}", "", *table(part)]
    if not _on_gpu(found):
        lines += ["## GPU", "", NO_GPU, ""]
    for figure in figures.figures_of(by_machine(found)[0][1]):
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", "", f"{figure.title}: {figure.caption}", ""]
    return "\n".join(lines)


def _on_gpu(found: Sequence[Record]) -> bool:
    return any(one["family"] == "norms" and one["device"] == "cuda" for one in found)


def summary(found: Sequence[Record]) -> str:
    """The README's part: what the machine with the steadiest times gave."""
    if not found:
        return NOT_YET
    (_, part), *others = by_machine(found)
    device = "cpu" if any(one["family"] == "norms" and one["device"] == "cpu" for one in part) else "cuda"
    lines: List[str] = []
    train, evaluation = _rows(_norms(part, "train", 1, device)), _rows(_norms(part, "eval", 1, device))
    body = []
    for name, at in train.items():
        record = next(iter(at.values()))
        kind = (record["norm"], record["path"])
        if kind not in IN_README or (record["variant"] and kind not in (("power", "native"), ("power", "gpu"))):
            continue
        fixed = at.get((4096, 512))
        body.append(
            [name, *(cell(at.get(shape)) for shape in SHAPES), cell(evaluation.get(name, {}).get((4096, 512))),
             cell(fixed, lambda one: one.get("peak_memory")), cell(fixed, lambda one: one["roofline"])]
        )  # fmt: skip
    if body:
        heading = ["time / LayerNorm", *(f"{a} x {b}" for a, b in SHAPES), "eval 4096 x 512", "memory", "roofline"]
        lines += [markdown_lines(heading, body), ""]
    one_thread = [one for one in part if one.get("threads", 1) == 1]
    lines += [
        *step_table(one_thread),
        *decoding_table(one_thread),
        *startup_table(part),
        around(part),
        reached(part),
        *(f"On {machine}, with times less steady: {reached(other)}" for machine, other in others),
    ]
    if not _on_gpu(found):
        lines.append(NO_GPU)
    return "\n".join(lines)


def put_into(text: str, block: str) -> str:
    """``text`` with ``block`` between the markers.

    Raises:
        UserError: it has not got the markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the README has no block between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def write(folder: Path = RESULTS, readme: Optional[Path] = README) -> List[Path]:
    """Writes ``tables.md``, the figures, and the block of the README; returns what was written."""
    found = records.load(folder)
    steadiest = by_machine(found)[0][1] if found else []
    written = [folder / "tables.md", *figures.write(figures.figures_of(steadiest), folder / "figures")]
    write_atomically(written[0], page(found))
    if readme is not None:
        write_atomically(readme, put_into(readme.read_text(encoding="utf-8"), summary(found)))
        written.append(readme)
    return written


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Writes everything."""
    # fairseq's imports set the root logger to DEBUG; matplotlib would tell of each font that it finds.
    logging.getLogger().setLevel(logging.WARNING)
    parser = records.parser("Tables and figures from the records of the benchmarks.")
    args = parser.parse_args(argv)
    for path in write(args.output, README if args.output == RESULTS else None):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
