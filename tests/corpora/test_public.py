"""IWSLT14, IWSLT15 and WMT14 from archives in their published formats to what fairseq reads."""

# ruff: noqa: RUF001 - typographic marks are what is tested

import dataclasses
import json
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from powernorm_fairseq import __main__ as command
from powernorm_fairseq.corpora import streams, text, translation
from powernorm_fairseq.corpora.archives import segments, unwrap_tags
from powernorm_fairseq.corpora.catalogue import CATALOGUE, File
from powernorm_fairseq.corpora.public import IWSLT14, IWSLT15, WMT14, extract, prepare_public
from powernorm_fairseq.corpora.translation import SPLITS, read_lines, tokenise_pairs
from powernorm_fairseq.processes import PACKAGE, UserError
from tests.commands import in_this_process
from tests.corpora import archives
from tests.corpora.archives import TESTS, news_sgm, pairs, ted_xml

TALKS = [pairs(0, 60), pairs(100, 60), pairs(200, 60)]
# Each test file says which it is.
TED = {name: [(f"Datei {name}: {de}", f"File {name}: {en}")] for name, (de, en) in zip(TESTS, pairs(900, 5))}


@pytest.fixture(autouse=True)
def preprocess_here(monkeypatch):
    """fairseq-preprocess in this process, which saves its start."""
    monkeypatch.setattr(
        translation, "run_to_end", lambda command, log: in_this_process("fairseq-preprocess", *command[1:])
    )


def small(layout, **changes):
    return dataclasses.replace(layout, recipe=dataclasses.replace(layout.recipe, **{"merges": 200, **changes}))


@pytest.fixture
def from_server(server, monkeypatch):
    """A data set's files at addresses of the server on this machine, without sizes and checksums."""

    def from_server(name, *paths):
        files = tuple(File(path.name, (server.address(f"/{path.name}"),)) for path in paths)
        monkeypatch.setitem(CATALOGUE, name, dataclasses.replace(CATALOGUE[name], files=files))
        return [server.add(f"/{path.name}", path.read_bytes()) for path in paths]

    return from_server


# Reasoned from the rules of Moses' scripts, not printed by this code.
GOLDEN = [
    # The published order: every typographic mark becomes ASCII's, then words are split, also at hyphens.
    (WMT14, "train",
     "The “state-of-the-art” e-mail costs 1,000 dollars – doesn’t it?",
     "The &quot; state @-@ of @-@ the @-@ art &quot; e @-@ mail costs 1,000 dollars - doesn &apos;t it ?",
     "Die „E-Mail“ kostet 3,5 %. Com\u00adputer!",
     "Die &quot; E @-@ Mail &quot; kostet 3,5 % . Com puter !"),
    # What is scored keeps its marks, but for the apostrophe.
    (WMT14, "test",
     "It’s a “well-known” fact [1].", "It &apos;s a “ well @-@ known ” fact &#91; 1 &#93; .",
     "Ein „E-Book“ & mehr …", "Ein „ E @-@ Book “ &amp; mehr …"),
    (IWSLT14, "train",
     "Das ist Teil <eins>: 50% \"gut\" | fertig.",
     "das ist teil &lt; eins &gt; : 50 % &quot; gut &quot; &#124; fertig .",
     "It's Mr. Smith’s well-known U.S. car.", "it &apos;s mr. smith ’ s well-known u.s. car ."),
    (IWSLT14, "test",
     "Wir haben’s GESCHAFFT!", "wir haben &apos; s geschafft !",
     "We’ve done it...", "we &apos;ve done it ..."),
    (IWSLT15, "train", "It  &apos;s  here .", "It &apos;s here .", "Nó\u00a0ở đây .", "Nó ở đây ."),
]  # fmt: skip


def test_the_numbers_of_the_recipes():
    numbers = {
        layout.data: (layout.recipe.merges, layout.recipe.ratio, layout.recipe.longest, layout.recipe.every)
        for layout in (IWSLT14, WMT14)
    }
    assert numbers == {"iwslt14-de-en": (10_000, 1.5, 175, 23), "wmt14-en-de": (32_764, 1.5, 80, 0)}
    assert (IWSLT15.recipe.merges, IWSLT15.recipe.every) == (10_000, 0)


@pytest.mark.parametrize("layout, split, source, source_tokens, target, target_tokens", GOLDEN)
def test_tokens(layout, split, source, source_tokens, target, target_tokens):
    uneven = dataclasses.replace(layout.recipe, ratio=9.0)
    assert tokenise_pairs([(source, target)], uneven, split) == [(0, source_tokens, target_tokens)]


