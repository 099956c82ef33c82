"""``powernorm_fairseq demo``: small models with several norms on the sample text, and one table of their scores.

Prepares the sample, trains by fairseq-train side by side, decodes, scores. Interrupted and started again, it continues
where it was.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from powernorm_fairseq.experiment import record
from powernorm_fairseq.experiment.config import Config, load_config, override, with_norm
from powernorm_fairseq.experiment.folder import check
from powernorm_fairseq.experiment.log import clock
from powernorm_fairseq.experiment.run import Say, add_override, placed, speaker
from powernorm_fairseq.processes import UserError, cores, environment, hold, own_program, stop, with_parent

NORMS = ("layer", "power", "batch", "ada")
TASKS = {"mt": "translation", "lm": "language model"}

# Seconds on one core of an ordinary machine: only for the first guess of the time left, and to start long jobs first.
USUAL_SECONDS = {"prepare": 40.0, "floor": 40.0, "mt": 280.0, "lm": 200.0}
OVERVIEW_SECONDS = 60.0


@dataclass
class Job:
    """One command of this package."""

    name: str
    kind: str
    command: List[str]
    after: Sequence[str] = ()
    folder: Optional[Path] = None
    config: Optional[Config] = None
    process: Optional["subprocess.Popen[bytes]"] = field(default=None, repr=False)
    started: float = 0.0
    seconds: float = 0.0
    # None: waiting or running; 0: done; else: failed, or not tried since what it needs failed.
    code: Optional[int] = None


def jobs_of(args: argparse.Namespace) -> List[Job]:
    """All that the demo does, in the order in which it is started."""
    prepare, runs, floors = [], [], []
    for task in args.tasks:
        corpus = f"sample-{task}"
        prepared = args.output / "data" / corpus
        prepare.append(
            Job(
                f"{task}/prepare", "prepare", own_program("prepare", corpus, "--raw", args.sample, "--output", prepared)
            )
        )
        path = args.configs / task / "sample.yaml"
        base = override(load_config(path), [*args.override, f"task.data={prepared / 'binarised'}"])
        shared = ["--data", prepared / "binarised", "--threads", args.threads]
        shared += ["--set", *args.override] if args.override else []
        for norm in args.norms:
            name, folder = f"{task}/{norm}", args.output / task / norm
            command = own_program("run", path, "--dir", folder, "--norm", norm, "--label", name, *shared)
            runs.append(Job(name, task, command, (f"{task}/prepare",), folder, placed(with_norm(base, norm), folder)))
        name, folder = f"{task}/floor", args.output / task / "floor"
        command = own_program("floor", path, "--dir", folder, "--label", name, *shared)
        floors.append(Job(name, "floor", command, (f"{task}/prepare",), folder, placed(base, folder)))
    return prepare + runs + floors


def work(jobs: List[Job], slots: int, threads: int, say: Say) -> None:
    """Run all jobs, at most ``slots`` at a time, each as soon as what it comes after is done.

    A job that fails, and what needs it, does not keep the others from running. Interrupted, all are ended.
    """
    began = spoke = time.monotonic()
    by_name = {job.name: job for job in jobs}
    try:
        while any(job.code is None for job in jobs):
            running = [job for job in jobs if job.process is not None and job.code is None]
            for job in running:
                assert job.process is not None
                job.code = job.process.poll()
                job.seconds = time.monotonic() - job.started
                if job.code:
                    say(f"{job.name} failed; the others go on")
            for job in jobs:
                if job.code is None and job.process is None:
                    before = [by_name[name].code for name in job.after]
                    if any(before):
                        job.code = -1
                        say(f"{job.name} is left out, as {', '.join(job.after)} failed")
                    elif all(code == 0 for code in before) and _busy(jobs) < slots:
                        _start(job, threads, say)
            if time.monotonic() - spoke >= OVERVIEW_SECONDS:
                spoke = time.monotonic()
                say(overview(jobs, slots, spoke - began))
            time.sleep(0.2)
    finally:
        for job in jobs:
            if job.process is not None:
                stop(job.process)


def _busy(jobs: List[Job]) -> int:
    return sum(job.process is not None and job.code is None for job in jobs)


def _start(job: Job, threads: int, say: Say) -> None:
    """Start a job, unless its result is there already."""
    if job.folder is not None and job.config is not None:
        try:
            if record.read(job.folder) is not None:
                check(job.folder, job.config)
                job.code = 0
                say(f"{job.name}: finished before")
                return
        except UserError as error:
            job.code = 1
            say(f"{job.name}: {error}")
            return
    job.started = time.monotonic()
    # A session of its own: an interrupt from the keyboard reaches this process alone, which ends the jobs in order.
    job.process = with_parent(job.command, env=environment(threads), start_new_session=True)


def overview(jobs: List[Job], slots: int, elapsed: float) -> str:
    """How far the whole is, and about how long it will still take."""
    measured = [job for job in jobs if job.code == 0 and job.kind in TASKS and job.seconds]
    usual = sum(USUAL_SECONDS[job.kind] for job in measured)
    # This machine's pace, as soon as a training has shown it.
    pace = sum(job.seconds for job in measured) / usual if measured else 1.0
    left = sum(max(0.0, USUAL_SECONDS[job.kind] * pace - job.seconds) for job in jobs if job.code is None)
    busy = ", ".join(job.name for job in jobs if job.process is not None and job.code is None)
    return (
        f"{sum(job.code is not None for job in jobs)} of {len(jobs)} jobs done, at work on {busy or 'nothing'}; "
        f"{clock(elapsed)} gone, about {clock(left / slots)} left"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--norms", type=_names, default=list(NORMS), help=f"which norms ({','.join(NORMS)})")
    parser.add_argument("--tasks", type=_names, default=list(TASKS), help=f"which tasks ({','.join(TASKS)})")
    parser.add_argument("--output", type=Path, default=Path("runs/sample"), help="folder for everything (%(default)s)")
    parser.add_argument("--sample", type=Path, default=Path("data/sample"), help="the raw text (%(default)s)")
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="the YAMLs (%(default)s)")
    parser.add_argument("--jobs", type=int, help="how many processes at a time (as many as cores)")
    add_override(parser)


def _names(text: str) -> List[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("at least one name is needed")
    return list(dict.fromkeys(names))


def main(args: argparse.Namespace) -> int:
    """Run the demo; the exit code is 1 if something failed, though the table shows all the rest."""
    from powernorm_fairseq.report.runs import report

    odd = [task for task in args.tasks if task not in TASKS]
    if odd:
        raise UserError(f"no task {', '.join(odd)}; there are {', '.join(TASKS)}")
    for folder in (args.sample, args.configs):
        if not folder.is_dir():
            raise UserError(f"no folder {folder}: start this in the project's folder")
    began = time.monotonic()
    runs = len(args.norms) * len(args.tasks)
    slots = max(1, min(args.jobs or cores(), runs))
    args.threads = max(1, cores() // slots)
    say = speaker("demo")
    with hold(args.output):
        jobs = jobs_of(args)
        say(f"{runs} trainings, {slots} at a time with {args.threads} thread(s) each; everything goes to {args.output}")
        work(jobs, slots, args.threads, say)
        failed: Dict[str, Optional[Path]] = {job.name: job.folder for job in jobs if job.code != 0}
        if any(job.code == 0 and job.kind in TASKS for job in jobs):
            report(args.output, args.output)
        say(f"done in {clock(time.monotonic() - began)}")
    if failed:
        sys.stderr.write(f"demo: failed: {', '.join(failed)}; the same command tries them again\n")
    return 1 if failed else 0
