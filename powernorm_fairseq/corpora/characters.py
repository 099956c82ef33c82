"""enwik8 for fairseq's language modelling: each byte is one symbol, the line feed fairseq's end of sentence.

So nothing is added and nothing left out: the binarised text has as many tokens as the text has bytes, and can be
decoded to it. Published scores of enwik8 (bits per character) are mostly of bytes in this sense, with the same split.
Some programs leave the line feeds out, which is another text (docs/evaluation.md).
"""

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from powernorm_fairseq.corpora.binarised import CORPUS, token_ids
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
            frequencies = {split: np.bincount(part, minlength=BYTE_VALUES) for split, part in parts.items()}
            occurring = np.sum(list(frequencies.values()), axis=0) > 0
            dictionary = write_dictionary(folder / "dict.txt", frequencies["train"], occurring)
            counts = {f"{split} bytes": len(part) for split, part in parts.items()}
            for split, part in parts.items():
                binarise(folder / split, part, dictionary)
                if decode(folder, split) != part.tobytes():
                    raise UserError(f"{folder / split} cannot be decoded to the text; is the disk full?")
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
    ids = torch.from_numpy(table[part])
    ends = np.flatnonzero(part == LINE_FEED) + 1
    if len(ends) == 0 or ends[-1] < len(part):
        ends = np.append(ends, len(part))
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(dictionary))
    start = 0
    for end in ends.tolist():
        builder.add_item(ids[start:end])
        start = end
    builder.finalize(f"{prefix}.idx")


def decode(data: Path, split: str) -> bytes:
    """The bytes of a split of binarised text.

    Raises:
        UserError: there is no such split, or a token that stands for no byte.
    """
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(data / "dict.txt"))
    table: Dict[int, int] = {dictionary.eos(): LINE_FEED}
    for index in range(dictionary.nspecial, len(dictionary)):
        if dictionary[index].isdigit():
            table[index] = int(dictionary[index])
    values = np.full(len(dictionary), -1, dtype=np.int16)
    values[list(table)] = list(table.values())
    decoded = values[token_ids(data, split)]
    if (decoded < 0).any():
        raise UserError(f"{data / split} holds tokens that stand for no byte")
    return decoded.astype(np.uint8).tobytes()
