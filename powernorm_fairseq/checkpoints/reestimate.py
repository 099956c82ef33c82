"""``powernorm_fairseq reestimate``: running statistics measured anew for the parameters of a checkpoint.

Averaged parameters, and those of an EMA, give other activations than those that the running statistics were gathered
from. This draws training batches as the run did, runs them forward in training mode, dropout included, each normalised
by its own statistics, and sets the statistics of `power`, `power_v` and `batch` to the mean over all tokens. Parameters
stay as they are. The same seed gives the same result; on a CPU to the last bit, with the same number of threads.

A checkpoint without running statistics is written as it is, so that a script can treat all norms alike.
"""

import argparse
import copy
import itertools
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

from powernorm_fairseq.checkpoints.average import (
    BATCHES,
    add_measuring,
    check_output,
    load_checkpoint,
    note_of,
    refuse_folded,
    save_checkpoint,
    to_stderr,
    with_note,
)
from powernorm_fairseq.experiment.log import clock
from powernorm_fairseq.norms.measuring import Meter, measuring
from powernorm_fairseq.processes import UserError

Say = Callable[[str], None]
PROGRESS_SECONDS = 5.0

# What evaluation uses; the rest of a norm's buffers is left as it is.
STATISTICS = ("running_psi_sq", "running_mean", "running_var")


def reestimate(
    state: Dict[str, Any],
    source: Path,
    batches: int = BATCHES,
    *,
    data: Optional[str] = None,
    max_tokens: Optional[int] = None,
    seed: int = 1,
    say: Say = to_stderr,
) -> Dict[str, Any]:
    """A checkpoint with statistics measured on training batches, without optimiser state.

    On the GPU if there is one, in single precision.

    Args:
        state: a fairseq checkpoint; not changed.
        source: the file that it comes from, or one of them.
        batches: how many batches; the training set's if it has fewer.
        data: binarised text, instead of the ``task.data`` of the checkpoint's config.
        max_tokens: tokens in a batch, instead of the run's ``max_tokens`` or ``batch_size``.
        seed: of the order of batches and of dropout.
        say: takes lines of progress.

    Raises:
        UserError: no such data, or statistics that cannot be measured; the message names the norms.
    """
    check_batches(batches, max_tokens)
    refuse_folded(state, source)
    state = {**state, "last_optimizer_state": None}
    if not any(map(is_statistic, state["model"])):
        say("no norm with running statistics: there is nothing to re-estimate")
        return state
    cuda = torch.cuda.is_available()
    with torch.random.fork_rng([torch.cuda.current_device()] if cuda else []), torch.no_grad():
        model, cfg, task = _load(state, source, data)
        device = torch.device("cuda" if cuda else "cpu")
        model.to(device).train()
        with measuring(model) as meter:
            done = _run(model, device, _batches(cfg, task, model, max_tokens, seed), batches, seed, say)
            _assign(meter)
        measured = {
            f"{name}.{buffer}": value.detach().cpu().clone()
            for name, norm in meter.norms.items()
            for buffer, value in norm.named_buffers()
            if buffer in STATISTICS
        }
    odd = sorted(set(measured) ^ {key for key in state["model"] if is_statistic(key)})
    if odd:
        raise UserError(f"only one of {source} and the model built from it has {_listed(odd)}")
    note = {"sources": [source.name], "subset": cfg.dataset.train_subset, "seed": seed, "max_tokens": max_tokens}
    before = note_of(state)
    if "averaged" in before:
        note["sources"] = before["averaged"]
    # In order of the model's own keys, and the keys' own type of mapping.
    kept = state["model"].copy()
    kept.update(measured)
    return with_note({**state, "model": kept}, {**before, "reestimated": {**done, **note}})


def is_statistic(key: str) -> bool:
    """Whether an entry of a model is a running statistic that evaluation uses."""
    return key.rpartition(".")[2] in STATISTICS


def check_batches(batches: int, max_tokens: Optional[int]) -> None:
    """Refuse numbers that cannot be (UserError)."""
    if batches < 1:
        raise UserError(f"statistics are measured on at least 1 batch, not {batches}")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"a batch has at least 1 token, not {max_tokens}")


def _load(state: Dict[str, Any], source: Path, data: Optional[str]) -> Any:
    """Model, config and task, made by fairseq from a checkpoint that is loaded already."""
    from fairseq import checkpoint_utils, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    cfg = state.get("cfg")
    if cfg is None:
        if state.get("args") is None:
            raise UserError(f"{source} has no config: neither cfg nor args")
        cfg = convert_namespace_to_omegaconf(state["args"])
    cfg = copy.deepcopy(cfg)  # fairseq fills in fields of what it is given
    if data is not None:
        cfg.task.data = data
    for folder in utils.split_paths(str(cfg.task.data)):
        if not Path(folder).is_dir():
            advice = "give its folder with --data" if data is None else "see --data"
            raise UserError(f"no binarised text in {folder}, seen from {Path.cwd()}: {advice}")
    # The path is only asked whether it exists. fairseq brings entries of the model up to date in what it is given.
    loading = {**state, "model": state["model"].copy(), "cfg": cfg, "args": None}
    try:
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(source)], state=loading)
    except Exception as error:  # fairseq raises nothing more specific
        raise UserError(f"{source}: the model cannot be built: {error}") from error
    return models[0].float(), cfg, task


