"""The public data sets of the papers: where their files are, what they must be, and what may be done with them.

Addresses, sizes and checksums are what others have published; nothing here was downloaded by this project. A figure
whose source is ``RECALLED`` stands in no source that was at hand when it was written down.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

RECALLED = "recalled"
TFDS = "checksum files of TensorFlow Datasets"
TORCHTEXT = "torchtext's data set definitions"
MAHONEY = "http://mattmahoney.net/dc/textdata.html"
SAMPLE = "counted in data/sample"

# Some servers turn away programs that do not look like a browser.
BROWSER = (("User-Agent", "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"),)


@dataclass(frozen=True)
class File:
    """One file of a data set.

    Attributes:
        name: what it is called here, whatever its address ends with.
        addresses: where it is, the preferred one first; empty if it may not be downloaded.
        size: bytes; None where nobody has published it.
        checksums: ``algorithm:hexadecimal digest``, all of which must fit; empty where none is public.
        members: the same for files inside an archive, by their base names.
        source: who published size and checksums.
        headers: what the server wants to be sent.
    """

    name: str
    addresses: Tuple[str, ...] = ()
    size: Optional[int] = None
    checksums: Tuple[str, ...] = ()
    members: Tuple[Tuple[str, str], ...] = ()
    source: str = ""
    headers: Tuple[Tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Count:
    """A known number of lines, tokens or words, and where it is known from."""

    of: str
    value: int
    source: str


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        counts: what whoever prepares it can compare with.
        licence: its terms, shortly.
        why_not: why this project does not download it; empty if it does.
        note: what else a user should know.
    """

    title: str
    files: Tuple[File, ...]
    licence: str
    citation: str
    counts: Tuple[Count, ...] = ()
    why_not: str = ""
    note: str = ""

    @property
    def size(self) -> Optional[int]:
        """Bytes of all files together; None if one of them is unknown."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def count(self, of: str) -> int:
        """The known number of ``of``; KeyError if there is none."""
        return {count.of: count.value for count in self.counts}[of]


def _statmt(path: str) -> Tuple[str, ...]:
    return (f"https://www.statmt.org/{path}", f"http://www.statmt.org/{path}", f"http://statmt.org/{path}")


def _stanford(name: str) -> File:
    return File(name, (f"https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi/{name}",))


_LANGUAGES = ("en", "vi")

CATALOGUE: Dict[str, DataSet] = {
    "iwslt14-de-en": DataSet(
        title="IWSLT14 German-English (TED talks)",
        files=(
            File(
                "de-en.tgz",
                (
                    "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
                    "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
                ),
                size=19_982_877,
                source="the server's answer",
            ),
        ),
        licence="TED talks, CC BY-NC-ND (recalled)",
        citation="Cettolo et al., Report on the 11th IWSLT evaluation campaign, IWSLT 2014",
        counts=(
            Count("train pairs", 160_239, RECALLED),
            Count("valid pairs", 7_283, RECALLED),
            Count("test pairs", 6_750, RECALLED),
        ),
        note="The counts are those after tokenisation and cleaning. The old address at wit3.fbk.eu is dead (404).",
    ),
    "iwslt15-en-vi": DataSet(
        title="IWSLT15 English-Vietnamese (TED talks, tokenised by the Stanford NLP group)",
        files=tuple(
            _stanford(f"{part}.{language}")
            for part in ("train", "tst2012", "tst2013", "vocab")
            for language in _LANGUAGES
        ),
        licence="TED talks, CC BY-NC-ND (recalled)",
        citation="Luong and Manning, Stanford neural machine translation systems for spoken language domain,"
        " IWSLT 2015",
        counts=(
            Count("train pairs", 133_317, RECALLED),
            Count("valid pairs", 1_553, "public READMEs"),
            Count("test pairs", 1_268, "public READMEs"),
            Count("English vocabulary", 17_191, "public code that reads it"),
            Count("Vietnamese vocabulary", 7_709, "public code that reads it"),
        ),
        note="Validation is tst2012, test is tst2013.",
    ),
    "wmt14-en-de": DataSet(
        title="WMT14 English-German with news-commentary v12, as the PowerNorm paper has it",
        files=(
            File(
                "training-parallel-europarl-v7.tgz",
                _statmt("wmt13/training-parallel-europarl-v7.tgz"),
                size=657_632_379,
                checksums=("sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",),
                source=TFDS,
            ),
            File(
                "training-parallel-commoncrawl.tgz",
                _statmt("wmt13/training-parallel-commoncrawl.tgz"),
                size=918_311_367,
                checksums=("sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",),
                source=TFDS,
            ),
            File(
                "training-parallel-nc-v12.tgz",
                (
                    "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
                    "http://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
                ),
                size=168_591_139,
                checksums=("sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",),
                source=TFDS,
            ),
            File(
                "dev.tgz",
                (
                    "https://data.statmt.org/wmt17/translation-task/dev.tgz",
                    "http://data.statmt.org/wmt17/translation-task/dev.tgz",
                ),
            ),
            File("test-full.tgz", _statmt("wmt14/test-full.tgz")),
        ),
        licence="free for research, Common Crawl's terms of use (recalled)",
        citation="Bojar et al., Findings of the 2014 workshop on statistical machine translation, WMT 2014",
        counts=(
            Count("europarl-v7 pairs", 1_920_209, "public listings"),
            Count("commoncrawl pairs", 2_399_123, "public listings"),
            Count("news-commentary-v12 pairs", 270_769, RECALLED),
            Count("valid pairs", 3_000, "public listings"),
            Count("test pairs", 3_003, "lines of newstest2014 in test-full.tgz"),
        ),
        note="The training counts are those before cleaning. Validation is newstest2013 of dev.tgz (that of WMT17;"
        " those of other years are other files), test is newstest2014 of test-full.tgz.",
    ),
    "ptb": DataSet(
        title="Penn Treebank language-modelling text, as Mikolov prepared it",
        files=(
            File("ptb.train.txt", checksums=("md5:f26c4b92c5fdc7b3f8c7cdcb991d8420",), source=TORCHTEXT),
            File("ptb.valid.txt", checksums=("md5:aa0affc06ff7c36e977d7cd49e3839bf",), source=TORCHTEXT),
            File("ptb.test.txt", checksums=("md5:8b80168b89c18661a38ef683c0dc3721",), source=TORCHTEXT),
        ),
        licence="Linguistic Data Consortium (LDC99T42), for licensees",
        citation="Marcus et al., Building a large annotated corpus of English, Computational Linguistics 1993;"
        " Mikolov et al., Recurrent neural network based language model, Interspeech 2010",
        counts=(
            Count("train lines", 42_068, TORCHTEXT),
            Count("valid lines", 3_370, TORCHTEXT),
            Count("test lines", 3_761, TORCHTEXT),
            Count("train tokens", 929_589, "published counts"),
            Count("valid tokens", 73_760, "published counts"),
            Count("test tokens", 82_430, "published counts"),
            Count("vocabulary", 10_000, "published counts"),
        ),
        why_not="the Penn Treebank is licensed by the Linguistic Data Consortium to its licensees, and the copies on"
        " public servers give nobody that licence; so this project neither ships nor downloads it, and takes your own"
        " copy: the three files ptb.train.txt, ptb.valid.txt and ptb.test.txt",
        note="Tokens include one end-of-line for each line.",
    ),
    "wikitext-103": DataSet(
        title="WikiText-103 (word level)",
        files=(
            File(
                "wikitext-103-v1.zip",
                ("https://wikitext.smerity.com/wikitext-103-v1.zip",),
                checksums=(
                    "md5:9ddaacaf6af0710eda8c456decff7832",
                    "sha1:0aec09a7537b58d4bb65362fee27650eeaba625a",
                    "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
                ),
                members=(
                    ("wiki.train.tokens", "sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211"),
                    ("wiki.valid.tokens", "sha1:c326ac59dc587676d58c422eb8a03e119582f92b"),
                    ("wiki.test.tokens", "sha1:8a5befc548865cec54ed4273cf87dbbad60d1e47"),
                ),
                source="definitions of several libraries",
                headers=BROWSER,
            ),
        ),
        licence="CC BY-SA",
        citation="Merity et al., Pointer sentinel mixture models, ICLR 2017",
        counts=(
            Count("train lines", 1_801_350, TORCHTEXT),
            Count("valid lines", 3_760, TORCHTEXT),
            Count("test lines", 4_358, TORCHTEXT),
            Count("train tokens", 103_227_021, "published counts"),
            Count("valid tokens", 217_646, "published counts"),
            Count("test tokens", 245_569, "published counts"),
            Count("vocabulary", 267_735, "published counts"),
            Count("train articles", 28_475, "published counts"),
            Count("valid articles", 60, "published counts"),
            Count("test articles", 60, "published counts"),
        ),
        note="Tokens include one end-of-line for each line. The old address at s3.amazonaws.com is dead."
        " Salesforce/wikitext on the Hugging Face hub is the same text in another format, which is not taken here.",
    ),
    "enwik8": DataSet(
        title="enwik8: the first 100,000,000 bytes of an English Wikipedia dump of 2006",
        files=(
            File(
                "enwik8.zip",
                ("https://mattmahoney.net/dc/enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip"),
                size=36_445_475,
                members=(
                    ("enwik8", "sha1:57b8363b814821dc9d47aa4d41f58733519076b2"),
                    ("enwik8", "md5:a1fa5ffddb56f4953e226637dabbb36a"),
                ),
                source=MAHONEY,
            ),
        ),
        licence="GFDL (recalled)",
        citation="Mahoney, Large text compression benchmark",
        counts=(
            Count("bytes", 100_000_000, MAHONEY),
            Count("train bytes", 90_000_000, RECALLED),
            Count("valid bytes", 5_000_000, RECALLED),
            Count("test bytes", 5_000_000, RECALLED),
            Count("byte values", 205, "public code that reads it"),
        ),
        note="The split by position is the usual one.",
    ),
    "sample": DataSet(
        title="the text that comes with this project: German-English sentences, State of the Union addresses",
        files=(),
        licence="free, see data/sample/NOTICE",
        citation="data/sample/README.md",
        counts=(
            Count("train pairs", 20_621, SAMPLE),
            Count("valid pairs", 1_000, SAMPLE),
            Count("test pairs", 1_000, SAMPLE),
            Count("documents", 233, SAMPLE),
        ),
        why_not="it is already here, in data/sample",
    ),
}


def readable_size(size: Optional[float]) -> str:
    """Bytes as a person reads them (decimal units); ``?`` for None."""
    if size is None:
        return "?"
    if size < 1000:
        return f"{size:.0f} B"
    power = 1 + (size >= 999_950) + (size >= 999_950_000)
    return f"{size / 1000**power:.1f} {['kB', 'MB', 'GB'][power - 1]}"


def known_by(file: File) -> str:
    """How a copy of ``file`` is told to be the right one."""
    kinds = [checksum.split(":")[0] for checksum in file.checksums]
    kinds += [f"{checksum.split(':')[0]} of its text" for _, checksum in file.members if not file.checksums]
    return ", ".join(kinds) or ("size" if file.size else "-")


def table() -> List[str]:
    """The catalogue as the lines of a Markdown table."""
    rows = [("name", "file", "size", "known by", "licence", "counts")]
    for name, data in CATALOGUE.items():
        counts = "; ".join(
            f"{count.of} {count.value:,}{' (recalled)' if count.source == RECALLED else ''}" for count in data.counts
        )
        for number, file in enumerate(data.files or (File("-"),)):
            own = (name, data.licence, counts) if number == 0 else ("", "", "")
            rows.append((own[0], file.name, readable_size(file.size), known_by(file), own[1], own[2]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["| " + " | ".join([*map(str.ljust, row, widths), row[-1]]) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|---|", *lines[1:]]
