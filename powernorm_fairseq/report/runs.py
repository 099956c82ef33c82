"""The table and the curves of the finished runs below a folder, without records: what the demo ends with."""

import json
from pathlib import Path

from powernorm_fairseq.experiment import record
from powernorm_fairseq.processes import UserError, write_atomically
from powernorm_fairseq.report import curves, table

TITLE = "Norms on the sample text"


def report(root: Path, output: Path) -> None:
    """Print the table and write ``table.md``, ``table.json`` and ``curves.png``.

    Raises:
        UserError: there is no finished run below ``root``.
    """
    results = record.read_all(root)
    if not any("norm" in result for result in results):
        raise UserError(f"no finished run below {root}")
    rows, notes = table.rows_of(results), table.notes(results)
    text = table.markdown(rows)
    listed = "\n".join(f"- {note}" for note in notes)
    write_atomically(output / "table.md", f"# {TITLE}\n\n{text}\n\n{listed}\n\n![Validation loss](curves.png)\n")
    write_atomically(
        output / "table.json", json.dumps({"rows": rows, "notes": notes}, indent=1, ensure_ascii=False) + "\n"
    )
    curves.draw(curves.curves_of(results), output / "curves.png")
    print(f"\n{TITLE}\n\n{text}\n\n{listed}\n\nSaved as {output}/table.md, table.json and curves.png", flush=True)
