"""Penn Treebank and WikiText-103 for fairseq's language modelling: the published words, untouched."""

import contextlib
import hashlib
import io
import shutil
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Mapping, Optional

from powernorm_fairseq.corpora.binarised import CORPUS, token_count
from powernorm_fairseq.corpora.catalogue import CATALOGUE, readable_size
from powernorm_fairseq.corpora.counts import read_counts, write_counts
from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.streams import Progress
from powernorm_fairseq.corpora.translation import SPLITS
from powernorm_fairseq.processes import UserError, hold

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


def prepare_word_level(corpus: WordLevel, raw: Path, root: Path) -> Path:
    """Prepare the text in ``raw``.

    Nothing is done to the words: every line is a line (blank ones too, which count as their end alone), ``<unk>`` in
    the text is fairseq's own unknown word, and the dictionary is that of the training text, most frequent words first.
    The files are those of ``fairseq-preprocess --only-source``, bit for bit, made in a small part of its time, line by
    line.

    Returns:
        The folder for ``fairseq-train``, with ``counts.json``. The text stays beside it, in ``text``.

    Raises:
        UserError: a text is missing, damaged, no UTF-8, or another than the catalogue's.
    """
    preparation = Preparation(root)
    sources = [raw / corpus.archive] if corpus.archive else [raw / name for name in corpus.names.values()]
    with hold(root):

        def make_text(folder: Path) -> None:
            counts: Dict[str, int] = {}
            with opened(corpus, raw) as streams:
                for split, stream in streams.items():
                    words: Optional[Counter[str]] = Counter() if split == "train" else None
                    counts.update(copy_text(corpus, split, stream, folder / f"{split}.txt", root.name, words))
                    if words is not None:
                        counts["vocabulary"] = write_dictionary(folder / "dict.txt", words)
            write_counts(folder, counts)

        text = preparation.step("text", make_text, {"raw": digest_of_files(sources)})

        def make_binary(folder: Path) -> None:
            shutil.copyfile(text / "dict.txt", folder / "dict.txt")
            for split in SPLITS:
                binarise(text / f"{split}.txt", folder / split, folder / "dict.txt", f"{root.name}: {split}")
            counts = read_counts(text)
            check_binarised(folder, counts)
            write_counts(folder, counts)
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


def copy_text(
    corpus: WordLevel, split: str, stream: "IO[bytes]", path: Path, label: str, words: "Optional[Counter[str]]" = None
) -> Dict[str, int]:
    """Write the text of a split as it is, verify it, and count ``lines`` and ``tokens`` (one more for each line).

    Args:
        words: gets the frequencies of the words.

    Raises:
        UserError: it is empty, no UTF-8, or not the text whose checksum is known.
    """
    name = corpus.names[split]
    known = checksums(corpus.data, name)
    digests = {algorithm: hashlib.new(algorithm) for algorithm, _ in known}
    lines = tokens = 0
    progress = Progress(f"{label}: {split} text", 0, written=readable_size)
    with open(path, "wb") as output:
        for line in stream:
            for digest in digests.values():
                digest.update(line)
            output.write(line)
            lines += 1
            try:
                found = line.decode("utf-8").split()
            except UnicodeDecodeError as error:
                raise UserError(f"{name}, line {lines}: not UTF-8 ({error})") from None
            tokens += len(found) + 1
            if words is not None:
                words.update(found)
            progress.add(len(line))
    for algorithm, digest in known:
        seen = digests[algorithm].hexdigest()
        if seen != digest:
            raise UserError(f"{name} is another text: its {algorithm} is {seen} instead of {digest}")
    if not lines:
        raise UserError(f"{name} is empty")
    print(f"{label}: {split} has {lines:,} lines, {tokens:,} tokens", flush=True)
    return {f"{split} lines": lines, f"{split} tokens": tokens}


def write_dictionary(path: Path, words: "Counter[str]") -> int:
    """fairseq's dictionary of words with their frequencies; returns the vocabulary's size as it is published.

    Published sizes include the unknown word, whether or not the text has it, and the end of line, both of which fairseq
    has on its own; not its other two symbols, nor what fills it up to a multiple of 8.
    """
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for word, count in sorted(words.items()):
        dictionary.add_symbol(word, n=count)
    size = len(dictionary) - dictionary.nspecial + SPECIAL_WORDS
    dictionary.finalize(padding_factor=8)
    dictionary.save(str(path))
    return size


def binarise(text: Path, prefix: Path, dictionary: Path, label: str) -> None:
    """Write a text as fairseq's indexed data ``<prefix>.bin`` and ``.idx``: a line each, with its end."""
    import numpy as np
    import torch
    from fairseq.data import Dictionary, indexed_dataset

    loaded = Dictionary.load(str(dictionary))
    index, unknown, end = loaded.indices, loaded.unk(), loaded.eos()
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(loaded))
    progress = Progress(f"{label} binarised", text.stat().st_size, written=readable_size)
    with open(text, "rb") as lines:
        for line in lines:
            ids = [index.get(word, unknown) for word in line.decode("utf-8").split()]
            ids.append(end)
            builder.add_item(torch.from_numpy(np.array(ids, dtype=np.int32)))
            progress.add(len(line))
    builder.finalize(f"{prefix}.idx")


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
            raise UserError(f"{folder}: {split} has {found} tokens where the text has {wanted}; is the disk full?")
