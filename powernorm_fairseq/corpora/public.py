"""The public parallel corpora: what is where in their archives, and the recipe of each."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

from powernorm_fairseq.corpora.archives import append_lines, append_plain, segments, unpack, unwrap_tags
from powernorm_fairseq.corpora.catalogue import CATALOGUE
from powernorm_fairseq.corpora.counts import write_counts
from powernorm_fairseq.corpora.steps import Preparation, digest_of_files
from powernorm_fairseq.corpora.streams import count_lines
from powernorm_fairseq.corpora.translation import TranslationRecipe, prepare_parallel
from powernorm_fairseq.corpora.verify import recall
from powernorm_fairseq.processes import UserError, hold


@dataclass(frozen=True)
class Part:
    """A piece of a split, one file a language.

    Attributes:
        split: where it belongs; parts of one split follow each other in the order of the layout.
        archive: the tar archive that holds it; empty where the files themselves are published.
        names: file names, source language first.
        form: ``plain`` (a sentence a line), ``tags`` (IWSLT's training text) or ``segments`` (XML, SGML).
        count: what the catalogue calls its number of pairs; empty if it has none.
    """

    split: str
    archive: str
    names: Tuple[str, str]
    form: str = "plain"
    count: str = ""


@dataclass(frozen=True)
class Layout:
    """A data set of the catalogue as parallel text.

    Attributes:
        entities: replace XML's entities in segments; the published IWSLT14 script leaves them as they are.
        vocabularies: files whose lines the catalogue knows the number of.
    """

    data: str
    parts: Tuple[Part, ...]
    recipe: TranslationRecipe
    entities: bool = False
    vocabularies: Tuple[Tuple[str, str], ...] = ()


def _iwslt14_test(name: str) -> Part:
    return Part("test", "de-en.tgz", (f"IWSLT14.{name}.de-en.de.xml", f"IWSLT14.{name}.de-en.en.xml"), "segments")


def _wmt14_train(archive: str, name: str) -> Part:
    return Part("train", archive, (f"{name}.de-en.en", f"{name}.de-en.de"), count=f"{name} pairs")


IWSLT14 = Layout(
    data="iwslt14-de-en",
    parts=(
        Part("train", "de-en.tgz", ("train.tags.de-en.de", "train.tags.de-en.en"), "tags"),
        *map(_iwslt14_test, ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")),
    ),
    recipe=TranslationRecipe(every=23, straighten=("test",)),
)

# The text is published tokenised, so that nothing is left to do but to split it. How Xu et al. did that is unpublished.
IWSLT15 = Layout(
    data="iwslt15-en-vi",
    parts=(
        Part("train", "", ("train.en", "train.vi"), count="train pairs"),
        Part("valid", "", ("tst2012.en", "tst2012.vi")),
        Part("test", "", ("tst2013.en", "tst2013.vi")),
    ),
    recipe=TranslationRecipe(
        source="en", target="vi", lower=False, ratio=float(10**9), longest=10**9, tokenise=False, merges=10_000
    ),
    vocabularies=(("vocab.en", "English vocabulary"), ("vocab.vi", "Vietnamese vocabulary")),
)

WMT14 = Layout(
    data="wmt14-en-de",
    parts=(
        _wmt14_train("training-parallel-europarl-v7.tgz", "europarl-v7"),
        _wmt14_train("training-parallel-commoncrawl.tgz", "commoncrawl"),
        _wmt14_train("training-parallel-nc-v12.tgz", "news-commentary-v12"),
        Part("valid", "dev.tgz", ("newstest2013.en", "newstest2013.de")),
        Part("test", "test-full.tgz", ("newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm"), "segments"),
    ),
    recipe=TranslationRecipe(
        source="en", target="de", lower=False, longest=80, merges=32_764, hyphens=True,
        normalise=("train",), straighten=("valid", "test"),
    ),
    entities=True,
)  # fmt: skip


def prepare_public(layout: Layout, raw: Path, root: Path, workers: int = 1, subwords: str = "bpe") -> Path:
    """Prepare a data set whose verified files are in ``raw``.

    Returns:
        The folder for fairseq, as ``translation.prepare_translation``; ``counts.json`` in it has what was counted.

    Raises:
        UserError: a file is missing, is not the published one, or its two sides differ in length.
    """
    preparation = Preparation(root)
    with hold(root):
        settings = [layout.entities, *([part.split, part.archive, *part.names, part.form] for part in layout.parts)]
        text = preparation.step(
            "text",
            lambda folder: extract(layout, raw, folder, root.name),
            {"raw": {name: _digest(layout, raw, name) for name in _files(layout)}, "layout": settings},
        )
        return prepare_parallel(preparation, text, text, layout.recipe, workers, subwords)


def extract(layout: Layout, raw: Path, folder: Path, name: str) -> None:
    """Write ``{train,valid,test}.{source,target}``, one sentence a line, out of the published files."""
    counts: Dict[str, int] = {}
    languages = layout.recipe.languages
    unpacked = folder / "unpacked"
    for archive in dict.fromkeys(part.archive for part in layout.parts):
        parts = [part for part in layout.parts if part.archive == archive]
        wanted = [one for part in parts for one in part.names]
        unpacked.mkdir()
        if archive:
            print(f"{name}: unpacking {archive}", flush=True)
            files = unpack(raw / archive, wanted, unpacked)
        else:
            files = {one: raw / one for one in wanted}
        for part in parts:
            lengths = []
            for one, language in zip(part.names, languages):
                target = folder / f"{part.split}.{language}"
                before = count_lines(target) if target.exists() else 0
                if part.form == "plain":
                    append_plain(files[one], target)
                elif part.form == "tags":
                    append_lines(unwrap_tags(files[one]), target)
                else:
                    append_lines(segments(files[one], layout.entities), target)
                lengths.append(count_lines(target) - before)
            if lengths[0] != lengths[1]:
                one, other = part.names
                raise UserError(
                    f"{lengths[0]} lines in {one}, {lengths[1]} in {other}: these are not the two sides of one text"
                )
            if part.count:
                counts[part.count] = lengths[0]
        shutil.rmtree(unpacked)
    for file, of in layout.vocabularies:
        counts[of] = count_lines(raw / file)
    write_counts(folder, counts)


def _files(layout: Layout) -> List[str]:
    names = [one for part in layout.parts for one in ([part.archive] if part.archive else part.names)]
    return list(dict.fromkeys([*names, *(name for name, _ in layout.vocabularies)]))


def _digest(layout: Layout, raw: Path, name: str) -> str:
    # Of a file that was verified the checksum is known; others are read.
    files = {file.name: file for file in CATALOGUE[layout.data].files}
    known = recall(raw, files[name]) if name in files and (raw / name).exists() else None
    if known and (raw / name).stat().st_size == known.get("size"):
        return known["sha256"]
    return digest_of_files([raw / name])
