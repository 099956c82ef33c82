"""The training of a run by fairseq-train: its start, its progress, its end; divergence is one way to end."""

import json
import math
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

from powernorm_fairseq.checkpoints.average import load_checkpoint
from powernorm_fairseq.checkpoints.last import mend_last_checkpoint
from powernorm_fairseq.checkpoints.patience import STATE
from powernorm_fairseq.experiment import record
from powernorm_fairseq.experiment.config import Config, number
from powernorm_fairseq.experiment.launch import LAUNCHERS, ONE, Launch, command, record_of
from powernorm_fairseq.experiment.log import Follower, clock, validations
from powernorm_fairseq.processes import UserError, failure, start, stop, write_atomically

Say = Callable[[str], None]
PROGRESS_SECONDS = 15.0

# How fairseq-train ends a training whose loss or gradients are no numbers any more. Of several workers it says that
# they are "inconsistent"; then only values of NaN or infinity mean divergence, others mean a fault.
_NOT_FINITE = re.compile(r"^FloatingPointError: gradients are Nan/Inf", re.MULTILINE)
_LOSS_SCALE = re.compile(r"^FloatingPointError: (?:AMP: )?Minimum loss scale reached", re.MULTILINE)
_WORKERS = re.compile(r"^FloatingPointError: Fatal error: gradients are inconsistent between workers.*", re.M | re.S)
_RANK = re.compile(r"^rank +\d+ = (nan|-?inf)\s*$", re.MULTILINE)


def train(config: Config, folder: Path, threads: int, say: Say, launch: Launch = ONE) -> Dict[str, Any]:
    """Train to the end, from where an earlier start was interrupted.

    Returns:
        ``outcome`` (``finished`` or ``diverged``), ``updates``, ``seconds``, ``parameters``, ``valid_loss`` and
        ``valid_nll`` of the last validation, ``workers``, ``nodes``, ``git_commit`` of the code that trained, and for a
        training that diverged ``reason``. What is not known is None.
        A training that has ended either way is not done again.

    Raises:
        UserError: fairseq-train failed otherwise.
    """
    marker, log, checkpoints = folder / "trained.json", folder / "train.log", folder / "checkpoints"
    if marker.exists():
        return json.loads(marker.read_text(encoding="utf-8"))
    checkpoints.mkdir(exist_ok=True)
    for words in mend_last_checkpoint(checkpoints, replace_missing=True):
        say(words)
    going_on = (checkpoints / "checkpoint_last.pt").exists()
    log.touch()
    follower, size, began = Follower(log), log.stat().st_size, time.time()
    code = 0
    # Several nodes start their workers together, whatever one of them knows.
    if launch.nodes == 1 and going_on and has_ended(config, checkpoints / "checkpoint_last.pt"):
        say("training had come to its end")
    else:
        process = _start(config, log, threads, launch)
        try:
            _watch(process, follower, int(number(config, "optimization", "max_update", 0)), going_on, say)
        finally:
            stop(process)
        code = process.returncode
    follower.look()
    history = validations(log)
    reason = None
    if code:
        reason = reason_of_divergence(_from(log, size))
        if reason is None:
            raise UserError(failure("fairseq-train", code, log))
    elif history and not math.isfinite(history[-1].loss):
        reason = f"the validation loss is {history[-1].loss}"
    last = history[-1] if history and math.isfinite(history[-1].loss) else None
    training = {
        "outcome": "diverged" if reason else "finished",
        **_end_of_training(checkpoints, follower, began if reason else None),
        "valid_loss": last.loss if last else None,
        "valid_nll": last.nll if last else None,
        **record_of(launch),
        # Scores may be computed by later code than that which trained.
        "git_commit": record.git_commit(),
    }
    if reason:
        training["reason"] = reason
        say(f"diverged after {training['updates']} updates: {reason}")
    write_atomically(marker, json.dumps(training) + "\n")
    return training


def has_ended(config: Config, last: Path) -> bool:
    """Whether a checkpoint is that of a training's end, which was interrupted before its end was written down.

    fairseq-train would go on from it: one update more, after a cosine schedule with a learning rate that is up again;
    after ``patience`` an epoch more or many.
    """
    state = load_checkpoint(last)
    limit = int(number(config, "optimization", "max_update", 0))
    patience = int(number(config, "checkpoint", "patience", -1))
    count = (state.get("extra_state") or {}).get(STATE, {}).get("num_runs", 0)
    return 0 < limit <= int(state["optimizer_history"][-1]["num_updates"]) or 0 < patience <= count