def _batches(cfg: Any, task: Any, model: Any, max_tokens: Optional[int], seed: int) -> Any:
    """The batches of an epoch as fairseq's trainer draws them."""
    from fairseq import utils

    subset = cfg.dataset.train_subset
    try:
        task.load_dataset(subset, combine=True, epoch=1)
    except FileNotFoundError as error:
        raise UserError(f"no training text: {error}") from error
    tokens, sentences = cfg.dataset.max_tokens, cfg.dataset.batch_size
    if max_tokens is not None:
        tokens, sentences = max_tokens, None
    iterator = task.get_batch_iterator(
        dataset=task.dataset(subset),
        max_tokens=tokens,
        max_sentences=sentences,
        max_positions=utils.resolve_max_positions(task.max_positions(), model.max_positions(), tokens),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
        seed=seed,
        num_workers=0,  # the same order and the same noise on every machine
        epoch=1,
        disable_iterator_cache=True,
    )
    return iterator.next_epoch_itr(shuffle=True)


def _run(model: Any, device: Any, epoch: Any, batches: int, seed: int, say: Say) -> Dict[str, int]:
    """Forward passes; returns how many, and their tokens."""
    from fairseq import utils
    from fairseq.data import data_utils

    total = min(batches, len(epoch))
    if total == 0:
        raise UserError("no training sentence fits into a batch: give a larger --max-tokens")
    if total < batches:
        say(f"the training set has {total} batches, fewer than {batches}; all are taken")
    began = spoke = time.monotonic()
    done = tokens = 0
    utils.set_torch_seed(seed)
    with data_utils.numpy_seed(seed):
        for sample in itertools.islice(epoch, total):
            sample = utils.apply_to_sample(lambda tensor: tensor.to(device), sample)
            model(**sample["net_input"])
            done += 1
            tokens += int(sample["ntokens"])
            now = time.monotonic()
            if now - spoke >= PROGRESS_SECONDS:
                spoke = now
                left = clock((now - began) / done * (total - done))
                say(f"{done} of {total} batches, {tokens:,} tokens, {left} left")
    say(f"measured {done} batches, {tokens:,} tokens, in {clock(time.monotonic() - began)}")
    return {"batches": done, "tokens": tokens}


def _assign(meter: Meter) -> None:
    bad = [name for name, count in meter.dropped.items() if count]
    if bad:
        raise UserError(f"activations are not finite at {_listed(bad)}; nothing is written")
    unseen = [name for name, count in meter.tokens.items() if not count]
    if unseen:
        raise UserError(f"the batches did not reach {_listed(unseen)}; nothing is written")
    meter.assign()


def _listed(names: List[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def shadow_of(state: Dict[str, Any], source: Path, say: Say = to_stderr) -> Dict[str, Any]:
    """A checkpoint whose model is the shadow model that ``--store-ema`` saves.

    Raises:
        UserError: there is none.
    """
    extra = dict(state.get("extra_state") or {})
    shadow = extra.pop("ema", None)
    extra.pop("ema_fp32_params", None)
    if not shadow:
        raise UserError(f"{source} has no shadow model: it was not trained with --store-ema")
    model = state["model"].copy()
    # A shadow without the plugin has lost its final norms, and has a version that says so: see around_ema_restore.
    missing = sorted(key for key in model if key not in shadow)
    if missing:
        say(f"warning: the shadow model has no {_listed(missing)}; the model's own are taken")
    model.update((key, value) for key, value in shadow.items() if not key.endswith("version"))
    return with_note({**state, "model": model, "extra_state": extra}, {**note_of(state), "ema": True})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint of fairseq")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--batches", type=int, default=BATCHES, metavar="N", help="training batches (%(default)s)")
    parser.add_argument("--ema", action="store_true", help="take the shadow model that --store-ema saves")
    add_measuring(parser)


def main(args: argparse.Namespace) -> int:
    """Re-estimate what the arguments name."""
    check_batches(args.batches, args.max_tokens)
    check_output(args.output, [args.checkpoint])
    state = load_checkpoint(args.checkpoint)
    if args.ema:
        state = shadow_of(state, args.checkpoint)
    state = reestimate(state, args.checkpoint, args.batches, data=args.data, max_tokens=args.max_tokens, seed=args.seed)
    save_checkpoint(state, args.output)
    done = note_of(state).get("reestimated")
    words = ["the shadow model"] if args.ema else []
    words.append(f"statistics measured on {done['batches']} batches" if done else "nothing measured")
    print(f"{args.output}: {', '.join(words)}")
    return 0
