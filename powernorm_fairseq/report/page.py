"""Tables as Markdown, and all results as one self-contained HTML page."""

import hashlib
import html
import json
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from powernorm_fairseq.evaluation.kinds import headline
from powernorm_fairseq.report import published
from powernorm_fairseq.report.figures import Figure
from powernorm_fairseq.report.summary import (
    SIGNIFICANT,
    Row,
    Table,
    ours_in_words,
    paper_in_words,
    significance_in_words,
)
from powernorm_fairseq.report.table import markdown_lines

TITLE = "Results"
MADE = "Made from the records in results/records by `make report`; do not edit."
HOW_TO_READ = [
    "Here: mean and standard deviation over seeds of what this project measured, and in brackets the number of runs.",
    "Paper: the published number, which this project did not measure; * marks one that could not be checked against "
    "its source.",
    "Against LayerNorm: paired approximate randomisation (10,000 trials) between the runs with the same seed, over the "
    "sentences of the test text (by sacreBLEU of detokenised text, whatever BLEU the table has), or over the samples "
    "of it for language models. Better or worse is said where "
    f"p < {SIGNIFICANT} with every seed, without correction for the number of norms. It says how a difference compares "
    "with the choice of test sentences; seeds vary too.",
]
STYLE = """
:root { color-scheme: light dark; --line: #d0d4da; --soft: #f4f5f7; --text: #1c2024; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a4048; --soft: #1d2126; --text: #e6e8eb; --page: #14171a; }
  figure svg { background: #ffffff; }
}
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin-bottom: 0.2rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; }
tbody tr:hover { background: var(--soft); }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
figcaption, .note { font-size: 0.9rem; opacity: 0.85; max-width: 48rem; }
.scroll { overflow-x: auto; }
.absent { opacity: 0.6; }
code { background: var(--soft); padding: 0 0.2rem; }
""".strip()


def cells_of(table: Table) -> Tuple[List[str], List[List[str]]]:
    """Heading and rows of one table."""
    digits = 3 if "character" in table.unit else 2
    heading = ["norm", "here"] + (["paper"] if table.has_paper else []) + ["against LayerNorm"]
    rows = []
    for row in table.rows:
        paper = [paper_in_words(row)] if table.has_paper else []
        rows.append([row.label, ours_in_words(row, digits), *paper, significance_in_words(row, table)])
    return heading, rows


def circumstances(table: Table) -> List[str]:
    """Commits, versions and hardware of a table's runs, in sentences."""
    records = table.records
    if not records:
        return []
    said = [
        f"Seeds {_listed(record['seed'] for record in records)}; trained at commit "
        + _listed((record["training"].get("git_commit") or "unknown")[:9] for record in records)
        + "; scored at commit "
        + _listed((record["git_commit"] or "unknown")[:9] for record in records)
        + "."
    ]
    machines = {
        f"{one['processor']}, {one['cores']} cores, {one['threads']} thread(s) a run"
        + (f", GPUs: {', '.join(one['gpus'])}" if one.get("gpus") else "")
        for one in (record["hardware"] for record in records)
    }
    said.append("Hardware: " + "; ".join(sorted(machines)) + ".")
    versions = {", ".join(f"{name} {value}" for name, value in record["versions"].items()) for record in records}
    said.append("Versions: " + "; ".join(sorted(versions)) + ".")
    kinds = {
        score.get("kind", "sacrebleu") if record["kind"] == "bleu" else score.get("unit", "word")
        for record in records
        for score in record["scores"].values()
    }
    if len(kinds) > 1:
        said.append(f"Scores of different kinds stand here ({', '.join(sorted(kinds))}) and do not compare.")
    windows = {
        (score["tokens_per_sample"], score["context_window"])
        for record in records
        for score in record["scores"].values()
        if score.get("tokens_per_sample")
    }
    said += [
        f"Scored in windows of {length} tokens, of which the first {context} are only context for the others."
        for length, context in sorted(windows)
    ]
    signatures = {
        score["signature"] for record in records for score in record["scores"].values() if "signature" in score
    }
    if signatures:
        said.append("sacreBLEU signature: " + "; ".join(sorted(signatures)) + ".")
    return said


