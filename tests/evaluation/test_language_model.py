"""Perplexity by sliding windows against a plain loop over the text, and what it is per word, token and character."""

import json
import math

import pytest
import torch

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.average import load_checkpoint, save_checkpoint
from powernorm_fairseq.corpora.binarised import CORPUS
from powernorm_fairseq.evaluation.language_model import evaluate, in_words, trained_with
from powernorm_fairseq.evaluation.perplexity import in_units
from powernorm_fairseq.evaluation.units import Text, measure, published_tokens
from powernorm_fairseq.evaluation.windows import Window, window_of
from powernorm_fairseq.experiment import run
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.processes import UserError
from tests.commands import in_this_process, write_lines

MODELS = {
    "layer": {"_name": "transformer_lm_norm_tiny"},
    "power": {"_name": "transformer_lm_pn_tiny"},
    "adaptive": {
        "_name": "transformer_lm_pn_tiny",
        "adaptive_softmax_cutoff": "20,60",
        "share_decoder_input_output_embed": False,
    },
}
LONGEST = 64


@pytest.fixture(scope="module")
def data(language_model_data, tmp_path_factory):
    """The dictionary of the language-modelling data with two splits: 107 tokens, and a line of 12 words."""
    folder = tmp_path_factory.mktemp("windows")
    lines = (language_model_data.parent / "test.txt").read_text(encoding="utf-8").splitlines()
    words = [" ".join(line.split()[:20]) for line in lines[:5]]
    # A blank line is a line too.
    write_lines(folder / "test.txt", [words[0], "", *words[1:]])
    write_lines(folder / "test1.txt", [" ".join(lines[8].split()[:12])])
    in_this_process(
        "fairseq-preprocess", "--only-source", "--srcdict", language_model_data / "dict.txt",
        "--testpref", f"{folder / 'test.txt'},{folder / 'test1.txt'}", "--destdir", folder / "bin", "--workers", 1,
    )  # fmt: skip
    return folder / "bin"


def encoded(data, split):
    """The ids of a text, by its dictionary's file and nothing of fairseq: ``<s> <pad> </s> <unk>`` come first."""
    entries = (data / "dict.txt").read_text(encoding="utf-8").splitlines()
    index = {entry.rsplit(" ", 1)[0]: number for number, entry in enumerate(entries, start=4)}
    lines = (data.parent / f"{split}.txt").read_text(encoding="utf-8").splitlines()
    return [one for line in lines for one in [*(index.get(word, 3) for word in line.split()), 2]]


@pytest.fixture(scope="module")
def checkpoints(data, tmp_path_factory):
    """A checkpoint of each model, with weights so large that each word of the context counts."""
    folder, saved = tmp_path_factory.mktemp("checkpoints"), {}
    for name, model in MODELS.items():
        config = {
            "common": {"cpu": True, "seed": 3},
            "task": {"_name": "language_modeling", "data": str(data), "tokens_per_sample": LONGEST},
            "model": model,
            "criterion": {"_name": "adaptive_loss" if name == "adaptive" else "cross_entropy"},
            "optimizer": {"_name": "adam"},
            "lr_scheduler": {"_name": "fixed"},
            "dataset": {"batch_size": 2},
        }
        saved[name] = folder / f"{name}.pt"
        save_untrained(run.placed(config, folder), saved[name])
        state, generator = load_checkpoint(saved[name]), torch.Generator().manual_seed(1)
        for key, value in state["model"].items():
            if value.is_floating_point() and value.dim() == 2 and "embed" not in key:
                value.mul_(2)
            elif key.endswith("running_psi_sq"):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        save_checkpoint(state, saved[name])
    return saved


def log_probabilities(network, adaptive, inputs, targets):
    """Of each target, from the network's output for one window; the adaptive softmax by its definition."""
    output = network(torch.tensor([inputs]))[0][0].double()
    if not adaptive:
        return output.log_softmax(-1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)
    softmax = network.decoder.adaptive_softmax.double()
    first, *ends = softmax.cutoff
    found = []
    for hidden, target in zip(output, targets):
        head = softmax.head(hidden).log_softmax(-1)
        if target < first:
            found.append(head[target])
            continue
        band = next(number for number, end in enumerate(ends) if target < end)
        tail = softmax.tail[band](hidden).log_softmax(-1)
        found.append(head[first + band] + tail[target - [first, *ends][band]])
    return torch.stack(found)