def join(config: Config, folder: Path, threads: int, say: Say, launch: Launch) -> None:
    """The part of a node other than the first in a training: its workers, and nothing before or after them.

    Raises:
        UserError: the workers failed otherwise than by divergence.
    """
    marker, log = folder / "trained.json", folder / f"train.node{launch.node}.log"
    if marker.exists():
        say("training has ended before")
        return
    folder.mkdir(parents=True, exist_ok=True)
    log.touch()
    size = log.stat().st_size
    say(f"node {launch.node} of {launch.nodes} takes part in the training")
    process = _start(config, log, threads, launch)
    try:
        process.wait()
    finally:
        stop(process)
    if process.returncode and not marker.exists() and reason_of_divergence(_from(log, size)) is None:
        raise UserError(failure("the training", process.returncode, log))


def _start(config: Config, log: Path, threads: int, launch: Launch) -> "subprocess.Popen[bytes]":
    return start(command(config, launch), log, threads=max(1, threads // launch.local), without=LAUNCHERS)


def _from(log: Path, position: int) -> str:
    """What was appended to a log."""
    with open(log, "rb") as file:
        file.seek(position)
        return file.read().decode("utf-8", errors="replace")


def reason_of_divergence(log: str) -> Optional[str]:
    """Why a training ended if it ended because it diverged, by what fairseq-train printed; else None."""
    if _LOSS_SCALE.search(log):
        return "gradients overflow at the smallest loss scale"
    workers = _WORKERS.search(log)
    if _NOT_FINITE.search(log) or (workers and _RANK.search(workers.group(0))):
        return "gradients are NaN or infinite"
    return None


def _end_of_training(checkpoints: Path, follower: Follower, began: Optional[float]) -> Dict[str, Any]:
    """Updates, seconds and parameters, from the checkpoint that fairseq-train ended with.

    Args:
        began: when a training started that diverged, for which fairseq writes ``crash.pt``; None for one that did not.
    """
    last = checkpoints / "checkpoint_last.pt"
    crash = checkpoints / "crash.pt"
    candidates = [last]
    if began is not None:
        candidates = [crash] if crash.exists() and crash.stat().st_mtime >= began - 1 else []
    for path in candidates:
        try:
            state = load_checkpoint(path)
        except Exception:
            if began is None:
                raise
            continue  # half written, by a worker that was ended since another one had failed
        return {
            "updates": int(state["optimizer_history"][-1]["num_updates"]),
            # fairseq carries this over an interruption; what was lost and repeated is not counted. Several workers
            # keep it as a tensor.
            "seconds": float(state["extra_state"]["previous_training_time"]),
            "parameters": count_parameters(state),
        }
    return {"updates": follower.update, "seconds": None, "parameters": None}


def _watch(process: "subprocess.Popen[bytes]", follower: Follower, updates: int, going_on: bool, say: Say) -> None:
    """Print progress until the process ends."""
    say("training goes on" if going_on else "training starts")
    began = spoke = time.monotonic()
    # Speed is measured from the first progress on, since before it lie imports and perhaps an earlier training.
    since: Optional[Tuple[float, int]] = None
    while process.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        if not follower.look():
            continue
        if since is None:
            since = (now, follower.update)
        elif now - spoke >= PROGRESS_SECONDS and follower.update > since[1]:
            spoke = now
            pace = (now - since[0]) / (follower.update - since[1])
            left = f", {clock(pace * (updates - follower.update))} left" if updates else ""
            total = f" of {updates}" if updates else ""
            loss = f"training loss {follower.loss:.2f}"
            say(f"update {follower.update}{total}, {loss}, {clock(now - began)} gone{left}")


def count_parameters(state: Dict[str, Any]) -> int:
    """Trained numbers in a checkpoint: what the optimiser has moments for."""
    optimizer = state.get("last_optimizer_state") or {}
    return sum(moments["exp_avg"].numel() for moments in optimizer.get("state", {}).values() if "exp_avg" in moments)
