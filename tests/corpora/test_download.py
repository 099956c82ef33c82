"""Downloads from a server that breaks connections, lies and changes its mind. Traps #2984, #4361 and #4110."""

import errno
import gzip
import hashlib
import io
import json
import re
import signal
import socket
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import zipfile

import pytest

from powernorm_fairseq.corpora import download
from powernorm_fairseq.corpora.catalogue import File
from powernorm_fairseq.corpora.download import Manner, fetch, take
from powernorm_fairseq.processes import PACKAGE, UserError, hold
from tests.commands import ROOT
from tests.corpora.servers import Server

QUICK = Manner(timeout=5.0, tries=3, wait=0.01, every=60.0)
# Real text; incompressible enough in a gzip file to be cut anywhere.
TEXT = (ROOT / "README.md").read_bytes()


def tgz():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in ("README.md", "LICENSE"):
            tar.add(ROOT / name, name)
    return buffer.getvalue()


ARCHIVE = tgz()
# Several times what is read at once.
LONG = gzip.compress(bytes(range(256)) * 1200, 0)


def sha256(body):
    return "sha256:" + hashlib.sha256(body).hexdigest()


RIGHT = (sha256(ARCHIVE),)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    running = Server()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def said():
    return []


@pytest.fixture
def get(server, tmp_path, said):
    """Fetch what is under ``paths``, in turn."""

    def get(*paths, checksums=RIGHT, name="a.tgz", manner=QUICK, **fields):
        addresses = tuple(path if "://" in path else server.address(path) for path in paths)
        return fetch(File(name, addresses, checksums=checksums, **fields), tmp_path, manner, said.append)

    return get


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_file_is_fetched_once(server, get, tmp_path, said):
    page = server.add("/a", ARCHIVE)
    assert get("/a", size=len(ARCHIVE)).read_bytes() == ARCHIVE
    assert names(tmp_path) == ["a.tgz", "a.tgz.seen.json"]
    get("/a")
    assert len(page.requests) == 1 and "is there" in said[-1]
    assert page.requests[0]["User-Agent"].startswith("powernorm_fairseq/")


def test_a_broken_connection_is_continued(server, get, said):
    page = server.add("/a", ARCHIVE)
    # More breaks than tries: a try that brings something new does not count against the server.
    page.breaks = [1000, 1000, 1000, 1000, 1000, 1, None]
    assert get("/a").read_bytes() == ARCHIVE
    assert [request.get("Range") for request in page.requests] == [
        None, "bytes=1000-", "bytes=2000-", "bytes=3000-", "bytes=4000-", "bytes=5000-", "bytes=5001-",
    ]  # fmt: skip
    assert page.requests[1]["If-Range"] == page.etag
    assert any("broke after 1000 of" in line for line in said)


def test_a_server_that_never_sends_more_is_given_up(server, get, tmp_path):
    page = server.add("/a", ARCHIVE)
    page.breaks = [1000] + [0] * 10
    with pytest.raises(UserError, match=r"broke after 1000.*given up after 3 tries(.|\n)*--archive a\.tgz"):
        get("/a")
    assert len(page.requests) == 4
    assert (tmp_path / "a.tgz.part").read_bytes() == ARCHIVE[:1000]  # for the next start
    page.breaks = []
    assert get("/a").read_bytes() == ARCHIVE
    assert page.requests[-1]["Range"] == "bytes=1000-"


def test_a_server_without_range_starts_anew(server, get, said):
    page = server.add("/a", ARCHIVE)
    page.ranges, page.breaks = False, [1000]
    assert get("/a").read_bytes() == ARCHIVE
    assert any("starting anew" in line for line in said)


