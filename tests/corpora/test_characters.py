"""enwik8 from an archive in its format: every byte is a token, and comes back."""

import hashlib
import io
import math
import zipfile
from collections import Counter

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.corpora.binarised import token_ids
from powernorm_fairseq.corpora.catalogue import CATALOGUE, Count, DataSet, File
from powernorm_fairseq.corpora.characters import cut, decode, prepare_enwik8
from powernorm_fairseq.corpora.counts import read_counts
from powernorm_fairseq.evaluation.perplexity import unigram
from powernorm_fairseq.processes import UserError
from tests.conftest import SAMPLE

# German, so that characters of several bytes are cut through, and XML as in a dump. No line feed at the end.
TEXT = b"<mediawiki>\n" + (SAMPLE / "ui-de-en" / "train.de").read_bytes()[:40_000] + "\n\n\t<ä>".encode()


def zipped(text, name="enwik8"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def catalogue(monkeypatch):
    def other(*members, counts=()):
        files = (File("enwik8.zip", members=members),)
        monkeypatch.setitem(CATALOGUE, "enwik8", DataSet("a title", files, "a licence", "a citation", counts))

    other()
    return other


@pytest.fixture
def raw(tmp_path, catalogue):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "enwik8.zip").write_bytes(zipped(TEXT))
    return tmp_path / "raw"


def test_every_byte_is_a_token_and_comes_back(raw, tmp_path):
    folder = prepare_enwik8(raw, tmp_path / "out")
    first, second = len(TEXT) * 90 // 100, len(TEXT) * 95 // 100
    parts = {"train": TEXT[:first], "valid": TEXT[first:second], "test": TEXT[second:]}
    # By the files alone: the dictionary's entries are the bytes, the line feed is fairseq's end of sentence.
    names = [line.split()[0] for line in (folder / "dict.txt").read_text().splitlines()]
    values = {2: 10, **{number: int(name) for number, name in enumerate(names, start=4) if name.isdigit()}}
    for split, part in parts.items():
        ids = token_ids(folder, split).tolist()
        assert len(ids) == len(part)
        assert bytes(values[one] for one in ids) == part
        assert decode(folder, split) == part
    counts = read_counts(folder)
    assert [counts[f"{split} bytes"] for split in parts] == [len(part) for part in parts.values()]
    assert counts["bytes"] == len(TEXT) and counts["byte values"] == len(set(TEXT))


def test_the_dictionary_is_by_frequency_in_the_training_text(tmp_path, catalogue):
    # A tab only at the end, which the training text lacks; the line feed is the most frequent but no entry.
    text = b"ab\n\n\nb \n\n\n" * 10 + b"\tb\n"
    (tmp_path / "enwik8.zip").write_bytes(zipped(text))
    folder = prepare_enwik8(tmp_path, tmp_path / "out")
    assert (folder / "dict.txt").read_text() == "98 19\n97 10\n32 9\n9 0\n"
    assert decode(folder, "test") == text[-6:]
    assert token_ids(folder, "test").tolist() == [2, 2, 2, 7, 4, 2]


def test_what_was_binarised_wrongly_is_noticed(raw, tmp_path, monkeypatch):
    from fairseq.data import indexed_dataset

    add = indexed_dataset.MMapIndexedDatasetBuilder.add_item
    for wrong, match in (
        (lambda self, ids: add(self, ids.clamp(max=5)), "cannot be decoded to the text from byte 0 on"),
        (lambda self, ids: add(self, ids * 0), "a token that stands for no byte"),
        (lambda self, ids: None if len(self._sizes) > 3 else add(self, ids), "cannot be decoded to the text from byte"),
    ):
        monkeypatch.setattr(indexed_dataset.MMapIndexedDatasetBuilder, "add_item", wrong)
        with pytest.raises(UserError, match=match):
            prepare_enwik8(raw, tmp_path / "out")
        assert not (tmp_path / "out" / "binarised").exists()


def test_bits_per_character_are_of_bytes(raw, tmp_path):
    folder = prepare_enwik8(raw, tmp_path / "out")
    train, _, test = cut(TEXT)
    counts = Counter(train)
    # Each symbol once more, the unknown one among them.
    total = len(train) + len(set(TEXT)) + 1
    bits = -sum(math.log2((counts[one] + 1) / total) for one in test) / len(test)
    score = unigram(folder, "test", unit="character")
    assert score["bits_per_character"] == pytest.approx(bits)
    assert score["tokens"] == len(test) and score["unknown"] == 0


def test_the_split_is_the_published_one():
    class Long(bytes):
        def __len__(self):
            return 100_000_000

        def __getitem__(self, part):
            return part

    parts = cut(Long())
    assert [(part.start, part.stop) for part in parts] == [
        (None, 90_000_000), (90_000_000, 95_000_000), (95_000_000, None),
    ]  # fmt: skip


def test_what_is_not_the_text_is_refused(raw, tmp_path, catalogue):
    def refused(content, match):
        (raw / "enwik8.zip").write_bytes(content)
        with pytest.raises(UserError, match=match):
            prepare_enwik8(raw, tmp_path / "out")
        assert not (tmp_path / "out" / "text").exists()

    refused(zipped(TEXT)[:-3000], "damaged or not whole")
    refused(zipped(TEXT, "enwik9"), "no enwik8 in .*enwik9")
    refused(zipped(b"a" * 99), "too few")
    catalogue(("enwik8", "sha1:" + hashlib.sha1(b"").hexdigest()))
    refused(zipped(TEXT), "another text: its sha1 is")


def test_the_command(raw, tmp_path, catalogue, capsys):
    digest = hashlib.md5(TEXT).hexdigest()
    known = (Count("bytes", len(TEXT), "a source"), Count("byte values", 205, "a source"))
    catalogue(("enwik8", f"md5:{digest}"), counts=known)
    archive = tmp_path / "my-copy.zip"
    archive.write_bytes((raw / "enwik8.zip").read_bytes())
    asked = ["prepare", "enwik8", "--archive", archive, "--raw", tmp_path / "new", "--output", tmp_path / "out"]
    assert main(list(map(str, asked))) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(tmp_path / "out" / "binarised")
    assert f"WARNING: byte values: {len(set(TEXT))} here, 205 known from a source" in said.err
    assert main(list(map(str, asked))) == 0
    assert capsys.readouterr().out.count(" is there") == 2
