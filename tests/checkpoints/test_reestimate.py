"""Statistics measured by the command, against sums in double precision; what it keeps, and what it refuses.

Trap 19: averaging parameters leaves running statistics that belong to no model.
"""

import re

import pytest
import torch

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints import reestimate as module
from powernorm_fairseq.checkpoints.average import averaged, load_checkpoint, note_of, save_checkpoint
from powernorm_fairseq.experiment.config import train_arguments
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.experiment.run import placed
from powernorm_fairseq.norms import RunningNorm
from powernorm_fairseq.norms.measuring import measuring
from powernorm_fairseq.processes import UserError
from tests.commands import hypotheses, in_this_process

STATISTICS = ("running_psi_sq", "running_mean", "running_var")
MIXED = {
    "encoder_norm_self": "power", "encoder_norm_ff": "power_v", "encoder_norm_final": "batch",
    "decoder_norm_self": "batch", "decoder_norm_cross": "power",
}  # fmt: skip


def config_of(data, task, model, **fields):
    tasks = {
        "language_modeling": {"tokens_per_sample": 64},
        "translation": {"source_lang": "de", "target_lang": "en"},
    }
    return {
        "common": {"cpu": True, "seed": 1},
        "task": {"_name": task, "data": str(data), **tasks[task]},
        "model": {"_name": model, **fields},
        "criterion": {"_name": "cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "dataset": {"max_tokens": 512, "num_workers": 0},
    }


def untrained(path, *args, **fields):
    """A checkpoint of a new model whose buffers are as if it had trained."""
    save_untrained(placed(config_of(*args, **fields), path.parent), path)
    state = load_checkpoint(path)
    generator = torch.Generator().manual_seed(3)
    for key, value in state["model"].items():
        if "running_" in key:
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        if key.endswith("updates_tracked"):
            value.fill_(7)
    state["optimizer_history"][-1]["num_updates"] = 7
    state["last_optimizer_state"] = {"state": {0: {"exp_avg": torch.ones(3)}}}
    save_checkpoint(state, path)
    return path


@pytest.fixture(scope="module")
def language_model(language_model_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    return untrained(folder / "c.pt", language_model_data, "language_modeling", "transformer_lm_pn_tiny", dropout=0.1)


@pytest.fixture(scope="module")
def translation(translation_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mt")
    return untrained(
        folder / "c.pt", translation_data, "translation", "transformer_norm_tiny", **MIXED,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip


def command(checkpoint, output, *args):
    return main(["reestimate", str(checkpoint), "--output", str(output), *map(str, args)])


def is_statistic(key):
    return key.rpartition(".")[2] in STATISTICS


def test_against_sums_in_double_precision(translation, tmp_path, capsys):
    """All tokens of all training batches count the same, padding does not, at each kind of norm in a translation."""
    assert command(translation, tmp_path / "new.pt", "--batches", 10_000) == 0
    told = capsys.readouterr()
    batches = int(re.search(r"the training set has (\d+) batches, fewer than 10000; all are taken", told.err).group(1))
    assert f"statistics measured on {batches} batches" in told.out
    state = load_checkpoint(tmp_path / "new.pt")

    from fairseq import checkpoint_utils

    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(translation)])
    model, pad = models[0].train(), task.source_dictionary.pad()
    task.load_dataset("train")
    epoch = task.get_batch_iterator(
        task.dataset("train"), max_tokens=512, max_positions=(1024, 1024), ignore_invalid_inputs=True,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple, seed=1, epoch=1,
    ).next_epoch_itr()  # fmt: skip
    sums, real = {}, {}

    def hook(name):
        def add(norm, args):
            h = args[0].detach().double()
            if norm.groups:
                parts = h.view(*h.shape[:2], norm.groups, -1)
                h = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.eps)).view_as(h)
            h = h[real[name.split(".")[0]].T]
            new = torch.stack([torch.full_like(h[0], len(h)), h.sum(0), h.square().sum(0)])
            sums[name] = sums.get(name, 0) + new

        return add

    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, RunningNorm)}
    assert len(norms) >= 9
    for name, norm in norms.items():
        norm.register_forward_pre_hook(hook(name))
    with measuring(model), torch.no_grad():
        for sample in epoch:
            source = sample["net_input"]
            real.update(encoder=source["src_tokens"].ne(pad), decoder=source["prev_output_tokens"].ne(pad))
            assert not (real["encoder"].all() and real["decoder"].all()) or len(source["src_tokens"]) < 4
            model(**source)
    assert epoch.n == batches
    for name in norms:
        count, total, squares = sums[name]
        mean = total / count
        wanted = {"running_psi_sq": squares / count, "running_mean": mean}
        wanted["running_var"] = (squares - total * mean) / (count - 1)
        for buffer in STATISTICS:
            key = f"{name}.{buffer}"
            if key in state["model"]:
                found = state["model"][key].double()
                torch.testing.assert_close(found, wanted[buffer], rtol=2e-5, atol=2e-5, msg=key)


