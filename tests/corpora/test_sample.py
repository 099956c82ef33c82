"""The text that comes with the project is what its README and NOTICE say."""

import re

import pytest

from powernorm_fairseq.corpora import sample
from powernorm_fairseq.corpora.language_model import read_documents
from powernorm_fairseq.corpora.translation import read_lines
from tests.conftest import SAMPLE

SIZES = {"train": 20_621, "valid": 1_000, "test": 1_000}


@pytest.mark.parametrize("split", SIZES)
def test_pairs_are_parallel_and_have_an_origin(split):
    sides = [read_lines(SAMPLE / "ui-de-en" / f"{split}.{side}") for side in ("de", "en", "src")]
    assert [len(side) for side in sides] == [SIZES[split]] * 3
    assert all(line.strip() for side in sides for line in side)


def test_splits_share_no_pair():
    pairs = {
        split: set(zip(*(read_lines(SAMPLE / "ui-de-en" / f"{split}.{side}") for side in ("de", "en"))))
        for split in SIZES
    }
    assert (
        not pairs["train"] & pairs["test"]
        and not pairs["train"] & pairs["valid"]
        and not pairs["valid"] & pairs["test"]
    )


def test_every_origin_has_its_notice_and_its_licence():
    notice = (SAMPLE / "NOTICE").read_text(encoding="utf-8")
    named = set(re.findall(r"^  (\S+)   ", notice, re.MULTILINE))
    origins = {line for split in SIZES for line in read_lines(SAMPLE / "ui-de-en" / f"{split}.src")}
    assert origins == named
    licences = {SAMPLE / name for name in re.findall(r"licenses/[\w.-]+\.txt", notice)}
    assert licences == set((SAMPLE / "licenses").iterdir())
    assert all(len(path.read_text(encoding="utf-8")) > 900 for path in licences)


def test_documents_and_size():
    documents = read_documents(SAMPLE / "sotu-raw.tar.xz")
    assert len(documents) == 233
    assert 1_750_000 < sum(len(text.split()) for text in documents.values()) < 1_850_000
    assert sum(name >= sample.LANGUAGE_MODEL.first for name in documents) == 62
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file()) < 6_000_000
