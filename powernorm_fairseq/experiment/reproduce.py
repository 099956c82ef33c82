"""``powernorm_fairseq reproduce``: one row of a published table, from raw text to a number beside the paper's.

Prepares the text, trains with each seed, averages, measures statistics anew where the config says so, decodes, scores
and records. Each stage is skipped when its output is whole, so that the same command continues an interrupted one.
"""

import argparse
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from powernorm_fairseq.evaluation.kinds import headline
from powernorm_fairseq.experiment import launch as launching
from powernorm_fairseq.experiment import run as running
from powernorm_fairseq.experiment.config import Config, changes_of, override, scoring_arguments, scoring_of
from powernorm_fairseq.experiment.folder import fingerprint_of_data
from powernorm_fairseq.experiment.launch import Launch
from powernorm_fairseq.experiment.rows import Row, row_of
from powernorm_fairseq.experiment.training import Say
from powernorm_fairseq.processes import (
    UserError,
    cores,
    environment,
    fairseq_program,
    own_program,
    stop,
    with_parent,
)
from powernorm_fairseq.report.published import in_words

# Adam keeps two numbers beside each parameter, in single precision.
BYTES_PER_PARAMETER = 12
POLL_SECONDS = 5.0


def folder_of(row: Row, runs: Path, seed: int) -> Path:
    """A run's folder."""
    return runs / row.kind / row.group / row.norm / f"seed{seed}"


def records_of(row: Row, records: Path) -> Path:
    """The file that a row's results are collected in."""
    return records / f"{row.kind}-{row.group}.jsonl"


def is_prepared(data: Path) -> bool:
    """Whether there is text for fairseq; its preparation puts it there when it is whole."""
    try:
        fingerprint_of_data(data)
    except UserError:
        return False
    return True


def prepare_command(row: Row, data: Path, raw: Optional[Path], archives: Sequence[Path], workers: int) -> List[str]:
    """The command line that prepares a row's text.

    Raises:
        UserError: ``data`` is not the folder that preparation would make.
    """
    if data.name != "binarised":
        raise UserError(f"no text prepared for fairseq in {data}")
    options: List[object] = ["--output", data.parent, "--workers", workers]
    options += ["--raw", raw] if raw else []
    options += ["--archive", *archives] if archives else []
    return own_program("prepare", row.corpus(), *options)


def prepare(command: Sequence[str], data: Path, launch: Launch, say: Say) -> None:
    """Prepare the text on the first node, unless there is nothing to be done (no ``command``); on others wait for it.

    Raises:
        UserError: the preparation failed.
    """
    if not command or is_prepared(data):
        say(f"text prepared before: {data}")
        return
    if launch.node:
        say(f"waiting for the first node to prepare {data}")
        while not is_prepared(data):
            time.sleep(POLL_SECONDS)
        return
    say("preparing the text")
    process = with_parent(command, env=environment(1))
    try:
        code = process.wait()
    finally:
        stop(process)
    if code:
        raise UserError(f"the text was not prepared: {shlex.join(command)} ended with code {code}")


def settings(row: Row, assignments: Sequence[str], seed: int, launch: Launch) -> Tuple[Config, List[str]]:
    """The config of one run, and what the number of workers makes of it, in words."""
    config = override(override(row.config(), assignments), [f"common.seed={seed}"])
    return launching.adapted(config, launch)


