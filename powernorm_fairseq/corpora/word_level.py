"""Penn Treebank and WikiText-103 for fairseq's language modelling: the published words, untouched."""

import contextlib
import hashlib
import io
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Mapping

from powernorm_fairseq.corpora.binarised import CORPUS, token_count
from powernorm_fairseq.corpora.catalogue import CATALOGUE, readable_size
from powernorm_fairseq.corpora.counts import read_counts, write_counts
from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.translation import SPLITS
from powernorm_fairseq.processes import UserError, fairseq_program, hold, run_to_end

# Of fairseq-preprocess, each worker: docs/data.md says on what.
TOKENS_PER_SECOND = 300_000
PROGRESS_SECONDS = 15.0

# What fairseq's dictionary holds beside the words: bos, pad, eos, unk. The published counts of words include the latter
# two, as `<eos>` and `<unk>`.
SPECIAL_WORDS = 2


@dataclass(frozen=True)
class WordLevel:
    """A corpus of words that spaces separate.

    Attributes:
        data: its name in the catalogue.
        names: what the text of each split is called.
        archive: the zip archive that holds them, in whatever folder; empty if they are files of their own.
    """

    data: str
    names: Mapping[str, str]
    archive: str = ""


PTB = WordLevel("ptb", {split: f"ptb.{split}.txt" for split in SPLITS})
WIKITEXT_103 = WordLevel("wikitext-103", {split: f"wiki.{split}.tokens" for split in SPLITS}, "wikitext-103-v1.zip")


def prepare_word_level(corpus: WordLevel, raw: Path, root: Path, workers: int = 1) -> Path:
    """Prepare the text in ``raw``.

    Nothing is done to the words: every line is a line (blank ones too, which count as their end alone), ``<unk>`` in
    the text is fairseq's own unknown word, and the dictionary is that of the training text, most frequent words first.

    Args:
        workers: processes of fairseq-preprocess.

    Returns:
        The folder for ``fairseq-train``, with ``counts.json``. The text stays beside it, in ``text``.

    Raises:
        UserError: a text is missing, damaged, no UTF-8, or another than the catalogue's; or fairseq made another of it.
    """
    preparation = Preparation(root)
    sources = [raw / corpus.archive] if corpus.archive else [raw / name for name in corpus.names.values()]
    with hold(root):

        def make_text(folder: Path) -> None:
            counts: Dict[str, int] = {}
            with opened(corpus, raw) as streams:
                for split, stream in streams.items():
                    counts.update(copy_text(corpus, split, stream, folder / f"{split}.txt", root.name))
            write_counts(folder, counts)

        text = preparation.step("text", make_text, {"raw": digest_of_files(sources)})
        counts = read_counts(text)

        def make_binary(folder: Path) -> None:
            total = sum(counts[f"{split} tokens"] for split in SPLITS)
            # The training text is read twice, the first time for the dictionary.
            seconds = (total + counts["train tokens"] / 2) / TOKENS_PER_SECOND / workers
            print(
                f"{root.name}: binarising {total:,} tokens, about {seconds / 60:.1f} min with --workers {workers};"
                " what fairseq says is in preprocess.log",
                flush=True,
            )
            prefixes = [part for split in SPLITS for part in (f"--{split}pref", str(text / f"{split}.txt"))]
            run_to_end(
                [*fairseq_program("preprocess"), "--only-source", *prefixes, "--destdir", str(folder),
                 "--workers", str(workers)],
                root / "preprocess.log",
            )  # fmt: skip
            check_binarised(folder, counts)
            write_counts(folder, {**counts, "vocabulary": vocabulary(folder)})
            (folder / CORPUS).write_text(corpus.data + "\n", encoding="utf-8")

        return preparation.step("binarised", make_binary, {"text": text, "corpus": corpus.data})


@contextlib.contextmanager
def opened(corpus: WordLevel, raw: Path) -> Iterator[Dict[str, "IO[bytes]"]]:
    """The text of each split, to be read as bytes."""
    with contextlib.ExitStack() as stack:
        if not corpus.archive:
            yield {split: stack.enter_context(open(raw / name, "rb")) for split, name in corpus.names.items()}
            return
        try:
            archive = stack.enter_context(zipfile.ZipFile(raw / corpus.archive))
            yield {
                split: io.BufferedReader(stack.enter_context(member_of(archive, name)), 1 << 20)
                for split, name in corpus.names.items()
            }
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(f"{raw / corpus.archive} is damaged or not whole ({error})") from error


def member_of(archive: zipfile.ZipFile, name: str) -> Any:
    """The file of that name in an archive, whatever its folder, to be read.

    Raises:
        UserError: there is none.
    """
    for member in archive.infolist():
        if member.filename.split("/")[-1] == name:
            return archive.open(member)
    raise UserError(f"no {name} in {archive.filename}, which has " + ", ".join(archive.namelist()[:10]))


def copy_text(corpus: WordLevel, split: str, stream: "IO[bytes]", path: Path, label: str) -> Dict[str, int]:
    """Write the text of a split as it is, verify it, and count ``lines`` and ``tokens`` (one more for each line).

    Raises:
        UserError: it is empty, no UTF-8, or not the text whose checksum is known.
    """
    name = corpus.names[split]
    known = checksums(corpus.data, name)
    digests = {algorithm: hashlib.new(algorithm) for algorithm, _ in known}
    lines = tokens = done = 0
    spoke = time.monotonic()
    with open(path, "wb") as output:
        for line in stream:
            for digest in digests.values():
                digest.update(line)
            output.write(line)
            lines, done = lines + 1, done + len(line)
            try:
                tokens += len(line.decode("utf-8").split()) + 1
            except UnicodeDecodeError as error:
                raise UserError(f"{name}, line {lines}: not UTF-8 ({error})") from None
            if lines % 1000 == 0 and time.monotonic() - spoke >= PROGRESS_SECONDS:
                spoke = time.monotonic()
                print(f"{label}: {split}, {readable_size(done)}, {tokens:,} tokens so far", flush=True)
    for algorithm, digest in known:
        found = digests[algorithm].hexdigest()
        if found != digest:
            raise UserError(f"{name} is another text: its {algorithm} is {found} instead of {digest}")
    if not lines:
        raise UserError(f"{name} is empty")
    print(f"{label}: {split} has {lines:,} lines, {tokens:,} tokens", flush=True)
    return {f"{split} lines": lines, f"{split} tokens": tokens}


def checksums(data: str, name: str) -> Any:
    """Pairs of algorithm and digest that are known of a text inside an archive."""
    members = (member for file in CATALOGUE[data].files for member in file.members)
    return [checksum.split(":") for member, checksum in members if member == name]


def check_binarised(folder: Path, counts: Mapping[str, int], unit: str = "tokens") -> None:
    """Compare what lies binarised in a folder with what was counted in the text.

    Raises:
        UserError: they differ.
    """
    for split in SPLITS:
        found, wanted = token_count(folder, split), counts[f"{split} {unit}"]
        if found != wanted:
            raise UserError(
                f"{folder}: {split} has {found} tokens where the text has {wanted}; does it hold carriage returns,"
                " which fairseq takes for ends of line?"
            )


def vocabulary(folder: Path) -> int:
    """Words as published counts have them: those of the dictionary, the unknown word, and the end of line."""
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    words = dictionary.symbols[dictionary.nspecial :]
    return sum(not word.startswith("madeupword") for word in words) + SPECIAL_WORDS
