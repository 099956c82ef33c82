"""Text operations of the published recipes: Moses tokenisation, cleaning, and Penn-Treebank-like normalisation."""

import os
import re
from collections import Counter
from functools import lru_cache, partial
from typing import Any, Callable, Iterable, List, Sequence, Tuple

from powernorm_fairseq.corpora.streams import in_chunks, in_order
from powernorm_fairseq.processes import cores

UNKNOWN = "<unk>"
NUMBER = "N"

# Starting workers costs a second or two, which small texts do not earn back.
PARALLEL_FROM = 100_000

# The published cleaning also drops a pair with a longer word than this.
LONGEST_WORD = 1000

# Words whose pieces are remembered; each costs some 300 bytes in every worker.
REMEMBERED_WORDS = 200_000


def tokenise(lines: Sequence[str], language: str, lower: bool) -> List[str]:
    """Moses tokenisation with the escapes of the published scripts (``&apos;``), spaces between tokens."""
    return _over_lines(partial(moses, language=language, lower=lower), lines)


def moses(lines: Sequence[str], language: str, lower: bool = False, hyphens: bool = False) -> List[str]:
    """``tokenise`` in this process; with ``hyphens`` hyphens inside words are tokens, ``@-@`` (Moses' ``-a``)."""
    tokenizer = _tokenizer(language)
    tokenised = (
        tokenizer.tokenize(line, aggressive_dash_splits=hyphens, return_str=True, escape=True) for line in lines
    )
    return [line.lower() if lower else line for line in tokenised]


@lru_cache(maxsize=None)
def _tokenizer(language: str) -> Any:
    from sacremoses import MosesTokenizer

    return MosesTokenizer(lang=language)


def detokenise(lines: Iterable[str], language: str) -> List[str]:
    """The inverse of ``tokenise`` (but for case): text as a person writes it."""
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=language)
    return [detokenizer.detokenize(line.split()) for line in lines]


def normalise_punctuation(lines: Iterable[str], language: str) -> List[str]:
    """Moses' punctuation normalisation, then its removal of non-printing characters, as the published scripts do.

    Quotation marks, dashes and spaces of all kinds become those of ASCII. Every character of Unicode's category C (a
    soft hyphen, a zero-width space) becomes a space.
    """
    import regex

    normalizer, unprintable = _normalizer(language), regex.compile(r"\p{C}")
    return [unprintable.sub(" ", normalizer.normalize(line)) for line in lines]


@lru_cache(maxsize=None)
def _normalizer(language: str) -> Any:
    from sacremoses import MosesPunctNormalizer

    # With `perl_parity` a single right quotation mark that is no apostrophe becomes a double one, as in Moses.
    return MosesPunctNormalizer(lang=language, perl_parity=True)


def straighten(line: str) -> str:
    """The typographic apostrophe as the ASCII one."""
    return line.replace("\u2019", "'")


def keeps(pair: Tuple[str, str], ratio: float, longest: int) -> bool:
    """Whether the cleaning of the published scripts keeps a pair of tokenised sentences."""
    shorter, longer = sorted(len(side.split()) for side in pair)
    return (
        shorter >= 1
        and longer <= longest
        and longer <= ratio * shorter
        and not any(len(side) > LONGEST_WORD and max(map(len, side.split())) > LONGEST_WORD for side in pair)
    )


def clean(pairs: Iterable[Tuple[str, str]], ratio: float, longest: int) -> List[Tuple[str, str]]:
    """The pairs of 1 to ``longest`` tokens on each side whose longer side has at most ``ratio`` times the shorter's."""
    return [pair for pair in pairs if keeps(pair, ratio, longest)]


def apply_bpe(codes: str, lines: Sequence[str]) -> List[str]:
    """Split words by the merges in the file ``codes``; a piece that goes on ends with ``@@``."""
    return _over_lines(partial(bpe_pieces, codes=codes), lines)


def bpe_pieces(lines: Sequence[str], codes: str) -> List[str]:
    """``apply_bpe`` in this process."""
    bpe = _bpe(codes, _state(codes))
    if len(bpe.cache) > REMEMBERED_WORDS:
        bpe.cache.clear()
    return [bpe.process_line(line).strip() for line in lines]


@lru_cache(maxsize=1)
def _bpe(codes: str, state: Tuple[int, ...]) -> Any:
    from subword_nmt.apply_bpe import BPE

    with open(codes, encoding="utf-8") as file:
        return BPE(file)


def sentencepiece_pieces(lines: Sequence[str], model: str) -> List[str]:
    """Split lines by a sentencepiece model; a piece that begins a word begins with U+2581."""
    return [" ".join(pieces) for pieces in _sentencepiece(model, _state(model)).encode(list(lines), out_type=str)]


@lru_cache(maxsize=1)
def _sentencepiece(model: str, state: Tuple[int, ...]) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=model)


def _state(path: str) -> Tuple[int, ...]:
    # What is remembered of a file must not outlive it.
    found = os.stat(path)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _over_lines(function: Callable[[Sequence[str]], List[str]], lines: Sequence[str]) -> List[str]:
    """``function(lines)``, by several processes where there are enough lines."""
    workers = cores()
    if len(lines) < PARALLEL_FROM or workers == 1:
        return function(lines)
    size = max(1000, -(-len(lines) // (4 * workers)))
    return [line for _, done in in_order(function, in_chunks(lines, size), workers) for line in done]


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
