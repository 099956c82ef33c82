"""Penn Treebank and WikiText-103 from texts in their formats: every word and line as it is."""

import hashlib
import io
import tarfile
import zipfile

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.corpora import word_level
from powernorm_fairseq.corpora.binarised import CORPUS, token_ids
from powernorm_fairseq.corpora.catalogue import CATALOGUE, Count, DataSet, File
from powernorm_fairseq.corpora.counts import read_counts
from powernorm_fairseq.corpora.translation import SPLITS
from powernorm_fairseq.corpora.word_level import PTB, WIKITEXT_103, prepare_word_level
from powernorm_fairseq.processes import UserError
from tests.commands import in_this_process
from tests.conftest import SAMPLE

ARCHIVE = "wikitext-103-v1.zip"


@pytest.fixture(autouse=True)
def catalogue(monkeypatch):
    """The entries without the checksums of the real texts; what these tests prepare are others."""

    def other(name, files, counts):
        monkeypatch.setitem(CATALOGUE, name, DataSet("a title", files, "a licence", "a citation", counts))

    other("ptb", tuple(File(name) for name in PTB.names.values()), CATALOGUE["ptb"].counts)
    other("wikitext-103", (File(ARCHIVE),), CATALOGUE["wikitext-103"].counts)
    return other


def articles(first, count, longest=40):
    """Real text as WikiText has it: a blank line, a title, a blank line, a paragraph; spaces at both ends."""
    lines = []
    with tarfile.open(SAMPLE / "sotu-raw.tar.xz") as archive:
        members = sorted((member for member in archive.getmembers() if member.isfile()), key=lambda one: one.name)
        for member in members[first : first + count]:
            words = archive.extractfile(member).read(2000).decode("utf-8", errors="ignore").split()[:longest]
            paragraph = " ".join("<unk>" if word.istitle() else word for word in words)
            lines += [" ", f" = {member.name.split('/')[-1]} = ", " ", f" {paragraph} "]
    return "".join(line + "\n" for line in lines).encode("utf-8")


TEXTS = {"train": articles(0, 12), "valid": articles(20, 2), "test": articles(30, 2)}


