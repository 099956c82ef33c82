"""The two sample corpora that come with the project, and how each is prepared."""

from pathlib import Path

from powernorm_fairseq.corpora.language_model import LanguageModelRecipe, prepare_language_model
from powernorm_fairseq.corpora.translation import TranslationRecipe, prepare_translation

# The recipe of IWSLT14 with fewer merges: the text is an eighth of IWSLT14's.
TRANSLATION = TranslationRecipe(merges=2000)

# The addresses since 1961, which are in today's English; about 300,000 training words.
LANGUAGE_MODEL = LanguageModelRecipe(first="1961", vocabulary=5000)


def prepare_sample_translation(sample: Path, root: Path, workers: int = 1, subwords: str = "bpe") -> Path:
    """German-English sentences of user interfaces; ``sample`` is the project's data/sample."""
    return prepare_translation(sample / "ui-de-en", root, TRANSLATION, workers, subwords)


def prepare_sample_language_model(sample: Path, root: Path) -> Path:
    """State of the Union addresses; ``sample`` is the project's data/sample."""
    return prepare_language_model(sample / "sotu-raw.tar.xz", root, LANGUAGE_MODEL)
