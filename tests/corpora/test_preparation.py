"""Both sample corpora, from small cuts of the raw text to what fairseq reads."""

import tarfile
from collections import Counter

import pytest

from powernorm_fairseq.corpora import language_model, translation
from powernorm_fairseq.corpora.language_model import LanguageModelRecipe, prepare_language_model
from powernorm_fairseq.corpora.prepare import CORPORA
from powernorm_fairseq.corpora.translation import TranslationRecipe, prepare_translation, read_lines, write_lines
from powernorm_fairseq.evaluation.perplexity import token_ids
from powernorm_fairseq.processes import UserError
from tests.commands import in_this_process
from tests.conftest import SAMPLE


@pytest.fixture(scope="module", autouse=True)
def preprocess_here():
    """fairseq-preprocess in this process, which saves its start; the demo's test has the real one."""

    def here(command, log, **options):
        in_this_process("fairseq-preprocess", *command[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation, "run_to_end", here)
        patch.setattr(language_model, "run_to_end", here)
        yield


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    for split, count in (("train", 400), ("valid", 30), ("test", 30)):
        for language in ("de", "en"):
            write_lines(folder / f"{split}.{language}", read_lines(SAMPLE / "ui-de-en" / f"{split}.{language}")[:count])
    return folder


@pytest.fixture(scope="module")
def parallel(raw, tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared") / "mt"
    return prepare_translation(raw, root, TranslationRecipe(merges=300))


def test_parallel_text_stays_parallel_and_whole(parallel, raw):
    tokenised = parallel.parent / "tokenised"
    for split in translation.SPLITS:
        sides = [read_lines(tokenised / f"{split}.{language}") for language in ("de", "en")]
        assert len(sides[0]) == len(sides[1])
        if split == "train":
            assert 300 < len(sides[0]) < 400  # some pairs are too uneven
        else:
            assert len(sides[0]) == 30  # nothing may be left out of what is scored
    for split in ("valid", "test"):
        assert (parallel / f"reference.{split}.en").read_bytes() == (raw / f"{split}.en").read_bytes()
        assert read_lines(parallel / f"tokenised.{split}.en") == read_lines(tokenised / f"{split}.en")


def test_merges_are_learned_from_the_training_text_of_both_languages_alone(parallel, tmp_path):
    from subword_nmt.learn_bpe import learn_bpe

    lines = [line for one in ("de", "en") for line in read_lines(parallel.parent / "tokenised" / f"train.{one}")]
    with open(tmp_path / "codes", "w", encoding="utf-8") as file:
        learn_bpe(lines, file, 300)
    assert (parallel / "codes").read_bytes() == (tmp_path / "codes").read_bytes()


def test_binarised_text_is_the_text_with_one_dictionary_for_both_sides(parallel):
    from fairseq.data import Dictionary, data_utils

    assert (parallel / "dict.de.txt").read_bytes() == (parallel / "dict.en.txt").read_bytes()
    dictionary = Dictionary.load(str(parallel / "dict.en.txt"))
    binary = data_utils.load_indexed_dataset(str(parallel / "valid.de-en.de"), dictionary)
    unknown = dictionary.unk_string()
    for number, line in enumerate(read_lines(parallel.parent / "subwords" / "valid.de")):
        back = dictionary.string(binary[number])
        assert all(one in (other, unknown) for one, other in zip(back.split(" "), line.split(" ")))


def test_prepared_twice_changes_nothing(parallel, raw, capsys):
    before = {path: path.stat().st_mtime_ns for path in parallel.parent.rglob("*") if path.is_file()}
    capsys.readouterr()
    prepare_translation(raw, parallel.parent, TranslationRecipe(merges=300))
    assert capsys.readouterr().out.count("is there") == 4
    after = {path: path.stat().st_mtime_ns for path in parallel.parent.rglob("*") if path.is_file()}
    before.pop(parallel.parent / ".lock"), after.pop(parallel.parent / ".lock")
    assert after == before


def test_sides_of_different_length_are_refused(raw, tmp_path):
    for path in raw.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_lines(tmp_path / "valid.de", read_lines(raw / "valid.de")[:-1])
    with pytest.raises(UserError, match="29 lines in one language, 30 in the other"):
        prepare_translation(tmp_path, tmp_path / "out", TranslationRecipe(merges=300))
    (tmp_path / "valid.de").unlink()
    with pytest.raises(UserError, match=r"no file .*valid\.de"):
        prepare_translation(tmp_path, tmp_path / "out", TranslationRecipe(merges=300))


def test_only_a_line_feed_ends_a_line(tmp_path):
    write_lines(tmp_path / "text", ["a\u2028b\x85c\rd", "e"])
    assert read_lines(tmp_path / "text") == ["a\u2028b\x85c\rd", "e"]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """The ten shortest of the recent addresses, in an archive of their own."""
    archive = tmp_path_factory.mktemp("raw") / "addresses.tar.xz"
    with tarfile.open(SAMPLE / "sotu-raw.tar.xz") as source, tarfile.open(archive, "w:xz") as target:
        members = [member for member in source.getmembers() if member.name >= "sotu-raw/1961" and member.isfile()]
        for member in sorted(members, key=lambda member: member.size)[:10]:
            target.addfile(member, source.extractfile(member))
    return archive


@pytest.fixture(scope="module")
def text(addresses, tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared") / "lm"
    return prepare_language_model(addresses, root, LanguageModelRecipe(vocabulary=1000))


def test_documents_are_in_one_split_each(addresses):
    documents = language_model.read_documents(addresses)
    splits = language_model.split_documents(documents, LanguageModelRecipe())
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 8, "valid": 1, "test": 1}
    assert sorted(document for texts in splits.values() for document in texts) == sorted(documents.values())
    with pytest.raises(UserError, match="leave nothing for valid, test"):
        language_model.split_documents(dict(list(documents.items())[:3]), LanguageModelRecipe())


def test_vocabulary_is_that_of_the_training_text(text):
    words = {split: " ".join(read_lines(text.parent / "text" / f"{split}.txt")).split() for split in translation.SPLITS}
    assert len(set(words["train"]) - {"<unk>"}) == 1000
    assert set(words["test"]) <= set(words["train"])
    assert Counter(words["train"])["N"] > 20 and Counter(words["test"])["<unk>"] > 20


def test_binarised_tokens_are_words_and_ends_of_sentence(text):
    for split in translation.SPLITS:
        lines = read_lines(text.parent / "text" / f"{split}.txt")
        assert len(token_ids(text, split)) == sum(len(line.split()) + 1 for line in lines)


def test_what_can_be_prepared():
    public = {"iwslt14-de-en", "iwslt15-en-vi", "wmt14-en-de"}
    assert {"sample-mt", "sample-lm", *public} <= set(CORPORA)
