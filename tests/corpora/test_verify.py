"""What is not the file of the catalogue never gets its name. Traps #2984, #4361 and #4110."""

import gzip
import hashlib
import io
import json
import zipfile

import pytest

from powernorm_fairseq.corpora.catalogue import File
from powernorm_fairseq.corpora.download import take
from powernorm_fairseq.processes import UserError
from tests.corpora.servers import ARCHIVE, TEXT, names, sha256


def test_wrong_bytes_go_aside_and_the_next_mirror_is_asked(server, get, tmp_path):
    wrong = ARCHIVE[:2000] + b"x" + ARCHIVE[2001:]
    server.add("/wrong", wrong)
    server.add("/right", ARCHIVE)
    assert get("/wrong", "/right").read_bytes() == ARCHIVE
    assert (tmp_path / "a.tgz.wrong").read_bytes() == wrong


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha256"])
def test_wrong_bytes_alone_are_refused(server, get, tmp_path, algorithm):
    server.add("/a", ARCHIVE)
    right, wrong = hashlib.new(algorithm, ARCHIVE).hexdigest(), hashlib.new(algorithm, TEXT).hexdigest()
    with pytest.raises(UserError, match=rf"its {algorithm} is {right} instead of {wrong}"):
        get("/a", checksums=(f"{algorithm}:{wrong}",))
    assert names(tmp_path) == ["a.tgz.wrong"]
    get("/a", checksums=(f"{algorithm}:{right}",))


def test_a_wrong_size_is_refused_before_the_transfer(server, get, tmp_path):
    server.add("/a", ARCHIVE)
    with pytest.raises(UserError, match=rf"sends {len(ARCHIVE)} bytes instead of 5"):
        get("/a", size=5)
    assert names(tmp_path) == []


def test_a_body_of_unknown_length_that_breaks(server, get):
    page = server.add("/a", ARCHIVE)
    page.length, page.breaks = False, [1000]
    with pytest.raises(UserError, match="damaged or not whole"):
        get("/a", checksums=())
    page.breaks = [1000]
    assert get("/a", size=len(ARCHIVE), checksums=()).read_bytes() == ARCHIVE


PAGE = b"<!DOCTYPE html>\n<html><body>Moved.</body></html>\n"


@pytest.mark.parametrize(
    "name, body, kind, wrong",
    [
        ("a.tgz", PAGE, "text/html; charset=utf-8", "web page"),
        ("a.tgz", PAGE, "application/octet-stream", "web page"),
        ("a.txt", b"\xef\xbb\xbf\n" + PAGE, "text/plain", "web page"),
        ("a.zip", b"Sorry, try again later.", "text/plain", r"no \.zip archive"),
        ("a.tgz", b"", "text/plain", r"no \.tgz archive"),
    ],
)
def test_a_page_instead_of_the_file_is_refused(server, get, tmp_path, name, body, kind, wrong):
    server.add("/a", body, kind=kind)
    with pytest.raises(UserError, match=rf"http://\S+/a: sends something else: it is a? ?{wrong}"):
        get("/a", name=name, checksums=())
    assert names(tmp_path) == []


def test_a_page_does_not_cost_the_part_that_is_there(server, get, tmp_path):
    page = server.add("/a", ARCHIVE)
    page.breaks = [1000, 0, 0, 0]
    with pytest.raises(UserError):
        get("/a")
    page.body, page.ranges = PAGE, False
    with pytest.raises(UserError, match="web page"):
        get("/a")
    assert (tmp_path / "a.tgz.part").read_bytes() == ARCHIVE[:1000]


def test_a_gz_sent_as_encoded_stays_as_published(server, get):
    page = server.add("/a", ARCHIVE)
    page.headers = {"Content-Encoding": "gzip"}
    assert get("/a").read_bytes() == ARCHIVE
    page = server.add("/t", gzip.compress(TEXT))
    page.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(UserError, match="sent as gzip"):
        get("/t", name="a.txt", checksums=())


def test_without_a_public_checksum_the_first_copy_counts(server, get, tmp_path, said):
    page = server.add("/a", ARCHIVE)
    get("/a", checksums=())
    assert any(sha256(ARCHIVE)[7:] in line for line in said)
    assert json.loads((tmp_path / "a.tgz.seen.json").read_text())["from"] == server.address("/a")
    (tmp_path / "a.tgz").unlink()
    page.body = gzip.compress(TEXT)
    with pytest.raises(UserError, match=r"that of the copy taken on \d{4}-(.|\n)*delete a\.tgz\.seen\.json"):
        get("/a", checksums=())
    assert not (tmp_path / "a.tgz").exists()
    (tmp_path / "a.tgz.seen.json").unlink()
    assert get("/a", checksums=()).read_bytes() == page.body


def test_a_file_that_was_changed_here_is_noticed(server, get, tmp_path):
    server.add("/a", ARCHIVE)
    path = get("/a", checksums=())
    path.write_bytes(gzip.compress(TEXT))
    with pytest.raises(UserError, match=r"is there but not what it should be(.|\n)*Move it away"):
        get("/a", checksums=())
    path.write_bytes(ARCHIVE[:-20])
    with pytest.raises(UserError, match="its sha256"):
        get("/a")
    assert path.read_bytes() == ARCHIVE[:-20]  # the user's file is not touched


def zipped(text, name="folder/text"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return buffer.getvalue()


def test_a_zip_is_known_by_the_text_in_it(server, get):
    file = {"checksums": (), "members": (("text", sha256(TEXT)),), "name": "a.zip"}
    for body, wrong in (
        (zipped(TEXT + b"."), "text is another: sha256"),
        (zipped(TEXT, "other"), "no text in it"),
        (zipped(TEXT)[:-30], "not whole"),
    ):
        server.add("/a", body)
        with pytest.raises(UserError, match=wrong):
            get("/a", **file)
    server.add("/a", zipped(TEXT))
    get("/a", **file)


def test_a_damaged_zip_without_any_checksum(server, get):
    body = zipped(TEXT)
    server.add("/a", body[:1000] + bytes([body[1000] ^ 1]) + body[1001:])
    with pytest.raises(UserError, match="damaged"):
        get("/a", checksums=(), name="a.zip")


def test_a_local_copy(tmp_path, said):
    copy, folder = tmp_path / "copy.tgz", tmp_path / "raw"
    copy.write_bytes(ARCHIVE)
    file = File("a.tgz", checksums=(sha256(ARCHIVE),))
    assert take(copy, file, folder, said.append).read_bytes() == ARCHIVE and copy.exists()
    take(copy, file, folder, said.append)
    assert "is there" in said[-1]
    with pytest.raises(UserError, match=r"no file .*none"):
        take(tmp_path / "none", file, folder)
    copy.write_bytes(ARCHIVE[:-9])
    with pytest.raises(UserError, match=r"copy\.tgz is not b\.tgz of the catalogue: its sha256"):
        take(copy, File("b.tgz", checksums=file.checksums), folder)
    with pytest.raises(UserError, match="not whole"):
        take(copy, File("b.tgz"), folder)
    assert names(folder) == ["a.tgz", "a.tgz.seen.json"]
