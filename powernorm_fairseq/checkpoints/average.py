"""``powernorm_fairseq average``: one model from the last checkpoints of a run.

Parameters are averaged. So are running statistics, which then belong to no single model: ``--reestimate`` measures them
anew, with the averaged parameters, on training batches.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Sequence

import torch

from powernorm_fairseq.checkpoints import loading
from powernorm_fairseq.norms import RunningNorm
from powernorm_fairseq.processes import UserError

# These count updates; a mean of counts means nothing.
COUNTERS = (*RunningNorm.COUNTERS, "num_batches_tracked")

# Training batches on which statistics are measured unless a number is given.
BATCHES = 200

# What is written about a checkpoint that was made from others, in its ``extra_state``.
NOTE = "powernorm_fairseq"

EPOCH = re.compile(r"checkpoint(\d+)\.pt$")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt$")


def last_checkpoints(folder: Path, count: int) -> List[Path]:
    """The last ``count`` checkpoints of a run, oldest first.

    Checkpoints saved each so many updates (``checkpoint_2_600.pt``) are taken where there are any, else those saved at
    the end of each epoch (``checkpoint2.pt``).

    Raises:
        UserError: there are fewer.
    """
    for pattern in (UPDATE, EPOCH):
        matches = [
            (int(match.group(1)), path) for path in folder.glob("*.pt") for match in [pattern.match(path.name)] if match
        ]
        if matches:
            break
    if count < 1:
        raise UserError("at least one checkpoint is needed")
    if len(matches) < count:
        raise UserError(f"{folder} has {len(matches)} checkpoints by epoch or update; {count} are needed")
    return [path for _, path in sorted(matches)[-count:]]


def average_states(states: Iterable[Dict[str, torch.Tensor]]) -> Dict[str, torch.Tensor]:
    """The mean of several state dicts, key by key; they are taken one after the other and not kept.

    Parameters and running statistics are added up in float64 and cast back to their own type at the end. Counters and
    everything that is not floating point are those of the last state.

    Raises:
        UserError: the states do not have the same keys and shapes.
    """
    totals: Dict[str, torch.Tensor] = {}
    shapes: Dict[str, torch.Size] = {}
    state: Dict[str, torch.Tensor] = {}
    number = 0
    for number, state in enumerate(states, start=1):
        if number == 1:
            shapes = {key: value.shape for key, value in state.items()}
        odd = sorted(set(state) ^ set(shapes))
        if odd:
            raise UserError(f"checkpoints of different models: only one of two has {', '.join(odd[:5])}")
        for key, value in state.items():
            if value.shape != shapes[key]:
                raise UserError(
                    f"{key} is {tuple(value.shape)} in checkpoint {number}, {tuple(shapes[key])} in the first"
                )
            if value.is_floating_point() and key.rpartition(".")[2] not in COUNTERS:
                totals[key] = value.double() + totals[key] if number > 1 else value.double()
    return {
        key: (totals[key] / number).to(value.dtype) if key in totals else value.clone() for key, value in state.items()
    }


def average_checkpoints(paths: Sequence[Path], output: Path) -> None:
    """Write the average of several checkpoints; the file appears whole or not at all.

    Raises:
        UserError: see :func:`averaged`.
    """
    save_checkpoint(averaged(paths), output)


def averaged(paths: Sequence[Path]) -> Dict[str, Any]:
    """The average of several checkpoints; what is not the model (configuration, ...) is the last one's.

    The optimiser's state is left out, as an average cannot be trained on.

    Raises:
        UserError: a file is missing or is no checkpoint, or the models differ.
    """
    for path in paths:
        if not path.is_file():
            raise UserError(f"no checkpoint {path}")
    last: Dict[str, Any] = {}

    def models() -> Iterator[Dict[str, torch.Tensor]]:
        for path in paths:
            last.update(load_checkpoint(path), last_optimizer_state=None)
            refuse_folded(last, path)
            yield last["model"]

    mean = average_states(models())
    return with_note({**last, "model": mean}, {"averaged": [path.name for path in paths]})


def with_note(state: Dict[str, Any], note: Dict[str, Any]) -> Dict[str, Any]:
    """A checkpoint with a note on how it was made."""
    return {**state, "extra_state": {**(state.get("extra_state") or {}), NOTE: note}}


def note_of(state: Dict[str, Any]) -> Dict[str, Any]:
    """The note on how a checkpoint was made: ``averaged``, ``reestimated``, ``folded`` where that was done."""
    return dict((state.get("extra_state") or {}).get(NOTE) or {})


def refuse_folded(state: Dict[str, Any], path: Path) -> None:
    """UserError for a checkpoint that ``powernorm_fairseq fold`` has written."""
    if "folded" in note_of(state):
        raise UserError(f"{path} is folded for inference already: give the checkpoint that it was made from")


def load_checkpoint(path: Path) -> Dict[str, Any]:
    """A fairseq checkpoint on the CPU.

    Raises:
        UserError: there is no such file, or it is no checkpoint.
    """
    from fairseq import checkpoint_utils

    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        with loading.without_warnings():
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except Exception as error:  # torch raises whatever the bytes happen to lead to
        raise UserError(f"{path} cannot be read as a checkpoint: {unreadable(error)}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), Mapping):
        raise UserError(f"{path} is no fairseq checkpoint: it has no model")
    return state


def unreadable(error: Exception) -> str:
    """What an exception of torch or fairseq says of a file, in one line: often it is a bare key, or a page."""
    first = next(iter(str(error).splitlines()), "")
    return f"it is broken or something else ({type(error).__name__}{': ' * bool(first)}{first})"


def check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Find out early that a file cannot be written, or would replace one that is read (UserError)."""
    if not output.parent.is_dir():
        raise UserError(f"no folder {output.parent}")
    if output.is_dir():
        raise UserError(f"{output} is a folder; give the name of a file")
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise UserError(f"the output would replace {path}, with its optimiser state; give another name")