def by_a_plain_loop(checkpoint, tokens, length, stride, adaptive=False):
    """Minus the log-probability of the text, one window after the other; and how many tokens were scored."""
    from fairseq import checkpoint_utils

    (network,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    network.eval()
    shifted, nats, scored = [2, *tokens[:-1]], 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens), stride):
            end, first = min(start + stride, len(tokens)), max(0, start - (length - stride))
            each = log_probabilities(network, adaptive, shifted[first:end], tokens[first:end])
            nats -= each[start - first :].sum().item()
            scored += end - start
    return nats, scored


WINDOWS = [
    ("layer", "test", 64, 64), ("layer", "test", 50, 7), ("layer", "test1", 64, 16),
    ("power", "test", 64, 64), ("power", "test", 33, 32), ("power", "test", 50, 7), ("power", "test", 9, 1),
    ("power", "test", 1, 1), ("power", "test1", 64, 64), ("power", "test1", 64, 16), ("power", "test1", 13, 12),
    ("adaptive", "test", 50, 7),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("programs_here")
@pytest.mark.parametrize("name, split, length, stride", WINDOWS)
def test_windows_give_what_a_plain_loop_gives(name, split, length, stride, data, checkpoints):
    tokens = encoded(data, split)
    nats, scored = by_a_plain_loop(checkpoints[name], tokens, length, stride, name == "adaptive")
    score = evaluate(checkpoints[name], data, split, Window(length, stride), batch_size=20)
    assert score["tokens"] == scored == len(tokens)
    assert score["nats"] == pytest.approx(nats, rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(nats / scored), rel=1e-4)
    assert score["unknown"] == tokens.count(3)
    assert (score["tokens_per_sample"], score["stride"], score["context_window"]) == (length, stride, length - stride)


@pytest.mark.slow
@pytest.mark.usefixtures("programs_here")
def test_batches_have_no_influence_and_windows_have(data, checkpoints):
    """PowerNorm's statistics among it: those of the training are used, whatever padding a batch has."""
    scores = {
        (window, size): evaluate(checkpoints["power"], data, "test", Window(*window), batch_size=size)["nats"]
        for window, size in [((50, 7), 1), ((50, 7), None), ((50, 50), 2)]
    }
    assert scores[(50, 7), 1] == pytest.approx(scores[(50, 7), None], rel=1e-6)
    # Or a wrong context would not be noticed above.
    assert abs(scores[(50, 7), 1] / scores[(50, 50), 2] - 1) > 1e-3


def test_a_window_is_given_by_its_stride_or_its_context():
    assert window_of(64) == window_of(64, context=0) == Window(64, 64)
    assert window_of(64, stride=16) == window_of(64, context=48) == window_of(64, 16, 48) == Window(64, 16)
    assert window_of(64, context=63).stride == 1
    for wrong in ({"stride": 65}, {"stride": 0}, {"context": 64}, {"context": -1}):
        with pytest.raises(UserError, match="a window of 64 tokens can have a stride of 1 to 64"):
            window_of(64, **wrong)
    with pytest.raises(UserError, match=r"stride 16 and context 40 do not make up the window of 64 tokens.*stride 24"):
        window_of(64, 16, 40)
    with pytest.raises(UserError, match="at least 1"):
        window_of(0)


def test_a_batch_fits_into_memory():
    assert Window(64, 1).batch_size(10_000) == 419
    assert Window(512, 512).batch_size(267_744) == 1
    assert Window(3072, 512).batch_size(267_744) == 1


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory):
    """The same three words in pieces of two kinds, and an unknown piece."""
    folder = tmp_path_factory.mktemp("pieces")
    for name, lines in {
        "bpe": ["un@@ der@@ stand the", "", "the un@@ x"],
        "spm": ["\u2581under stand \u2581the", "", "\u2581the \u2581un x"],
    }.items():
        write_lines(folder / f"{name}.train", [lines[0], "the un@@" if name == "bpe" else "\u2581the \u2581un"])
        write_lines(folder / f"{name}.test", lines)
        in_this_process(
            "fairseq-preprocess", "--only-source", "--trainpref", folder / f"{name}.train",
            "--testpref", folder / f"{name}.test", "--destdir", folder / name, "--workers", 1,
        )  # fmt: skip
    return folder


