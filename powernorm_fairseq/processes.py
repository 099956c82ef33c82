"""Starting fairseq's programs, and the errors that a user sees without a traceback."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Dict, Iterable, List, Mapping, Sequence

PACKAGE = Path(__file__).resolve().parent


# Seconds to wait for a locked folder: the children of a process that was just killed need a moment to end.
PATIENCE = 5.0


class UserError(Exception):
    """Something that the user can put right; the command line prints the message alone."""


def fairseq_program(name: str) -> List[str]:
    """The start of a command line for ``fairseq-<name>`` of the running Python's environment."""
    script = Path(sys.executable).with_name(f"fairseq-{name}")
    return [str(script)] if script.exists() else [sys.executable, "-m", "fairseq_cli." + name.replace("-", "_")]


def own_program(*args: object) -> List[str]:
    """A command line of this very package with the running Python."""
    script, here = Path(sys.executable).with_name(PACKAGE.name), Path.cwd() / PACKAGE.name
    # `python -m` looks into the current folder first, which may be a checkout of another state than what is installed.
    elsewhere = here.is_dir() and here.resolve() != PACKAGE
    start = [str(script)] if elsewhere and script.exists() else [sys.executable, "-m", PACKAGE.name]
    return [*start, *map(str, args)]


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(threads: int) -> Dict[str, str]:
    """The environment of a child that computes with ``threads`` threads.

    The package's own folder comes first in the search path, so that a child started in another folder, or from
    a checkout that is not installed, runs the same code. The malloc settings keep glibc from returning every large
    tensor to the kernel and faulting it in again, which costs about a fifth of the time of a small model on a CPU.
    """
    changed = dict(os.environ)
    changed["OMP_NUM_THREADS"] = changed["MKL_NUM_THREADS"] = str(threads)
    changed["PYTHONUNBUFFERED"] = "1"
    known = changed.get("PYTHONPATH", "")
    changed["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *([known] if known else [])])
    for name, value in (("MMAP_THRESHOLD", 1 << 31), ("TRIM_THRESHOLD", 1 << 33), ("TOP_PAD", 1 << 26)):
        changed.setdefault(f"MALLOC_{name}_", str(value))
    return changed


def end_with_parent() -> None:
    """In a child: be killed when the parent dies, however it dies; nothing to do outside Linux."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def start(
    command: Sequence[str], log: Path, *, threads: int = 1, without: Iterable[str] = ()
) -> "subprocess.Popen[bytes]":
    """Start ``command``; all of its output is appended to ``log``.

    The child ends with this process, so that nobody goes on writing into a folder that a later start continues; and it
    inherits a lock on the folder (``hold``), for systems where it cannot be made to end. It does not see the variables
    of the environment that ``without`` names.
    """
    seen = {name: value for name, value in environment(threads).items() if name not in set(without)}
    with open(log, "ab") as output:
        output.write(("$ " + " ".join(command) + "\n").encode())
        output.flush()
        # Of Python's own files only those that `hold` has made inheritable are passed on.
        return with_parent(command, stdout=output, stderr=subprocess.STDOUT, env=seen, close_fds=False)


def with_parent(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a child that ends with this process and shares its output."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent, **options)


def run_to_end(command: Sequence[str], log: Path, **options: Any) -> None:
    """Run ``command`` to its end.

    Raises:
        UserError: it ended with another code than 0; the message holds the end of ``log``.
    """
    process = start(command, log, **options)
    try:
        code = process.wait()
    except BaseException:
        stop(process)
        raise
    if code:
        raise UserError(failure(Path(command[0]).name, code, log))


def stop(process: "subprocess.Popen[bytes]", patience: float = 5.0) -> None:
    """End a child that was started here, politely first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def failure(name: str, code: int, log: Path) -> str:
    """What to tell the user about a program that failed: its code and the end of its log."""
    return f"{name} ended with code {code}; the end of {log}:\n{tail(log)}"


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a text file, indented; long lines are cut."""
    if not path.exists():
        return "    (no log)"
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 40_000))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join("    " + line[:400] for line in text.splitlines()[-lines:])


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none of it, whenever this process is killed."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def hold(folder: Path) -> "IO[str]":
    """Lock a folder for this process and its children; close the returned file to let it go.

    Raises:
        UserError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "w")  # noqa: SIM115 - it is held until the caller closes it
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                lock.close()
                raise UserError(f"another process is at work in {folder}; wait for it or end it") from None
            time.sleep(0.1)
    os.set_inheritable(lock.fileno(), True)
    return lock


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> List[str]:
    """The keys in which two nested mappings differ, as ``group.key: old -> new``."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return found