@pytest.mark.parametrize("if_range", [True, False])
def test_a_file_that_changes_between_tries_is_not_mixed(server, get, if_range):
    other = ARCHIVE[:10] + gzip.compress(TEXT * 2)
    page = server.add("/a", other)
    page.breaks, page.if_range = [1000], if_range

    def change():
        page.body, page.etag = ARCHIVE, '"2"'

    page.after = change
    assert get("/a", checksums=()).read_bytes() == ARCHIVE
    assert len(page.requests) == (2 if if_range else 3)


def test_without_a_validator_only_a_checksum_allows_to_continue(server, get):
    page = server.add("/a", ARCHIVE, etag="")
    page.breaks = [1000]
    get("/a", checksums=())
    assert "Range" not in page.requests[1]
    page.requests, page.breaks = [], [1000]
    get("/a", name="b.tgz")
    assert page.requests[1]["Range"] == "bytes=1000-" and "If-Range" not in page.requests[1]


def test_a_weak_validator_is_none(server, get):
    page = server.add("/a", ARCHIVE, etag='W/"1"')
    page.breaks = [1000]
    get("/a", checksums=())
    assert "Range" not in page.requests[1]


def test_the_file_has_become_shorter(server, get):
    page = server.add("/a", ARCHIVE + ARCHIVE)
    page.breaks, page.if_range = [len(ARCHIVE) + 10], False

    def shrink():
        page.body = ARCHIVE

    page.after = shrink
    assert get("/a").read_bytes() == ARCHIVE
    assert [request.get("Range") for request in page.requests] == [None, f"bytes={len(ARCHIVE) + 10}-", None]


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
    assert names(tmp_path) == ["a.tgz.part.json", "a.tgz.wrong"]
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


def test_not_found(server, get):
    with pytest.raises(UserError, match=r"http://\S+/none: HTTP 404(.|\n)*--archive a\.tgz"):
        get("/none")


def test_a_busy_server_is_asked_again(server, get):
    page = server.add("/a", ARCHIVE)
    page.codes = [503, 429]
    assert get("/a").read_bytes() == ARCHIVE
    assert len(page.requests) == 3


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


def test_silence_counts_as_broken(server, get):
    page = server.add("/a", ARCHIVE)
    page.hangs, page.hangs_after = 3.0, 1000
    began = time.monotonic()

    def wake():
        page.hangs = 0.0

    timer = threading.Timer(0.25, wake)
    timer.start()
    assert get("/a", manner=Manner(timeout=0.3, tries=3, wait=0.01)).read_bytes() == ARCHIVE
    assert time.monotonic() - began < 2.5
    assert page.requests[1]["Range"] == "bytes=1000-"


def test_a_dead_mirror_first(server, get, said):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/a"
        server.add("/a", ARCHIVE)
        assert get(dead, "/a").read_bytes() == ARCHIVE
    assert any("no connection" in line and "2 tries" in line for line in said)


def test_a_dead_mirror_does_not_cost_the_part_of_another(server, get, tmp_path):
    page = server.add("/a", ARCHIVE)
    page.breaks = [1000] + [0] * 3
    with pytest.raises(UserError):
        get("/none", "/a")
    assert get("/none", "/a").read_bytes() == ARCHIVE
    assert page.requests[-1]["Range"] == "bytes=1000-"  # and it was asked first


def test_headers_that_the_server_wants(server, get):
    page = server.add("/a", ARCHIVE)
    page.breaks = [1000]
    get("/a", headers=(("User-Agent", "Mozilla/5.0"),))
    assert [request["User-Agent"] for request in page.requests] == ["Mozilla/5.0"] * 2


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