def test_words_are_counted_by_their_pieces(in_pieces):
    # Four words and three ends of line.
    assert measure(in_pieces / "bpe", "test", "subword_nmt") == Text(tokens=10, words=7, unknown=1)
    assert measure(in_pieces / "spm", "test", "sentencepiece") == Text(tokens=9, words=7, unknown=1)
    assert measure(in_pieces / "bpe", "test").words == 10
    with pytest.raises(UserError, match="no subwords 'letters'"):
        measure(in_pieces / "bpe", "test", "letters")


def test_what_a_log_probability_is_worth():
    text = Text(tokens=10, words=7, unknown=1)
    word, token, character = (in_units(20.0, text, unit) for unit in ("word", "token", "character"))
    assert word["perplexity"] == word["perplexity_per_word"] == token["perplexity_per_word"] == math.exp(20 / 7)
    assert token["perplexity"] == word["perplexity_per_token"] == math.exp(2)
    assert (word["units"], token["units"], character["units"]) == (7, 10, 10)
    assert character["bits_per_character"] == pytest.approx(2 / math.log(2))
    assert "words" not in character and "perplexity_per_word" not in character
    with pytest.raises(UserError, match="no unit 'line'; there are word, token, character"):
        in_units(1.0, text, "line")
    with pytest.raises(UserError, match="subwords of another kind"):
        in_units(1.0, Text(tokens=3, words=0, unknown=0))


def test_the_published_number_of_tokens(in_pieces):
    data = in_pieces / "bpe"
    assert published_tokens(data, "test") is None
    assert published_tokens(data, "test", "ptb") == 82_430
    assert published_tokens(data, "valid", "enwik8") == 5_000_000
    (data / CORPUS).write_text("wikitext-103\n")
    assert published_tokens(data, "test") == 245_569
    window = {**Window(64, 16).described(), "published_tokens": 245_569}
    lines = list(in_words({"test": {**in_units(20.0, Text(10, 7, 1)), **window}}))
    assert lines[0] == "test: perplexity 17.41 per word (7.39 per token)"
    assert lines[1:3] == [
        "  10 tokens, 7 words with ends of line, 1 unknown",
        "  windows of 64 tokens, 16 of them scored, 48 before them as context",
    ]
    assert "WARNING" in lines[3] and "245,569" in lines[3]
    whole = {**in_units(1.0, Text(245_569, 245_569, 0), "character"), **window}
    assert list(in_words({"test": whole}))[-1] == "  the number of tokens is the published one"


@pytest.mark.slow
@pytest.mark.usefixtures("programs_here")
def test_the_command(data, checkpoints, tmp_path, capsys):
    log = tmp_path / "scores.txt"
    asked = ["perplexity", "--path", str(checkpoints["power"]), "--subset", "test1", "--cpu", "--threads", "1"]
    assert main([*asked, "--stride", "10", "--unit", "character", "--corpus", "ptb", "--log", str(log), "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["test1"]
    nats, scored = by_a_plain_loop(checkpoints["power"], encoded(data, "test1"), LONGEST, 10)
    assert score["bits_per_character"] == pytest.approx(nats / scored / math.log(2), rel=1e-5)
    assert score["published_tokens"] is None and score["tokens"] == 13
    assert "fairseq_cli.eval_lm" in log.read_text()
    for more, error in (
        (["--tokens-per-sample", "65"], "the model takes at most 64 tokens"),
        (["--data", str(tmp_path)], "no binarised text in"),
        (["--path", str(tmp_path / "none.pt")], "no checkpoint"),
        (["--subset", "test", "test1", "--log", str(log)], "--log holds the scores of one --subset"),
        (["--subset", "dev"], "no split 'dev'"),
    ):
        assert main([*asked, *more]) == 1
        assert error in capsys.readouterr().err


def test_what_a_checkpoint_says(checkpoints, data, tmp_path):
    said = trained_with(checkpoints["layer"])
    assert said == {"data": str(data), "tokens_per_sample": LONGEST, "longest": LONGEST}
    state = load_checkpoint(checkpoints["layer"])
    state["cfg"]["task"]["_name"] = "translation"
    save_checkpoint(state, tmp_path / "mt.pt")
    with pytest.raises(UserError, match="was trained for translation, not for language_modeling"):
        trained_with(tmp_path / "mt.pt")
