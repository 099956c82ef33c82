"""Preparation in steps, each of which makes one folder, whole or not at all, and only where its inputs have changed."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence

from powernorm_fairseq.processes import UserError

STAMP = "made.json"


def digest_of_files(paths: Sequence[Path]) -> str:
    """SHA-256 over the names and contents of files, in the given order.

    Raises:
        UserError: a file does not exist.
    """
    total = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            raise UserError(f"no file {path}")
        total.update(path.name.encode() + b"\0")
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                total.update(block)
    return total.hexdigest()


def stamp_of(folder: Path) -> Optional[Dict[str, Any]]:
    """What a finished step says of itself; None where the folder is missing or no finished step made it."""
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class Preparation:
    """The folder of one prepared corpus.

    A step writes into ``<name>.partial``, is stamped with a fingerprint of its settings and of all that it was made
    from, and only then renamed to ``<name>``. So a folder that bears its name is whole, and a step whose fingerprint
    has changed (other raw text, other settings, an earlier step made anew) is made again.
    """

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        self.root = root
        self.say = say

    def step(self, name: str, make: Callable[[Path], None], made_from: Mapping[str, Any]) -> Path:
        """Return the folder ``name``, made by ``make(folder)`` unless it is there and made from the same.

        Args:
            made_from: settings (anything JSON can hold), digests of raw files, and folders of earlier steps (Path),
                which count with their fingerprints.
        """
        target = self.root / name
        inputs = {
            key: self._fingerprint(value) if isinstance(value, Path) else value for key, value in made_from.items()
        }
        encoded = json.dumps([name, inputs], sort_keys=True, ensure_ascii=False)
        fingerprint = hashlib.sha256(encoded.encode()).hexdigest()
        stamp = stamp_of(target)
        if stamp and stamp.get("fingerprint") == fingerprint:
            self.say(f"{self.root.name}: {name} is there")
            return target

        began = time.monotonic()
        partial = self.root / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        (partial / STAMP).write_text(
            json.dumps({"fingerprint": fingerprint, "made_from": inputs}, indent=1, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )
        if target.exists():
            # First, or what is left after a kill in between would pass for whole once the settings are the old ones.
            (target / STAMP).unlink(missing_ok=True)
            shutil.rmtree(target)
        os.replace(partial, target)
        self.say(f"{self.root.name}: {name} made in {time.monotonic() - began:.1f} s")
        return target

    @staticmethod
    def _fingerprint(folder: Path) -> str:
        stamp = stamp_of(folder)
        if stamp is None:
            raise UserError(f"{folder} is not the finished output of a preparation step")
        return stamp["fingerprint"]
