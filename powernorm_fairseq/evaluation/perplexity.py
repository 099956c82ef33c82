"""Perplexity per word: of a language model through fairseq-eval-lm, and of a unigram model as the floor."""

import math
import re
from pathlib import Path
from typing import Any, Dict

import numpy as np

from powernorm_fairseq.processes import UserError

# "... | INFO | fairseq_cli.eval_lm | 17 the [-2.345678]\tstate [-5.4321]"; "INFO:fairseq_cli.eval_lm:17 the ..." where
# something else has set up logging first.
_WORD_LINE = re.compile(r"fairseq_cli\.eval_lm(?: \| |:)\d+ (.*\[-?(?:[\d.]+|inf|nan)\])$")
_SCORE = re.compile(r"\[(-?(?:[\d.]+|inf|nan))\]$")
_PRINTED = re.compile(r"Loss \(base 2\): ([\d.]+|inf|nan), Perplexity: ")


def perplexity(nats: float, words: int) -> float:
    """exp(nats / words); infinite where a double cannot hold it."""
    try:
        return math.exp(nats / words)
    except OverflowError:
        return math.inf


def score_of(output: str, expected_tokens: int) -> Dict[str, Any]:
    """Perplexity per word, end-of-sentence included, from ``fairseq-eval-lm --output-word-probs``.

    The log-probabilities of the words are added up here, so that the number of tokens is known and not only believed.

    Raises:
        UserError: not exactly ``expected_tokens`` were scored, or the sum is not what fairseq printed.
    """
    nats, tokens = 0.0, 0
    for line in output.split("\n"):
        words = _WORD_LINE.search(line)
        for word in words.group(1).split("\t") if words else ():
            score = _SCORE.search(word)
            if score is None:
                raise UserError(f"cannot read the log-probability in {word[:80]!r}")
            nats -= float(score.group(1))
            tokens += 1
    if tokens != expected_tokens:
        raise UserError(f"{tokens} tokens were scored, but the text has {expected_tokens}")
    printed = _PRINTED.search(output)
    if printed is None:
        raise UserError("fairseq-eval-lm printed no loss")
    bits = nats / tokens / math.log(2)
    if abs(float(printed.group(1)) - bits) > 1e-3 * max(1.0, bits):
        raise UserError(f"the words give a loss of {bits:.4f} bits, fairseq printed {printed.group(1)}")
    return {"perplexity": perplexity(nats, tokens), "nats_per_word": nats / tokens, "tokens": tokens, "unit": "word"}


def token_ids(data: Path, split: str) -> "np.ndarray[Any, Any]":
    """All token ids of a split of binarised text, ends of sentence included, in order.

    Raises:
        UserError: there is no such split.
    """
    from fairseq.data import data_utils

    dataset = data_utils.load_indexed_dataset(str(data / split), None, None)
    if dataset is None:
        raise UserError(f"no split {split!r} in {data}")
    return np.concatenate([dataset[index].numpy() for index in range(len(dataset))])


def unigram(data: Path, subset: str) -> Dict[str, Any]:
    """Perplexity of word frequencies alone: estimated on ``train``, scored on ``subset``.

    Both include the ends of sentence. Every word of the dictionary is counted once more than it occurs, so that a word
    that the training text lacks has a probability.
    """
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(data / "dict.txt"))
    counts = np.bincount(token_ids(data, "train"), minlength=len(dictionary)).astype(np.float64)
    real = np.array([not symbol.startswith("madeupword") for symbol in dictionary.symbols])
    real[[dictionary.bos(), dictionary.pad()]] = False  # never predicted, like the filling symbols
    counts += real
    with np.errstate(divide="ignore"):
        log_probabilities = np.log(counts / counts.sum())
    test = token_ids(data, subset)
    nats = float(-log_probabilities[test].sum())
    return {
        "perplexity": perplexity(nats, len(test)),
        "nats_per_word": nats / len(test),
        "tokens": len(test),
        "unit": "word",
    }
