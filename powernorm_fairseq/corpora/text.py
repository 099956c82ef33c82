"""Text operations of the published recipes: Moses tokenisation, cleaning, and Penn-Treebank-like normalisation."""

import multiprocessing
import re
from collections import Counter
from functools import partial
from typing import Callable, Iterable, List, Sequence, Tuple

from powernorm_fairseq.processes import cores

UNKNOWN = "<unk>"
NUMBER = "N"

# Starting workers costs a second or two, which small texts do not earn back.
PARALLEL_FROM = 100_000


def tokenise(lines: Sequence[str], language: str, lower: bool) -> List[str]:
    """Moses tokenisation with the escapes of the published scripts (``&apos;``), spaces between tokens."""
    return _over_lines(partial(_tokenise, language=language, lower=lower), lines)


def _tokenise(lines: Sequence[str], language: str, lower: bool) -> List[str]:
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(lang=language)
    tokenised = (tokenizer.tokenize(line, return_str=True, escape=True) for line in lines)
    return [line.lower() if lower else line for line in tokenised]


def detokenise(lines: Iterable[str], language: str) -> List[str]:
    """The inverse of ``tokenise`` (but for case): text as a person writes it."""
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=language)
    return [detokenizer.detokenize(line.split()) for line in lines]


def clean(pairs: Iterable[Tuple[str, str]], ratio: float, longest: int) -> List[Tuple[str, str]]:
    """The pairs of 1 to ``longest`` tokens on each side whose longer side has at most ``ratio`` times the shorter's."""
    kept = []
    for pair in pairs:
        shorter, longer = sorted(len(side.split()) for side in pair)
        if shorter >= 1 and longer <= longest and longer <= ratio * shorter:
            kept.append(pair)
    return kept


def apply_bpe(codes: str, lines: Sequence[str]) -> List[str]:
    """Split words by the merges in the file ``codes``; a piece that goes on ends with ``@@``."""
    return _over_lines(partial(_apply_bpe, codes=codes), lines)


def _apply_bpe(lines: Sequence[str], codes: str) -> List[str]:
    from subword_nmt.apply_bpe import BPE

    with open(codes, encoding="utf-8") as file:
        bpe = BPE(file)
    return [bpe.process_line(line).strip() for line in lines]


def _over_lines(function: Callable[[Sequence[str]], List[str]], lines: Sequence[str]) -> List[str]:
    """``function(lines)``, by several processes where there are enough lines."""
    workers = cores()
    if len(lines) < PARALLEL_FROM or workers == 1:
        return function(lines)
    size = max(1000, -(-len(lines) // (4 * workers)))
    chunks = [lines[start : start + size] for start in range(0, len(lines), size)]
    with multiprocessing.Pool(workers) as pool:
        return [line for done in pool.map(function, chunks, chunksize=1) for line in done]


# A full stop after these ends no sentence.
_ABBREVIATIONS = frozenset(
    ["mr", "mrs", "ms", "dr", "st", "no", "gen", "sen", "rep", "gov", "lt", "col", "hon", "rev", "messrs", "jr", "sr"]
)
_SENTENCE_END = re.compile(r"(?<=[.?!])[\"'\u201d\u2019)]*\s+(?=[\"'\u201c\u2018(]*[A-Z0-9])")
_STAGE_DIRECTION = re.compile(r"\((?:applause|laughter)\.?\)", re.IGNORECASE)
_CLITIC = re.compile(r"(?<=[a-z])(n't|'s|'re|'ve|'ll|'d|'m)$")
_WORD = re.compile(r"\d[\d.,:/-]*\d|\d|(?:[a-z]\.){2,}|[^\W\d_]+(?:['-][^\W\d_]+)*")


def sentences(text: str) -> List[str]:
    """Split running text into sentences at ``.``, ``?`` and ``!`` before a capital, a digit or an opening quote."""
    pieces = _SENTENCE_END.split(_STAGE_DIRECTION.sub(" ", text))
    joined: List[str] = []
    for piece in pieces:
        if joined and _ends_with_abbreviation(joined[-1]):
            joined[-1] += " " + piece
        else:
            joined.append(piece)
    return joined


def _ends_with_abbreviation(piece: str) -> bool:
    words = piece.rsplit(None, 1)
    last = words[-1] if words else ""
    # "U.S." and initials ("John F.") go on more often than they end a sentence.
    return last.endswith(".") and (last[:-1].lower() in _ABBREVIATIONS or bool(re.fullmatch(r"(?:[A-Z]\.)+", last)))


def penn_words(sentence: str) -> List[str]:
    """Words in the manner of the Penn Treebank language-modelling text.

    Lower case, no punctuation, every number ``N``, clitics split (``do n't``, ``it 's``).
    """
    words: List[str] = []
    for match in _WORD.findall(sentence.lower().replace("\u2019", "'").replace("\u2011", "-")):
        if match[0].isdigit():
            words.append(NUMBER)
            continue
        clitic = _CLITIC.search(match)
        words += [match[: clitic.start()], clitic.group()] if clitic else [match]
    return words


def most_frequent(lines: Iterable[Sequence[str]], size: int) -> List[str]:
    """The ``size`` most frequent words, ties in alphabetical order."""
    counts = Counter(word for line in lines for word in line)
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]