def _listed(values: Any) -> str:
    return ", ".join(map(str, sorted(set(values))))


def runs_of(table: Table) -> Tuple[List[str], List[List[str]]]:
    """Heading and rows of the list of all runs."""
    heading = ["norm", "seed", "scores", "updates", "seconds", "parameters"]
    rows = []
    for record in table.records:
        scores = "; ".join(f"{subset} {_number(one, record['kind'])}" for subset, one in record["scores"].items())
        training = record["training"]
        seconds = training.get("seconds")
        rows.append(
            [
                Row(record["row"]).label,
                str(record["seed"]),
                scores or f"diverged: {training.get('reason', 'no scores')}",
                str(training.get("updates")),
                "\u2013" if seconds is None else f"{seconds:.0f}",
                f"{training['parameters']:,}" if training.get("parameters") else "\u2013",
            ]
        )
    return heading, rows


def _number(score: Mapping[str, Any], kind: str) -> str:
    return f"{headline(score, kind):.{3 if 'bits_per_character' in score else 2}f}"


def markdown(tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """``tables.md``."""
    parts = [f"# {TITLE}", f"<!-- {MADE} -->", *HOW_TO_READ]
    for table in tables:
        parts += [f"## {table.title}", f"`{table.task}/{table.group}`, {table.unit}."]
        parts.append(markdown_lines(*cells_of(table)))
        parts += ([table.note] if table.note else []) + circumstances(table)
        parts += [f"![{one.title}](figures/{one.name}.svg)\n\n{one.caption}" for one in figures if _belongs(one, table)]
    return "\n\n".join(parts) + "\n"


def page(tables: Sequence[Table], figures: Sequence[Figure], drawings: Mapping[str, str], digest: str) -> str:
    """``report.html``: everything in one file.

    Args:
        drawings: name of a figure -> SVG.
        digest: of the records.
    """
    body = [f"<h1>{TITLE}</h1>"]
    body += [f'<p class="note">{_text(sentence)}</p>' for sentence in HOW_TO_READ]
    for table in tables:
        body.append(f'<h2 id="{html.escape(f"{table.task}-{table.group}")}">{_text(table.title)}</h2>')
        body.append(f"<p><code>{_text(f'{table.task}/{table.group}')}</code>, {_text(table.unit)}</p>")
        body.append(_html_table(*cells_of(table)))
        body += [
            f'<p class="note">{_text(sentence)}</p>' for sentence in [table.note, *circumstances(table)] if sentence
        ]
        if table.records:
            runs = _html_table(*runs_of(table))
            body.append(f"<details><summary>All {len(table.records)} runs</summary>{runs}</details>")
        for figure in figures:
            if _belongs(figure, table):
                body.append(
                    f'<figure><h3>{_text(figure.title)}</h3><div class="scroll">{drawings[figure.name].strip()}</div>'
                    f"<figcaption>{_text(figure.caption)}</figcaption></figure>"
                )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="records" content="{digest}">\n<title>powernorm_fairseq: {TITLE.lower()}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _belongs(figure: Figure, table: Table) -> bool:
    return figure.name.endswith(f"-{table.task}-{table.group}")


def _html_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in heading)
    lines = []
    for row in rows:
        cells = [f"<td>{_text(row[0])}</td>"]
        for cell in row[1:]:
            kind = "number" if cell[:1].isdigit() else "absent" if cell in ("not run here", "\u2013") else ""
            cells.append(f'<td class="{kind}">{_text(cell)}</td>' if kind else f"<td>{_text(cell)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _text(words: str) -> str:
    return html.escape(words, quote=False)


def digest_of_records(records: Sequence[Dict[str, Any]]) -> str:
    """SHA-256 of all records and of the published numbers beside them."""
    told = {name: published.in_words(*name.split("/")) for name in published.names()}
    return hashlib.sha256(json.dumps([list(records), told], sort_keys=True).encode()).hexdigest()
