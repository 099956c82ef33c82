"""Subwords of both languages together: byte-pair merges (subword-nmt), or a sentencepiece model."""

import contextlib
import io
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Callable, Iterator, List, Sequence

from powernorm_fairseq.corpora.streams import Progress, lines_of
from powernorm_fairseq.corpora.text import bpe_pieces, sentencepiece_pieces
from powernorm_fairseq.processes import UserError

# Sentences at most that a sentencepiece model is learned from, drawn evenly: its memory grows with their number.
SAMPLED_SENTENCES = 2_000_000

# Its result depends on the number of threads, and must not depend on the machine.
SENTENCEPIECE_THREADS = 16


@dataclass(frozen=True)
class Subwords:
    """One way to split words.

    Attributes:
        model: the file that says how, which lies beside the binarised text.
        learned, split, binarised: names of the steps' folders.
        post_process: fairseq's name for how the pieces are joined (``--post-process``).
    """

    model: str
    learned: str
    split: str
    binarised: str
    post_process: str


KINDS = {
    "bpe": Subwords("codes", "codes", "subwords", "binarised", "subword_nmt"),
    "sentencepiece": Subwords(
        "sentencepiece.model", "sentencepiece-model", "sentencepiece", "binarised-sentencepiece", "sentencepiece"
    ),
}


def learn(kind: str, texts: Sequence[Path], model: Path, size: int) -> None:
    """Learn ``size`` merges, or a vocabulary of that size, from the training text of both languages."""
    if kind == "bpe":
        learn_joint_bpe(texts, model, size)
    else:
        learn_sentencepiece(texts, model, size)


def splitter(kind: str, model: Path) -> Callable[[List[str]], List[str]]:
    """What splits a chunk of lines, in any process."""
    if kind == "bpe":
        return partial(bpe_pieces, codes=str(model))
    return partial(sentencepiece_pieces, model=str(model))


def count_words(texts: Sequence[Path]) -> "Counter[str]":
    """How often each word occurs; words are what single spaces separate, as for subword-nmt."""
    counts: Counter[str] = Counter()
    for text in texts:
        for line in lines_of(text):
            counts.update(line.strip("\r\n ").split(" "))
    del counts[""]
    return counts


def learn_joint_bpe(texts: Sequence[Path], codes: Path, merges: int) -> None:
    """Learn byte-pair merges on several texts together.

    They are learned from the counts of words, which gives the very merges that the texts give: memory grows with the
    number of different words, not with the length of the text.
    """
    from subword_nmt.learn_bpe import learn_bpe

    counts = count_words(texts)
    if not counts:
        raise UserError(f"no words in {', '.join(map(str, texts))} to learn subwords from")
    entries = [f"{word} {count}" for word, count in sorted(counts.items())]
    what = f"{codes.parent.parent.name}: merges of {len(entries):,} different words"
    del counts
    # It draws a progress bar to stderr, which other processes may be writing to as well.
    with open(codes, "w", encoding="utf-8", newline="\n") as file, contextlib.redirect_stderr(io.StringIO()):
        learn_bpe(_taken(entries), _Counted(file, Progress(what, merges)), merges, is_dict=True)


def _taken(entries: List[str]) -> Iterator[str]:
    # Each entry is let go when it has been read.
    entries.reverse()
    while entries:
        yield entries.pop()


class _Counted:
    """A text file in which each line written is one step of the progress."""

    def __init__(self, file: IO[str], progress: Progress) -> None:
        self.file, self.progress = file, progress

    def write(self, text: str) -> int:
        self.progress.add(1)
        return self.file.write(text)


def learn_sentencepiece(texts: Sequence[Path], model: Path, size: int) -> None:
    """Learn a unigram sentencepiece model, and leave it as ``model``.

    The text is taken as it is (no normalisation), so that joining the pieces gives back the very tokens. A text that
    has not enough different pieces gives a smaller vocabulary.
    """
    from sentencepiece import SentencePieceTrainer

    options: Any = {
        "vocab_size": size,
        "model_type": "unigram",
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "hard_vocab_limit": False,
        "input_sentence_size": SAMPLED_SENTENCES,
        "shuffle_input_sentence": True,
        "max_sentence_length": 16384,
        "num_threads": SENTENCEPIECE_THREADS,
        "minloglevel": 2,
    }
    sentences = (line for text in texts for line in lines_of(text) if line)
    with open(model, "wb") as file:
        try:
            SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=file, **options)
        except RuntimeError as error:
            raise UserError(f"sentencepiece cannot learn {size} pieces from this text: {error}") from error
