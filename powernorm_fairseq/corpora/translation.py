"""A parallel corpus from raw text to what fairseq reads, by the recipe published for IWSLT14 German-English."""

import contextlib
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List, Sequence

from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.text import apply_bpe, clean, tokenise
from powernorm_fairseq.processes import UserError, fairseq_program, hold, run_to_end

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TranslationRecipe:
    """What is done to the text; the defaults are those of the IWSLT14 script.

    Attributes:
        lower: lower-case both sides, so that scores must ignore case.
        ratio, longest: pairs of the training text that are longer or more uneven (in tokens) are dropped; validation
            and test text is never cleaned.
        merges: operations of the byte-pair encoding that both languages share.
    """

    source: str = "de"
    target: str = "en"
    lower: bool = True
    ratio: float = 1.5
    longest: int = 175
    merges: int = 10_000


def prepare_translation(raw: Path, root: Path, recipe: TranslationRecipe) -> Path:
    """Prepare ``raw/{train,valid,test}.{source,target}`` (one sentence a line, as people write it).

    Returns:
        The folder for ``fairseq-train``: binarised text with one joined dictionary, the merges as ``codes``, and the
        untouched target sides ``reference.{valid,test}.<target>`` that hypotheses are scored against.

    Raises:
        UserError: a file is missing or the sides of a split differ in length.
    """
    languages = (recipe.source, recipe.target)
    sources = [raw / f"{split}.{language}" for split in SPLITS for language in languages]
    preparation = Preparation(root)
    with hold(root):

        def make_tokens(folder: Path) -> None:
            for split in SPLITS:
                sides = [read_lines(raw / f"{split}.{language}") for language in languages]
                if len(sides[0]) != len(sides[1]):
                    raise UserError(
                        f"{raw}/{split}: {len(sides[0])} lines in one language, {len(sides[1])} in the other"
                    )
                tokens = [tokenise(side, language, recipe.lower) for side, language in zip(sides, languages)]
                pairs = list(zip(*tokens))
                if split == "train":
                    pairs = clean(pairs, recipe.ratio, recipe.longest)
                    print(f"{root.name}: {len(pairs)} of {len(sides[0])} training pairs kept", flush=True)
                for side, language in zip(zip(*pairs), languages):
                    write_lines(folder / f"{split}.{language}", side)

        tokenised = preparation.step("tokenised", make_tokens, {"raw": digest_of_files(sources), **asdict(recipe)})

        def make_subwords(folder: Path) -> None:
            print(f"{root.name}: learning {recipe.merges} byte-pair merges", flush=True)
            learn_joint_bpe(
                [tokenised / f"train.{language}" for language in languages], folder / "codes", recipe.merges
            )
            for split in SPLITS:
                for language in languages:
                    name = f"{split}.{language}"
                    write_lines(folder / name, apply_bpe(str(folder / "codes"), read_lines(tokenised / name)))

        subwords = preparation.step("subwords", make_subwords, {"tokenised": tokenised, "merges": recipe.merges})

        def make_binary(folder: Path) -> None:
            prefixes = [part for split in SPLITS for part in (f"--{split}pref", str(subwords / split))]
            run_to_end(
                [*fairseq_program("preprocess"), "--source-lang", recipe.source, "--target-lang", recipe.target,
                 *prefixes, "--joined-dictionary", "--destdir", str(folder), "--workers", "1"],
                root / "preprocess.log",
            )  # fmt: skip
            (folder / "codes").write_bytes((subwords / "codes").read_bytes())
            for split in SPLITS[1:]:
                reference = f"{split}.{recipe.target}"
                (folder / f"reference.{reference}").write_bytes((raw / reference).read_bytes())

        return preparation.step("binarised", make_binary, {"subwords": subwords, "raw": digest_of_files(sources)})


def learn_joint_bpe(texts: Sequence[Path], codes: Path, merges: int) -> None:
    """Learn byte-pair merges on several texts together."""
    from subword_nmt.learn_bpe import learn_bpe

    # It draws a progress bar to stderr, which other processes may be writing to as well.
    with open(codes, "w", encoding="utf-8") as output, contextlib.redirect_stderr(io.StringIO()):
        learn_bpe([line for text in texts for line in read_lines(text)], output, merges)


def read_lines(path: Path) -> List[str]:
    """The lines of a file; only a line feed ends one, whatever else Unicode counts as a line separator."""
    with open(path, encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write one line for each string."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)
