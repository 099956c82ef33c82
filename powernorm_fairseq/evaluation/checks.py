"""What must be true of translations before they are scored."""

import contextlib
import re
from typing import Iterator, Sequence

from powernorm_fairseq.processes import UserError

# subword-nmt ends a piece that goes on with @@; sentencepiece starts a word with U+2581.
SUBWORD_MARK = re.compile(r"@@(?= |$)|\u2581")
# People write "@@ -1 +1 @@" and bars of blocks, so in references only what hangs on to a word is a mark.
_MARK_ON_A_WORD = re.compile(r"[^\s@]@@(?= |$)|(?:^| )\u2581\w")
# What Moses tokenisation makes of quotes and brackets. `&amp;` is left out: people write it.
_ESCAPE = re.compile(r"&(?:apos|quot|#91|#93|#124);")


def check_pairs(hypotheses: Sequence[str], references: Sequence[str], allow_empty: bool = False) -> None:
    """Refuse what would give a number that means something else.

    Args:
        allow_empty: accept that no hypothesis has a word.

    Raises:
        UserError: nothing to score, different numbers of lines, an empty reference, or subword marks left on either
            side, which would change the score.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} hypotheses for {len(references)} references; each line needs one of both, so take the "
            "files of the same split"
        )
    if not references:
        raise UserError("there is nothing to score: no lines")
    for number, (hypothesis, reference) in enumerate(zip(hypotheses, references), start=1):
        if not reference.strip():
            raise UserError(f"the reference in line {number} is empty; remove the line on both sides, or mend it")
        if SUBWORD_MARK.search(hypothesis):
            raise UserError(f"line {number} still has subword marks, join them first: {hypothesis[:80]!r}\n{_JOIN}")
        if _MARK_ON_A_WORD.search(reference):
            raise UserError(
                f"the reference in line {number} still has subword marks, join them first: {reference[:80]!r}\n{_JOIN}"
            )
    if not allow_empty and not any(hypothesis.strip() for hypothesis in hypotheses):
        raise UserError("every hypothesis is empty; was it the output of a run that failed?")


_JOIN = "fairseq-generate does so with --remove-bpe (subword-nmt) or --remove-bpe sentencepiece"


def check_detokenised(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Refuse hypotheses that Moses has tokenised where the references are as people write them.

    Raises:
        UserError: a hypothesis has an escape such as ``&apos;``, and no reference has one.
    """
    if any(map(_ESCAPE.search, references)):
        return
    for number, hypothesis in enumerate(hypotheses, start=1):
        if _ESCAPE.search(hypothesis):
            raise UserError(
                f"the hypothesis in line {number} is tokenised, the references are not: {hypothesis[:80]!r}\n"
                "undo the tokenisation first (--detokenise)"
            )


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a system in front of what is wrong with it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
