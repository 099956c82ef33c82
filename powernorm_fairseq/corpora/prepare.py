"""``powernorm_fairseq prepare``: raw text to what fairseq reads; what is missing of a public data set is fetched."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Tuple

from powernorm_fairseq.corpora import sample
from powernorm_fairseq.corpora.catalogue import CATALOGUE
from powernorm_fairseq.corpora.characters import prepare_enwik8
from powernorm_fairseq.corpora.counts import compare, read_counts
from powernorm_fairseq.corpora.fetch import have
from powernorm_fairseq.corpora.public import IWSLT14, IWSLT15, WMT14, Layout, prepare_public
from powernorm_fairseq.corpora.subwords import KINDS
from powernorm_fairseq.corpora.word_level import PTB, WIKITEXT_103, WordLevel, prepare_word_level
from powernorm_fairseq.processes import UserError, cores


@dataclass(frozen=True)
class Options:
    """What the command line says to a preparation.

    Attributes:
        workers: processes that work on large text.
        subwords: how words are split, ``bpe`` or ``sentencepiece``.
    """

    workers: int = 1
    subwords: str = "bpe"


@dataclass(frozen=True)
class Corpus:
    """How a corpus is prepared.

    Attributes:
        prepare: called with the folder of the raw text, the folder for all that is made, and the options; returns the
            folder for fairseq. It may leave ``counts.json`` there (``counts.write_counts``).
        data: its name in the catalogue, whose files are fetched first; empty where the raw text comes with the project.
        subwords: the values of ``--subwords`` that it takes; none if it is not split.
    """

    prepare: Callable[[Path, Path, Options], Path]
    data: str = ""
    subwords: Tuple[str, ...] = ()


def _public(layout: Layout) -> Corpus:
    def prepare(raw: Path, root: Path, options: Options) -> Path:
        return prepare_public(layout, raw, root, options.workers, options.subwords)

    return Corpus(prepare, layout.data, tuple(KINDS))


def _word_level(corpus: WordLevel) -> Corpus:
    return Corpus(lambda raw, root, options: prepare_word_level(corpus, raw, root), corpus.data)


def _sample_translation(raw: Path, root: Path, options: Options) -> Path:
    return sample.prepare_sample_translation(raw, root, options.workers, options.subwords)


CORPORA: Dict[str, Corpus] = {
    **{layout.data: _public(layout) for layout in (IWSLT14, IWSLT15, WMT14)},
    **{corpus.data: _word_level(corpus) for corpus in (PTB, WIKITEXT_103)},
    "enwik8": Corpus(lambda raw, root, options: prepare_enwik8(raw, root), "enwik8"),
    "sample-mt": Corpus(_sample_translation, subwords=tuple(KINDS)),
    "sample-lm": Corpus(lambda raw, root, options: sample.prepare_sample_language_model(raw, root)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("corpus", choices=sorted(CORPORA), help="what to prepare")
    parser.add_argument(
        "--archive",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="copies on this machine of the data set's files, as for fetch",
    )
    parser.add_argument("--raw", type=Path, help="folder of the raw text (runs/raw/CORPUS, data/sample)")
    parser.add_argument(
        "--output", type=Path, help="folder for the prepared text (runs/data/CORPUS, runs/sample/data/CORPUS)"
    )
    parser.add_argument("--workers", type=int, default=cores(), help="processes (%(default)s, the cores here)")
    parser.add_argument("--subwords", choices=tuple(KINDS), default="bpe", help="how words are split (%(default)s)")


def main(args: argparse.Namespace) -> int:
    """Prepare one corpus and print the folder that fairseq reads."""
    corpus = CORPORA[args.corpus]
    if args.subwords not in ("bpe", *corpus.subwords):
        raise UserError(f"{args.corpus} cannot be prepared with --subwords {args.subwords}")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: it takes one at least")
    if corpus.data:
        data = CATALOGUE[corpus.data]
        raw, output = args.raw or Path("runs/raw") / args.corpus, args.output or Path("runs/data") / args.corpus
        have(data, raw, args.archive)
    else:
        raw, output = args.raw or Path("data/sample"), args.output or Path("runs/sample/data") / args.corpus
        if args.archive:
            raise UserError(f"{args.corpus} comes with the project and takes no --archive")
        if not raw.is_dir():
            raise UserError(f"no folder {raw}: run this in the project's folder, or say where it is with --raw")
    folder = corpus.prepare(raw, output, Options(args.workers, args.subwords))
    if corpus.data:
        compare(data, read_counts(folder))
    print(folder)
    return 0
