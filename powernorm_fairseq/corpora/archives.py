"""Parallel text out of the archives in which it is published: plain or tagged lines, and segments of XML or SGML."""

import re
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Dict, Iterable, Iterator, Sequence

from powernorm_fairseq.corpora.streams import lines_of
from powernorm_fairseq.processes import UserError

# Lines of the IWSLT training files that the published script drops, and tags that it takes off the others.
DROPPED = ("<url>", "<talkid>", "<keywords>")
_TAGS = re.compile(r"</?(?:title|description)>")
_SEGMENT = re.compile(r'<seg id="[^"]*"\s*>\s*(.*?)\s*</seg>', re.IGNORECASE)
_BEGIN = re.compile(r"<seg\b", re.IGNORECASE)
_ENTITY = re.compile(r"&(amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});")
_NAMED = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}


def unpack(archive: Path, names: Sequence[str], folder: Path) -> Dict[str, Path]:
    """Write the members of these base names, wherever in a tar archive they are, into ``folder``; nothing else.

    Raises:
        UserError: the archive is damaged, or one of them is not in it.
    """
    found: Dict[str, Path] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in names and name not in found and member.isfile() else None
                if content is not None:
                    found[name] = folder / name
                    with open(found[name], "wb") as file:
                        shutil.copyfileobj(content, file, 1 << 20)
                if len(found) == len(names):
                    break
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the archive
        raise UserError(f"{archive} is damaged or not whole ({error}); delete it to fetch it again") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(f"there is no {', '.join(missing)} in {archive}: it is not the published archive")
    return found


def append_plain(source: Path, target: Path) -> None:
    """Append a file, byte for byte, to another; only an end that its last line lacks is added."""
    with open(source, "rb") as old, open(target, "ab") as new:
        last = b"\n"
        for block in iter(lambda: old.read(1 << 20), b""):
            new.write(block)
            last = block[-1:]
        if last != b"\n":
            new.write(b"\n")


def append_lines(lines: Iterable[str], target: Path) -> None:
    """Append one line for each string."""
    with open(target, "a", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def unwrap_tags(path: Path) -> Iterator[str]:
    """The text of an IWSLT ``train.tags`` file, to which titles and descriptions belong, addresses and keywords not."""
    for line in lines_of(path):
        if not any(tag in line for tag in DROPPED):
            yield _TAGS.sub("", line)


def segments(path: Path, entities: bool) -> Iterator[str]:
    """The text of each ``<seg>`` of an XML or SGML file of the evaluation campaigns.

    These files have one segment a line and are often no well-formed XML (bare ampersands), so they are read by lines.

    Args:
        entities: replace ``&amp;`` and the like by what they stand for.

    Raises:
        UserError: a segment does not end on its line, the file breaks off, or it has no segments.
    """
    count, opened, closed = 0, 0, 0
    for number, line in enumerate(lines_of(path), 1):
        lowered = line.lower()
        opened += lowered.count("<doc ")
        closed += lowered.count("</doc>")
        found = _SEGMENT.findall(line)
        if len(found) != len(_BEGIN.findall(line)):
            raise UserError(f'{path.name}, line {number}: not a whole <seg id="...">...</seg>: {line.strip()[:80]}')
        for text in found:
            count += 1
            yield _ENTITY.sub(_character, text) if entities else text
    if count == 0:
        raise UserError(f"{path.name}: no <seg> in it")
    if opened > closed:
        raise UserError(f"{path.name} breaks off: {opened} documents begin, {closed} end")


def _character(match: "re.Match[str]") -> str:
    name = match.group(1)
    if name in _NAMED:
        return _NAMED[name]
    code = int(name[2:], 16) if name[1] == "x" else int(name[1:])
    # What is no character, or would break the line, stays as it is written.
    usable = 0x20 <= code < 0x110000 and not 0xD800 <= code < 0xE000 and code not in (0x7F, 0x85, 0x2028, 0x2029)
    return chr(code) if usable else match.group()
