"""A parallel corpus from raw text to what fairseq reads, by the published recipes."""

import contextlib
import struct
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple, Union

from powernorm_fairseq.corpora.counts import read_counts, write_counts
from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.streams import Progress, count_lines, in_chunks, in_order, lines_of
from powernorm_fairseq.corpora.subwords import KINDS, learn, splitter
from powernorm_fairseq.corpora.subwords import learn_joint_bpe as learn_joint_bpe
from powernorm_fairseq.corpora.text import (
    PARALLEL_FROM,
    detokenise,
    keeps,
    moses,
    normalise_punctuation,
    straighten,
)
from powernorm_fairseq.processes import UserError, fairseq_program, hold, run_to_end

SPLITS = ("train", "valid", "test")
Pairs = List[Tuple[str, str]]


@dataclass(frozen=True)
class TranslationRecipe:
    """What is done to the text; the defaults are those of the IWSLT14 script.

    Attributes:
        lower: lower-case both sides, so that scores must ignore case.
        ratio, longest: pairs of the training text that are longer or more uneven (in tokens) are dropped; validation
            and test text that comes as such is never cleaned.
        merges: operations of the byte-pair encoding (or size of the sentencepiece vocabulary) of both languages.
        every: each ``every``-th pair of the cleaned training text is a validation pair instead; 0: validation text is
            a file of its own.
        tokenise: by Moses' rules; False: the text is tokenised already, and only spaces are put in order.
        hyphens: hyphens inside words are tokens.
        normalise: the splits whose punctuation is normalised.
        straighten: the splits whose typographic apostrophes become ASCII ones.
    """

    source: str = "de"
    target: str = "en"
    lower: bool = True
    ratio: float = 1.5
    longest: int = 175
    merges: int = 10_000
    every: int = 0
    tokenise: bool = True
    hyphens: bool = False
    normalise: Tuple[str, ...] = ()
    straighten: Tuple[str, ...] = ()

    @property
    def languages(self) -> Tuple[str, str]:
        """Source and target."""
        return self.source, self.target

    @property
    def given(self) -> Tuple[str, ...]:
        """The splits that come as files."""
        return tuple(split for split in SPLITS if not (self.every and split == "valid"))


def prepare_translation(
    raw: Path, root: Path, recipe: TranslationRecipe, workers: int = 1, subwords: str = "bpe"
) -> Path:
    """Prepare ``raw/{train,valid,test}.{source,target}`` (one sentence a line, as people write it).

    Returns:
        The folder for ``fairseq-train``: binarised text with one joined dictionary, the merges (``codes``) or the
        sentencepiece model, and for validation and test the target side as ``reference.SPLIT.<target>`` (untouched) and
        ``tokenised.SPLIT.<target>`` (before it was split into subwords), which hypotheses are scored against.

    Raises:
        UserError: a file is missing or the sides of a split differ in length.
    """
    with hold(root):
        digest = digest_of_files([raw / f"{split}.{one}" for split in recipe.given for one in recipe.languages])
        return prepare_parallel(Preparation(root), raw, digest, recipe, workers, subwords)


def prepare_parallel(
    preparation: Preparation,
    raw: Path,
    origin: Union[str, Path],
    recipe: TranslationRecipe,
    workers: int = 1,
    subwords: str = "bpe",
) -> Path:
    """The steps of ``prepare_translation``; the caller holds the folder.

    Args:
        origin: what tells this raw text from another: a digest, or the folder of an earlier step.
    """
    root, languages, kind = preparation.root, recipe.languages, KINDS[subwords]
    if count_lines(raw / f"train.{recipe.source}") < PARALLEL_FROM:
        workers = 1
    settings: Dict[str, Any] = asdict(recipe)
    merges = settings.pop("merges")

    def make_tokens(folder: Path) -> None:
        counts = {}
        for split in recipe.given:
            counts.update(tokenise_split(split, raw, folder, recipe, workers, root.name))
        print(
            f"{root.name}: {counts['train pairs']} of {counts['train pairs read']} training pairs kept"
            + (f", {counts['valid pairs']} others are validation pairs" if recipe.every else ""),
            flush=True,
        )
        write_counts(folder, counts)

    tokenised = preparation.step("tokenised", make_tokens, {"raw": origin, **settings})

    def make_model(folder: Path) -> None:
        print(f"{root.name}: learning {merges} {'byte-pair merges' if subwords == 'bpe' else 'pieces'}", flush=True)
        learn(subwords, [tokenised / f"train.{one}" for one in languages], folder / kind.model, merges)

    learned = preparation.step(kind.learned, make_model, {"tokenised": tokenised, "merges": merges})

    def make_subwords(folder: Path) -> None:
        names = [f"{split}.{language}" for split in SPLITS for language in languages]
        progress = Progress(f"{root.name}: lines split", sum(count_lines(tokenised / name) for name in names))
        split = splitter(subwords, learned / kind.model)
        for name in names:
            with open(folder / name, "w", encoding="utf-8", newline="\n") as file:
                for chunk, pieces in in_order(split, in_chunks(lines_of(tokenised / name)), workers):
                    file.writelines(line + "\n" for line in pieces)
                    progress.add(len(chunk))

    pieces = preparation.step(kind.split, make_subwords, {"tokenised": tokenised, "model": learned})

    def make_binary(folder: Path) -> None:
        print(f"{root.name}: binarising; what fairseq says is in preprocess.log", flush=True)
        prefixes = [part for split in SPLITS for part in (f"--{split}pref", str(pieces / split))]
        run_to_end(
            [*fairseq_program("preprocess"), "--source-lang", recipe.source, "--target-lang", recipe.target,
             *prefixes, "--joined-dictionary", "--destdir", str(folder), "--workers", str(workers)],
            root / "preprocess.log",
        )  # fmt: skip
        for name in [f"{split}.{language}" for split in SPLITS for language in languages]:
            split, language = name.split(".")
            index = folder / f"{split}.{recipe.source}-{recipe.target}.{language}.idx"
            found, expected = binarised_lines(index), count_lines(pieces / name)
            if found != expected:
                raise UserError(f"fairseq-preprocess made {found} sentences of the {expected} in {pieces / name}")
        (folder / kind.model).write_bytes((learned / kind.model).read_bytes())
        for split in SPLITS[1:]:
            name = f"{split}.{recipe.target}"
            (folder / f"tokenised.{name}").write_bytes((tokenised / name).read_bytes())
            (folder / f"reference.{name}").write_bytes((tokenised / f"reference.{name}").read_bytes())
        write_counts(folder, {**read_counts(tokenised), **read_counts(raw)})

    return preparation.step(kind.binarised, make_binary, {"subwords": pieces})


