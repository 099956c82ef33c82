"""``powernorm_fairseq prepare``: raw text to what fairseq reads."""

import argparse
from pathlib import Path

from powernorm_fairseq.corpora.sample import CORPORA
from powernorm_fairseq.processes import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("corpus", choices=sorted(CORPORA), help="what to prepare")
    parser.add_argument("--raw", type=Path, default=Path("data/sample"), help="folder of the raw text (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder for the prepared text (runs/sample/data/CORPUS)")


def main(args: argparse.Namespace) -> int:
    """Prepare one corpus and print the folder that fairseq reads."""
    if not args.raw.is_dir():
        raise UserError(f"no folder {args.raw}: run this in the project's folder, or say where it is with --raw")
    output = args.output or Path("runs/sample/data") / args.corpus
    print(CORPORA[args.corpus](args.raw, output))
    return 0
