"""``powernorm_fairseq run``: train, average, re-estimate statistics, decode and score what one YAML describes.

Every stage leaves a file that is whole or absent, and is skipped when it is there; an interrupted training goes on
from its last checkpoint. A folder belongs to one config.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from powernorm_fairseq.checkpoints.average import (
    average_checkpoints,
    last_checkpoints,
    load_checkpoint,
    note_of,
    save_checkpoint,
)
from powernorm_fairseq.checkpoints.reestimate import is_statistic, reestimate
from powernorm_fairseq.evaluation.kinds import headline
from powernorm_fairseq.experiment import launch as launching
from powernorm_fairseq.experiment import record
from powernorm_fairseq.experiment.config import (
    Config,
    changes_of,
    load_config,
    override,
    scoring_arguments,
    scoring_of,
    scoring_window,
    with_norm,
)
from powernorm_fairseq.experiment.folder import claim
from powernorm_fairseq.experiment.launch import ONE, Launch
from powernorm_fairseq.experiment.training import Say, join, train
from powernorm_fairseq.processes import PACKAGE, UserError, cores, fairseq_program, run_to_end, write_atomically


def run(
    config: Config,
    folder: Path,
    *,
    norm: str = "",
    path: Optional[Path] = None,
    threads: int = 1,
    launch: Launch = ONE,
    changes: Sequence[str] = (),
    say: Say = print,
) -> Dict[str, Any]:
    """Do all that is still to be done of one run and return its result.

    A training that diverges is a result too: ``outcome`` is ``diverged``, and there are no scores.

    Args:
        config: a complete config; where checkpoints go is set here.
        folder: the run's own folder.
        norm: the name under which tables show the run.
        path: the file that the config came from, which names the group of runs that this one belongs to.
        threads: for every process of the run; the workers of a node share them.
        launch: the workers that train, for which the config is made (``launch.adapted``). On a node other than the
            first its part of the training is all that is done, and the result is empty.

    Raises:
        UserError: a stage failed, or the folder belongs to another run.
    """
    config = placed(config, folder)
    if launch.node:
        join(config, folder, threads, say, launch)
        return {}
    with claim(folder, config):
        finished = record.read(folder)
        if finished is not None:
            say("finished before")
            return finished
        training = train(config, folder, threads, say, launch)
        result = {
            "kind": scoring_of(config).metric,
            "outcome": training["outcome"],
            "norm": norm or config["model"]["_name"],
            "group": group_of(path) if path else None,
            "task_kind": "lm" if config["task"]["_name"] == "language_modeling" else "mt",
            "config_file": str(path) if path else None,
            "set": list(changes),
            "model": config["model"]["_name"],
            "task": config["task"]["_name"],
            "checkpoint": None,
            "reestimated": None,
            "scores": {},
            "reported": scoring_of(config).subsets[-1],
            "training": training,
            "seed": config.get("common", {}).get("seed", 1),
            "config": config,
        }
        if training["outcome"] == "finished":
            checkpoint = final_checkpoint(config, folder, say)
            checkpoint, result["reestimated"] = with_new_statistics(config, folder, checkpoint, threads, say)
            result["checkpoint"] = checkpoint.name
            result["scores"] = score(config, folder, checkpoint, threads, say)
        result = record.write(folder, result, threads)
        say("finished: " + in_words(result))
        return result


def group_of(path: Path) -> str:
    """The group of a config: ``sample`` for ``mt/sample.yaml``, ``ptb`` for ``lm/ptb/power.yaml``."""
    return path.parent.name if is_row(path) else path.stem


def is_row(path: Path) -> bool:
    """Whether a config is one row of a published table, ``mt/GROUP/NORM.yaml`` or ``lm/GROUP/NORM.yaml``."""
    return path.resolve().parent.parent.name in ("mt", "lm")


def placed(config: Config, folder: Path) -> Config:
    """The config with what depends on the place: where checkpoints go, and where fairseq's programs find the plugin."""
    changed = override(config, [])
    changed.setdefault("checkpoint", {})["save_dir"] = str(folder / "checkpoints")
    changed.setdefault("common", {})["user_dir"] = str(PACKAGE)
    return changed


