"""A language-modelling corpus in the manner of the Penn Treebank text, from whole documents."""

import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, List

from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.text import UNKNOWN, most_frequent, penn_words, sentences
from powernorm_fairseq.corpora.translation import SPLITS, write_lines
from powernorm_fairseq.processes import UserError, fairseq_program, hold, run_to_end


@dataclass(frozen=True)
class LanguageModelRecipe:
    """What is done to the text.

    Attributes:
        first: documents whose name sorts before this one are left out.
        every, valid_at, test_at: of ``every`` documents in the order of their names, the one at position ``valid_at``
            becomes validation text and the one at ``test_at`` test text. No document is in two splits.
        vocabulary: words kept, the most frequent of the training text; all others become ``<unk>``.
    """

    first: str = ""
    every: int = 10
    valid_at: int = 4
    test_at: int = 9
    vocabulary: int = 10_000


def prepare_language_model(archive: Path, root: Path, recipe: LanguageModelRecipe) -> Path:
    """Prepare the ``*.txt`` documents in a tar archive.

    Returns:
        The folder for ``fairseq-train``. The text itself stays beside it in ``text/{train,valid,test}.txt``, a sentence
        a line.

    Raises:
        UserError: the archive is missing, or it holds too few documents to split.
    """
    preparation = Preparation(root)
    with hold(root):

        def make_text(folder: Path) -> None:
            splits = split_documents(read_documents(archive), recipe)
            words = {
                split: [line for document in documents for line in map(penn_words, sentences(document)) if line]
                for split, documents in splits.items()
            }
            known = set(most_frequent(words["train"], recipe.vocabulary))
            for split, lines in words.items():
                kept = [[word if word in known else UNKNOWN for word in line] for line in lines]
                count, unknown = sum(map(len, kept)), sum(line.count(UNKNOWN) for line in kept)
                print(
                    f"{root.name}: {split} has {len(splits[split])} documents, {len(kept)} sentences, {count} words,"
                    f" {100 * unknown / count:.1f} % {UNKNOWN}",
                    flush=True,
                )
                write_lines(folder / f"{split}.txt", [" ".join(line) for line in kept])

        text = preparation.step("text", make_text, {"raw": digest_of_files([archive]), **asdict(recipe)})

        def make_binary(folder: Path) -> None:
            prefixes = [part for split in SPLITS for part in (f"--{split}pref", str(text / f"{split}.txt"))]
            run_to_end(
                [
                    *fairseq_program("preprocess"),
                    "--only-source",
                    *prefixes,
                    "--destdir",
                    str(folder),
                    "--workers",
                    "1",
                ],
                root / "preprocess.log",
            )

        return preparation.step("binarised", make_binary, {"text": text})


def read_documents(archive: Path) -> Dict[str, str]:
    """Name (without folder and extension) to text, of the ``*.txt`` members of a tar archive, sorted by name."""
    documents = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member) if member.name.endswith(".txt") else None
            if file is not None:
                documents[Path(member.name).stem] = file.read().decode("utf-8")
    return dict(sorted(documents.items()))


def split_documents(documents: Dict[str, str], recipe: LanguageModelRecipe) -> Dict[str, List[str]]:
    """The texts of each split.

    Raises:
        UserError: a split would be empty.
    """
    splits: Dict[str, List[str]] = {split: [] for split in SPLITS}
    special = {recipe.valid_at: "valid", recipe.test_at: "test"}
    names = [name for name in documents if name >= recipe.first]
    for position, name in enumerate(names):
        splits[special.get(position % recipe.every, "train")].append(documents[name])
    empty = [split for split, texts in splits.items() if not texts]
    if empty:
        raise UserError(f"{len(names)} documents leave nothing for {', '.join(empty)}")
    return splits