@pytest.mark.parametrize(
    "layout, lengths, kept",
    [
        (IWSLT14, (175, 175), True), (IWSLT14, (176, 176), False), (IWSLT14, (3, 2), True), (IWSLT14, (5, 3), False),
        (WMT14, (80, 80), True), (WMT14, (80, 81), False), (WMT14, (2, 3), True), (WMT14, (1, 2), False),
        (IWSLT15, (300, 2), True), (IWSLT15, (0, 1), False),
    ],
)  # fmt: skip
def test_cleaning(layout, lengths, kept):
    pair = (" ".join(["a"] * lengths[0]), " ".join(["b"] * lengths[1]))
    assert len(tokenise_pairs([pair], layout.recipe, "train")) == kept
    assert len(tokenise_pairs([pair], layout.recipe, "test")) == 1  # what is scored is never left out


def test_a_pair_with_an_endless_word_goes():
    assert tokenise_pairs([("a" * 1000, "b")], IWSLT14.recipe, "train")
    assert not tokenise_pairs([("a" * 1001, "b")], IWSLT14.recipe, "train")


def test_tags_and_segments(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(archives.tagged(1, [[("", "One & two"), ("", "A <b>"), ("", "")]]))
    assert list(unwrap_tags(path)) == ["One & two", "TED Talk: One & two", "A <b>", ""]
    written = ["A &amp; B &lt;c&gt; &quot;d&apos; &#8217;&#x41;", " R&D &nbsp; &amp;lt; ", "", "x\u2028y"]
    path.write_bytes(news_sgm(written))
    assert list(segments(path, True)) == ["A & B <c> \"d' ’A", "R&D &nbsp; &lt;", "", "x\u2028y"]
    path.write_bytes(ted_xml(written))
    assert list(segments(path, False)) == [written[0], written[1].strip(), "", "x\u2028y"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b'<doc docid="1">\n<seg id="1">One</seg>\n<seg id="2">Tw', 'line 3: not a whole <seg id="...">'),
        (b'<doc docid="1">\n<seg id="1">One</seg>\n', "breaks off: 1 documents begin, 0 end"),
        (b'<doc docid="1">\n</doc>\n', "no <seg> in it"),
        (b'<doc docid="1">\n<seg>One</seg>\n</doc>\n', "line 2: not a whole"),
    ],
)
def test_broken_markup_is_refused(tmp_path, content, message):
    (tmp_path / "a.xml").write_bytes(content)
    with pytest.raises(UserError, match="a.xml.*" + message):
        list(segments(tmp_path / "a.xml", False))


def test_iwslt14_from_the_network_to_fairseq(tmp_path, server, from_server, capsys, monkeypatch):
    [page] = from_server("iwslt14-de-en", archives.iwslt14(tmp_path / "de-en.tgz", TALKS, TED))
    page.breaks = [5000, None]
    monkeypatch.chdir(tmp_path)
    assert command.main(["prepare", "iwslt14-de-en", "--workers", "1"]) == 0
    output = capsys.readouterr()
    assert len(page.requests) == 2 and output.out.splitlines()[-1] == "runs/data/iwslt14-de-en/binarised"
    root = tmp_path / "runs/data/iwslt14-de-en"

    # The same by other means: lists in memory, and the arithmetic of the split.
    written = archives.untagged(TALKS)
    tokens = zip(*(text.tokenise(side, one, lower=True) for side, one in zip(zip(*written), ("de", "en"))))
    kept = [(*both, raw[1]) for both, raw in zip(tokens, written) if text.clean([both], 1.5, 175)]
    valid = kept[22::23]
    train = [pair for number, pair in enumerate(kept, 1) if number % 23]
    assert len(valid) == len(kept) // 23 > 5
    for split, expected in (("train", train), ("valid", valid)):
        for side, language in enumerate(("de", "en")):
            assert read_lines(root / "tokenised" / f"{split}.{language}") == [pair[side] for pair in expected]
    assert read_lines(root / "binarised" / "reference.valid.en") == [pair[2] for pair in valid]
    assert read_lines(root / "binarised" / "reference.test.en") == [TED[name][0][1] for name in TESTS]
    assert read_lines(root / "binarised" / "tokenised.test.en")[1].startswith("file tedx.dev2012 : ")
    joined = [line.replace("@@ ", "") for line in read_lines(root / "subwords" / "train.de")]
    assert joined == [pair[0] for pair in train]

    counts = json.loads((root / "binarised" / "counts.json").read_text())
    assert counts == {
        "train pairs read": 183, "train pairs": len(train), "valid pairs": len(valid), "test pairs": 5,
    }  # fmt: skip
    assert f"note: train pairs: {len(train)} here, 160,239 as recalled" in output.err

    # Nothing is made twice, and it needs no network.
    page.codes = [500] * 20
    assert command.main(["prepare", "iwslt14-de-en"]) == 0
    assert capsys.readouterr().out.count("is there") == 5