def final_checkpoint(config: Config, folder: Path, say: Say) -> Path:
    """The checkpoint to be scored, averaged first where the config says so."""
    scoring, checkpoints = scoring_of(config), folder / "checkpoints"
    if not scoring.average:
        return checkpoints / f"checkpoint_{scoring.checkpoint}.pt"
    averaged = checkpoints / "averaged.pt"
    if not averaged.exists():
        average_checkpoints(last_checkpoints(checkpoints, scoring.average), averaged)
        say(f"averaged the last {scoring.average} checkpoints")
    return averaged


def with_new_statistics(
    config: Config, folder: Path, checkpoint: Path, threads: int, say: Say
) -> Tuple[Path, Optional[Dict[str, Any]]]:
    """The checkpoint with statistics measured anew, and on what; as it is where the config or the model has none.

    Kept as ``checkpoints/reestimated.pt``.
    """
    import torch

    batches, output = scoring_of(config).reestimate, folder / "checkpoints" / "reestimated.pt"
    if not batches:
        return checkpoint, None
    if not output.exists():
        state = load_checkpoint(checkpoint)
        if not any(map(is_statistic, state["model"])):
            return checkpoint, None
        say(f"measuring statistics on {batches} training batches")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        seed = config.get("common", {}).get("seed", 1)
        try:
            state = reestimate(state, checkpoint, batches, data=config["task"]["data"], seed=seed, say=say)
        finally:
            torch.set_num_threads(before)
        save_checkpoint(state, output)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return output, note_of(load_checkpoint(output))["reestimated"]


def score(config: Config, folder: Path, checkpoint: Path, threads: int, say: Say) -> Dict[str, Dict[str, Any]]:
    """The score of a checkpoint on each subset; each is kept as ``scores/<subset>.json``."""
    scoring, scores = scoring_of(config), {}
    (folder / "scores").mkdir(exist_ok=True)
    for subset in scoring.subsets:
        kept = folder / "scores" / f"{subset}.json"
        if not kept.exists():
            say(f"scoring {subset}")
            one = bleu if scoring.metric == "bleu" else word_perplexity
            found = one(config, folder, checkpoint, subset, threads)
            write_atomically(kept, json.dumps(found, indent=1) + "\n")
        scores[subset] = json.loads(kept.read_text(encoding="utf-8"))
    return scores


def bleu(config: Config, folder: Path, checkpoint: Path, subset: str, threads: int) -> Dict[str, Any]:
    """Decode a subset by fairseq-generate, keep the hypotheses, and score them in every way that the config names."""
    from powernorm_fairseq.corpora.text import detokenise
    from powernorm_fairseq.corpora.translation import read_lines, write_lines
    from powernorm_fairseq.evaluation.bleu import hypotheses_of
    from powernorm_fairseq.evaluation.kinds import needs_tokens, scores_by_kind

    scoring, data, target = scoring_of(config), Path(config["task"]["data"]), config["task"]["target_lang"]
    by_tokens = needs_tokens(scoring.kinds)
    files = [data / name.format(subset=subset, target=target) for name in (scoring.reference, scoring.tokenised)]
    for file in files if by_tokens else files[:1]:
        if not file.exists():
            raise UserError(f"no references {file}; `powernorm_fairseq prepare` writes them beside the binarised text")
    references, tokenised = read_lines(files[0]), read_lines(files[1]) if by_tokens else None
    output = _program_output("generate", config, folder, checkpoint, subset, threads)
    tokens = hypotheses_of(output, len(references))
    hypotheses = detokenise(tokens, target)
    write_lines(folder / "hypotheses" / f"{subset}.{target}", hypotheses)
    if by_tokens:
        write_lines(folder / "hypotheses" / f"tokenised.{subset}.{target}", tokens)
    return scores_by_kind(scoring.kinds, tokens, hypotheses, tokenised, references, scoring.lowercase, target)