def binarised_lines(index: Path) -> int:
    """How many sentences binarised text has, by the head of its index (fairseq's ``mmap`` format).

    Raises:
        UserError: it is no such index.
    """
    with open(index, "rb") as file:
        head = file.read(26)
    magic = b"MMIDIDX\x00\x00"
    if len(head) < 26 or not head.startswith(magic):
        raise UserError(f"{index} is not an index of fairseq-preprocess")
    _, _, count = struct.unpack("<QBQ", head[len(magic) :])
    return int(count)


def tokenise_split(
    split: str, raw: Path, folder: Path, recipe: TranslationRecipe, workers: int, name: str
) -> Dict[str, int]:
    """Tokenise, clean and lower-case one split into ``folder``, with the untouched target sides of what is scored.

    Returns:
        The numbers of pairs.

    Raises:
        UserError: the sides differ in length.
    """
    paths = [raw / f"{split}.{language}" for language in recipe.languages]
    lengths = [count_lines(path) for path in paths]
    if lengths[0] != lengths[1]:
        raise UserError(f"{raw}/{split}: {lengths[0]} lines in one language, {lengths[1]} in the other")
    parts = [split, "valid"] if split == "train" and recipe.every else [split]
    counts = dict.fromkeys(parts, 0)
    kept = 0
    with contextlib.ExitStack() as stack:

        def create(name: str) -> Any:
            return stack.enter_context(open(folder / name, "w", encoding="utf-8", newline="\n"))

        outputs = {part: [create(f"{part}.{language}") for language in recipe.languages] for part in parts}
        references = {part: create(f"reference.{part}.{recipe.target}") for part in parts if part != "train"}
        progress = Progress(f"{name}: {split} pairs tokenised", lengths[0])
        work = partial(tokenise_pairs, recipe=recipe, split=split)
        for chunk, tokens in in_order(work, in_chunks(zip(*map(lines_of, paths))), workers):
            for number, *sides in tokens:
                kept += 1
                part = "valid" if len(parts) == 2 and kept % recipe.every == 0 else split
                counts[part] += 1
                for output, side in zip(outputs[part], sides):
                    output.write(side + "\n")
                if part in references:
                    untouched = chunk[number][1] if recipe.tokenise else detokenise(sides[1:], recipe.target)[0]
                    references[part].write(untouched + "\n")
            progress.add(len(chunk))
    found = {f"{part} pairs": count for part, count in counts.items()}
    return {"train pairs read": lengths[0], **found} if split == "train" else found


def tokenise_pairs(pairs: Pairs, recipe: TranslationRecipe, split: str) -> List[Tuple[int, str, str]]:
    """The tokenised pairs that stay, each with its number among ``pairs``."""
    sides: List[List[str]] = []
    for side, language in zip(zip(*pairs), recipe.languages):
        lines = list(side)
        if split in recipe.straighten:
            lines = [straighten(line) for line in lines]
        if split in recipe.normalise:
            lines = normalise_punctuation(lines, language)
        if recipe.tokenise:
            lines = moses(lines, language, recipe.lower, recipe.hyphens)
        else:
            lines = [" ".join(line.lower().split() if recipe.lower else line.split()) for line in lines]
        sides.append(lines)
    return [
        (number, source, target)
        for number, (source, target) in enumerate(zip(*sides))
        if split != "train" or keeps((source, target), recipe.ratio, recipe.longest)
    ]


def read_lines(path: Path) -> List[str]:
    """The lines of a file; only a line feed ends one, whatever else Unicode counts as a line separator."""
    with open(path, encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write one line for each string."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)
