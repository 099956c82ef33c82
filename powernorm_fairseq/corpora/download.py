"""Fetch one file of the catalogue, or nothing: under its name a file is whole and verified.

The transfer itself is urllib's. pooch, the usual library for this, starts a broken transfer again from its first byte
and takes one address a file; requests unpacks a body that is sent with ``Content-Encoding: gzip``, so that a ``.tgz``
would not be the published file, and is needed by nothing else here. What is added to urllib: continuing where the last
try or the last process stopped, further tries and addresses, and the verification.

In the folder, beside ``NAME``:

- ``NAME.part``, ``NAME.part.json``: what has arrived, and of which file at which address it is a part;
- ``NAME.wrong``: the last file that arrived whole and failed verification, kept to be looked at;
- ``NAME.seen.json``: checksum and origin of the verified copy.
"""

import contextlib
import errno
import filecmp
import http.client
import json
import os
import re
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Optional

from powernorm_fairseq.corpora.catalogue import File, readable_size
from powernorm_fairseq.corpora.verify import WrongFileError, looks_wrong, recall, remember, verify
from powernorm_fairseq.processes import UserError, hold, write_atomically
from powernorm_fairseq.version import __version__

Say = Callable[[str], None]
BLOCK = 1 << 16
LONGEST_WAIT = 60.0
BUSY = frozenset([408, 425, 429])  # "try again" among the codes of 400 to 499


@dataclass(frozen=True)
class Manner:
    """How patient to be.

    Attributes:
        timeout: seconds of silence after which a connection counts as broken.
        tries: tries in a row that bring nothing new before an address is given up.
        wait: seconds before the second try; doubled for each further one.
        every: seconds between two lines about the progress.
    """

    timeout: float = 30.0
    tries: int = 5
    wait: float = 1.0
    every: float = 5.0


USUAL = Manner()


class RefusedError(Exception):
    """This address will not give the file; another one may."""


class BrokenError(Exception):
    """This try failed; the next one may do better, after ``wait`` seconds if the server says so."""

    def __init__(self, message: str, wait: Optional[float] = None) -> None:
        super().__init__(message)
        self.wait = wait


def tell(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)


def fetch(file: File, folder: Path, manner: Manner = USUAL, say: Say = tell) -> Path:
    """Have ``file`` in ``folder``: verify the copy that is there, or download it.

    Raises:
        UserError: no address gives the right file, the copy that is there is another, the folder cannot be written, its
            disk is full, or another process is at work in it.
    """
    target = folder / file.name
    with clear_errors(folder), contextlib.closing(hold(folder)):
        if target.exists():
            return _verified(target, file, say)
        problems = []
        transfer = _Transfer(file, folder, manner, say)
        addresses = transfer.order()
        for address in addresses:
            last = address == addresses[-1]
            try:
                transfer.run(address, manner.tries if last or transfer.here() else min(2, manner.tries))
                _accept(transfer.part, file, folder, address, say)
                transfer.state.unlink()
                return target
            except RefusedError as error:
                problems.append(f"{address}: {error}")
            except WrongFileError as error:
                aside = folder / f"{file.name}.wrong"
                os.replace(transfer.part, aside)
                transfer.forget()
                problems.append(f"{address}: {error} (kept as {aside})")
            say(problems[-1])
        raise UserError(
            "\n  ".join([f"{file.name} could not be had:", *problems])
            + f"\nGet it in another way and give it with --archive {file.name}"
        )


def take(source: Path, file: File, folder: Path, say: Say = tell) -> Path:
    """Have ``file`` in ``folder`` from a copy on this machine, verified in the same way.

    Raises:
        UserError: the copy is missing, broken or another file; or as for ``fetch``.
    """
    target, copy = folder / file.name, folder / f"{file.name}.copy"
    if not source.is_file():
        raise UserError(f"no file {source}")
    with clear_errors(folder), contextlib.closing(hold(folder)):
        if target.exists():
            _verified(target, file, say)
            if not file.checksums and not filecmp.cmp(source, target, shallow=False):
                raise UserError(f"{source} is another file than {target}; delete the wrong one of them")
            return target
        try:
            shutil.copyfile(source, copy)
            _accept(copy, file, folder, str(source), say)
        except WrongFileError as error:
            raise UserError(f"{source} is not {file.name} of the catalogue: {error}") from error
        finally:
            if copy.exists():
                copy.unlink()
    return target