def test_only_statistics_change_and_the_file_says_how(language_model, tmp_path):
    assert command(language_model, tmp_path / "new.pt", "--batches", 3, "--seed", 5, "--max-tokens", 256) == 0
    before, after = load_checkpoint(language_model), load_checkpoint(tmp_path / "new.pt")
    assert list(before["model"]) == list(after["model"])
    changed = [key for key, value in before["model"].items() if not torch.equal(value, after["model"][key])]
    assert changed == [key for key in before["model"] if is_statistic(key)] and changed
    assert after["last_optimizer_state"] is None and before["last_optimizer_state"] is not None
    for key in set(before) - {"model", "last_optimizer_state", "extra_state"}:
        assert before[key] == after[key], key
    note = after["extra_state"].pop("powernorm_fairseq")
    assert 0 < note["reestimated"].pop("tokens") <= 3 * 256
    wanted = {"batches": 3, "sources": ["c.pt"], "subset": "train", "seed": 5, "max_tokens": 256}
    assert note == {"reestimated": wanted}
    assert after["extra_state"] == before["extra_state"]


def test_the_same_seed_gives_the_same_bits(language_model, tmp_path):
    """Dropout is on, as in training, and seeded; the caller's random numbers go on as if nothing had happened."""
    states = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        expected = torch.random.get_rng_state()
        assert command(language_model, tmp_path / "new.pt", "--batches", 2, "--seed", seed) == 0
        assert torch.equal(torch.random.get_rng_state(), expected)
        states.append(load_checkpoint(tmp_path / "new.pt")["model"])
    first, again, other = states
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not any(torch.equal(value, other[key]) for key, value in first.items() if is_statistic(key))


def test_batches_are_shuffled_by_the_seed_and_sized_by_max_tokens(language_model):
    from fairseq import checkpoint_utils

    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(language_model)])
    cfg.dataset.batch_size = 2
    firsts = {}
    for seed, max_tokens in ((1, None), (1, None), (2, None), (1, 320)):
        first = next(iter(module._batches(cfg, task, models[0], max_tokens, seed)))
        assert len(first["id"]) == (2 if max_tokens is None else 5)  # blocks of 64 tokens
        firsts.setdefault((seed, max_tokens), []).append(first["id"].tolist())
    assert firsts[1, None][0] == firsts[1, None][1] != firsts[2, None][0]


def test_dropout_is_on(language_model):
    """The same batches give other statistics if the config has no dropout."""
    models = []
    for dropout in (0.1, 0.0):
        state = load_checkpoint(language_model)
        state["cfg"].model.dropout = dropout
        models.append(module.reestimate(state, language_model, 2, say=lambda words: None)["model"])
    assert not any(torch.equal(value, models[1][key]) for key, value in models[0].items() if is_statistic(key))


