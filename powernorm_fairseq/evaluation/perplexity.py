"""Perplexity per word, token or character: of what fairseq-eval-lm prints, and of a unigram model as the floor."""

import math
import re
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from powernorm_fairseq.corpora.binarised import token_ids
from powernorm_fairseq.evaluation.units import UNITS, Text, measure
from powernorm_fairseq.processes import UserError

__all__ = ["in_units", "perplexity", "score_of", "token_ids", "unigram"]

# "... | INFO | fairseq_cli.eval_lm | 17 the [-2.345678]\tstate [-5.4321]"; "INFO:fairseq_cli.eval_lm:17 the ..." where
# something else has set up logging first.
_WORD_LINE = re.compile(r"fairseq_cli\.eval_lm(?: \| |:)(\d+) (.*\[-?(?:[\d.]+|inf|nan)\])$")
_SCORE = re.compile(r"\[(-?(?:[\d.]+|inf|nan))\]$")
_PRINTED = re.compile(r"Loss \(base 2\): ([\d.]+|inf|nan), Perplexity: ")


def perplexity(nats: float, words: int) -> float:
    """exp(nats / words); infinite where a double cannot hold it."""
    try:
        return math.exp(nats / words)
    except OverflowError:
        return math.inf


def in_units(nats: float, text: Text, unit: str = "word") -> Dict[str, Any]:
    """What the log-probability of a text is worth, per token, word and, if those are the tokens, character.

    Args:
        nats: minus the log-probability of the whole text.
        unit: what ``perplexity`` is of. ``character`` says that each token is one character (or byte).

    Returns:
        ``perplexity``, ``unit`` and ``units`` (how many there are); ``tokens``, ``words`` and ``unknown`` of the text;
        ``nats``, ``nats_per_token``, ``nats_per_word``, ``perplexity_per_token``, ``perplexity_per_word``. Per
        character instead of per word: ``nats_per_character``, ``bits_per_character``.

    Raises:
        UserError: no such unit, or words where the pieces of one hang together with none.
    """
    if unit not in UNITS:
        raise UserError(f"no unit {unit!r}; there are {', '.join(UNITS)}")
    if not text.words:
        raise UserError("the text has no words; are the subwords of another kind?")
    found: Dict[str, Any] = {
        "perplexity": perplexity(nats, text.words if unit == "word" else text.tokens),
        "unit": unit,
        "units": text.words if unit == "word" else text.tokens,
        "tokens": text.tokens,
        "unknown": text.unknown,
        "nats": nats,
        "nats_per_token": nats / text.tokens,
        "perplexity_per_token": perplexity(nats, text.tokens),
    }
    if unit == "character":
        each = nats / text.tokens
        return {**found, "nats_per_character": each, "bits_per_character": each / math.log(2)}
    each = nats / text.words
    return {
        **found,
        "words": text.words,
        "nats_per_word": each,
        "perplexity_per_word": perplexity(nats, text.words),
    }


def nats_by_sample(output: str) -> Dict[int, Tuple[float, int]]:
    """Sample of the text -> minus the log-probability of its tokens, and their number; from the same output.

    Raises:
        UserError: a line cannot be read.
    """
    found: Dict[int, Tuple[float, int]] = {}
    for line in output.split("\n"):
        match = _WORD_LINE.search(line)
        if match:
            nats, tokens = found.get(int(match.group(1)), (0.0, 0))
            for word in match.group(2).split("\t"):
                score = _SCORE.search(word)
                if score is None:
                    raise UserError(f"cannot read the log-probability in {word[:80]!r}")
                nats -= float(score.group(1))
                tokens += 1
            found[int(match.group(1))] = (nats, tokens)
    return found


def score_of(output: str, text: Text, unit: str = "word") -> Dict[str, Any]:
    """Perplexity, end-of-sentence included, from ``fairseq-eval-lm --output-word-probs`` without ``--post-process``.

    The log-probabilities of the tokens are added up here, so that their number is known and not only believed.

    Returns:
        As ``in_units``.

    Raises:
        UserError: not exactly the tokens of ``text`` were scored, or the sum is not what fairseq printed.
    """
    samples = nats_by_sample(output).values()
    nats, tokens = sum(nats for nats, _ in samples), sum(count for _, count in samples)
    if tokens != text.tokens:
        raise UserError(f"{tokens} tokens were scored, but the text has {text.tokens}")
    printed = _PRINTED.search(output)
    if printed is None:
        raise UserError("fairseq-eval-lm printed no loss")
    bits = nats / tokens / math.log(2)
    if abs(float(printed.group(1)) - bits) > 1e-3 * max(1.0, bits):
        raise UserError(f"the words give a loss of {bits:.4f} bits, fairseq printed {printed.group(1)}")
    return in_units(nats, text, unit)


def unigram(data: Path, subset: str, unit: str = "word", subwords: str = "") -> Dict[str, Any]:
    """Perplexity of token frequencies alone: estimated on ``train``, scored on ``subset``.

    Both include the ends of sentence. Every token of the dictionary is counted once more than it occurs, so that one
    that the training text lacks has a probability. ``unit``, ``subwords`` and the result are those of ``in_units`` and
    ``measure``.
    """
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(data / "dict.txt"))
    counts = np.bincount(token_ids(data, "train"), minlength=len(dictionary)).astype(np.float64)
    real = np.array([not symbol.startswith("madeupword") for symbol in dictionary.symbols])
    real[[dictionary.bos(), dictionary.pad()]] = False  # never predicted, like the filling symbols
    counts += real
    with np.errstate(divide="ignore"):
        log_probabilities = np.log(counts / counts.sum())
    nats = float(-log_probabilities[token_ids(data, subset)].sum())
    return in_units(nats, measure(data, subset, subwords), unit)