def commands(row: Row, config: Config, folder: Path, launch: Launch) -> List[List[str]]:
    """What ``run`` starts for one run or does itself, as command lines, in order."""
    scoring, placed = scoring_of(config), running.placed(config, folder)
    checkpoints, found = folder / "checkpoints", [launching.command(placed, launch)]
    checkpoint = checkpoints / f"checkpoint_{scoring.checkpoint}.pt"
    if scoring.average:
        checkpoint = checkpoints / "averaged.pt"
        found.append(own_program("average", "--folder", checkpoints, "--last", scoring.average, "--output", checkpoint))
    if scoring.reestimate:
        measured = checkpoints / "reestimated.pt"
        options: List[object] = ["--batches", scoring.reestimate, "--output", measured]
        # As `run` does: with this run's seed, on the text that the config names.
        options += ["--seed", config.get("common", {}).get("seed", 1), "--data", config["task"]["data"]]
        found.append(own_program("reestimate", checkpoint, *options))
        checkpoint = measured
    if scoring.metric == "bleu":
        found.append(["mkdir", "-p", str(folder / "hypotheses")])
    for subset in scoring.subsets:
        if scoring.metric == "bleu":
            generated = folder / "hypotheses" / f"{subset}.generate.txt"
            arguments = scoring_arguments(placed, checkpoint, subset)
            found.append([*fairseq_program("generate"), *arguments, ">", str(generated)])
            found += _score_commands(config, generated, subset)
        else:
            found.append([*fairseq_program("eval-lm"), *scoring_arguments(placed, checkpoint, subset)])
    return found


def _score_commands(config: Config, generated: Path, subset: str) -> List[List[str]]:
    scoring, data, target = scoring_of(config), Path(config["task"]["data"]), config["task"]["target_lang"]
    found = []
    for kind in scoring.kinds:
        if kind != "chrf":
            tokens = kind in ("tokenised", "compound")
            name = (scoring.tokenised if tokens else scoring.reference).format(subset=subset, target=target)
            options: List[object] = ["--generated", generated, "--references", data / name, "--kind", kind]
            options += ["--language", target, *([] if tokens else ["--detokenise"])]
            options += ["--chrf"] if not tokens and "chrf" in scoring.kinds else []
            options += ["--lowercase"] if scoring.lowercase else []
            found.append(own_program("score", *options))
    return found


def printed(command: Sequence[str]) -> str:
    """A command line to be pasted into a shell."""
    return " ".join(">" if word == ">" else shlex.quote(word) for word in command)


def disk_needed(config: Config) -> int:
    """Bytes that the checkpoints of one run will take, roughly."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    name = config["model"]["_name"]
    if name not in ARCH_MODEL_REGISTRY:
        raise UserError(f"no model is named {name!r}")
    defaults = vars(ARCH_MODEL_REGISTRY[name])["__dataclass"]()
    dims = {**vars(defaults), **config["model"]}
    data = Path(config["task"]["data"])
    words = sorted(data.glob("dict*.txt"))[0].read_bytes().count(b"\n") if is_prepared(data) else 0
    parameters = words * dims["decoder_embed_dim"]
    for stack, attentions in (("encoder", 1), ("decoder", 2 if "encoder_layers" in dims else 1)):
        if f"{stack}_layers" in dims:
            width, inner = dims[f"{stack}_embed_dim"], dims[f"{stack}_ffn_embed_dim"]
            parameters += dims[f"{stack}_layers"] * (4 * attentions * width * width + 2 * width * inner)
    checkpoint = config.get("checkpoint", {})
    # One more while it is written, beside the last, the best, and the average.
    kept = 4 + sum(max(0, checkpoint.get(name, 0)) for name in ("keep_last_epochs", "keep_interval_updates"))
    return int(parameters) * BYTES_PER_PARAMETER * kept


def check_disk(config: Config, folder: Path) -> None:
    """Refuse (UserError) to begin a run whose checkpoints will not fit."""
    there = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    if (folder / "trained.json").exists():
        return
    taken = sum(path.stat().st_size for path in folder.glob("checkpoints/*.pt"))
    needed, free = disk_needed(config) - taken, shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"the checkpoints of a run take about {needed / 1e9:.1f} GB, and {there} has {free / 1e9:.1f} GB free; "
            "free some, or take another folder with --runs"
        )


def summary(row: Row, results: Sequence[Dict[str, Any]]) -> str:
    """The scores of all seeds and the paper's, in lines."""
    lines = [f"{row.name}"]
    values = []
    for result in results:
        score = result["scores"].get(result["reported"], {})
        label = f" ({score['label']})" if "label" in score else ""
        lines.append(f"    seed {result['seed']}: {running.in_words(result)}{label}")
        if score:
            values.append(headline(score, result["kind"]))
    if len(values) > 1:
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        lines.append(f"    mean of {len(values)} seeds: {mean:.4g}, standard deviation {deviation:.2g}")
    lines += [
        f"    with other values than the row's: {', '.join(result['set'])}"
        for result in results[:1]
        if result.get("set")
    ]
    lines.append(f"    paper: {published(row)}")
    return "\n".join(lines)