@pytest.mark.slow
def test_unchanged_parameters_give_about_the_statistics_that_training_gave(language_model_data, tmp_path):
    """With a learning rate of almost 0, training gathers over an epoch what the command measures."""
    config = config_of(
        language_model_data, "language_modeling", "transformer_lm_norm_tiny", decoder_norm_self="power",
        decoder_norm_ff="batch", norm_cumulative=True, norm_warmup_updates=1000, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    config["optimization"] = {"lr": [1e-12], "max_epoch": 1}
    config["checkpoint"] = {"no_epoch_checkpoints": True}
    config["dataset"].update(max_tokens=64, required_batch_size_multiple=1)
    config = placed(config, tmp_path)
    in_this_process("fairseq-train", *train_arguments(config))
    checkpoint = tmp_path / "checkpoints" / "checkpoint_last.pt"
    assert command(checkpoint, tmp_path / "new.pt", "--batches", 1000) == 0
    before, after = load_checkpoint(checkpoint), load_checkpoint(tmp_path / "new.pt")
    assert note_of(after)["reestimated"]["batches"] == before["optimizer_history"][-1]["num_updates"] > 3
    for key in filter(is_statistic, after["model"]):
        # All batches but the last have one size; training weighs that one as the others.
        gap, size = (after["model"][key] - before["model"][key]).abs(), before["model"][key].abs().mean()
        assert float(gap.mean() / size) < 0.02 and float(gap.max() / size) < 0.1, key
        assert float((after["model"][key] - 1).abs().max()) > 0.1


def test_fairseq_generates_from_the_result(translation, translation_data, tmp_path):
    assert command(translation, tmp_path / "new.pt", "--batches", 2) == 0
    output = in_this_process(
        "fairseq-generate", translation_data, "--path", tmp_path / "new.pt", "--beam", 2, "--max-len-b", 5, "--cpu",
        "--num-workers", 0,
    )  # fmt: skip
    assert len(hypotheses(output)) == 20


def test_data_of_a_relative_path_and_data_that_moved(
    language_model, language_model_data, tmp_path, monkeypatch, capsys
):
    state = load_checkpoint(language_model)
    state["cfg"].task.data = language_model_data.name
    save_checkpoint(state, tmp_path / "relative.pt")
    output = tmp_path / "new.pt"
    monkeypatch.chdir(tmp_path)
    assert command("relative.pt", "new.pt", "--batches", 1) == 1
    assert f"no binarised text in {language_model_data.name}, seen from" in capsys.readouterr().err
    assert command("relative.pt", "new.pt", "--batches", 1, "--data", language_model_data) == 0
    # The path of the checkpoint's own config stays, whatever was measured on.
    assert load_checkpoint(output)["cfg"].task.data == language_model_data.name
    by_data = load_checkpoint(output)["model"]
    monkeypatch.chdir(language_model_data.parent)
    assert command(tmp_path / "relative.pt", output, "--batches", 1) == 0
    assert all(torch.equal(value, by_data[key]) for key, value in load_checkpoint(output)["model"].items())
    assert command(tmp_path / "relative.pt", output, "--batches", 1, "--data", "nowhere") == 1
    assert "no binarised text in nowhere" in capsys.readouterr().err


def test_progress(language_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.0)
    assert command(language_model, tmp_path / "new.pt", "--batches", 3) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"2 of 3 batches, [\d,]+ tokens, 0:0\d left", lines[1])
    assert re.fullmatch(r"measured 3 batches, [\d,]+ tokens, in 0:0\d", lines[-1])


def test_without_running_statistics_there_is_nothing_to_do(language_model_data, tmp_path, capsys):
    checkpoint = untrained(
        tmp_path / "c.pt", language_model_data, "language_modeling", "transformer_lm_norm_tiny", norm="layer"
    )
    assert command(checkpoint, tmp_path / "new.pt") == 0
    assert "nothing to re-estimate" in capsys.readouterr().err
    before, after = load_checkpoint(checkpoint), load_checkpoint(tmp_path / "new.pt")
    assert all(torch.equal(value, after["model"][key]) for key, value in before["model"].items())
    assert note_of(after) == {}


