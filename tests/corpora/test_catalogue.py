"""The catalogue is complete and agrees with what else says the same; the command fetches what it lists."""

import hashlib
import re
import tarfile

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.corpora import catalogue
from powernorm_fairseq.corpora.catalogue import CATALOGUE, DataSet, File, known_by, readable_size, table
from powernorm_fairseq.corpora.language_model import read_documents
from powernorm_fairseq.corpora.translation import read_lines
from tests.commands import ROOT
from tests.conftest import SAMPLE
from tests.corpora.servers import Server

DIGITS = {"md5": 32, "sha1": 40, "sha256": 64}
FILES = [(name, file) for name, data in CATALOGUE.items() for file in data.files]


@pytest.mark.parametrize("name, file", FILES, ids=[f"{name}/{file.name}" for name, file in FILES])
def test_an_entry_is_well_formed(name, file):
    for checksum in [*file.checksums, *(checksum for _, checksum in file.members)]:
        algorithm, digest = checksum.split(":")
        assert re.fullmatch("[0-9a-f]+", digest) and len(digest) == DIGITS[algorithm]
    assert bool(file.size or file.checksums or file.members) == bool(file.source)
    assert all(address.startswith(("https://", "http://")) for address in file.addresses)
    assert all(address.endswith("/" + file.name) for address in file.addresses)
    assert len(set(file.addresses)) == len(file.addresses)
    # What cannot be known to be right is fetched where nobody on the way can change it, if that is possible.
    assert not file.addresses or file.addresses[0].startswith("https://")


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_data_set_says_all_that_it_must(name):
    data = CATALOGUE[name]
    assert data.title and data.licence and data.citation and data.counts
    assert len({file.name for file in data.files}) == len(data.files)
    assert all(count.value > 0 and count.source for count in data.counts)
    assert len({count.of for count in data.counts}) == len(data.counts)
    assert bool(data.why_not) == (not any(file.addresses for file in data.files))


def test_the_data_sets_of_the_papers_are_there():
    assert list(CATALOGUE) == [
        "iwslt14-de-en", "iwslt15-en-vi", "wmt14-en-de", "ptb", "wikitext-103", "enwik8", "sample",
    ]  # fmt: skip
    wmt = {file.name for file in CATALOGUE["wmt14-en-de"].files}
    assert wmt == {"dev.tgz", "test-full.tgz", *(f"training-parallel-{part}.tgz" for part in
                   ("europarl-v7", "commoncrawl", "nc-v12"))}  # fmt: skip
    assert CATALOGUE["iwslt14-de-en"].size == 19_982_877
    assert CATALOGUE["wmt14-en-de"].size is None
    assert dict(CATALOGUE["wikitext-103"].files[0].headers)["User-Agent"].startswith("Mozilla/")


def test_the_treebank_has_no_address():
    ptb = CATALOGUE["ptb"]
    assert not any(file.addresses for file in ptb.files) and "licens" in ptb.why_not
    assert not [path for path in ROOT.rglob("ptb.*.txt") if ".venv" not in path.parts and "runs" not in path.parts]


def test_counts_of_the_sample_are_right():
    sample = CATALOGUE["sample"]
    for split in ("train", "valid", "test"):
        assert sample.count(f"{split} pairs") == len(read_lines(SAMPLE / "ui-de-en" / f"{split}.en"))
    assert sample.count("documents") == len(read_documents(SAMPLE / "sotu-raw.tar.xz"))
    with pytest.raises(KeyError):
        sample.count("nonsense")


