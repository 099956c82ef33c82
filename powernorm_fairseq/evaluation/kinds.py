"""Which number of a score stands for it; the scores of one translation in several ways, kept with their labels."""

from typing import Any, Dict, Mapping, Optional, Sequence

from powernorm_fairseq.evaluation.score import LABELS
from powernorm_fairseq.processes import UserError

# What can be asked for. chrF is no BLEU and cannot be the headline of a table of BLEU.
KINDS = (*LABELS, "chrf")


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse (UserError) kinds that there are not, none at all, or a headline that is no BLEU."""
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise UserError(f"scoring.kinds is {kinds!r}, and must be a list of {', '.join(KINDS)}")
    if kinds[0] == "chrf":
        raise UserError("scoring.kinds begins with chrf; the first is the score that tables show, which must be BLEU")
    if len(set(kinds)) < len(kinds):
        raise UserError(f"scoring.kinds names one twice: {', '.join(kinds)}")


def needs_tokens(kinds: Sequence[str]) -> bool:
    """Whether tokenised references are needed."""
    return "tokenised" in kinds or "compound" in kinds


def headline(score: Mapping[str, Any], kind: str) -> float:
    """The number of a score that stands beside published ones: of characters their bits, else what ``kind`` says."""
    return score["bits_per_character"] if "bits_per_character" in score else score[kind]


def scores_by_kind(
    kinds: Sequence[str],
    tokens: Sequence[str],
    text: Sequence[str],
    reference_tokens: Optional[Sequence[str]],
    reference_text: Sequence[str],
    lowercase: bool = False,
    language: str = "de",
) -> Dict[str, Any]:
    """Score one translation.

    Args:
        kinds: ``tokenised``, ``compound``, ``sacrebleu``, ``chrf``; the first is the headline.
        tokens: hypotheses as tokens, subwords joined; ``text``: as people write them.
        reference_tokens: the same of the references; needed for ``tokenised`` and ``compound``.
        reference_text: as people wrote them.
        lowercase: ignore case.
        language: of the text, for ``compound``.

    Returns:
        The numbers of the headline with its ``kind``, ``label`` and ``lowercase``, and under ``kinds`` those of each
        kind, headline included, in the same form.

    Raises:
        UserError: what ``check_pairs`` refuses, or tokenised references are missing.
    """
    found: Dict[str, Any] = {}
    for kind in kinds:
        if kind in ("tokenised", "compound"):
            if reference_tokens is None:
                raise UserError(f"{kind} BLEU needs tokenised references")
            pair = (tokens, reference_tokens)
        else:
            pair = (text, reference_text)
        label = LABELS.get(kind, "chrF2 of detokenised text")
        numbers = _one(kind, *pair, lowercase, language)
        found[kind] = {"kind": kind, "label": label, "lowercase": lowercase, **numbers}
    return {**found[kinds[0]], "kinds": found}


def _one(
    kind: str, hypotheses: Sequence[str], references: Sequence[str], lowercase: bool, language: str
) -> Dict[str, Any]:
    from powernorm_fairseq.evaluation import bleu

    # A model that has learned nothing may say nothing, which is worth 0 and no reason to stop.
    if kind == "compound":
        return bleu.compound_bleu(hypotheses, references, lowercase, allow_empty=True, language=language)
    one = {"tokenised": bleu.tokenised_bleu, "sacrebleu": bleu.sacrebleu_score, "chrf": bleu.chrf_score}[kind]
    return one(hypotheses, references, lowercase, allow_empty=True)
