"""``powernorm_fairseq record``: keep the results of finished runs as records, one line of JSON each.

A record is what tables and figures are made of: a run's scores and circumstances, its learning curve, its running
statistics over training, and how its scores differ from those of layer normalization with the same seed. Recording a
run again replaces its record.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple

from powernorm_fairseq.corpora.translation import read_lines
from powernorm_fairseq.experiment import record as results
from powernorm_fairseq.experiment.log import statistics, validations
from powernorm_fairseq.processes import UserError, hold, write_atomically
from powernorm_fairseq.report import published
from powernorm_fairseq.report.comparison import compare_runs
from powernorm_fairseq.report.published import WITH
from powernorm_fairseq.report.table import LABELS

RECORDS = Path("results/records")

# Where things lie on the machine of a run is nobody else's business.
PLACES = (("task", "data"), ("checkpoint", "save_dir"), ("common", "user_dir"))


def record_of(folder: Path) -> Dict[str, Any]:
    """The record of the finished run in ``folder``, without a comparison.

    Raises:
        UserError: there is no finished run in it.
    """
    result = results.read(folder)
    if result is None:
        raise UserError(f"no finished run in {folder}")
    if not result.get("group") or "norm" not in result:
        raise UserError(f"{folder}: the result does not say which row it is of; run it again from a config in configs/")
    config = {group: dict(options) for group, options in result.pop("config", {}).items()}
    for group, option in PLACES:
        config.get(group, {}).pop(option, None)
    result["config_file"] = _short(result.get("config_file") or "")
    # The kernel's version has no influence, and some name the machine.
    hardware = {name: value for name, value in result["hardware"].items() if name != "system"}
    record = {
        **result,
        "hardware": hardware,
        "row": row_of(result),
        "config": config,
        "curve": [[one.update, one.loss, one.nll] for one in validations(folder / "train.log")],
        "statistics": {
            name: [[update, float(f"{value:.4g}")] for update, value in values]
            for name, values in statistics(folder / "train.log").items()
        },
    }
    record["command"] = [Path(record["command"][0]).name, *(_short(word) for word in record["command"][1:])]
    return record


def row_of(result: Dict[str, Any]) -> str:
    """The name of a result's row: its YAML's where each row has one, else its norm.

    With other values than that YAML's it is a row of its own, which says so.
    """
    path = Path(result.get("config_file") or "")
    name = path.stem if path.parent.name == result["group"] else result["norm"]
    return name + (WITH + ", ".join(result["set"]) if result.get("set") else "")


def _short(word: str) -> str:
    """A path without what leads to this project on this machine."""
    parts = Path(word).parts
    for top in ("configs", "runs"):
        if top in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(top) :])
    return Path(word).name if word.startswith("/") else word


def identity(record: Dict[str, Any]) -> Tuple[str, str, str, int]:
    """What a record is of; two of the same are two measurements of one thing, of which the later counts."""
    return record["task_kind"], record["group"], record["row"], record["seed"]


def order(record: Dict[str, Any]) -> Tuple[int, str, int]:
    """Records lie in the order of the tables: as published, else as the norms are listed; then by seed."""
    group = published.GROUPS.get(record["group"])
    known = [*(group.rows if group else ()), *LABELS]
    name = record["row"].partition(WITH)[0]
    place = known.index(name) if name in known else len(known)
    return place, record["row"], record["seed"]


def file_of(record: Dict[str, Any], records: Path) -> Path:
    """The file that a record lies in."""
    return records / f"{record['task_kind']}-{record['group']}.jsonl"


def load(records: Path) -> List[Dict[str, Any]]:
    """All records of a folder.

    Raises:
        UserError: a line is damaged.
    """
    return [one for path in sorted(records.glob("*.jsonl")) for one in _read(path)]


def _read(path: Path) -> List[Dict[str, Any]]:
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is no JSON ({error}); mend or remove it") from None
    return found


def store(new: Iterable[Dict[str, Any]], records: Path) -> List[Path]:
    """Put records into their files, each in place of the one of the same identity; returns the files."""
    by_file: Dict[Path, List[Dict[str, Any]]] = {}
    for record in new:
        by_file.setdefault(file_of(record, records), []).append(record)
    with hold(records):
        for path, found in by_file.items():
            kept = {identity(one): one for one in [*(_read(path) if path.exists() else []), *found]}
            lines = [json.dumps(one, ensure_ascii=False) for one in sorted(kept.values(), key=order)]
            write_atomically(path, "\n".join(lines) + "\n")
    return list(by_file)


def add(folder: Path, records: Path) -> Dict[str, Any]:
    """Record the finished run in ``folder``, compared with layer normalization if that has been run beside it.

    The runs of a group lie in ``GROUP/ROW/seedN``. If ``folder`` is the run that others are compared with, those of the
    same seed are recorded again, as far as there are records of them.

    Raises:
        UserError: there is no finished run in ``folder``.
    """
    record = _compared(record_of(folder), folder)
    new, group = [record], folder.parent.parent
    for sibling in sorted(group.glob(f"*/{folder.name}")):
        found = results.read(sibling)
        if sibling != folder and found is not None and found.get("group") == record["group"] and "norm" in found:
            other = record_of(sibling)
            if published.baseline(other["group"], other["row"]) == record["row"].partition(WITH)[0]:
                new.append(_compared(other, sibling))
    store(new, records)
    return record


def _compared(record: Dict[str, Any], folder: Path) -> Dict[str, Any]:
    """The record with ``against``: how it differs from the baseline of its recipe and seed; None where that lacks."""
    name = published.baseline(record["group"], record["row"])
    beside = folder.parent.parent / name / folder.name if name else None
    theirs = results.read(beside) if beside else None
    against: Optional[Dict[str, Any]] = None
    if beside and theirs and theirs.get("seed") == record["seed"] and theirs.get("group") == record["group"]:
        if theirs.get("set", []) != record.get("set", []):
            return {**record, "against": None}
        found = compare_runs(beside, folder)
        against = {"row": name, **found} if found else None
    return {**record, "against": against}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or folders that hold some")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records (%(default)s)")


def main(args: argparse.Namespace) -> int:
    """Record all finished runs below the folders; each is compared with the one beside it that it belongs to."""
    folders = sorted({path.parent for root in args.runs for path in root.rglob(results.RESULT)})
    new = []
    for folder in folders:
        result = results.read(folder)
        if result is None or "norm" not in result:  # half written, or a floor
            continue
        new.append(_compared(record_of(folder), folder))
        print(f"{folder}: recorded", flush=True)
    if not new:
        raise UserError(f"no finished run below {', '.join(map(str, args.runs))}")
    for path in store(new, args.records):
        print(path)
    return 0
