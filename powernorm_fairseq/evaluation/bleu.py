"""BLEU and chrF of translations by sacreBLEU, in the ways that published figures are computed.

All functions take one line for each sentence and one reference for each, and refuse what ``check_pairs`` refuses.
"""

import re
from typing import Any, Dict, List, Sequence

from sacrebleu.metrics import BLEU, CHRF

from powernorm_fairseq.corpora.text import detokenise, tokenise
from powernorm_fairseq.evaluation.checks import check_pairs
from powernorm_fairseq.evaluation.generated import hypotheses_of

__all__ = [
    "chrf_score",
    "compound_bleu",
    "hypotheses_of",
    "plain_metric",
    "sacrebleu_score",
    "split_compounds",
    "tokenised_bleu",
]

# The convention counts bytes of any other space as part of a word, as Perl does where it is not told of UTF-8.
_HYPHEN = re.compile(r"(\S)-(\S)", re.ASCII)
_SPLIT_HYPHEN = " ##AT##-##AT## "


def sacrebleu_score(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False, allow_empty: bool = False
) -> Dict[str, Any]:
    """Corpus BLEU of detokenised text against references as people wrote them.

    Args:
        lowercase: ignore case (``case:lc`` in the signature).
        allow_empty: score even if no hypothesis has a word, which gives 0; else that is taken for a mistake.

    Returns:
        ``bleu`` (0 to 100), ``precisions``, ``brevity_penalty``, ``hypothesis_length`` and ``reference_length`` in
        tokens, ``sentences``, and sacreBLEU's ``signature``.

    Raises:
        UserError: nothing to score, different numbers of lines, an empty reference, or subword marks left, which would
            change the score.
    """
    check_pairs(hypotheses, references, allow_empty)
    return _corpus_bleu(BLEU(lowercase=lowercase), hypotheses, references)


def tokenised_bleu(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False, allow_empty: bool = False
) -> Dict[str, Any]:
    """Corpus BLEU of the tokens that spaces separate: 4-grams, brevity penalty, no smoothing.

    That is what ``multi-bleu.perl`` and fairseq-generate print, and the IWSLT14 figures of both papers: Moses tokens,
    lower-cased in the preparation, subwords joined. The score is 0 if the corpus has not a single match of some order,
    or is too short to have n-grams of it, as in both programs.

    Arguments, result and errors are those of ``sacrebleu_score``.
    """
    check_pairs(hypotheses, references, allow_empty)
    return _corpus_bleu(plain_metric(lowercase), hypotheses, references)


def compound_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lowercase: bool = False,
    allow_empty: bool = False,
    language: str = "de",
) -> Dict[str, Any]:
    """``tokenised_bleu`` after ``split_compounds`` on both sides: the WMT14 English-German figures.

    The splits are more tokens, most of them easily right, so that it is higher than without.

    Arguments, result and errors are those of ``sacrebleu_score``.
    """
    check_pairs(hypotheses, references, allow_empty)
    sides = [split_compounds(side, language) for side in (hypotheses, references)]
    return _corpus_bleu(plain_metric(lowercase), *sides)


def chrf_score(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False, allow_empty: bool = False
) -> Dict[str, Any]:
    """Corpus chrF2 (character 6-grams, recall counts twice) of detokenised text.

    Returns:
        ``chrf`` (0 to 100), ``sentences``, and sacreBLEU's ``signature``.

    Arguments and errors are those of ``sacrebleu_score``.
    """
    check_pairs(hypotheses, references, allow_empty)
    metric = CHRF(lowercase=lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return {"chrf": score.score, "sentences": len(references), "signature": str(metric.get_signature())}


def plain_metric(lowercase: bool) -> BLEU:
    """BLEU of the tokens that spaces separate, without smoothing."""
    # `force`: the text is meant to be tokenised, so there is nothing to warn of.
    return BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)


def split_compounds(lines: Sequence[str], language: str) -> List[str]:
    """Moses tokens with each hyphen inside a word as a token ``##AT##-##AT##`` of its own.

    The tokens are joined to text and split anew without ``-a``, so that it does not matter how hyphens were split
    before: ``-``, ``@-@`` and ``##AT##-##AT##`` give the same. A hyphen is inside a word if no space is on either side;
    of two that share one letter (``a-b-c``) only the first is split, which is how published scripts count too.
    """
    text = detokenise([line.replace(_SPLIT_HYPHEN, "-") for line in lines], language)
    return [_HYPHEN.sub(rf"\1{_SPLIT_HYPHEN}\2", line) for line in tokenise(text, language, lower=False)]


def _corpus_bleu(metric: BLEU, hypotheses: Sequence[str], references: Sequence[str]) -> Dict[str, Any]:
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return {
        "bleu": score.score,
        "precisions": list(score.precisions),
        "brevity_penalty": score.bp,
        "hypothesis_length": score.sys_len,
        "reference_length": score.ref_len,
        "sentences": len(references),
        "signature": str(metric.get_signature()),
    }
