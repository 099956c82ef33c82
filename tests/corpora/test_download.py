"""Downloads from a server that breaks connections, lies and changes its mind. Traps #2984, #4361 and #4110."""

import errno
import gzip
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from powernorm_fairseq.corpora import download
from powernorm_fairseq.corpora.catalogue import File
from powernorm_fairseq.corpora.download import Manner
from powernorm_fairseq.processes import PACKAGE, UserError, hold
from tests.corpora.servers import ARCHIVE, LONG, TEXT, names


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
    other = ARCHIVE[:500] + bytes(len(ARCHIVE) - 500)  # of the same length
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


def test_not_found(server, get):
    with pytest.raises(UserError, match=r"http://\S+/none: HTTP 404(.|\n)*--archive a\.tgz"):
        get("/none")


def test_a_busy_server_is_asked_again(server, get):
    page = server.add("/a", ARCHIVE)
    page.codes = [503, 429]
    assert get("/a").read_bytes() == ARCHIVE
    assert len(page.requests) == 3


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
    other = server.add("/b", ARCHIVE)
    assert get("/b", "/a").read_bytes() == ARCHIVE
    assert page.requests[-1]["Range"] == "bytes=1000-" and not other.requests  # what has begun is gone on with


def test_parts_of_two_mirrors_are_not_mixed(server, get):
    """Their validators may be equal by chance."""
    server.add("/a", ARCHIVE[:500] + bytes(len(ARCHIVE) - 500)).breaks = [1000, 0, 0, 0]
    page = server.add("/b", ARCHIVE)
    with pytest.raises(UserError):
        get("/a", checksums=())
    assert get("/b", checksums=()).read_bytes() == ARCHIVE
    assert "Range" not in page.requests[0]


def test_headers_that_the_server_wants(server, get):
    page = server.add("/a", ARCHIVE)
    page.breaks = [1000]
    get("/a", headers=(("User-Agent", "Mozilla/5.0"),))
    assert [request["User-Agent"] for request in page.requests] == ["Mozilla/5.0"] * 2


def test_a_full_disk(server, get, tmp_path, monkeypatch):
    server.add("/a", ARCHIVE)
    usage = download.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage._replace(free=100))
    with pytest.raises(UserError, match=r"no space left .*kB needed, 100 B free"):
        get("/a")
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "*")

    def full(self, last=False):
        if self.output.tell() > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")

    page = server.add("/a", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(download._Progress, "show", full)
        with pytest.raises(UserError, match=r"no space left on the disk of .*; what has arrived is kept"):
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


def test_another_copy_than_the_one_that_is_there_is_not_passed_over(tmp_path):
    """Where no checksum is public, nothing else tells the two apart."""
    one, other = tmp_path / "one.gz", tmp_path / "other.gz"
    one.write_bytes(gzip.compress(b"one"))
    other.write_bytes(gzip.compress(b"other"))
    file, folder = File("a.gz"), tmp_path / "raw"
    download.take(one, file, folder, print)
    assert download.take(one, file, folder, print).read_bytes() == one.read_bytes()
    with pytest.raises(UserError, match=r"other\.gz is another file than .*a\.gz; delete the wrong one"):
        download.take(other, file, folder, print)