def test_a_full_disk(server, get, tmp_path, monkeypatch):
    server.add("/a", ARCHIVE)
    usage = download.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage._replace(free=100))
    with pytest.raises(UserError, match="no space left"):
        get("/a")
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "*")

    def full(self, last=False):
        if self.output.tell() > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")

    page = server.add("/a", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(download._Progress, "show", full)
        with pytest.raises(UserError, match=r"no space left on the disk of .*what has arrived is kept"):
            get("/a", checksums=())
    kept = (tmp_path / "a.tgz.part").stat().st_size
    assert 3000 < kept < len(LONG)
    get("/a", checksums=())
    assert page.requests[-1]["Range"] == f"bytes={kept}-"


def test_a_folder_that_may_not_be_written(server, get, tmp_path, monkeypatch):
    server.add("/a", ARCHIVE)

    def denied(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(download, "open", denied, raising=False)
    with pytest.raises(UserError, match=r"may not read or write \S+a\.tgz\.part; .*--dir"):
        get("/a")


def test_two_processes_at_once(server, get, tmp_path, monkeypatch):
    monkeypatch.setattr("powernorm_fairseq.processes.PATIENCE", 0.0)
    page = server.add("/a", ARCHIVE)
    with hold(tmp_path), pytest.raises(UserError, match="another process is at work"):
        get("/a")
    assert page.requests == []
    get("/a")


def test_an_interrupt_keeps_the_part(server, get, tmp_path, monkeypatch):
    page = server.add("/a", LONG)

    def interrupt(self, last=False):
        if self.output.tell() > 3000:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download._Progress, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get("/a", checksums=())
    kept = (tmp_path / "a.tgz.part").stat().st_size
    assert 3000 < kept < len(LONG)
    assert get("/a", checksums=()).read_bytes() == LONG
    assert page.requests[-1]["Range"] == f"bytes={kept}-"


def test_killed_and_continued(server, tmp_path):
    """Trap #2984: killed with -9 in the middle, the next start goes on with the same file."""
    body = gzip.compress(TEXT) + gzip.compress(bytes(range(256)) * 4000, 0)
    page = server.add("/a", body)
    page.slow = 0.002
    script = tmp_path / "get.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pathlib, sys, types
            package = types.ModuleType("powernorm_fairseq"); package.__path__ = [{str(PACKAGE)!r}]
            sys.modules["powernorm_fairseq"] = package  # without fairseq, which takes seconds to import
            from powernorm_fairseq.corpora.catalogue import File
            from powernorm_fairseq.corpora.download import fetch
            fetch(File("a.gz", ({server.address("/a")!r},)), pathlib.Path({str(tmp_path / "raw")!r}))
            """
        )
    )
    part = tmp_path / "raw" / "a.gz.part"
    process = subprocess.Popen([sys.executable, str(script)])
    deadline = time.monotonic() + 20
    while not (part.exists() and part.stat().st_size > 50_000):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    assert kept < len(body) and names(tmp_path / "raw") == ["a.gz.part", "a.gz.part.json"]
    page.slow = 0.0
    subprocess.run([sys.executable, str(script)], check=True, timeout=30)
    assert (tmp_path / "raw" / "a.gz").read_bytes() == body
    assert page.requests[-1]["Range"] == f"bytes={kept}-"
    assert names(tmp_path / "raw") == ["a.gz", "a.gz.seen.json"]


def test_killed_between_the_last_byte_and_the_name(server, get, tmp_path):
    page = server.add("/a", ARCHIVE)
    page.breaks = [1000, 0, 0, 0]
    with pytest.raises(UserError):
        get("/a")
    (tmp_path / "a.tgz.part").write_bytes(ARCHIVE)
    count = len(page.requests)
    assert get("/a").read_bytes() == ARCHIVE
    assert len(page.requests) == count


def test_progress_says_how_much_how_fast_and_how_long_yet(server, get, said):
    page = server.add("/a", ARCHIVE)
    page.slow = 0.01
    get("/a", manner=Manner(every=0.03))
    lines = [line for line in said if "/s" in line]
    assert len(lines) >= 2
    assert re.match(r"a\.tgz: [\d.]+ kB of [\d.]+ kB \(\d+ %\), [\d.]+ kB/s, 0 min \d+ s left", lines[0])
    assert "(100 %)" in lines[-1] and "left" not in lines[-1]


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