def test_refusals_of_arguments(language_model, tmp_path, capsys):
    output = tmp_path / "new.pt"
    for arguments, words in (
        ([language_model, output, "--batches", 0], "at least 1 batch, not 0"),
        ([language_model, output, "--max-tokens", 0], "at least 1 token, not 0"),
        ([language_model, tmp_path / "no" / "new.pt"], "no folder"),
        ([language_model, tmp_path], "is a folder"),
        ([language_model, language_model], "the output would replace"),
        ([tmp_path / "no.pt", output], "no checkpoint"),
        ([language_model, output, "--max-tokens", 1], "no training sentence fits into a batch"),
        ([language_model, output, "--ema"], "has no shadow model: it was not trained with --store-ema"),
    ):
        assert command(*arguments) == 1
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_norms_that_cannot_be_measured_are_named(language_model, language_model_data, tmp_path, capsys):
    output = tmp_path / "new.pt"
    state = load_checkpoint(language_model)
    state["model"]["decoder.layers.0.fc1.weight"][3, 4] = float("nan")
    save_checkpoint(state, tmp_path / "nan.pt")
    assert command(tmp_path / "nan.pt", output, "--batches", 1) == 1
    error = capsys.readouterr().err
    assert "not finite at decoder.layers.1.self_attn_layer_norm" in error and "layers.0" not in error
    dropped = untrained(
        tmp_path / "dropped.pt",
        language_model_data,
        "language_modeling",
        "transformer_lm_pn_tiny",
        decoder_layerdrop=1.0,
    )
    assert command(dropped, output, "--batches", 1) == 1
    assert "did not reach decoder.layers.0.self_attn_layer_norm, " in capsys.readouterr().err
    assert not output.exists()


def test_a_model_of_another_dictionary_is_refused(language_model, translation_data, tmp_path, capsys):
    assert command(language_model, tmp_path / "new.pt", "--data", translation_data) == 1
    assert "c.pt: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_interrupted_while_writing_nothing_is_left(language_model, tmp_path, monkeypatch):
    def interrupted(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    assert command(language_model, tmp_path / "new.pt", "--batches", 1) == 130
    assert not list(tmp_path.iterdir())


def test_average_and_reestimate_in_one_command(language_model, tmp_path, capsys):
    """`average --reestimate N` is `average`, then `reestimate`; without it there is a warning."""
    other = load_checkpoint(language_model)
    for key, value in other["model"].items():
        if value.is_floating_point() and "running" not in key:
            value.mul_(1.5)
    save_checkpoint(other, tmp_path / "other.pt")
    inputs = ["--inputs", str(language_model), str(tmp_path / "other.pt")]
    one, two, three = (str(tmp_path / name) for name in ("1.pt", "2.pt", "3.pt"))
    assert main(["average", *inputs, "--output", one, "--reestimate", "2", "--seed", "4"]) == 0
    told = capsys.readouterr()
    assert "the mean of c.pt, other.pt, statistics measured on 2 batches" in told.out and "warning" not in told.err
    assert main(["average", *inputs, "--output", two]) == 0
    assert "--reestimate measures them anew" in capsys.readouterr().err
    assert command(two, three, "--batches", 2, "--seed", 4) == 0
    states = [load_checkpoint(tmp_path / f"{number}.pt") for number in (1, 2, 3)]
    assert all(torch.equal(value, states[2]["model"][key]) for key, value in states[0]["model"].items())
    assert note_of(states[0]) == note_of(states[2])
    assert note_of(states[0])["averaged"] == note_of(states[0])["reestimated"]["sources"] == ["c.pt", "other.pt"]
    psi_sq = next(filter(is_statistic, states[0]["model"]))
    assert not torch.equal(states[0]["model"][psi_sq], states[1]["model"][psi_sq])
    assert main(["average", *inputs, "--output", one, "--reestimate", "0"]) == 1
    assert "at least 1 batch" in capsys.readouterr().err
    with pytest.raises(UserError, match="at least 1 batch"):
        module.reestimate(averaged([language_model]), language_model, -1)