def published(row: Row) -> str:
    """The paper's number, with what is known of its source; the sample is in no paper."""
    return in_words(row.group, row.norm) or row.paper() or "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "row", metavar="ROW", help="GROUP/NORM, such as iwslt14_de_en/power; a wrong one lists them all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="a run for each (the config's seed)")
    parser.add_argument("--dry-run", action="store_true", help="print every command; start and write nothing")
    parser.add_argument(
        "--archive", type=Path, nargs="+", default=[], metavar="FILE", help="the data set's files, as for prepare"
    )
    parser.add_argument("--raw", type=Path, help="folder of the raw text, as for prepare")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (%(default)s)")
    parser.add_argument(
        "--records", type=Path, default=Path("results/records"), help="folder for the collected results (%(default)s)"
    )
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="the YAMLs (%(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of each node's workers (%(default)s)")
    running.add_override(parser)
    launching.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Reproduce the row, or print how."""
    results = reproduce(args)
    if results:
        print(summary(row_of(args.row, args.configs), results), flush=True)
    return 0


def reproduce(args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Do what the arguments say; returns the results by seed, none after a dry run or on a node other than the first.

    Raises:
        UserError: something is missing, or a stage failed.
    """
    from powernorm_fairseq.report.records import add

    row = row_of(args.row, args.configs)
    base = override(row.config(), args.override)
    data = Path(base["task"]["data"])
    seeds = list(dict.fromkeys(args.seeds or [base.get("common", {}).get("seed", 1)]))
    launch = launching.launch_of(args, base, anywhere=args.dry_run)
    needs_preparation = not is_prepared(data)
    preparing = prepare_command(row, data, args.raw, args.archive, cores()) if needs_preparation else []
    say = running.speaker(row.name)
    if args.dry_run:
        dry_run(row, args, seeds, launch, preparing)
        return []
    first, words = settings(row, args.override, seeds[0], launch)
    for sentence in words:
        say(sentence)
    check_disk(first, folder_of(row, args.runs, seeds[0]))
    prepare(preparing, data, launch, say)
    results, changes = [], changes_of(row.config(), args.override)
    for number, seed in enumerate(seeds):
        config, _ = settings(row, args.override, seed, launch)
        folder = folder_of(row, args.runs, seed)
        check_disk(config, folder)
        say(f"seed {seed}, in {folder}")
        options: Dict[str, Any] = {"threads": args.threads, "launch": _apart(launch, number)}
        options.update(changes=changes, say=say)
        result = running.run(config, folder, norm=row.norm, path=row.path, **options)
        if not launch.node:
            add(folder, args.records)
            results.append(result)
    return results


def _apart(launch: Launch, number: int) -> Launch:
    """Another port for each training: the one before may still be held for a moment."""
    return replace(launch, port=launch.port + number) if launch.nodes > 1 else launch


def dry_run(row: Row, args: argparse.Namespace, seeds: Sequence[int], launch: Launch, preparing: List[str]) -> None:
    """Print what would be done."""
    lines = [f"# {row.name}, {launch.described()}; paper: {published(row)}"]
    if preparing:
        lines += ["# the text", printed(preparing)]
    for number, seed in enumerate(seeds):
        config, words = settings(row, args.override, seed, launch)
        folder = folder_of(row, args.runs, seed)
        done = " (has its result)" if (folder / "result.json").exists() else ""
        lines += [f"# seed {seed}, in {folder}{done}", *(f"# {sentence}" for sentence in words)]
        lines += map(printed, commands(row, config, folder, _apart(launch, number)))
        lines.append(f"# then {folder / 'result.json'} is written and added to {records_of(row, args.records)}")
    sys.stdout.write("\n".join(lines) + "\n")