def test_wmt14(tmp_path):
    raw, root = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    train = {"europarl-v7": pairs(0, 30), "commoncrawl": pairs(30, 20), "news-commentary-v12": pairs(50, 10)}
    test = [("Ein &quot;E-Book&quot; &amp; mehr", "An ‘e-book’ &amp; more"), *pairs(81, 3)]
    archives.wmt14(raw, train, pairs(70, 8), test)
    folder = prepare_public(small(WMT14), raw, root)
    whole = [pair for part in ("europarl-v7", "commoncrawl", "news-commentary-v12") for pair in train[part]]
    assert read_lines(root / "text" / "train.en") == [pair[1] for pair in whole]
    assert read_lines(root / "text" / "train.de") == [pair[0] for pair in whole]
    assert read_lines(root / "text" / "valid.en") == [pair[1] for pair in pairs(70, 8)]
    assert read_lines(folder / "reference.test.de")[0] == 'Ein "E-Book" & mehr'
    assert read_lines(folder / "tokenised.test.de")[0] == "Ein &quot; E @-@ Book &quot; &amp; mehr"
    assert read_lines(root / "tokenised" / "test.en")[0] == "An ‘ e @-@ book &apos; &amp; more"
    assert (folder / "dict.en.txt").read_bytes() == (folder / "dict.de.txt").read_bytes()
    counts = json.loads((folder / "counts.json").read_text())
    assert [counts[f"{part} pairs"] for part in train] == [30, 20, 10]
    assert counts["valid pairs"] == 8 and counts["test pairs"] == 4
    assert counts["train pairs"] < counts["train pairs read"] == 60


def test_iwslt15(tmp_path, capsys):
    """Vietnamese, for which German stands here, is the target; the text is tokenised as published."""
    raw = tmp_path / "raw"
    raw.mkdir()
    tokens = [text.tokenise(side, one, lower=False) for side, one in zip(zip(*pairs(0, 120)), ("de", "en"))]
    both = list(zip(*tokens))
    archives.iwslt15(raw, both[:100], both[100:110], both[110:])
    folder = prepare_public(small(IWSLT15), raw, tmp_path / "out")
    assert read_lines(tmp_path / "out" / "tokenised" / "train.vi") == tokens[0][:100]  # nothing is cleaned away
    assert read_lines(folder / "tokenised.test.vi") == tokens[0][110:]
    reference = read_lines(folder / "reference.test.vi")
    assert reference == text.detokenise(tokens[0][110:], "vi") and not any(" ." in line for line in reference)
    counts = json.loads((folder / "counts.json").read_text())
    assert counts["train pairs"] == 100 and counts["English vocabulary"] == len(read_lines(raw / "vocab.en"))


def test_sentencepiece(tmp_path):
    from fairseq.data.data_utils import post_process

    archives.iwslt14(tmp_path / "de-en.tgz", TALKS, TED)
    folder = prepare_public(small(IWSLT14), tmp_path, tmp_path / "out", subwords="sentencepiece")
    assert folder.name == "binarised-sentencepiece" and (folder / "sentencepiece.model").stat().st_size > 1000
    for name in ("train.de", "test.en"):
        pieces = read_lines(tmp_path / "out" / "sentencepiece" / name)
        assert sum(map(len, map(str.split, pieces))) > 1.5 * sum(line.count("\u2581") for line in pieces)
        tokens = read_lines(tmp_path / "out" / "tokenised" / name)
        assert [post_process(line, "sentencepiece") for line in pieces] == tokens
    dictionary = {line.split(" ")[0] for line in read_lines(folder / "dict.en.txt")}
    assert len(dictionary - {"madeupword0000"}) <= 206


