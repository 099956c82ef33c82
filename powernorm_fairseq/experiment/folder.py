"""The folder of one run: whose it is."""

import json
from pathlib import Path
from typing import IO

from powernorm_fairseq.corpora.steps import digest_of_files, stamp_of
from powernorm_fairseq.experiment.config import Config, dump, load_config
from powernorm_fairseq.processes import UserError, differences, hold, write_atomically

CONFIG = "config.yaml"
DATA = "data.json"


def claim(folder: Path, config: Config) -> "IO[str]":
    """Take a folder for a run of ``config``, new or to be continued; close the returned file to let it go.

    Raises:
        UserError: another process is at work in it, or it belongs to a run of another config or other data.
    """
    lock = hold(folder)
    try:
        check(folder, config)
    except BaseException:
        lock.close()
        raise
    return lock


def check(folder: Path, config: Config) -> None:
    """Write down whose folder this is, or find out that it is another run's (UserError)."""
    identity = {"fingerprint": fingerprint_of_data(Path(config["task"]["data"]))}
    if (folder / CONFIG).exists():
        changed = differences(_without_places(load_config(folder / CONFIG)), _without_places(config))
        before = json.loads((folder / DATA).read_text(encoding="utf-8")) if (folder / DATA).exists() else identity
        if before != identity:
            changed.append(f"the data in {config['task']['data']} is not what it was")
        if changed:
            listed = "\n    ".join(changed)
            raise UserError(
                f"{folder} holds a run of another config; remove it or take another folder. What differs:\n    {listed}"
            )
    write_atomically(folder / DATA, json.dumps(identity) + "\n")
    dump(config, folder / CONFIG)


def _without_places(config: Config) -> Config:
    """A config without what may change when a folder is moved."""
    kept = {group: dict(options) for group, options in config.items()}
    kept["task"].pop("data", None)
    kept.get("checkpoint", {}).pop("save_dir", None)
    kept.get("common", {}).pop("user_dir", None)
    return kept


def fingerprint_of_data(data: Path) -> str:
    """What identifies binarised text: the stamp of its preparation, or else dictionaries and the sizes of files.

    Raises:
        UserError: there is no binarised text.
    """
    stamp = stamp_of(data)
    if stamp is not None:
        return stamp["fingerprint"]
    dictionaries = sorted(data.glob("dict*.txt"))
    if not dictionaries:
        raise UserError(f"no text prepared for fairseq in {data}; see `powernorm_fairseq prepare --help`")
    sizes = ",".join(f"{path.name}:{path.stat().st_size}" for path in sorted(data.glob("*.bin")))
    return digest_of_files(dictionaries) + "," + sizes
