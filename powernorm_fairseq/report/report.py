"""``powernorm_fairseq report``: tables and figures from the records of all runs, the papers' numbers beside ours."""

import argparse
from pathlib import Path
from typing import Dict, List

from powernorm_fairseq.processes import write_atomically
from powernorm_fairseq.report.figures import digest_of, figures_of
from powernorm_fairseq.report.page import digest_of_records, markdown, page
from powernorm_fairseq.report.records import RECORDS, load
from powernorm_fairseq.report.summary import tables_of


def report(records: Path, output: Path) -> List[Path]:
    """Write ``tables.md``, ``report.html`` (all in one file) and ``figures/*.svg``; returns what was written.

    A figure that shows the same data already is not drawn again, so that another version of matplotlib changes nothing.
    """
    found = load(records)
    tables = tables_of(found)
    figures = figures_of(tables)
    folder = output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawings: Dict[str, str] = {}
    written = []
    for figure in figures:
        path = folder / f"{figure.name}.svg"
        drawing = path.read_text(encoding="utf-8") if path.exists() else ""
        if digest_of(drawing) != figure.digest:
            drawing = figure.svg()
            write_atomically(path, drawing)
        drawings[figure.name] = drawing
        written.append(path)
    for path in set(folder.glob("*.svg")) - set(written):
        path.unlink()  # of records that are gone
    for name, text in (
        ("tables.md", markdown(tables, figures)),
        ("report.html", page(tables, figures, drawings, digest_of_records(found))),
    ):
        write_atomically(output / name, text)
        written.append(output / name)
    return written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for the files (%(default)s)")


def main(args: argparse.Namespace) -> int:
    """Report on the records that the arguments name."""
    for path in report(args.records, args.output):
        print(path)
    return 0
