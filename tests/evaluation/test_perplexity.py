"""Perplexity against the log-probabilities of the model itself, and the unigram floor against counting."""

import math
from collections import Counter

import pytest
import torch

from powernorm_fairseq.evaluation.perplexity import perplexity, score_of, token_ids, unigram
from powernorm_fairseq.evaluation.units import Text
from powernorm_fairseq.evaluation.windows import Window
from powernorm_fairseq.experiment import run
from powernorm_fairseq.experiment.config import scoring_arguments, scoring_window
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.processes import UserError

LINES = (
    "INFO:fairseq_cli.eval_lm:0 the [-1.500000]\tstate[-1] [-2.000000]\t</s> [-0.250000]\n"
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | 1 of [-3.000000]\n"
    "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Loss (base 2): {:.4f}, Perplexity: 5.40\n"
)
OUTPUT = LINES.format(6.75 / 4 / math.log(2))
FOUR = Text(tokens=4, words=4, unknown=0)


def test_words_are_added_up():
    score = score_of(OUTPUT, FOUR)
    assert score["tokens"] == 4 and score["unit"] == "word"
    assert score["perplexity"] == pytest.approx(math.exp(6.75 / 4))


@pytest.mark.parametrize("expected", [3, 5])
def test_the_number_of_tokens_must_be_right(expected):
    with pytest.raises(UserError, match=f"4 tokens were scored, but the text has {expected}"):
        score_of(OUTPUT, Text(expected, expected, 0))


def test_a_sum_that_fairseq_does_not_print_is_refused():
    with pytest.raises(UserError, match=r"fairseq printed 2\.5000"):
        score_of(LINES.format(2.5), FOUR)
    with pytest.raises(UserError, match="printed no loss"):
        score_of(OUTPUT.rpartition("2026")[0], FOUR)


def test_a_diverged_model_is_infinitely_perplexed():
    assert perplexity(1e6, 10) == math.inf


@pytest.mark.slow
@pytest.mark.usefixtures("programs_here")
@pytest.mark.parametrize("model, context", [("transformer_lm_norm_tiny", 0), ("transformer_lm_pn_tiny", 24)])
def test_the_same_as_from_the_models_own_log_probabilities(model, context, language_model_data, tmp_path):
    """Each token once, from its window: the context before it and what its own block holds so far."""
    from fairseq import checkpoint_utils

    window = 64
    config = run.placed(
        {
            "common": {"cpu": True, "seed": 3},
            "task": {
                "_name": "language_modeling",
                "data": str(language_model_data),
                "sample_break_mode": "none",
                "tokens_per_sample": window,
            },
            "model": {"_name": model},
            "criterion": {"_name": "cross_entropy"},
            "optimizer": {"_name": "adam"},
            "lr_scheduler": {"_name": "fixed"},
            "dataset": {"batch_size": 2},
            "eval_lm": {"context_window": context},
            "scoring": {"metric": "perplexity", "batch_size": 7},
        },
        tmp_path,
    )
    save_untrained(config, tmp_path / "model.pt")
    score = run.word_perplexity(config, tmp_path, tmp_path / "model.pt", "test", threads=1)

    (network,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "model.pt")])
    network.eval()
    tokens = torch.from_numpy(token_ids(language_model_data, "test"))
    shifted = torch.cat([torch.tensor([task.source_dictionary.eos()]), tokens[:-1]])
    nats, block = 0.0, window - context
    with torch.no_grad():
        for start in range(0, len(tokens), block):
            first, last = max(0, start - context), min(start + block, len(tokens))
            logits, _ = network(shifted[first:last].unsqueeze(0))
            picked = logits[0].double().log_softmax(-1).gather(1, tokens[first:last].unsqueeze(1)).squeeze(1)
            nats -= picked[start - first :].sum().item()
    assert score["tokens"] == len(tokens)
    assert score["nats_per_word"] == pytest.approx(nats / len(tokens), abs=2e-6)
    assert (score["tokens_per_sample"], score["context_window"]) == (window, context)


def test_a_config_says_the_window_and_the_unit(tmp_path):
    def config(context=None, **scoring):
        eval_lm = {} if context is None else {"context_window": context}
        task = {"_name": "language_modeling", "data": "data", "tokens_per_sample": 64}
        return {"task": task, "eval_lm": eval_lm, "scoring": {"metric": "perplexity", **scoring}}

    for one, window in (
        (config(), Window(64, 64)),
        (config(context=24), Window(64, 40)),
        (config(stride=40), Window(64, 40)),
        (config(context=0, stride=1), Window(64, 1)),
        (config(context=24, stride=8, tokens_per_sample=32), Window(32, 8)),
    ):
        assert scoring_window(one) == window
        arguments = scoring_arguments(one, tmp_path / "c.pt", "test")
        for flag, value in (("--tokens-per-sample", window.length), ("--context-window", window.context)):
            assert arguments[arguments.index(flag) + 1] == str(value)
        assert "--stride" not in arguments and "--unit" not in arguments
    with pytest.raises(UserError, match="do not make up the window of 64 tokens"):
        scoring_window(config(context=24, stride=8))
    with pytest.raises(UserError, match=r"scoring\.unit is 'byte', and must be one of word, token, character"):
        scoring_window(config(unit="byte"))


def test_unigram_is_counting(language_model_data):
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(language_model_data / "dict.txt"))
    counts = Counter(token_ids(language_model_data, "train").tolist())
    words = [
        index
        for index, symbol in enumerate(dictionary.symbols)
        if symbol not in ("<s>", "<pad>") and not symbol.startswith("madeupword")
    ]
    total = sum(counts.values()) + len(words)
    test = token_ids(language_model_data, "test").tolist()
    nats = -sum(math.log((counts[index] + 1) / total) for index in test)
    score = unigram(language_model_data, "test")
    assert score["perplexity"] == pytest.approx(math.exp(nats / len(test)))
    assert score["tokens"] == len(test)
    assert test.count(dictionary.eos()) > 10


def test_no_such_split(language_model_data):
    with pytest.raises(UserError, match="no split 'dev'"):
        token_ids(language_model_data, "dev")