def word_perplexity(config: Config, folder: Path, checkpoint: Path, subset: str, threads: int) -> Dict[str, Any]:
    """Score a subset by fairseq-eval-lm."""
    from powernorm_fairseq.evaluation.perplexity import score_of
    from powernorm_fairseq.evaluation.units import measure, published_tokens

    scoring, data = scoring_of(config), Path(config["task"]["data"])
    text = measure(data, subset, scoring.post_process)
    output = _program_output("eval-lm", config, folder, checkpoint, subset, threads)
    window = {**scoring_window(config).described(), "break_mode": config["task"].get("sample_break_mode", "none")}
    return {**score_of(output, text, scoring.unit), **window, "published_tokens": published_tokens(data, subset)}


def _program_output(name: str, config: Config, folder: Path, checkpoint: Path, subset: str, threads: int) -> str:
    """What fairseq-<name> prints about a subset; kept in the folder, and read from there the second time."""
    (folder / "hypotheses").mkdir(exist_ok=True)
    whole = folder / "hypotheses" / f"{subset}.{name}.txt"
    if not whole.exists():
        partial = whole.with_name(whole.name + ".partial")
        command = [*fairseq_program(name), *scoring_arguments(config, checkpoint, subset)]
        partial.unlink(missing_ok=True)
        run_to_end(command, partial, threads=threads, without=launching.LAUNCHERS)
        os.replace(partial, whole)
    return whole.read_text(encoding="utf-8")


def in_words(result: Dict[str, Any]) -> str:
    """The scores of a result in a few words, or that there are none."""
    if result.get("outcome") == "diverged":
        return f"diverged after {result['training']['updates']} updates"
    said = []
    for subset, score in result["scores"].items():
        unit, digits = {"bleu": ("BLEU", 2), "perplexity": ("perplexity", 2)}[result["kind"]]
        if "bits_per_character" in score:
            unit, digits = "bits per character", 3
        said.append(f"{subset} {unit} {headline(score, result['kind']):.{digits}f}")
    return ", ".join(said)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", type=Path, help="the YAML of the run")
    parser.add_argument("--dir", type=Path, required=True, help="the run's own folder")
    parser.add_argument("--norm", help="take the config's model with this norm, placed as published")
    parser.add_argument("--data", type=Path, help="binarised text, instead of the config's task.data")
    parser.add_argument("--threads", type=int, default=cores(), help="threads for each process (%(default)s)")
    parser.add_argument("--label", default="", help="what progress lines start with")
    add_override(parser)
    launching.add_arguments(parser)


def add_override(parser: argparse.ArgumentParser) -> None:
    """The argument that changes single values of a config."""
    parser.add_argument(
        "--set",
        dest="override",
        nargs="+",
        action="extend",
        default=[],
        metavar="group.option=value",
        help="other values than the config's, such as optimization.max_update=2000",
    )


def config_of(args: argparse.Namespace) -> Config:
    """The config that the arguments describe."""
    config = load_config(args.config)
    if args.norm:
        config = with_norm(config, args.norm)
    assignments = list(args.override)
    if args.data:
        assignments.append(f"task.data={args.data}")
    return override(config, assignments)


def speaker(label: Optional[str]) -> Say:
    """Prints whole lines, so that several processes can share a terminal."""
    prefix = f"{label}: " if label else ""

    def say(words: str) -> None:
        sys.stdout.write(f"{prefix}{words}\n")
        sys.stdout.flush()

    return say


def main(args: argparse.Namespace) -> int:
    """Run what the arguments describe."""
    say, planned = speaker(args.label), config_of(args)
    launch = launching.launch_of(args, planned)
    config, words = launching.adapted(planned, launch)
    for sentence in words if launch.workers > 1 or config != planned else []:
        say(sentence)
    norm = args.norm or (args.config.stem if is_row(args.config) else "")
    changes = changes_of(load_config(args.config), args.override)
    options: Dict[str, Any] = {"threads": args.threads, "launch": launch, "changes": changes, "say": say}
    run(config, args.dir, norm=norm, path=args.config, **options)
    return 0
