"""What fairseq-train says about its progress (``--log-format json``)."""

import json
import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

# "... | INFO | valid | {...}" from fairseq-train, "[...][valid][INFO] - {...}" from fairseq-hydra-train, and
# "INFO:valid:{...}" where something else has set up logging first.
_RECORD = re.compile(r"(?:\| INFO \| |\]\[|INFO:)(train_inner|valid)(?: \| |\]\[INFO\] - |:)(\{.*\})\s*$")


class Validation(NamedTuple):
    """One validation: after how many updates, and fairseq's losses in bits per token."""

    update: int
    loss: float
    nll: float


def records(lines: List[str]) -> List[Tuple[str, Dict[str, float]]]:
    """(``train_inner`` or ``valid``, its numbers) for each such line; half a line at the end is left out."""
    found = []
    for line in lines:
        match = _RECORD.search(line)
        if match:
            try:
                fields = json.loads(match.group(2))
                # "None" is a number that no update since the last line has given.
                found.append((match.group(1), {key: float(v) for key, v in fields.items() if v not in (None, "None")}))
            except ValueError:
                continue
    return found


def validations(log: Path) -> List[Validation]:
    """The validations in a log, by update.

    Where training was interrupted and went on from an earlier checkpoint, the log holds some twice; the later counts.
    """
    if not log.exists():
        return []
    by_update = {}
    for kind, numbers in records(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if kind == "valid":
            update = int(numbers["valid_num_updates"])
            loss = numbers["valid_loss"]
            by_update[update] = Validation(update, loss, numbers.get("valid_nll_loss", loss))
    return [by_update[update] for update in sorted(by_update)]


def statistics(log: Path) -> Dict[str, List[Tuple[int, float]]]:
    """What ``norm_log_interval`` has left in a log: ``WHAT/NORM`` (``norms.watching``) -> (update, value), by update.

    Where training was interrupted and repeated updates, the later value counts.
    """
    found: Dict[str, Dict[int, float]] = {}
    if log.exists():
        for kind, numbers in records(log.read_text(encoding="utf-8", errors="replace").splitlines()):
            if kind == "train_inner":
                for name, value in numbers.items():
                    if name.startswith(("fwd_", "bkw_")) and "/" in name:
                        found.setdefault(name, {})[int(numbers["num_updates"])] = value
    return {name: sorted(values.items()) for name, values in found.items()}


class Follower:
    """Reads what is appended to a log between one look and the next."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.position = log.stat().st_size if log.exists() else 0
        self.update = 0
        self.loss = float("nan")

    def look(self) -> bool:
        """Take in what is new; True if ``update`` or ``loss`` changed."""
        with open(self.log, "rb") as file:
            file.seek(self.position)
            text = file.read()
        whole, newline, _ = text.rpartition(b"\n")
        self.position += len(whole) + len(newline)
        before = (self.update, self.loss)
        for kind, numbers in records(whole.decode("utf-8", errors="replace").splitlines()):
            if kind == "train_inner":
                self.update, self.loss = int(numbers["num_updates"]), numbers["loss"]
        return (self.update, self.loss) != before


def clock(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
