"""Records of measurements: one line of JSON each, in a file for each family."""

import argparse
import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from powernorm_fairseq.experiment.record import git_commit, hardware, versions
from powernorm_fairseq.norms import kernels
from powernorm_fairseq.processes import UserError, environment, hold, write_atomically

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "benchmarks"
FAMILIES = ("norms", "step", "watching", "decoding", "startup")
# What a record measured and under which circumstances; all else in it says what it is of.
MEASURED = {"seconds", "rounds", "ratio", "against", "roofline", "peak_memory", "targets", "rate", "share", "limit"}
MEASURED |= {"circumstances", "bandwidth", "loaded", "norms", "norms_seconds", "note", "adds", "tokens_per_second"}


def circumstances(threads: int) -> Dict[str, Any]:
    """Versions, machine, commit and time of a measurement."""
    native = kernels.available("native")
    found = {name: value for name, value in hardware(threads).items() if name != "system"}
    return {
        "hardware": found,
        "versions": versions(),
        "instructions": native.instructions() if native is not None else None,
        "git_commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def machine_of(record: Dict[str, Any]) -> str:
    """The machine that a record was measured on: processor, cores, GPUs."""
    found = record["circumstances"]["hardware"]
    gpus = f", {', '.join(found['gpus'])}" if found["gpus"] else ""
    return f"{found['cores']} cores of {found['processor']}{gpus}"


def identity(record: Dict[str, Any]) -> str:
    """What a record is of, with its machine; a later measurement of the same takes its place."""
    return json.dumps([machine_of(record), {key: value for key, value in record.items() if key not in MEASURED}])


def load(folder: Path = RESULTS) -> List[Dict[str, Any]]:
    """All records of a folder.

    Raises:
        UserError: a line is damaged.
    """
    return [one for family in FAMILIES for one in _read(folder / f"{family}.jsonl")]


def _read(path: Path) -> List[Dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is no JSON ({error}); mend or remove it") from None
    return found


class Run:
    """The measurements of one run of a family.

    Each is stored at once, in place of the machine's earlier one of the same, so that an interrupted run keeps what it
    has. :meth:`finish` then removes what the machine has of this family from earlier runs.
    """

    def __init__(self, family: str, folder: Optional[Path] = RESULTS) -> None:
        self.path = None if folder is None else folder / f"{family}.jsonl"
        self.family = family
        self.new: Dict[str, Dict[str, Any]] = {}

    def add(self, records: Sequence[Dict[str, Any]]) -> None:
        """Stores and prints measurements."""
        for record in records:
            self.new[identity(record)] = record
            print(in_words(record), flush=True)
        self._write(lambda record: identity(record) not in self.new)

    def finish(self) -> None:
        """The run is whole."""
        machines = {machine_of(record) for record in self.new.values()}
        self._write(lambda record: machine_of(record) not in machines)

    def _write(self, keep: Any) -> None:
        if self.path is None or not self.new:
            return
        with hold(self.path.parent):
            kept = [record for record in _read(self.path) if keep(record)]
            lines = [json.dumps(record, ensure_ascii=False) for record in [*kept, *self.new.values()]]
            write_atomically(self.path, "\n".join(lines) + "\n")


def in_words(record: Dict[str, Any]) -> str:
    """One line about a record, for somebody who waits."""
    parts = [str(value) for key, value in record.items() if key not in MEASURED and value not in (None, "", "cpu")]
    if "seconds" in record:
        time = record["seconds"]
        parts.append(f"{time['median'] * 1e3:.3f} ms ({time['low'] * 1e3:.3f} to {time['high'] * 1e3:.3f})")
    if "ratio" in record:
        parts.append(f"{record['ratio']['median']:.3f} of LayerNorm's")
    if "adds" in record:
        parts.append(
            f"adds {record['adds']['median']:.4f} ({record['adds']['low']:.4f} to {record['adds']['high']:.4f})"
        )
    if "rate" in record and "median" in record["rate"]:
        parts.append(f"{record['rate']['median']:.3f} of LayerNorm's tokens/s")
    if "roofline" in record:
        parts.append(f"{record['roofline']:.2f} of the roofline")
    if "peak_memory" in record:
        parts.append(f"peak {record['peak_memory']:.2f}")
    for target in record.get("targets", ()):
        parts.append(f"{target['name']} {target['value']:.3f}: {'met' if target['met'] else 'MISSED'}")
    return "  ".join(parts)


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all families share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--full", action="store_true", help="more of everything, in up to three hours")
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the records (%(default)s)")
    return made


def start_again(module: str, threads: int = 1) -> None:
    """Starts this process again in the environment for measurements, unless it has it.

    Without glibc's giving memory back to the system each large tensor costs a page fault per 4 KB, which is more than
    what a norm does with it; training processes of this project are started in the same way.
    """
    if os.environ.get("POWERNORM_BENCHMARK") != module:
        wanted = {**environment(threads), "POWERNORM_BENCHMARK": module}
        os.execve(sys.executable, [sys.executable, "-W", "ignore", "-m", module, *sys.argv[1:]], wanted)
    logging.disable(logging.INFO)  # fairseq's imports turn on what many libraries have to say
