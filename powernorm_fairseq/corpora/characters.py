"""enwik8 for fairseq's language modelling: each byte is one symbol, the line feed fairseq's end of sentence.

So nothing is added and nothing left out: the binarised text has as many tokens as the text has bytes, and can be
decoded to it. Published scores of enwik8 (bits per character) are mostly of bytes in this sense, with the same split.
Some programs leave the line feeds out, which is another text (docs/evaluation.md).
"""

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any, Iterator, Tuple

import numpy as np

from powernorm_fairseq.corpora.binarised import CORPUS
from powernorm_fairseq.corpora.counts import write_counts
from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.translation import SPLITS
from powernorm_fairseq.corpora.verify import BLOCK
from powernorm_fairseq.corpora.word_level import check_binarised, checksums, member_of
from powernorm_fairseq.processes import UserError, hold

DATA, ARCHIVE, MEMBER = "enwik8", "enwik8.zip", "enwik8"
# Parts of a hundred, by position.
SHARES = (90, 5, 5)
LINE_FEED = 10
BYTE_VALUES = 256


def prepare_enwik8(raw: Path, root: Path) -> Path:
    """Prepare ``raw/enwik8.zip``: the first 90 of 100 million bytes for training, 5 for validation, 5 for testing.

    The dictionary has the bytes that occur anywhere in the text but the line feed, named by their numbers, the most
    frequent of the training text first. Half a gigabyte of memory is needed.

    Returns:
        The folder for ``fairseq-train``, with ``counts.json``; to be read as one stream (``sample_break_mode: none``).

    Raises:
        UserError: the archive is missing, damaged, or holds another text.
    """
    preparation = Preparation(root)
    with hold(root):

        def make_text(folder: Path) -> None:
            text = read_text(raw / ARCHIVE)
            for split, part in zip(SPLITS, cut(text)):
                (folder / f"{split}.bytes").write_bytes(part)

        text = preparation.step("text", make_text, {"raw": digest_of_files([raw / ARCHIVE]), "shares": SHARES})

        def make_binary(folder: Path) -> None:
            parts = {split: np.fromfile(text / f"{split}.bytes", dtype=np.uint8) for split in SPLITS}
            frequencies = {split: frequencies_of(part) for split, part in parts.items()}
            occurring = np.sum(list(frequencies.values()), axis=0) > 0
            dictionary = write_dictionary(folder / "dict.txt", frequencies["train"], occurring)
            counts = {f"{split} bytes": len(part) for split, part in parts.items()}
            for split, part in parts.items():
                binarise(folder / split, part, dictionary)
                check_lossless(folder, split, part)
            check_binarised(folder, counts, "bytes")
            counts.update({"bytes": sum(counts.values()), "byte values": int(occurring.sum())})
            write_counts(folder, counts)
            (folder / CORPUS).write_text(DATA + "\n", encoding="utf-8")

        return preparation.step("binarised", make_binary, {"text": text})


def read_text(path: Path) -> bytes:
    """The text in the archive, verified.

    Raises:
        UserError: it is damaged, too short to be cut, or another one.
    """
    try:
        with zipfile.ZipFile(path) as archive, member_of(archive, MEMBER) as member:
            text = b"".join(iter(lambda: member.read(BLOCK), b""))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged or not whole ({error})") from error
    for algorithm, digest in checksums(DATA, MEMBER):
        found = hashlib.new(algorithm, text).hexdigest()
        if found != digest:
            raise UserError(f"{MEMBER} is another text: its {algorithm} is {found} instead of {digest}")
    if len(text) < sum(SHARES):
        raise UserError(f"{MEMBER} has {len(text)} bytes, too few to be cut into three")
    return text


def cut(text: bytes) -> Tuple[bytes, bytes, bytes]:
    """The text by position; what cannot be shared out is the last part's."""
    first, second = len(text) * SHARES[0] // 100, len(text) * (SHARES[0] + SHARES[1]) // 100
    return text[:first], text[first:second], text[second:]


def write_dictionary(path: Path, training: "np.ndarray[Any, Any]", occurring: "np.ndarray[Any, Any]") -> Any:
    """fairseq's dictionary of the bytes that occur, with their frequencies in the training text."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    values = [value for value in range(BYTE_VALUES) if occurring[value] and value != LINE_FEED]
    for value in sorted(values, key=lambda value: (-training[value], value)):
        dictionary.add_symbol(str(value), n=int(training[value]))
    dictionary.pad_to_multiple_(8)
    dictionary.save(str(path))
    return dictionary


def binarise(prefix: Path, part: "np.ndarray[Any, Any]", dictionary: Any) -> None:
    """Write bytes as fairseq's indexed data: a line each, with its line feed; the last one may have none."""
    import torch
    from fairseq.data import indexed_dataset

    table = np.full(BYTE_VALUES, dictionary.unk(), dtype=np.int16)
    for index in range(dictionary.nspecial, len(dictionary)):
        symbol = dictionary[index]
        if symbol.isdigit():
            table[int(symbol)] = index
    table[LINE_FEED] = dictionary.eos()
    ends = np.flatnonzero(part == LINE_FEED) + 1
    if len(ends) == 0 or ends[-1] < len(part):
        ends = np.append(ends, len(part))
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(dictionary))
    start = 0
    for end in ends.tolist():
        builder.add_item(torch.from_numpy(table[part[start:end]]))
        start = end
    builder.finalize(f"{prefix}.idx")


def frequencies_of(part: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """How often each byte occurs; in blocks, since numpy counts in copies of eight times the size."""
    counts = np.zeros(BYTE_VALUES, dtype=np.int64)
    for start in range(0, len(part), BLOCK):
        counts += np.bincount(part[start : start + BLOCK], minlength=BYTE_VALUES)
    return counts


def check_lossless(data: Path, split: str, part: "np.ndarray[Any, Any]") -> None:
    """Compare binarised text with the bytes that it was made of.

    Raises:
        UserError: they differ.
    """
    done = 0
    for piece in decoded(data, split):
        if part[done : done + len(piece)].tobytes() != piece:
            break
        done += len(piece)
    if done != len(part):
        raise UserError(f"{data / split} cannot be decoded to the text from byte {done} on; is the disk full?")


def decode(data: Path, split: str) -> bytes:
    """The bytes of a split of binarised text.

    Raises:
        UserError: there is no such split, or a token that stands for no byte.
    """
    return b"".join(decoded(data, split))


def decoded(data: Path, split: str) -> Iterator[bytes]:
    """The same line by line."""
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(data / "dict.txt"))
    values = np.full(len(dictionary), -1, dtype=np.int16)
    values[dictionary.eos()] = LINE_FEED
    for index in range(dictionary.nspecial, len(dictionary)):
        if dictionary[index].isdigit():
            values[index] = int(dictionary[index])
    lines = data_utils.load_indexed_dataset(str(data / split), None, None)
    if lines is None:
        raise UserError(f"no split {split!r} in {data}")
    for number in range(len(lines)):
        found = values[lines[number].numpy()]
        if found.min() < 0:
            raise UserError(f"{data / split}, line {number + 1}: a token that stands for no byte")
        yield found.astype(np.uint8).tobytes()
