"""``powernorm_fairseq floor``: what a score is worth, by what knows nothing reaches with the same settings.

For translation that is the model before its first update; for language models, word frequencies alone.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any, Dict

from powernorm_fairseq.checkpoints.average import save_checkpoint
from powernorm_fairseq.experiment import record, run
from powernorm_fairseq.experiment.config import Config, scoring_of, train_arguments
from powernorm_fairseq.experiment.folder import claim


def floor(config: Config, folder: Path, threads: int, say: run.Say) -> Dict[str, Any]:
    """Score what knows nothing with the settings of ``config``; kept as a result of its own in ``folder``."""
    config = run.placed(config, folder)
    scoring = scoring_of(config)
    with claim(folder, config):
        finished = record.read(folder)
        if finished is not None:
            return finished
        if scoring.metric == "bleu":
            checkpoint = folder / "untrained.pt"
            if not checkpoint.exists():
                save_untrained(config, checkpoint)
            say(f"scoring {scoring.subsets[-1]}")
            # One subset will do: an untrained model goes on to the longest length allowed, which takes its time.
            scores = {scoring.subsets[-1]: run.bleu(config, folder, checkpoint, scoring.subsets[-1], threads)}
        else:
            from powernorm_fairseq.evaluation.perplexity import unigram

            scores = {subset: unigram(Path(config["task"]["data"]), subset) for subset in scoring.subsets}
        result = {
            "kind": scoring.metric,
            "floor": "untrained model" if scoring.metric == "bleu" else "unigram model",
            "task": config["task"]["_name"],
            "scores": scores,
            "reported": scoring.subsets[-1],
            "config": config,
        }
        result = record.write(folder, result, threads)
        say(f"the floor, {result['floor']}: {run.in_words(result)}")
        return result


def save_untrained(config: Config, path: Path) -> None:
    """A checkpoint of the model as ``fairseq-train`` has it before the first update."""
    from fairseq import options, tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    arguments = options.parse_args_and_arch(options.get_training_parser(), input_args=train_arguments(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra's, about how fairseq calls it
        cfg = convert_namespace_to_omegaconf(arguments)
    task = tasks.setup_task(cfg.task)
    utils.set_torch_seed(cfg.common.seed)
    model = task.build_model(cfg.model)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    state = {
        "args": None,
        "cfg": cfg,
        "model": model.state_dict(),
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": None,
    }
    save_checkpoint(state, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments: those of ``run``."""
    run.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Find the floor for what the arguments describe."""
    floor(run.config_of(args), args.dir, args.threads, run.speaker(args.label))
    return 0
