"""``checkpoint_last.pt`` after a kill or on a full disk: what to do where it is cut off or missing.

fairseq writes one checkpoint of a save under another name and renames it when it is whole, but then copies it to
``checkpoint_best.pt`` and ``checkpoint_last.pt``, so that half of a copy can be left. fairseq fails to load that, and
each start fails again.
"""

import logging
import os
import pickletools
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

import torch

from powernorm_fairseq.checkpoints.average import load_checkpoint
from powernorm_fairseq.processes import UserError

logger = logging.getLogger(__name__)

DEFAULT = "checkpoint_last.pt"
# With these, which fairseq itself appends, each worker has a part of the model in a file of its own.
PARTS = re.compile(r"-(shard|rank-|model_part-)\d+$")


def around_load_checkpoint(original: Callable[..., Any], cfg: Any, trainer: Any, **passthrough_args: Any) -> Any:
    """``fairseq.checkpoint_utils.load_checkpoint`` that has a look at ``checkpoint_last.pt`` first.

    A broken one gives way to the newest other checkpoint; a missing one is warned about where there are others. Only
    the first worker touches files. Any other ``--restore-file`` is left to fairseq, as are models in several parts.
    """
    suffix = trainer.checkpoint_suffix
    if cfg.restore_file == DEFAULT and not PARTS.search(suffix):
        _first_worker(trainer, lambda: _mend(Path(cfg.save_dir), suffix))
    return original(cfg, trainer, **passthrough_args)


def _mend(folder: Path, suffix: str) -> None:
    for words in mend_last_checkpoint(folder, suffix):
        logger.warning("%s: %s", folder, words)


def _first_worker(trainer: Any, act: Callable[[], None]) -> None:
    """``act()`` in the first worker, while the others wait; if it fails there, it fails everywhere."""
    error: Optional[Exception] = None
    if trainer.data_parallel_rank == 0:
        try:
            act()
        except Exception as raised:
            error = raised
    if trainer.data_parallel_world_size > 1:
        from fairseq.distributed import utils

        failed = torch.tensor([float(error is not None)], device=trainer.device)
        utils.all_reduce(failed, group=trainer.data_parallel_process_group)
        if failed.item() and error is None:
            raise RuntimeError("the first worker could not put checkpoint_last.pt in order; its error says why")
    if error is not None:
        raise error


def mend_last_checkpoint(folder: Path, suffix: str = "", *, replace_missing: bool = False) -> List[str]:
    """Put a whole checkpoint in the place of a broken ``checkpoint_last.pt``; returns what was done, in sentences.

    Broken files are renamed to ``<name>.broken``. Nothing is deleted.

    Args:
        folder: where the checkpoints of one run are; may be missing.
        suffix: fairseq's ``--checkpoint-suffix``.
        replace_missing: do the same where there is no ``checkpoint_last.pt``; otherwise that is only told, since it
            is how fairseq is made to start anew.
    """
    last = folder / f"checkpoint_last{suffix}.pt"
    others = _other_checkpoints(folder, suffix)
    if last.exists():
        reason = why_broken(last)
        if reason is None:
            return []
        done = [_put_aside(last, reason)]
    elif not others:
        return []
    elif not replace_missing:
        names = ", ".join(path.name for path in others[:5]) + (", ..." if len(others) > 5 else "")
        return [
            f"there is no {last.name}, so training starts anew, and overwrites checkpoints of the same name ({names}); "
            f"to continue from one of them, stop now and copy it to {last.name}"
        ]
    else:
        done = [f"there is no {last.name}"]
    for path in list(others):
        reason = why_broken(path)
        if reason is not None:
            others.remove(path)
            done.append(_put_aside(path, reason))
    newest = _newest(others, suffix, done)
    if newest is None:
        done.append("there is no other whole checkpoint, so training starts anew")
    else:
        path, updates = newest
        partial = last.with_name(last.name + ".partial")
        shutil.copyfile(path, partial)  # no link: fairseq writes into the file that it finds
        os.replace(partial, last)
        done.append(f"training continues from {path.name}, update {updates}")
    return done


def why_broken(checkpoint: Path) -> Optional[str]:
    """Why a file is no whole file of ``torch.save``; None if it is one, in today's format or in that before torch 1.6.

    A whole file that torch refuses to load for another reason, such as an unknown class, is not broken.
    """
    if checkpoint.stat().st_size == 0:
        return "it is empty"
    with open(checkpoint, "rb") as file:
        if file.read(2) == b"PK":
            try:
                with zipfile.ZipFile(file):  # reads the archive's list of contents, which is written last
                    return None
            except zipfile.BadZipFile:
                return "it is cut off: the end of its zip archive is missing"
        file.seek(0)
        try:
            for _ in range(5):  # a magic number, a version, sizes of types, the state, the keys of its tensors
                for _ in pickletools.genops(file):
                    pass
        except Exception as error:  # whatever the bytes happen to lead to
            return f"it is cut off or no checkpoint at all: {error}"
    try:
        torch.load(str(checkpoint), map_location="cpu")
    except Exception as error:
        if "EOF" in str(error):
            return f"it is cut off: {error}"
        logger.debug("%s does not load", checkpoint, exc_info=True)
    return None


def _put_aside(path: Path, reason: str) -> str:
    aside, number = path.with_name(path.name + ".broken"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.broken{number}")
    os.replace(path, aside)
    return f"{path.name} is broken and now called {aside.name} ({reason})"


def _other_checkpoints(folder: Path, suffix: str) -> List[Path]:
    """What fairseq may have saved apart from the last: by epoch, by update, the best."""
    names = rf"checkpoint(\d+|_\d+_\d+|_best|\.best_.+_-?[\d.]+){re.escape(suffix)}\.pt"
    return sorted(path for path in folder.glob("checkpoint*.pt") if re.fullmatch(names, path.name) and path.is_file())


def _newest(paths: List[Path], suffix: str, done: List[str]) -> Optional[Tuple[Path, int]]:
    """The loadable checkpoint after the most updates, and their number; ``done`` is told of those that do not load."""
    end = re.escape(suffix) + r"\.pt"
    kinds: List[List[Path]] = []  # each with the newest first
    rest = set(paths)
    for names in (rf"checkpoint_\d+_(\d+){end}", rf"checkpoint(\d+){end}"):
        matches = [(re.fullmatch(names, path.name), path) for path in paths]
        numbered = sorted((int(match.group(1)), path) for match, path in matches if match)
        kinds.append([path for _, path in reversed(numbered)])
        rest -= set(kinds[-1])
    found: List[Tuple[Path, int]] = []
    for kind in kinds + [[path] for path in sorted(rest)]:
        for path in kind:
            try:
                history = load_checkpoint(path)["optimizer_history"]
            except UserError as error:
                done.append(str(error).splitlines()[0])
                continue
            found.append((path, int(history[-1].get("num_updates", 0))))
            break
    return max(found, key=lambda pair: pair[1], default=None)
