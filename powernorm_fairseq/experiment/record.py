"""``result.json``: what a run gave, and what somebody else needs to know to get it again."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from powernorm_fairseq.processes import PACKAGE, cores, write_atomically

RESULT = "result.json"


def versions() -> Dict[str, str]:
    """The versions that scores may depend on."""
    import fairseq
    import numpy
    import omegaconf
    import sacrebleu
    import torch

    from powernorm_fairseq.version import __version__

    modules = {"torch": torch, "fairseq": fairseq, "numpy": numpy, "omegaconf": omegaconf, "sacrebleu": sacrebleu}
    found = {name: str(module.__version__) for name, module in modules.items()}
    return {"powernorm_fairseq": __version__, "python": platform.python_version(), **found}


def hardware(threads: int) -> Dict[str, Any]:
    """Processor, cores, GPUs, and the threads that each process of the run had."""
    import torch

    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"processor": name, "system": platform.platform(), "cores": cores(), "threads": threads, "gpus": gpus}


def git_commit() -> Optional[str]:
    """The commit that the running package is of, with ``+`` if files differ from it; None where that cannot be known.

    A package that is installed has no commit itself; if the current folder is a checkout of the same files, its commit
    counts.
    """
    here = Path.cwd() / PACKAGE.name
    candidates = [PACKAGE] + ([here] if here.is_dir() and _sources(here) == _sources(PACKAGE) else [])
    for folder in candidates:
        try:
            # A virtual environment may lie in some checkout; only files that git knows are of its commit.
            _git(folder, "ls-files", "--error-unmatch", "version.py")
            changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
            return _git(folder, "rev-parse", "HEAD") + ("+" if changed else "")
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _sources(folder: Path) -> Dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    return done.stdout.strip()


def write(folder: Path, result: Dict[str, Any], threads: int) -> Dict[str, Any]:
    """Complete ``result`` with the circumstances and write it, whole or not at all; returns what was written."""
    complete = {
        **result,
        "versions": versions(),
        "hardware": hardware(threads),
        "git_commit": git_commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
    write_atomically(folder / RESULT, json.dumps(complete, indent=1, ensure_ascii=False) + "\n")
    return complete


def read(folder: Path) -> Optional[Dict[str, Any]]:
    """The result in a run's folder; None where there is none."""
    try:
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_all(root: Path) -> List[Dict[str, Any]]:
    """All results below ``root``, by folder; each gets its ``folder``."""
    found = []
    for path in sorted(root.rglob(RESULT)):
        result = read(path.parent)
        if result is not None:
            found.append({**result, "folder": str(path.parent)})
    return found
