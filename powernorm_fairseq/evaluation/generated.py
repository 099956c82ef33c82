"""Hypotheses and references in what fairseq-generate prints."""

import re
from typing import Dict, List, Optional, Tuple

from powernorm_fairseq.processes import UserError

_NUMBERED = {letter: re.compile(rf"{letter}-(\d+)\t") for letter in "HT"}


def hypotheses_of(output: str, count: int) -> List[str]:
    """The best hypothesis for each line of the data set, from what fairseq-generate printed.

    Raises:
        UserError: there is not exactly one for each of the ``count`` lines.
    """
    found: Dict[int, str] = {}
    for number, rest in _numbered(output, "H"):
        if number in found:
            raise UserError(f"line {number} of the data set has two hypotheses; decode with --nbest 1")
        found[number] = rest.partition("\t")[2]
    missing = sorted(set(range(count)) - set(found))
    if missing or len(found) != count:
        raise UserError(f"{len(found)} hypotheses for {count} lines; the first one missing is {missing[:1]}")
    return [found[number] for number in range(count)]


def references_of(output: str) -> Optional[List[str]]:
    """The references that fairseq-generate printed beside the hypotheses; None where it printed none.

    They are tokens joined from subwords, and ``<<unk>>`` stands for what the dictionary lacks: not text as people
    wrote it.

    Raises:
        UserError: a line of the data set is missing or has two references.
    """
    lines = _numbered(output, "T")
    found = dict(lines)
    if len(lines) != len(found) or set(found) != set(range(len(found))):
        raise UserError(f"the {len(lines)} references are not one for each line of the data set; is the output whole?")
    return [found[number] for number in range(len(found))] or None


def _numbered(output: str, letter: str) -> List[Tuple[int, str]]:
    """The number and the rest of each line that starts with ``letter``."""
    found = []
    for line in output.split("\n"):
        match = _NUMBERED[letter].match(line)
        if match:
            found.append((int(match.group(1)), line[match.end() :]))
    return found