def zipped(texts, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for split, text in texts.items():
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", text)
    return buffer.getvalue()


@pytest.fixture
def wikitext(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / ARCHIVE).write_bytes(zipped(TEXTS))
    return tmp_path / "raw"


def test_the_treebank_to_the_last_token(tmp_path):
    texts = {
        "train": b" the cat <unk> the N \n mr. cat 's the <unk> \n",
        "valid": b" the <unk> n't \n",
        "test": b" cat \n\n mr. cat \n",
    }
    for split, text in texts.items():
        (tmp_path / f"ptb.{split}.txt").write_bytes(text)
    folder = prepare_word_level(PTB, tmp_path, tmp_path / "out")
    # By frequency, then by alphabet; <unk> and the end of line are fairseq's own, 3 and 2; filled to a multiple of 8.
    words = ["the 3", "cat 2", "'s 1", "N 1", "mr. 1", *(f"madeupword{number:04d} 0" for number in range(7))]
    assert (folder / "dict.txt").read_text().splitlines() == words
    the, cat, s, n, mr, unknown, end = 4, 5, 6, 7, 8, 3, 2
    assert token_ids(folder, "train").tolist() == [the, cat, unknown, the, n, end, mr, cat, s, the, unknown, end]
    assert token_ids(folder, "valid").tolist() == [the, unknown, unknown, end]
    assert token_ids(folder, "test").tolist() == [cat, end, end, mr, cat, end]
    assert read_counts(folder) == {
        "train lines": 2, "train tokens": 12, "valid lines": 1, "valid tokens": 4, "test lines": 3, "test tokens": 6,
        "vocabulary": 7,
    }  # fmt: skip
    assert (folder / CORPUS).read_text() == "ptb\n"


def test_wikitext_word_by_word(wikitext, tmp_path):
    from fairseq.data import Dictionary, data_utils

    folder = prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out")
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    assert len(dictionary) % 8 == 0 and dictionary.symbols.count("<unk>") == 1
    known = set(TEXTS["train"].decode().split())
    for split, text in TEXTS.items():
        assert (tmp_path / "out" / "text" / f"{split}.txt").read_bytes() == text
        binary = data_utils.load_indexed_dataset(str(folder / split), dictionary)
        lines = text.decode("utf-8").splitlines()
        assert len(binary) == len(lines)
        for ids, line in zip(binary, lines):
            assert ids[-1] == dictionary.eos()
            back = [dictionary[index] for index in ids[:-1]]
            assert back == [word if word in known else "<unk>" for word in line.split()]
    counts = read_counts(folder)
    # With the end of line: a blank line is one token, a title of one word four.
    assert counts["test tokens"] == 2 * (1 + 4 + 1 + 41) and counts["test lines"] == 8
    assert counts["vocabulary"] == len(known) + 1
    assert b"<unk>" in TEXTS["train"]


def test_the_files_are_those_of_fairseq_preprocess(wikitext, tmp_path):
    folder = prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out")
    text, other = tmp_path / "out" / "text", tmp_path / "fairseq"
    prefixes = [part for split in SPLITS for part in (f"--{split}pref", text / f"{split}.txt")]
    in_this_process("fairseq-preprocess", "--only-source", *prefixes, "--destdir", other, "--workers", 1)
    for name in ("dict.txt", *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def test_each_step_is_done_once_and_what_broke_off_again(wikitext, tmp_path, monkeypatch, capsys):
    def killed(*args, **options):
        raise KeyboardInterrupt

    working = word_level.binarise
    monkeypatch.setattr(word_level, "binarise", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out")
    assert not (tmp_path / "out" / "binarised").exists()
    monkeypatch.setattr(word_level, "binarise", working)
    capsys.readouterr()
    folder = prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out")
    said = capsys.readouterr().out
    assert "out: text is there" in said and "out: binarised made in" in said
    monkeypatch.setattr(word_level, "binarise", killed)
    assert prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out") == folder
    (wikitext / ARCHIVE).write_bytes(zipped({**TEXTS, "test": articles(40, 1)}))
    with pytest.raises(KeyboardInterrupt):
        prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out")


def test_what_is_not_the_text_is_refused(wikitext, tmp_path, catalogue):
    archive = wikitext / ARCHIVE

    def refused(content, match):
        archive.write_bytes(content)
        with pytest.raises(UserError, match=match):
            prepare_word_level(WIKITEXT_103, wikitext, tmp_path / "out")
        assert not (tmp_path / "out" / "text").exists()

    whole = zipped(TEXTS, zipfile.ZIP_STORED)
    refused(whole[:2000], "damaged or not whole")
    refused(whole.replace(b"the", b"The"), "damaged or not whole")
    refused(zipped({**TEXTS, "valid": b""}), r"wiki\.valid\.tokens is empty")
    refused(zipped({**TEXTS, "valid": b" a \n caf\xe9 \n"}), r"wiki\.valid\.tokens, line 2: not UTF-8")
    refused(zipped({split: TEXTS[split] for split in ("train", "test")}), r"no wiki\.valid\.tokens in .*wiki\.train")
    members = (("wiki.test.tokens", "sha1:" + hashlib.sha1(TEXTS["valid"]).hexdigest()),)
    catalogue("wikitext-103", (File(ARCHIVE, members=members),), ())
    refused(whole, r"wiki\.test\.tokens is another text: its sha1 is")


def test_only_a_line_feed_ends_a_line(tmp_path):
    for split in SPLITS:
        (tmp_path / f"ptb.{split}.txt").write_bytes(" a b\r c\u2028d\x85 \n e".encode())
    folder = prepare_word_level(PTB, tmp_path, tmp_path / "out")
    assert token_ids(folder, "test").tolist() == [4, 5, 6, 7, 2, 8, 2]


def test_the_command_fetches_prepares_and_compares(server, tmp_path, catalogue, capsys):
    """From a server whose connection breaks, through member checksums, to counts beside the known ones."""
    page = server.add(f"/{ARCHIVE}", zipped(TEXTS), kind="application/zip")
    page.breaks = [1000]
    members = tuple((f"wiki.{split}.tokens", "sha1:" + hashlib.sha1(text).hexdigest()) for split, text in TEXTS.items())
    counts = (Count("test tokens", 94, "published counts"), Count("train tokens", 103_227_021, "published counts"))
    catalogue("wikitext-103", (File(ARCHIVE, (server.address(f"/{ARCHIVE}"),), members=members),), counts)
    asked = ["prepare", "wikitext-103", "--raw", tmp_path / "raw", "--output", tmp_path / "out", "--workers", 1]
    assert main(list(map(str, asked))) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(tmp_path / "out" / "binarised")
    assert len(page.requests) == 2 and page.requests[1]["Range"] == "bytes=1000-"
    assert "WARNING: train tokens: " in said.err and "103,227,021 known from published counts" in said.err
    assert "test tokens" not in said.err
    page.codes = [404]
    assert main(list(map(str, asked))) == 0
    assert "out: binarised is there" in capsys.readouterr().out
