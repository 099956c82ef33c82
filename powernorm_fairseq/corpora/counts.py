"""What was counted in a prepared corpus, beside what is known of it."""

import json
import sys
from pathlib import Path
from typing import Callable, Dict, Mapping

from powernorm_fairseq.corpora.catalogue import RECALLED, DataSet
from powernorm_fairseq.processes import write_atomically

COUNTS = "counts.json"


def tell(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)


def write_counts(folder: Path, counts: Mapping[str, int]) -> None:
    """Leave counts, named as the catalogue names them, in the folder of a step."""
    write_atomically(folder / COUNTS, json.dumps(dict(counts), indent=1, ensure_ascii=False) + "\n")


def read_counts(folder: Path) -> Dict[str, int]:
    """What ``write_counts`` left there; empty if it left nothing."""
    path = folder / COUNTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def compare(data: DataSet, found: Mapping[str, int], say: Callable[[str], None] = tell) -> bool:
    """Compare counts with the catalogue's, and say each difference and its weight; nothing is refused.

    A figure that others have published and that is not met means another text: WARNING. One that is only recalled may
    itself be wrong: note.

    Returns:
        Whether all that is known and was counted is the same.
    """
    same = True
    for count in data.counts:
        if count.of not in found or found[count.of] == count.value:
            continue
        same = False
        number = f"{count.of}: {found[count.of]:,} here, {count.value:,}"
        if count.source == RECALLED:
            say(f"note: {number} as recalled by this project, which may be wrong")
        else:
            say(f"WARNING: {number} known from {count.source}; this is another text, scores on it will not compare")
    known = [count.of for count in data.counts if count.of in found]
    if same and known:
        say(f"as known: {', '.join(known)}")
    return same
