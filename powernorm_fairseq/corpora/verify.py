"""Is this file the one of the catalogue? Size, checksums, what its first bytes say, and whether an archive is whole."""

import gzip
import hashlib
import json
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterable, Optional, Union

from powernorm_fairseq.corpora.catalogue import File
from powernorm_fairseq.processes import UserError, write_atomically

BLOCK = 1 << 20
# What a file of such a name begins with.
SIGNATURES = {".tgz": b"\x1f\x8b", ".gz": b"\x1f\x8b", ".zip": b"PK\x03\x04"}
WEB_PAGE = (b"<!doctype html", b"<html", b"<head", b"<?xml")


class WrongFileError(Exception):
    """The file is not what it should be; the message says in what."""


def looks_wrong(name: str, head: bytes) -> str:
    """What the first bytes (16 or more, or all) tell against a file of this name; empty if nothing."""
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(WEB_PAGE):
        return "it is a web page"
    signature = SIGNATURES.get(Path(name).suffix)
    return f"it is no {Path(name).suffix} archive" if signature and not head.startswith(signature) else ""


def digests(source: Union[Path, BinaryIO], algorithms: Iterable[str]) -> Dict[str, str]:
    """Checksums of a file, all in one reading."""
    if isinstance(source, Path):
        with open(source, "rb") as opened:
            return digests(opened, algorithms)
    running = {name: hashlib.new(name) for name in algorithms}
    for block in iter(lambda: source.read(BLOCK), b""):
        for digest in running.values():
            digest.update(block)
    return {name: digest.hexdigest() for name, digest in running.items()}


def verify(path: Path, file: File, remembered: Optional[Dict[str, Any]] = None) -> str:
    """Compare a file with its entry in the catalogue, and with what an earlier copy of it was.

    Archives for which no checksum is public are read to their end, which finds those that break off.

    Returns:
        The SHA-256.

    Raises:
        WrongFileError: it is another file, or broken.
    """
    size = path.stat().st_size
    with open(path, "rb") as opened:
        wrong = looks_wrong(file.name, opened.read(512))
    if wrong:
        raise WrongFileError(wrong)
    if size == 0 or (file.size is not None and size != file.size):
        raise WrongFileError(f"it has {size} bytes" + (f" instead of {file.size}" if file.size else ""))
    wanted = [checksum.split(":") for checksum in file.checksums]
    found = digests(path, {"sha256", *(algorithm for algorithm, _ in wanted)})
    _compare(wanted, found)
    if not file.checksums:
        if remembered and remembered.get("sha256") != found["sha256"]:
            raise WrongFileError(
                f"its sha256 is {found['sha256']}, but that of the copy taken on {remembered.get('on')} was"
                f" {remembered.get('sha256')}; if the change is right, delete {receipt(path.parent, file).name}"
            )
        _read_to_end(path, file)
    return found["sha256"]


def _compare(wanted: Iterable[Any], found: Dict[str, str], what: str = "its") -> None:
    for algorithm, digest in wanted:
        if found[algorithm] != digest:
            raise WrongFileError(f"{what} {algorithm} is {found[algorithm]} instead of {digest}")


def _read_to_end(path: Path, file: File) -> None:
    suffix = Path(file.name).suffix
    try:
        if suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
                if bad:
                    raise WrongFileError(f"{bad} in it is damaged")
                for name, checksum in file.members:
                    algorithm, digest = checksum.split(":")
                    inside = [one for one in archive.namelist() if one.split("/")[-1] == name]
                    if not inside:
                        raise WrongFileError(f"there is no {name} in it")
                    with archive.open(inside[0]) as member:
                        _compare([(algorithm, digest)], digests(member, [algorithm]), f"{name} is another:")  # type: ignore[arg-type]
        elif suffix in (".tgz", ".gz"):
            with gzip.open(path) as stream:
                while stream.read(BLOCK):
                    pass
    except (EOFError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile) as error:
        raise WrongFileError(f"it is damaged or not whole ({error})") from error


def receipt(folder: Path, file: File) -> Path:
    """Where the checksum of a verified copy is remembered."""
    return folder / f"{file.name}.seen.json"


def recall(folder: Path, file: File) -> Optional[Dict[str, Any]]:
    """What is remembered of the copy that was verified last; None if there was none."""
    path = receipt(folder, file)
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged; delete it if {file.name} is to be trusted without it") from error


def remember(folder: Path, file: File, sha256: str, size: int, origin: str) -> None:
    """Write down the checksum of a verified copy, so that another file under the same address is noticed later."""
    noted = {"sha256": sha256, "size": size, "from": origin, "on": time.strftime("%Y-%m-%d", time.gmtime())}
    write_atomically(receipt(folder, file), json.dumps(noted, indent=1) + "\n")