def _verified(target: Path, file: File, say: Say) -> Path:
    try:
        verify(target, file, recall(target.parent, file))
    except WrongFileError as error:
        raise UserError(f"{target} is there but not what it should be: {error}\nMove it away and run again") from error
    say(f"{file.name} is there")
    return target


def _accept(path: Path, file: File, folder: Path, origin: str, say: Say) -> None:
    """Verify a whole file and give it its name."""
    sha256 = verify(path, file, recall(folder, file))
    if file.checksums:
        say(f"{file.name}: checksums are right")
    else:
        known = (
            "its text has the published checksum"
            if file.members
            else "no checksum of it is public, compare it where you can"
        )
        say(f"{file.name}: sha256 {sha256}; {known}; a later change will be noticed")
    with open(path, "rb") as opened:
        os.fsync(opened.fileno())
    remember(folder, file, sha256, path.stat().st_size, origin)
    os.replace(path, folder / file.name)


@contextlib.contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Say what is to be done about a full disk or a folder that may not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left on the disk of {folder} ({error.strerror});"
                " what has arrived is kept: make room and run the same again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"may not read or write {error.filename or folder}; another folder can be chosen with --dir"
            ) from error
        raise UserError(f"{folder}: {error}") from error


class _Transfer:
    """The part of a file that has arrived, and how to get the rest."""

    def __init__(self, file: File, folder: Path, manner: Manner, say: Say) -> None:
        self.file, self.manner, self.say = file, manner, say
        self.part = folder / f"{file.name}.part"
        self.state = folder / f"{file.name}.part.json"

    def here(self) -> int:
        """Bytes that have arrived."""
        return self.part.stat().st_size if self.part.exists() else 0

    def known(self) -> Dict[str, Any]:
        """Of what the part is one: ``address``, ``size``, ``etag``, ``modified``."""
        try:
            return json.loads(self.state.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}

    def order(self) -> List[str]:
        """The addresses, first the one of which there is a part."""
        begun = self.known().get("address") if self.here() else None
        return sorted(self.file.addresses, key=lambda address: address != begun)

    def forget(self) -> None:
        """Begin with nothing."""
        for path in (self.part, self.state):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def run(self, address: str, tries: int) -> None:
        """Complete the part from one address.

        Raises:
            RefusedError: it will not give the file, or did not in ``tries`` tries.
        """
        most, failed = self.here() if self.known().get("address") == address else 0, 0
        while True:
            try:
                return self.once(address)
            except BrokenError as error:
                failed = 0 if self.here() > most else failed + 1
                most = max(most, self.here())
                if failed >= tries:
                    raise RefusedError(f"{error} (given up after {tries} tries)") from error
                wait = self.manner.wait * 2 ** max(0, failed - 1) if error.wait is None else error.wait
                wait = min(wait, LONGEST_WAIT)
                self.say(
                    f"{self.file.name}: {error}; trying again in {wait:.0f} s, {readable_size(self.here())} are here"
                )
                time.sleep(wait)

    def once(self, address: str) -> None:
        """One request."""
        state, have = self.known(), self.here()
        # Without a validator another version of the file might be appended; only a public checksum would show that.
        validator = state.get("etag") or state.get("modified")
        if not (state.get("address") == address and (validator or self.file.checksums)):
            have = 0
        if have and have == state.get("size"):
            return
        headers = {"User-Agent": f"powernorm_fairseq/{__version__}", **dict(self.file.headers)}
        if have:
            headers["Range"] = f"bytes={have}-"
            if validator:
                headers["If-Range"] = validator
        with self.open(address, headers) as response:
            head = b""
            if response.status == http.client.PARTIAL_CONTENT and have:
                self.check_continuation(response, state, have)
                self.say(f"{self.file.name}: going on at {readable_size(have)}")
            else:
                head = self.begin(address, response)
            self.receive(response, head, self.known().get("size") or self.file.size)

    def open(self, address: str, headers: Dict[str, str]) -> Any:
        """Send a request and translate what may go wrong."""
        try:
            return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=self.manner.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                self.forget()
                raise BrokenError("the file there is shorter than what is here; starting anew") from error
            if error.code in BUSY or error.code >= 500:
                later = error.headers.get("Retry-After", "")
                raise BrokenError(
                    f"HTTP {error.code} {error.reason}", float(later) if later.isdigit() else None
                ) from error
            raise RefusedError(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise RefusedError(f"the server's certificate is not trusted ({reason})") from error
            raise BrokenError(f"no connection ({reason})") from error

    def check_continuation(self, response: Any, state: Dict[str, Any], have: int) -> None:
        """Refuse what does not join on to the part: not every server heeds If-Range."""
        joins = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        fits = joins and int(joins[1]) == have and joins[2] in ("*", str(state.get("size") or joins[2]))
        for key, header in (("etag", "ETag"), ("modified", "Last-Modified")):
            theirs = response.headers.get(header)
            fits = fits and (not state.get(key) or not theirs or state[key] == theirs)
        if not fits:
            self.forget()
            raise BrokenError("what the server sends does not continue what is here; starting anew")

    def begin(self, address: str, response: Any) -> bytes:
        """Look at the start of a whole file and, if it may be the right one, forget the part of another; its start."""
        headers = response.headers
        if response.status != http.client.OK:
            raise RefusedError(f"HTTP {response.status} {response.reason}")
        if headers.get("Content-Encoding", "identity") != "identity" and not self.file.name.endswith("gz"):
            raise RefusedError(f"sent as {headers['Content-Encoding']}, which nobody asked for")
        length = headers.get("Content-Length")
        size = int(length) if length else None
        head = self.read(response, 512)
        wrong = "it is a web page" if headers.get_content_type() == "text/html" else looks_wrong(self.file.name, head)
        if wrong:
            raise RefusedError(f"sends something else: {wrong}")
        if size is not None and self.file.size is not None and size != self.file.size:
            raise RefusedError(f"sends {size} bytes instead of {self.file.size}")
        if self.here():
            self.say(f"{self.file.name}: the server does not continue, or the file has changed; starting anew")
        self.forget()
        free = shutil.disk_usage(self.part.parent).free
        if size is not None and size > free:
            raise OSError(errno.ENOSPC, f"{readable_size(size)} needed, {readable_size(free)} free")
        etag = headers.get("ETag", "")
        state = {
            "address": address,
            "size": size,
            "etag": "" if etag.startswith("W/") else etag,  # a weak one does not promise the same bytes
            "modified": headers.get("Last-Modified", ""),
        }
        write_atomically(self.state, json.dumps(state, indent=1) + "\n")
        return head

    def receive(self, response: Any, head: bytes, size: Optional[int]) -> None:
        """Append what comes to the part."""
        with open(self.part, "ab") as output:
            progress = _Progress(self.file.name, output, size, self.manner.every, self.say)
            block = head or self.read(response)
            while block:
                output.write(block)
                progress.show()
                block = self.read(response)
            progress.show(last=True)
        if size is not None and self.here() < size:
            raise BrokenError(f"the connection broke after {self.here()} of {size} bytes")

    @staticmethod
    def read(response: Any, exactly: int = 0) -> bytes:
        """The next bytes, as soon as there are some, or just so many; empty at the end."""
        try:
            return response.read(exactly) if exactly else response.read1(BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise BrokenError(f"the connection broke ({error or type(error).__name__})") from error


class _Progress:
    """Now and then a line: how much, how fast, how long yet."""

    def __init__(self, name: str, output: "IO[bytes]", size: Optional[int], every: float, say: Say) -> None:
        self.name, self.output, self.size, self.every, self.say = name, output, size, every, say
        self.began = self.shown = time.monotonic()
        self.start = output.tell()

    def show(self, last: bool = False) -> None:
        """Say where the transfer is, if it is time to, or if it is over."""
        now = time.monotonic()
        if not last and now - self.shown < self.every:
            return
        self.shown = now
        here = self.output.tell()
        rate = (here - self.start) / max(now - self.began, 1e-6)
        line = f"{self.name}: {readable_size(here)}"
        if self.size:
            line += f" of {readable_size(self.size)} ({100 * here / self.size:.0f} %)"
        line += f", {readable_size(rate)}/s"
        if self.size and rate and here < self.size:
            left = round((self.size - here) / rate)
            line += f", {left // 60} min {left % 60} s left"
        self.say(line)