def test_the_table_stands_in_the_documentation(capsys):
    assert "\n".join(table()) in (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert main(["fetch", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == table()


@pytest.mark.parametrize(
    "size, shown",
    [(None, "?"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"),
     (19_982_877, "20.0 MB"), (1_744_534_885, "1.7 GB")],
)  # fmt: skip
def test_sizes(size, shown):
    assert readable_size(size) == shown


def test_what_a_file_is_known_by():
    assert known_by(File("a")) == "-"
    assert known_by(File("a", size=3)) == "size"
    assert known_by(File("a", size=3, checksums=("md5:0", "sha1:0"), members=(("b", "sha256:0"),))) == "md5, sha1"
    assert known_by(File("a", size=3, members=(("b", "sha1:0"),))) == "sha1 of its text"


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A data set of two texts with checksums, one of them on a server of ours."""
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    texts = {name: (ROOT / name).read_bytes() for name in ("LICENSE", "README.md")}
    page = server.add("/LICENSE", texts["LICENSE"])
    (tmp_path / "own").mkdir()
    for name, text in texts.items():
        (tmp_path / "own" / name).write_bytes(text)
    data = DataSet(
        title="two texts",
        files=tuple(
            File(name, addresses, checksums=(f"md5:{hashlib.md5(texts[name]).hexdigest()}",))
            for name, addresses in (("LICENSE", (server.address("/LICENSE"),)), ("README.md", ()))
        ),
        licence="MIT",
        citation="none",
        why_not="it is licensed",
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "two", data)
    yield page
    server.shutdown()
    server.server_close()


def have(folder):
    return {path.name for path in folder.iterdir() if path.name in ("LICENSE", "README.md")}


def test_fetch_takes_copies_and_downloads_the_rest(two, tmp_path, capsys):
    folder = tmp_path / "raw"
    assert main(["fetch", "two", "--dir", str(folder), "--archive", str(tmp_path / "own" / "README.md")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "two texts" and "licence: MIT" in out and out[-1] == str(folder)
    assert have(folder) == {"LICENSE", "README.md"} and len(two.requests) == 1
    # All is there now: without the copies, and without the network.
    two.codes = [404]
    assert main(["fetch", "two", "--dir", str(folder)]) == 0
    assert len(two.requests) == 1


def test_fetch_takes_them_out_of_a_tar(two, tmp_path):
    archive, folder = tmp_path / "simple.tgz", tmp_path / "raw"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "own", "simple/./data")
        tar.add(ROOT / "setup.py", "../setup.py")
    assert main(["fetch", "two", "--dir", str(folder), "--archive", str(archive)]) == 0
    assert have(folder) == {"LICENSE", "README.md"} and not two.requests
    archive.write_bytes(archive.read_bytes()[:2000])
    assert main(["fetch", "two", "--dir", str(tmp_path / "raw2"), "--archive", str(archive)]) == 1


def test_fetch_says_what_is_missing_and_what_is_wrong(two, tmp_path, capsys):
    def failure(*args):
        assert main(["fetch", "two", "--dir", str(tmp_path / "raw"), *map(str, args)]) == 1
        return capsys.readouterr().err

    assert "no README.md in" in failure() and (tmp_path / "raw" / "LICENSE").exists()
    assert "it is licensed; give them with --archive" in failure()
    assert "bears the name of none of the files, which are LICENSE, README.md" in failure(
        "--archive", ROOT / "setup.py"
    )
    assert "no file" in failure("--archive", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("another")
    assert "is not README.md of the catalogue: its md5 is" in failure("--archive", tmp_path / "README.md")
    assert have(tmp_path / "raw") == {"LICENSE"}


def test_fetch_of_what_needs_no_network(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", "sample"]) == 1
    assert "data/sample" in capsys.readouterr().err
    assert main(["fetch", "ptb"]) == 1
    assert "Linguistic Data Consortium" in capsys.readouterr().err
    assert main(["fetch"]) == 1
    assert "iwslt14-de-en, iwslt15-en-vi" in capsys.readouterr().err
    # A download that was numbered by a browser or by wget is known by being the only one.
    (tmp_path / "de-en.tgz.1").write_bytes(b"\x1f\x8b")
    assert main(["fetch", "iwslt14-de-en", "--archive", "de-en.tgz.1"]) == 1
    assert "de-en.tgz.1 is not de-en.tgz of the catalogue: it has 2 bytes" in capsys.readouterr().err
