"""What a perplexity is divided by: the tokens, words or characters of binarised text, counted in the text itself.

fairseq's own ``--post-process`` counts words while it scores, block by block, and takes a piece that a block cuts off
for a whole word; so the number of words would depend on the window.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from powernorm_fairseq.corpora.binarised import CORPUS, token_ids
from powernorm_fairseq.corpora.catalogue import CATALOGUE
from powernorm_fairseq.processes import UserError

UNITS = ("word", "token", "character")
# Which symbols are no word of their own, by the names that fairseq's --post-process has for kinds of subwords.
SUBWORDS = ("", "subword_nmt", "sentencepiece")


@dataclass(frozen=True)
class Text:
    """How long a split of binarised text is; each end of line counts as one token, one word and one character.

    Attributes:
        tokens: what the model predicts one by one.
        words: tokens, where a word in several pieces counts once.
        unknown: tokens outside the dictionary, all of which are one word for the model.
    """

    tokens: int
    words: int
    unknown: int


def measure(data: Path, split: str, subwords: str = "") -> Text:
    """Count a split of binarised text.

    Args:
        data: the folder with ``dict.txt``.
        subwords: the kind of pieces; with ``subword_nmt`` text of whole words is counted rightly too.

    Raises:
        UserError: there is no such split or kind of pieces.
    """
    from fairseq.data import Dictionary

    if subwords not in SUBWORDS:
        raise UserError(f"no subwords {subwords!r}; there are {', '.join(map(repr, SUBWORDS))}")
    ids = token_ids(data, split)
    dictionary = Dictionary.load(str(data / "dict.txt"))
    counts = np.bincount(ids, minlength=len(dictionary))
    symbols = dictionary.symbols
    if subwords == "sentencepiece":
        begins = np.array([symbol.startswith("\u2581") for symbol in symbols])
        begins[dictionary.eos()] = True
    else:
        begins = np.array([not (subwords and symbol.endswith("@@")) for symbol in symbols])
    return Text(len(ids), int(counts[begins].sum()), int(counts[dictionary.unk()]))


def published_tokens(data: Path, split: str, corpus: str = "") -> Optional[int]:
    """How many tokens a split has by the catalogue, bytes where those are the tokens; None where that is not known.

    Args:
        corpus: name in the catalogue; default: what the preparation left in ``data``.
    """
    noted = data / CORPUS
    if not corpus and noted.exists():
        corpus = noted.read_text(encoding="utf-8").strip()
    known = {count.of: count.value for count in CATALOGUE[corpus].counts} if corpus in CATALOGUE else {}
    return known.get(f"{split} tokens", known.get(f"{split} bytes"))
