"""``python -m powernorm_fairseq <command>``, installed as ``powernorm_fairseq`` too."""

import argparse
import importlib
import logging
import sys
from typing import Optional, Sequence

from powernorm_fairseq.processes import UserError
from powernorm_fairseq.version import __version__

# Command -> (module with add_arguments(parser) and main(args) -> exit code, what the command does).
COMMANDS = {
    "fetch": ("powernorm_fairseq.corpora.fetch", "the public data sets: what they are, and their files"),
    "prepare": ("powernorm_fairseq.corpora.prepare", "raw text to what fairseq reads"),
    "run": ("powernorm_fairseq.experiment.run", "train, average, decode and score what one YAML describes"),
    "reproduce": ("powernorm_fairseq.experiment.reproduce", "a row of a published table, from raw text to its number"),
    "score": ("powernorm_fairseq.evaluation.score", "BLEU and chrF of translations, and whether systems differ"),
    "perplexity": (
        "powernorm_fairseq.evaluation.language_model",
        "perplexity of a language model, per word, token or character",
    ),
    "floor": ("powernorm_fairseq.experiment.floor", "the score that what knows nothing reaches on the same text"),
    "demo": (
        "powernorm_fairseq.experiment.demo",
        "small models with several norms on the sample text, and their table",
    ),
    "average": ("powernorm_fairseq.checkpoints.average", "average the last checkpoints of a run"),
    "reestimate": ("powernorm_fairseq.checkpoints.reestimate", "measure a checkpoint's running statistics anew"),
    "fold": ("powernorm_fairseq.checkpoints.fold", "a checkpoint for inference, its norms folded into linear layers"),
    "convert": ("powernorm_fairseq.checkpoints.convert", "a checkpoint of the authors' PowerNorm code for this plugin"),
    "inspect": ("powernorm_fairseq.checkpoints.inspect", "running statistics in checkpoints, and what looks wrong"),
    "record": ("powernorm_fairseq.report.records", "keep the results of finished runs as records"),
    "report": ("powernorm_fairseq.report.report", "tables and figures from the records"),
}


def build_parser() -> argparse.ArgumentParser:
    """The command line; its namespaces hold ``command`` and, to be called with them, ``main``."""
    parser = argparse.ArgumentParser(prog="powernorm_fairseq", description="Normalization layers for fairseq.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        described = commands.add_parser(name, help=summary, description=f"{command.__doc__}")
        command.add_arguments(described)
        described.set_defaults(main=command.main)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 130 interrupted."""
    # fairseq's imports set the root logger to DEBUG or INFO; its programs, which are processes of their own, keep that.
    logging.getLogger().setLevel(logging.WARNING)
    args = build_parser().parse_args(argv)
    try:
        return args.main(args)
    except UserError as error:
        print(f"powernorm_fairseq {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues where this one was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