def save_checkpoint(state: Dict[str, Any], output: Path) -> None:
    """Write a checkpoint so that it appears whole or not at all; UserError where it cannot be written."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(state.get("cfg")):
        # As fairseq saves it: plain types, which torch loads without trusting the file.
        state = {**state, "cfg": OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)}
    partial = output.with_name(output.name + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, output)
    except BaseException as error:
        if partial.exists():
            partial.unlink()
        if isinstance(error, (OSError, RuntimeError)):  # torch makes the latter of some of the former
            raise UserError(f"{output} cannot be written: {error}") from error
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--folder", type=Path, help="checkpoint folder of a run")
    parser.add_argument("--last", type=int, default=5, help="how many of its last checkpoints (%(default)s)")
    parser.add_argument("--inputs", type=Path, nargs="+", help="instead of --folder: the checkpoints, oldest first")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    reestimate = parser.add_argument_group("running statistics (power, power_v, batch)")
    reestimate.add_argument(
        "--reestimate",
        type=int,
        nargs="?",
        const=BATCHES,
        metavar="N",
        help="measure them anew on N training batches, %(const)s unless given, with the averaged parameters",
    )
    add_measuring(reestimate)


def add_measuring(parser: Any) -> None:
    """The arguments that say on what statistics are measured."""
    parser.add_argument("--data", help="binarised text, instead of the task.data of the checkpoint's config")
    parser.add_argument("--max-tokens", type=int, help="tokens in a batch, instead of the run's size of a batch")
    parser.add_argument("--seed", type=int, default=1, help="of shuffling and dropout (%(default)s)")


def main(args: argparse.Namespace) -> int:
    """Average what the arguments name."""
    from powernorm_fairseq.checkpoints.reestimate import check_batches, reestimate

    if (args.folder is None) == (args.inputs is None):
        raise UserError("give either --folder or --inputs")
    if args.reestimate is not None:
        check_batches(args.reestimate, args.max_tokens)
    paths = args.inputs or last_checkpoints(args.folder, args.last)
    check_output(args.output, paths)
    state = averaged(paths)
    words = f"the mean of {', '.join(path.name for path in paths)}"
    if args.reestimate is not None:
        state = reestimate(
            state, paths[-1], args.reestimate, data=args.data, max_tokens=args.max_tokens, seed=args.seed, say=to_stderr
        )
        done = note_of(state).get("reestimated")
        words += f", statistics measured on {done['batches']} batches" if done else ""
    elif len(paths) > 1 and any(key.endswith((".running_psi_sq", ".running_var")) for key in state["model"]):
        to_stderr(
            "warning: the running statistics are the mean of those of the checkpoints, which is not what the averaged "
            "parameters give; --reestimate measures them anew"
        )
    save_checkpoint(state, args.output)
    print(f"{args.output}: {words}")
    return 0


def to_stderr(words: str) -> None:
    """Prints a line of progress or a warning."""
    print(words, file=sys.stderr, flush=True)
