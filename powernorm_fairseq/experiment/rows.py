"""The rows of published tables and of the sample: which there are, where their configs, text and runs are."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import List

from powernorm_fairseq.experiment.config import Config, load_config, with_norm
from powernorm_fairseq.processes import UserError

KINDS = ("mt", "lm")
SAMPLE = "sample"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        kind: ``mt`` or ``lm``.
        group: the table, such as ``iwslt14_de_en``; ``sample``: the text that comes with the project.
        norm: the row's name in it.
        path: its YAML; that of the sample is one for all norms.
    """

    kind: str
    group: str
    norm: str
    path: Path

    @property
    def name(self) -> str:
        """Its full name, ``mt/iwslt14_de_en/power``."""
        return f"{self.kind}/{self.group}/{self.norm}"

    def config(self) -> Config:
        """Its config."""
        config = load_config(self.path)
        return with_norm(config, self.norm) if self.group == SAMPLE else config

    def corpus(self) -> str:
        """What ``powernorm_fairseq prepare`` calls its text: the folder around the one for fairseq."""
        return Path(load_config(self.path)["task"]["data"]).parent.name

    def paper(self) -> str:
        """The published number, in the words of the YAML's header; empty for the sample."""
        head = self.path.read_text(encoding="utf-8").partition("\ncommon:")[0]
        match = re.search(r"^# Paper: +(.*(?:\n#  +.*)*)", head, flags=re.MULTILINE)
        return " ".join(line.lstrip("# ") for line in match.group(1).splitlines()) if match else ""


def rows(configs: Path) -> List[Row]:
    """All rows below a folder of configs, the sample's with every norm.

    Raises:
        UserError: there is no such folder.
    """
    from powernorm_fairseq.norms import NORMS

    if not configs.is_dir():
        raise UserError(f"no folder {configs}: start this in the project's folder, or say where it is with --configs")
    found = []
    for kind in KINDS:
        for path in sorted((configs / kind).glob("*/*.yaml")):
            found.append(Row(kind, path.parent.name, path.stem, path))
        sample = configs / kind / f"{SAMPLE}.yaml"
        if sample.exists():
            found += [Row(kind, SAMPLE, norm, sample) for norm in NORMS]
    return found


def row_of(name: str, configs: Path) -> Row:
    """The row of that name, with or without its kind.

    Raises:
        UserError: there is none (the message lists those that there are), or one of each kind.
    """
    known = rows(configs)
    fitting = [row for row in known if name in (row.name, row.name.partition("/")[2])]
    if len(fitting) > 1:
        raise UserError(f"{name} can be {' or '.join(row.name for row in fitting)}; say which")
    if fitting:
        return fitting[0]
    listed = []
    for kind, group in dict.fromkeys((row.kind, row.group) for row in known):
        norms = [row.norm for row in known if (row.kind, row.group) == (kind, group)]
        listed.append(f"    {kind}/{group}/: {', '.join(norms)}")
    raise UserError("\n".join([f"no row {name}; there are", *listed]))
