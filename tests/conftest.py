"""Data for the tests: real text from data/sample, made small and binarised by fairseq-preprocess."""

import gc
import tarfile
from pathlib import Path

import pytest

from tests.commands import ROOT, checked, write_lines

SAMPLE = ROOT / "data" / "sample"
SHARED = ROOT.parent / "shared"

# Hydra copies deep trees for each command line, and with all of torch and fairseq imported a search for garbage takes
# long: as often as Python does it by itself, a quarter of the time of such a test.
gc.set_threshold(50_000, 20, 50)


def sample_lines(split: str, language: str, count: int) -> list:
    """The first ``count`` sentences of the sample, lower-cased; split by spaces they are the tokens."""
    with open(SAMPLE / "ui-de-en" / f"{split}.{language}", encoding="utf-8") as lines:
        return [next(lines).strip().lower() for _ in range(count)]


@pytest.fixture(scope="session")
def golden():
    """Arrays of the released implementations (shared/golden/README.md); skips where they are missing."""
    path = SHARED / "golden" / "released.npz"
    if not path.exists():
        pytest.skip(f"no golden file at {path}")
    import numpy

    return numpy.load(path)


@pytest.fixture(scope="session")
def translation_data(tmp_path_factory) -> Path:
    """A binarised German-English data set of 300/40/20 pairs with one joined dictionary."""
    folder = tmp_path_factory.mktemp("translation")
    for split, count in (("train", 300), ("valid", 40), ("test", 20)):
        for language in ("de", "en"):
            write_lines(folder / f"{split}.{language}", sample_lines(split, language, count))
    checked(
        "fairseq-preprocess", "--source-lang", "de", "--target-lang", "en", "--joined-dictionary",
        "--trainpref", folder / "train", "--validpref", folder / "valid", "--testpref", folder / "test",
        "--thresholdsrc", 2, "--thresholdtgt", 2, "--destdir", folder / "bin", "--workers", 1,
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture(scope="session")
def language_model_data(tmp_path_factory) -> Path:
    """A binarised English language-modelling data set of three State of the Union addresses."""
    folder = tmp_path_factory.mktemp("language_model")
    with tarfile.open(SAMPLE / "sotu-raw.tar.xz") as archive:
        names = sorted(name for name in archive.getnames() if name.endswith(".txt"))
        for split, name in zip(("train", "valid", "test"), names):
            member = archive.extractfile(name)
            assert member is not None
            text = member.read().decode("utf-8").lower()
            write_lines(folder / f"{split}.txt", [" ".join(line.split()) for line in text.split(". ") if line.strip()])
    checked(
        "fairseq-preprocess", "--only-source", "--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt",
        "--testpref", folder / "test.txt", "--thresholdsrc", 2, "--destdir", folder / "bin", "--workers", 1,
    )  # fmt: skip
    return folder / "bin"
