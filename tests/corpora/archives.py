"""The public corpora's archives in their published formats, built from the sample's sentences."""

import io
import tarfile
from pathlib import Path
from typing import Dict, Iterable, List, Sequence, Tuple

from tests.conftest import SAMPLE

Pairs = List[Tuple[str, str]]
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def pairs(first: int, count: int) -> Pairs:
    """German-English sentences of the sample's training text."""
    sides = []
    for language in ("de", "en"):
        text = (SAMPLE / "ui-de-en" / f"train.{language}").read_text(encoding="utf-8")
        sides.append(text.split("\n")[first : first + count])
    return list(zip(*sides))


def lines(texts: Iterable[str]) -> bytes:
    return "".join(text + "\n" for text in texts).encode("utf-8")


def tgz(path: Path, members: Dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def tagged(side: int, talks: Sequence[Pairs]) -> bytes:
    """``train.tags``: the head of each talk, and its sentences. The first pair of a talk is its title."""
    text = []
    for number, talk in enumerate(talks):
        text += [
            f"<url>http://www.ted.com/talks/talk_{number}.html</url>",
            "<keywords>talks, science</keywords>",
            f"<talkid>{number}</talkid>",
            f"<title>{talk[0][side]}</title>",
            f"<description>TED Talk: {talk[0][side]}</description>",
            *(pair[side] for pair in talk[1:]),
        ]
    return lines(text)


def untagged(talks: Sequence[Pairs]) -> Pairs:
    """What of ``tagged`` is text."""
    return [
        pair for talk in talks for pair in [talk[0], (f"TED Talk: {talk[0][0]}", f"TED Talk: {talk[0][1]}"), *talk[1:]]
    ]


def ted_xml(texts: Sequence[str], kind: str = "srcset") -> bytes:
    return lines(
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            "<mteval>",
            f'<{kind} setid="iwslt2014" srclang="german">',
            '<doc docid="69" genre="lectures">',
            "<url>http://www.ted.com/talks/talk_69.html</url>",
            "<keywords>talks, culture</keywords>",
            "<talkid>69</talkid>",
            "<title>A title</title>",
            "<description>TED Talk</description>",
            *(f'<seg id="{number}"> {text} </seg>' for number, text in enumerate(texts, 1)),
            "</doc>",
            f"</{kind}>",
            "</mteval>",
        ]
    )


def news_sgm(texts: Sequence[str], kind: str = "srcset") -> bytes:
    return lines(
        [
            f'<{kind} setid="newstest2014" srclang="any"{" trglang=" if kind == "refset" else ""}>',
            '<doc sysid="ref" docid="abcnews.148308" genre="news" origlang="de">',
            "<p>",
            *(f'<seg id="{number}">{text}</seg>' for number, text in enumerate(texts, 1)),
            "</p>",
            "</doc>",
            f"</{kind}>",
        ]
    )


def iwslt14(path: Path, talks: Sequence[Pairs], tests: Dict[str, Pairs]) -> Path:
    """``de-en.tgz``; ``tests`` has pairs for each of ``TESTS``."""
    members = {"de-en/README": b"read me\n"}
    for side, language in enumerate(("de", "en")):
        members[f"de-en/train.tags.de-en.{language}"] = tagged(side, talks)
        # In the archive's order, which is not that of the test set.
        for name in sorted(tests):
            text = ted_xml([pair[side] for pair in tests[name]], ("srcset", "refset")[side])
            members[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = text
    return tgz(path, members)


def wmt14(folder: Path, train: Dict[str, Pairs], valid: Pairs, test: Pairs) -> None:
    """The five archives; ``train`` has pairs for europarl-v7, commoncrawl and news-commentary-v12."""

    def both(name: str, texts: Pairs) -> Dict[str, bytes]:
        return {f"{name}.{one}": lines(pair[side] for pair in texts) for side, one in enumerate(("de", "en"))}

    europarl = both("training/europarl-v7.de-en", train["europarl-v7"])
    tgz(folder / "training-parallel-europarl-v7.tgz", {"training/europarl-v7.cs-en.en": b"no\n", **europarl})
    tgz(folder / "training-parallel-commoncrawl.tgz", both("commoncrawl.de-en", train["commoncrawl"]))
    news = both("training/news-commentary-v12.de-en", train["news-commentary-v12"])
    tgz(folder / "training-parallel-nc-v12.tgz", news)
    tgz(folder / "dev.tgz", {**both("dev/newstest2012", valid[:1]), **both("dev/newstest2013", valid)})
    sides = [[pair[side] for pair in test] for side in (0, 1)]
    tgz(
        folder / "test-full.tgz",
        {
            "test-full/newstest2014-deen-ref.de.sgm": news_sgm(sides[0], "refset"),
            "test-full/newstest2014-deen-ref.en.sgm": news_sgm(["not this one"], "refset"),
            "test-full/newstest2014-deen-src.de.sgm": news_sgm(["nor this one"]),
            "test-full/newstest2014-deen-src.en.sgm": news_sgm(sides[1]),
        },
    )


def iwslt15(folder: Path, train: Pairs, valid: Pairs, test: Pairs) -> None:
    """The files of the Stanford group; the German side stands for Vietnamese. The texts are tokenised already."""
    for side, language in enumerate(("vi", "en")):
        for name, texts in (("train", train), ("tst2012", valid), ("tst2013", test)):
            (folder / f"{name}.{language}").write_bytes(lines(pair[side] for pair in texts))
        words = sorted({word for pair in train for word in pair[side].split()})
        (folder / f"vocab.{language}").write_bytes(lines(["<unk>", "<s>", "</s>", *words]))
