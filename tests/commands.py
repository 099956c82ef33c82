"""Runs fairseq's own commands for the tests, in this process or in a fresh one."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import List, Mapping, Optional, Sequence
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "powernorm_fairseq"
READERS = ("fairseq-train", "fairseq-generate", "fairseq-interactive", "fairseq-validate", "fairseq-eval-lm")


def in_fresh_process(
    program: str,
    *args: object,
    cwd: Optional[Path] = None,
    env: Optional[Mapping[str, str]] = None,
    timeout: float = 180,
) -> "subprocess.CompletedProcess[str]":
    """Run ``program`` (``fairseq-train``, ...) of this environment; never raises on a bad exit code."""
    command = [str(Path(sys.executable).parent / program), *with_no_reader(program, args)]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
    )


def in_a_group(command: Sequence[object], timeout: float) -> str:
    """Run a command that starts processes of its own, all of which are killed at the end, however it ends.

    A bad exit code fails the test and shows the output, which is returned.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=str(ROOT),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]
    return output


def checked(program: str, *args: object, **kwargs: object) -> str:
    """Like ``in_fresh_process``, but a bad exit code fails the test and shows the output, which is returned."""
    done = in_fresh_process(program, *args, **kwargs)  # type: ignore[arg-type]
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def in_this_process(program: str, *args: object) -> str:
    """Run ``fairseq-<program>`` through its ``cli_main`` here, which saves the import; returns stdout."""
    import importlib

    module = importlib.import_module("fairseq_cli." + program.replace("fairseq-", "").replace("-", "_"))
    handlers = list(logging.root.handlers)
    out = io.StringIO()
    argv: List[str] = [program, *with_no_reader(program, args)]
    try:
        with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out):
            module.cli_main()
    finally:
        logging.root.handlers[:] = handlers
    return out.getvalue()


def with_no_reader(program: str, args: Sequence[object]) -> List[str]:
    """The arguments, with data read by the program itself where they do not say how many processes shall read it.

    The end of a reader is waited for, often for seconds.
    """
    told = list(map(str, args))
    return told if program not in READERS or "--num-workers" in told else [*told, "--num-workers", "0"]


def hypotheses(output: str) -> List[str]:
    """The hypotheses in fairseq-generate's output (its ``H-`` lines), in the order of the data set."""
    lines = [line.split("\t") for line in output.splitlines() if line.startswith("H-")]
    return [fields[2] for fields in sorted(lines, key=lambda fields: int(fields[0][2:]))]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def sample_reference(data: Path, split: str, language: str, count: int) -> None:
    """Put the untouched sentences of the sample beside binarised text, as preparation does."""
    with open(ROOT / "data" / "sample" / "ui-de-en" / f"{split}.{language}", encoding="utf-8") as lines:
        write_lines(data / f"reference.{split}.{language}", [next(lines).rstrip("\n") for _ in range(count)])