def copied(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    return raw, tmp_path / "out", archives.iwslt14(raw / "de-en.tgz", TALKS, TED)


def test_a_changed_archive_makes_it_anew(tmp_path, capsys):
    raw, root, archive = copied(tmp_path)
    prepare_public(small(IWSLT14), raw, root)
    codes = (root / "codes" / "codes").read_bytes()
    archives.iwslt14(archive, [pairs(400, 50), pairs(500, 50)], TED)
    capsys.readouterr()
    folder = prepare_public(small(IWSLT14), raw, root)
    assert "is there" not in capsys.readouterr().out
    assert (root / "codes" / "codes").read_bytes() != codes
    assert (folder / "codes").read_bytes() == (root / "codes" / "codes").read_bytes()
    joined = [line.replace("@@ ", "") for line in read_lines(root / "subwords" / "train.de")]
    assert joined == read_lines(root / "tokenised" / "train.de")
    # Other merges leave the tokens as they are.
    prepare_public(small(IWSLT14, merges=100), raw, root)
    assert capsys.readouterr().out.count("is there") == 2


def test_what_is_wrong_with_an_archive_is_said(tmp_path):
    raw, root, archive = copied(tmp_path)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"de-en\.tgz is damaged or not whole"):
        prepare_public(IWSLT14, raw, root)
    archives.iwslt14(archive, TALKS, {name: TED[name] for name in TESTS[:-1]})
    with pytest.raises(UserError, match=r"no IWSLT14\.TED\.tst2012\.de-en\.de\.xml, .*in .*not the published"):
        prepare_public(IWSLT14, raw, root)
    good = {}
    for name in TESTS:
        for language in ("de", "en"):
            good[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = ted_xml(["one"])
    for language, count in (("de", 3), ("en", 4)):
        good[f"de-en/train.tags.de-en.{language}"] = b"a\n" * count
    archives.tgz(archive, good)
    with pytest.raises(UserError, match=r"3 lines in train\.tags\.de-en\.de, 4 in train\.tags\.de-en\.en"):
        prepare_public(IWSLT14, raw, root)
    archive.unlink()
    with pytest.raises(UserError, match=r"no file .*de-en\.tgz"):
        prepare_public(IWSLT14, raw, root)
    assert not any((root / step).exists() for step in ("text", "tokenised", "binarised"))


def test_binarised_text_that_lost_sentences_is_refused(tmp_path, monkeypatch):
    raw, root, _ = copied(tmp_path)

    def lossy(command, log):
        in_this_process("fairseq-preprocess", *command[1:])
        folder = root / "binarised.partial"
        (folder / "valid.de-en.en.idx").write_bytes((folder / "test.de-en.en.idx").read_bytes())

    monkeypatch.setattr(translation, "run_to_end", lossy)
    with pytest.raises(UserError, match=r"made 5 sentences of the 7 in .*valid\.en"):
        prepare_public(small(IWSLT14), raw, root)
    assert not (root / "binarised").exists()
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(30))
    with pytest.raises(UserError, match="not an index"):
        translation.binarised_lines(tmp_path / "a.idx")


def test_a_last_line_without_an_end_does_not_join_the_next_text(tmp_path):
    train = {"europarl-v7": pairs(0, 2), "commoncrawl": pairs(2, 1), "news-commentary-v12": pairs(3, 1)}
    archives.wmt14(tmp_path, train, pairs(4, 1), pairs(5, 1))
    endless = {f"training/europarl-v7.de-en.{one}": b"first\nsecond" for one in ("de", "en")}
    archives.tgz(tmp_path / "training-parallel-europarl-v7.tgz", endless)
    (tmp_path / "text").mkdir()
    extract(WMT14, tmp_path, tmp_path / "text", "wmt14")
    assert read_lines(tmp_path / "text" / "train.en")[:3] == ["first", "second", pairs(2, 1)[0][1]]


@pytest.mark.slow
def test_killed_while_processes_tokenise(tmp_path, monkeypatch):
    """The workers end too, what was whole is kept, and two processes go on to what one gives undisturbed."""
    raw, root, _ = copied(tmp_path)
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, sys, time, types
            package = types.ModuleType("powernorm_fairseq"); package.__path__ = [{str(PACKAGE)!r}]
            sys.modules["powernorm_fairseq"] = package  # without fairseq, which takes seconds to import
            from powernorm_fairseq.corpora import public, translation
            from powernorm_fairseq.corpora import streams
            translation.PARALLEL_FROM = 0
            translation.in_chunks = lambda items: streams.in_chunks(items, 20)
            def slow(lines, *rest):
                os.write(1, b"%d\\n" % os.getpid())  # at once: the other process writes too
                time.sleep(60)
            translation.moses = slow
            public.prepare_public(public.IWSLT14, pathlib.Path({str(raw)!r}), pathlib.Path({str(root)!r}), workers=2)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    workers = set()
    while len(workers) < 2:
        line = process.stdout.readline()
        assert line
        if line.strip().isdigit():
            workers.add(int(line))
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while any(map(_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.pid not in workers
    assert (root / "text" / "made.json").exists() and not (root / "tokenised").exists()

    undisturbed = tmp_path / "undisturbed"
    prepare_public(small(IWSLT14), raw, undisturbed)
    monkeypatch.setattr(translation, "PARALLEL_FROM", 0)
    monkeypatch.setattr(translation, "in_chunks", lambda items: streams.in_chunks(items, 20))
    prepare_public(small(IWSLT14), raw, root, workers=2)
    for step, name in [("tokenised", "{}.de"), ("subwords", "{}.en"), ("binarised", "{}.de-en.en.bin")]:
        for path in [f"{step}/{name.format(split)}" for split in SPLITS]:
            assert (root / path).read_bytes() == (undisturbed / path).read_bytes()
    assert not list(root.glob("*.partial"))


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split()[2] not in "ZX"
    except OSError:
        return False
