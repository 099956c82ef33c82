"""BLEU by sacreBLEU, and what must be true of a file before it is scored."""

import re
from typing import Any, Dict, List, Sequence

from powernorm_fairseq.processes import UserError

# subword-nmt ends a piece that goes on with @@; sentencepiece starts a word with U+2581.
SUBWORD_MARK = re.compile(r"@@(?= |$)|\u2581")


def hypotheses_of(output: str, count: int) -> List[str]:
    """The best hypothesis for each line of the data set, from what fairseq-generate printed.

    Raises:
        UserError: there is not exactly one for each of the ``count`` lines.
    """
    found: Dict[int, str] = {}
    for line in output.split("\n"):
        if line.startswith("H-"):
            number, _, rest = line[2:].partition("\t")
            if int(number) in found:
                raise UserError(f"line {number} of the data set has two hypotheses; decode with --nbest 1")
            found[int(number)] = rest.partition("\t")[2]
    missing = sorted(set(range(count)) - set(found))
    if missing or len(found) != count:
        raise UserError(f"{len(found)} hypotheses for {count} lines; the first one missing is {missing[:1]}")
    return [found[number] for number in range(count)]


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
        UserError: nothing to score, different numbers of lines, an empty reference, or subword marks left in a
            hypothesis, which would change the score.
    """
    from sacrebleu.metrics import BLEU

    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if not references:
        raise UserError("there is nothing to score: no lines")
    for number, (hypothesis, reference) in enumerate(zip(hypotheses, references), start=1):
        if not reference.strip():
            raise UserError(f"the reference in line {number} is empty")
        if SUBWORD_MARK.search(hypothesis):
            raise UserError(f"line {number} still has subword marks, join them first: {hypothesis[:80]!r}")
    if not allow_empty and not any(hypothesis.strip() for hypothesis in hypotheses):
        raise UserError("every hypothesis is empty")
    metric = BLEU(lowercase=lowercase)
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
