"""A web server on this machine that misbehaves as told, and what it has to send."""

import gzip
import hashlib
import io
import re
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Callable, Dict, List

from powernorm_fairseq.corpora.download import Manner
from tests.commands import ROOT


class Page:
    """What the server has under one path; the attributes may be changed between requests.

    Attributes:
        ranges: whether Range is heeded; if_range: whether If-Range is.
        breaks: after how many bytes of a body the connection breaks, one entry a request; None is a whole body.
        codes: answers of this code, one a request, before the page itself.
        hangs: seconds of silence before the body goes on after ``hangs_after`` bytes.
        slow: seconds after each block of 1000 bytes.
    """

    def __init__(self, body: bytes, etag: str = '"1"', kind: str = "application/octet-stream") -> None:
        self.body, self.etag, self.kind = body, etag, kind
        self.ranges = self.if_range = self.length = True
        self.breaks: List = []
        self.codes: List[int] = []
        self.headers: Dict[str, str] = {}
        self.hangs, self.hangs_after, self.slow = 0.0, 0, 0.0
        self.requests: List[Dict[str, str]] = []
        self.after: Callable[[], None] = lambda: None


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        page = self.server.pages.get(self.path)
        if page is None:
            return self.send_error(404)
        page.requests.append(dict(self.headers.items()))
        if page.codes:
            self.send_response(page.codes.pop(0))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body, start = page.body, 0
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and page.ranges and (not page.if_range or self.headers.get("If-Range", page.etag) == page.etag):
            start = int(asked[1])
            if start >= len(body):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", page.kind)
        if page.etag:
            self.send_header("ETag", page.etag)
        if page.length:
            self.send_header("Content-Length", str(len(body) - start))
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        end = page.breaks.pop(0) if page.breaks else None
        sent = body[start:] if end is None else body[start : start + end]
        try:
            if page.hangs:
                self.wfile.write(sent[: page.hangs_after])
                self.wfile.flush()
                time.sleep(page.hangs)
                sent = sent[page.hangs_after :]
            for first in range(0, len(sent), 1000 if page.slow else max(1, len(sent))):
                self.wfile.write(sent[first : first + 1000] if page.slow else sent)
                self.wfile.flush()
                time.sleep(page.slow)
        except OSError:
            pass  # the client has gone
        self.close_connection = True
        page.after()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: Dict[str, Page] = {}
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def add(self, path: str, *args, **kwargs) -> Page:
        self.pages[path] = Page(*args, **kwargs)
        return self.pages[path]

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


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


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
