"""``powernorm_fairseq fetch``: the files of a public data set, verified, from the network or from your own copies."""

import argparse
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Dict, List, Sequence

from powernorm_fairseq.corpora.catalogue import CATALOGUE, DataSet, File, table
from powernorm_fairseq.corpora.download import clear_errors, fetch, take
from powernorm_fairseq.processes import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("name", nargs="?", choices=sorted(CATALOGUE), help="the data set")
    parser.add_argument("--dir", type=Path, help="folder for the files (runs/raw/NAME)")
    parser.add_argument(
        "--archive",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="copies on this machine, taken instead of the network and verified in the same way",
    )
    parser.add_argument("--list", action="store_true", help="print the catalogue")


def main(args: argparse.Namespace) -> int:
    """Print the catalogue, or have a data set's files in a folder and print that."""
    if args.list:
        print("\n".join(table()))
        return 0
    if args.name is None:
        raise UserError("say which data set, one of " + ", ".join(CATALOGUE) + "; --list describes them")
    data, folder = CATALOGUE[args.name], args.dir or Path("runs/raw") / args.name
    if not data.files:
        raise UserError(f"{args.name}: nothing to fetch, {data.why_not}")
    print(f"{data.title}\nlicence: {data.licence}\ncite: {data.citation}", flush=True)
    have(data, folder, args.archive)
    print(folder)
    return 0


def have(data: DataSet, folder: Path, archives: Sequence[Path] = ()) -> None:
    """Have all files of a data set in ``folder``: from ``archives`` those that are there, the others by download.

    Raises:
        UserError: a file cannot be had, or an archive is none of the data set's files.
    """
    with tempfile.TemporaryDirectory() as unpacked, clear_errors(folder):
        copies = assign(data, archives, Path(unpacked))
        for file in data.files:
            if file.name in copies:
                take(copies[file.name], file, folder)
            elif file.addresses or (folder / file.name).exists():
                fetch(file, folder)
            else:
                raise UserError(f"no {file.name} in {folder}: {data.why_not}; give them with --archive FILE ...")


def assign(data: DataSet, archives: Sequence[Path], unpacked: Path) -> Dict[str, Path]:
    """Which copy is which file: by its name, or as the only one; or else a tar archive that holds such files.

    Raises:
        UserError: a copy is missing or none of these.
    """
    copies: Dict[str, Path] = {}
    names = [file.name for file in data.files]
    for archive in archives:
        if not archive.is_file():
            raise UserError(f"no file {archive}")
        if archive.name in names:
            copies[archive.name] = archive
            continue
        if len(names) == len(archives) == 1:
            return {name: archive for name in names}
        inside = _unpack(archive, data.files, unpacked)
        if not inside:
            raise UserError(f"{archive} bears the name of none of the files, which are " + ", ".join(names))
        copies.update({path.name: path for path in inside})
    return copies


def _unpack(archive: Path, files: Sequence[File], target: Path) -> List[Path]:
    """Files of these names out of a tar archive, wherever in it they are; nothing else is written."""
    found = []
    wanted = {file.name for file in files}
    try:
        if not tarfile.is_tarfile(archive):
            return []
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in wanted and member.isfile() else None
                if content is not None:
                    (target / name).write_bytes(content.read())
                    found.append(target / name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} is damaged or not whole ({error})") from error
    return found
