"""One table of norms and tasks from the results of finished runs."""

from typing import Any, Dict, List, Optional, Sequence, Set

# As the papers write them.
LABELS = {
    "layer": "LayerNorm",
    "power": "PowerNorm",
    "batch": "BatchNorm",
    "ada": "AdaNorm",
    "power_v": "PowerNorm-V",
    "layer_simple": "LayerNorm-simple",
    "detach": "DetachNorm",
    "rms": "RMSNorm",
    "scale": "ScaleNorm",
    "none": "no norm",
}

# Kind of score -> heading; an arrow says which way is better.
KINDS = {"bleu": "BLEU \u2191", "perplexity": "perplexity \u2193"}
NOTHING = "\u2013"

RANKING = (
    "These are small models on little text, one seed each. The table shows that each norm trains, decodes and is "
    "scored; its differences are too uncertain to rank norms, and its scores are not comparable with published ones."
)
PLACEMENT = (
    "In translation, PowerNorm and BatchNorm are in the encoder and the decoder has LayerNorm, as published; all other "
    "norms are everywhere."
)


def rows_of(results: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The data of the table: one row a norm, in the order of ``LABELS``, and last the floor.

    Returns:
        Rows with ``norm``, ``label`` and, for each kind of score that any result has, ``scores`` by subset (numbers),
        ``reported`` (the subset to look at), ``seconds`` of training, ``parameters``, ``model``.
    """
    names: Set[str] = {result["norm"] for result in results if "norm" in result}
    order = [name for name in LABELS if name in names] + sorted(names - set(LABELS))
    rows = [_row(name, LABELS.get(name, name), [one for one in results if one.get("norm") == name]) for name in order]
    floors = [result for result in results if "floor" in result]
    if floors:
        rows.append(_row("floor", "floor", floors))
    return rows


def _row(norm: str, label: str, results: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    row: Dict[str, Any] = {"norm": norm, "label": label}
    for result in results:
        training = result.get("training", {})
        row[result["kind"]] = {
            "scores": {subset: score[result["kind"]] for subset, score in result["scores"].items()},
            "reported": result["reported"],
            "floor": result.get("floor"),
            "seconds": training.get("seconds"),
            "updates": training.get("updates"),
            "parameters": training.get("parameters"),
            "model": result.get("model"),
            "folder": result.get("folder"),
        }
    return row


def markdown(rows: Sequence[Dict[str, Any]]) -> str:
    """The table, padded so that it reads well as plain text too."""
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    header, body = ["norm"], [[row["label"]] for row in rows]
    for kind in kinds:
        reported = next(row[kind]["reported"] for row in rows if kind in row)
        others = sorted({subset for row in rows if kind in row for subset in row[kind]["scores"]} - {reported})
        for subset in [reported, *others]:
            header.append(f"{KINDS[kind]} {subset}")
            for cells, row in zip(body, rows):
                cells.append(_score(row.get(kind), subset))
        header.append("training, s")
        for cells, row in zip(body, rows):
            seconds = row.get(kind, {}).get("seconds")
            cells.append(NOTHING if seconds is None else f"{seconds:.0f}")
    for cells, row in zip(body, rows):
        floors = [row[kind]["floor"] for kind in kinds if kind in row and row[kind]["floor"]]
        if floors:
            cells[0] += f" ({', '.join(floors)})"
    return _lines([header, *body])


def _score(entry: Optional[Dict[str, Any]], subset: str) -> str:
    if entry is None or subset not in entry["scores"]:
        return NOTHING
    return f"{entry['scores'][subset]:.2f}"


def markdown_lines(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, padded so that it reads well as plain text too; numbers are to the right."""
    return _lines([heading, *rows])


def _lines(table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = []
    for cells in table:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths))
        ]
        lines.append("| " + " | ".join(padded) + " |")
    rule = ["-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def notes(results: Sequence[Dict[str, Any]]) -> List[str]:
    """What has to be known to read the table, in sentences."""
    said = [RANKING]
    if any(result["kind"] == "bleu" and result.get("norm") in ("power", "batch") for result in results):
        said.append(PLACEMENT)
    signatures = sorted(
        {score["signature"] for one in results for score in one["scores"].values() if "signature" in score}
    )
    if signatures:
        said.append(
            "BLEU by sacreBLEU on detokenised text: " + "; ".join(f"`{signature}`" for signature in signatures) + "."
        )
    scores = [score for result in results if result["kind"] == "perplexity" for score in result["scores"].values()]
    windows = sorted({(s["tokens_per_sample"], s["context_window"]) for s in scores if s.get("tokens_per_sample")})
    for window, context in windows:
        said.append(
            f"Perplexity per word, ends of sentence included, in windows of {window} tokens, {context} of them context."
        )
    if any("floor" in result for result in results):
        said.append(
            "The floor has learned nothing: the translation model before its first update, decoded with the same "
            "settings; for the language models, the word frequencies of the training text."
        )
    trained = [result for result in results if "versions" in result and "training" in result]
    if trained:
        one = trained[-1]
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        machine = one["hardware"]
        seeds = ", ".join(sorted({str(result["seed"]) for result in trained}))
        said.append(
            f"Training seconds with {machine['threads']} thread(s) a run, other runs beside it, on {machine['cores']} "
            f"cores of {machine['processor']}; seed {seeds}; {versions}."
        )
    return said
