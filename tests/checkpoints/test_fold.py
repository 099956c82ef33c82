"""Folding: models in double precision before and after, then fairseq's own commands; what is refused.

Statistics, gains and biases are random, so that a forgotten term shows.
"""

import functools
import math
import re
import threading
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.average import load_checkpoint, note_of, save_checkpoint
from powernorm_fairseq.checkpoints.fold import fold, fold_checkpoint
from powernorm_fairseq.experiment.floor import save_untrained
from powernorm_fairseq.experiment.run import placed
from powernorm_fairseq.norms import NoNorm, RunningNorm
from powernorm_fairseq.norms.constant import ConstantNorm
from powernorm_fairseq.processes import UserError
from tests.checkpoints.test_reestimate import config_of
from tests.commands import PLUGIN, in_this_process
from tests.models.helpers import build, hydra, inputs_for, is_language_model, sentences, translation_input

PATH = Path("checkpoint.pt")
TRANSLATION, LANGUAGE_MODEL = "transformer_norm_tiny", "transformer_lm_norm_tiny"
POST = {"encoder_normalize_before": False, "decoder_normalize_before": False}
SMALL = {"layers": 3, "embed_dim": 24, "ffn_embed_dim": 16}


def ordered(order):
    return POST if order == "post" else {}


def randomise(state, seed=3):
    """Random running statistics, gains and biases in a state dict; counters as after seven updates."""
    generator = torch.Generator().manual_seed(seed)
    for key, value in state.items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if key.endswith(("running_psi_sq", "running_var")):
            value.copy_(noise.abs() + 0.3)
        elif "running_" in key or key.endswith("bias"):
            value.copy_(noise * 0.3)
        elif "norm" in key and key.endswith(("weight", ".g")):
            value.mul_(1 + noise * 0.4)
        elif key.endswith(("w_resid", "c_attn")):
            value.copy_(1 + noise * 0.2)
        elif key.endswith("updates_tracked"):
            value.fill_(7)


@functools.lru_cache(maxsize=None)
def config(name, fields):
    return hydra(name, **dict(fields))


def model_and_state(name, joined=True, **fields):
    small = {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in SMALL.items()}
    fields = {**small, **fields}
    if is_language_model(name):
        fields = {key: value for key, value in fields.items() if not key.startswith("encoder_")}
    cfg = config(name, tuple(fields.items()))
    model = build(cfg, joined=joined).double().eval()
    randomise(model.state_dict())
    state = {"cfg": cfg, "args": None, "model": model.state_dict(), "extra_state": {}}
    return model, {**state, "optimizer_history": [{"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 7}]}


def loaded(state, joined=True):
    """The model of a checkpoint, as fairseq builds and loads it."""
    cfg = OmegaConf.create(state["cfg"])
    model = build(cfg, joined=joined).double().eval()
    model.load_state_dict(state["model"], strict=True, model_cfg=cfg.model)
    return model


def folded_pair(name, joined=True, **fields):
    """A model, the same folded, and what was done at each site."""
    model, state = model_and_state(name, joined, **fields)
    done, rows = fold(state, PATH)
    return model, loaded(done, joined), {row.site: row for row in rows}


def log_probabilities(model, net_input):
    """(tokens, V) over the real target positions."""
    tokens = net_input.get("prev_output_tokens", net_input["src_tokens"])
    with torch.no_grad():
        return torch.log_softmax(model(**net_input)[0], -1)[tokens.ne(1)]


def assert_equal(model, other, name):
    one, two = (log_probabilities(each, inputs_for(name)) for each in (model, other))
    assert one.std() > 0.1
    assert (one - two).abs().max() < 1e-10


def norms_of(model):
    return [module for name, module in model.named_modules() if name.rpartition(".")[2].endswith("layer_norm")]


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("norm", ["power", "power_v", "batch"])
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("name", [TRANSLATION, LANGUAGE_MODEL])
def test_the_same_function(name, order, norm, groups):
    model, folded, rows = folded_pair(name, norm=norm, norm_groups=groups, **ordered(order))
    assert_equal(model, folded, name)
    assert not any(isinstance(module, RunningNorm) for module in folded.modules())
    assert sum(row.number for row in rows.values()) == len(norms_of(folded))
    assert "shares its matrix with the embeddings" in rows.pop("decoder_final").done
    assert all(row.done.startswith("into ") and "constant" not in row.done for row in rows.values())
    # All but the decoder's final norm is gone, or is the row scale alone.
    for module in norms_of(folded):
        constant = module is norms_of(folded)[-1] if order == "post" else module is folded.decoder.layer_norm
        if groups or constant:
            assert isinstance(module, ConstantNorm) and module.groups == groups
            assert (module.gain is not None) == constant
        else:
            assert isinstance(module, NoNorm)


SITES = [
    ({"norm": "rms"}, {"decoder_ff": "into fc1; the scale of 1 channel group stays", "decoder_final": "stays: the"}),
    ({"norm": "scale", **POST}, {"encoder_self": "into fc1 and the residual", "decoder_final": "stays: the output"}),
    (
        {
            "encoder_norm_self": "power", "encoder_norm_ff": "ada", "encoder_norm_final": "batch",
            "decoder_norm_self": "layer", "decoder_norm_cross": "power_v", "decoder_norm_ff": "rms",
        },
        {
            "encoder_ff": "stays: it does more", "decoder_cross": "into q_proj; the scale of 4",
            "encoder_final": "into k_proj, v_proj", "decoder_self": "stays", "decoder_final": "stays",
        },
    ),
    (
        {
            "encoder_norm_self": "batch", "encoder_norm_ff": "power", "decoder_norm_self": "ada",
            "decoder_norm_cross": "power", "decoder_norm_ff": "layer", **POST,
        },
        {"encoder_final": "into k_proj, v_proj", "decoder_cross": "into fc1 and the residual", "decoder_ff": "stays"},
    ),
    (
        {
            "encoder_norm_self": "power", "encoder_norm_ff": "layer", "decoder_norm_self": "batch",
            "decoder_norm_cross": "rms", "decoder_norm_ff": "power", **POST,
        },
        {"encoder_final": "stays", "decoder_self": "into q_proj and the residual", "decoder_cross": "the residual"},
    ),
    ({"norm": "power", "encoder_normalize_before": False}, {"encoder_ff": "the residual", "decoder_ff": "into fc1"}),
    ({"norm": "batch", "decoder_normalize_before": False}, {"decoder_ff": "the residual", "encoder_ff": "into fc1"}),
    ({"norm": "power", "norm_affine": False, **POST}, {"encoder_ff": "the residual"}),
    ({"norm": "power", "share_all_embeddings": False}, {"decoder_final": "into output_projection"}),
    ({"norm": "batch", "share_all_embeddings": False, **POST}, {"decoder_final": "into output_projection"}),
    (
        {"norm": "power", "share_all_embeddings": False, "decoder_output_dim": 20, "decoder_input_dim": 12},
        {"decoder_final": "into project_out_dim"},
    ),
    ({"norm": "power", "decoder_embed_dim": 32, "share_all_embeddings": False}, {"encoder_final": "into k_proj"}),
    ({"norm": "power", "no_decoder_final_norm": True}, {"decoder_ff": "into fc1"}),
    ({"norm": "power", "layernorm_embedding": True}, {"encoder_embedding": "begins", "decoder_embedding": "begins"}),
    ({"norm": "batch", "layernorm_embedding": True, **POST}, {"encoder_embedding": "constant"}),
    (
        {"norm": "power", "no_cross_attention": True, **POST},
        {"encoder_final": "nothing reads it", "decoder_self": "into fc1 and the residual"},
    ),
    (
        {"norm": "power", "no_cross_attention": True, "cross_self_attention": True},
        {"encoder_final": "constant", "decoder_self": "constant", "decoder_ff": "into fc1"},
    ),
    (
        {"norm": "power", "no_cross_attention": True, "cross_self_attention": True, **POST},
        {"encoder_final": "constant", "decoder_self": "into fc1 and the residual", "decoder_ff": "constant"},
    ),
    ({"norm": "power", "encoder_layers": 1, "decoder_layers": 1, **POST}, {"encoder_final": "into k_proj, v_proj"}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), SITES, ids=range(len(SITES)))
def test_what_folds_where(fields, words):
    model, folded, rows = folded_pair(TRANSLATION, fields.get("share_all_embeddings", True), **fields)
    assert_equal(model, folded, TRANSLATION)
    for site, part in words.items():
        assert part in rows[site].done


def test_language_models_with_other_outputs_and_scales():
    model, folded, rows = folded_pair("transformer_lm_pn_tiny", share_decoder_input_output_embed=False)
    assert_equal(model, folded, "transformer_lm_pn_tiny")
    assert rows["decoder_final"].done.startswith("into output_projection")
    assert folded.decoder.output_projection.bias is not None
    scales = {"scale_heads": True, "scale_fc": True}
    model, folded, rows = folded_pair(LANGUAGE_MODEL, norm="batch", scale_attn=True, scale_resids=True, **scales)
    assert_equal(model, folded, LANGUAGE_MODEL)
    assert rows["decoder_self"].done == "into q_proj, k_proj, v_proj"
    model, folded, rows = folded_pair(LANGUAGE_MODEL, norm="batch", scale_resids=True, **scales, **POST)
    assert_equal(model, folded, LANGUAGE_MODEL)
    assert "--scale-resids scales" in rows["decoder_self"].done and "--scale-heads scales" in rows["decoder_ff"].done
    assert model.decoder.layers[0].w_resid is not None and model.decoder.layers[0].c_attn is not None


def test_adaptive_softmax():
    fields = {"adaptive_softmax_cutoff": "20,30", "share_decoder_input_output_embed": False}
    model, folded, rows = folded_pair("transformer_lm_pn_tiny", **fields)
    assert "adaptive softmax reads it" in rows["decoder_final"].done
    features, others = (one.decoder(sentences(9, 4))[0] for one in (model, folded))
    assert torch.allclose(features[0], others[0], atol=1e-10)


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_padding_is_read_by_nothing(order, groups):
    """A masked norm gives zeros at padding and what takes its place does not: noise there changes no real token."""
    model, folded, _ = folded_pair(TRANSLATION, norm="power", norm_groups=groups, **ordered(order))
    net_input = translation_input(more_source=3, more_target=2)
    source, target = net_input["src_tokens"].eq(1), net_input["prev_output_tokens"].eq(1)
    expected = log_probabilities(model, net_input)
    assert (log_probabilities(folded, net_input) - expected).abs().max() < 1e-10
    # fairseq computes softmax and positions in single precision, which batches of another width round differently.
    assert (log_probabilities(folded, translation_input()) - expected).abs().max() < 1e-4
    changed = []

    def noise(mask):
        def hook(module, args, output):
            x = output[0] if isinstance(output, tuple) else output
            x[mask.t()] = 1e4 * torch.randn(int(mask.sum()), x.shape[-1], dtype=x.dtype)
            changed.append(x)

        return hook

    for stack, mask in ((folded.encoder, source), (folded.decoder, target)):
        for layer in stack.layers:
            layer.register_forward_hook(noise(mask))
    assert (log_probabilities(folded, net_input) - expected).abs().max() < 1e-10
    assert len(changed) == 6 and source.any() and target.any()


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("name", [TRANSLATION, LANGUAGE_MODEL])
def test_step_by_step(name, order):
    """Decoding with cached keys and values, which are computed from folded norms, is decoding at once."""
    model, folded, _ = folded_pair(name, norm="power", **ordered(order))
    source, tokens = sentences(7, 5, 2, left=True), sentences(6, 6, 6, seed=2)
    with torch.no_grad():
        found = []
        for one in (model, folded):
            encoded = None if is_language_model(name) else one.encoder(source, source.ne(1).sum(1))
            state = {}
            steps = [
                one.decoder(tokens[:, :length], encoder_out=encoded, incremental_state=state)[0]
                for length in range(1, 7)
            ]
            found.append(torch.cat(steps, 1))
        whole = folded.decoder(tokens, encoder_out=encoded)[0]
    assert (found[0] - found[1]).abs().max() < 1e-10
    assert (found[1] - whole).abs().max() < 1e-4


def test_each_thread_counts_residual_connections_for_itself():
    model, folded, _ = folded_pair(LANGUAGE_MODEL, norm="power", **POST)
    net_input = {"src_tokens": sentences(5, 4)}
    expected, found = log_probabilities(model, net_input), []

    def pass_in_another_thread(module, args):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: found.append(log_probabilities(folded, net_input)))
            other.start()
            other.join()

    folded.decoder.layers[1].fc1.register_forward_pre_hook(pass_in_another_thread)
    assert (log_probabilities(folded, net_input) - expected).abs().max() < 1e-10
    assert (found[0] - expected).abs().max() < 1e-10


def test_a_folded_decoder_needs_the_encoder():
    _, folded, _ = folded_pair(TRANSLATION, norm="power", **POST)
    with pytest.raises(ValueError, match="needs the encoder's output"):
        folded.decoder(sentences(4))


def test_half_precision_is_rounded_once():
    _, state = model_and_state(TRANSLATION, norm="batch", **POST)
    half = {key: value if "running" in key else value.half() for key, value in state["model"].items()}
    done, _ = fold({**state, "model": half}, PATH)
    wide, _ = fold({**state, "model": {key: value.double() for key, value in half.items()}}, PATH)
    assert {value.dtype for value in done["model"].values()} == {torch.float16}
    for key, value in done["model"].items():
        assert torch.equal(value, wide["model"][key].half()), key
    half["decoder.layers.0.self_attn_layer_norm.weight"].fill_(60000)
    half["decoder.layers.0.self_attn_layer_norm.running_var"].fill_(1e-6)
    with pytest.raises(UserError, match=r"not be finite in torch.float16"):
        fold({**state, "model": half}, PATH)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_layers_that_are_left_out(order):
    """Pruned as the config says, then folded; a folded post-norm model cannot be pruned, a pre-norm one can."""
    keep = {"encoder_layers_to_keep": "0,2", "decoder_layers_to_keep": "1,2"}
    _, whole = model_and_state(TRANSLATION, norm="power", **ordered(order))
    _, state = model_and_state(TRANSLATION, norm="power", **keep, **ordered(order))
    cfg = OmegaConf.to_container(state["cfg"])
    pruned = loaded({**whole, "cfg": cfg})
    assert len(pruned.encoder.layers) == 2
    done, rows = fold({**whole, "cfg": OmegaConf.create(cfg)}, PATH)
    assert rows[0].number == 2
    assert_equal(pruned, loaded(done), TRANSLATION)
    done, _ = fold(whole, PATH)
    done["cfg"]["model"].update(keep)
    if order == "pre":
        assert_equal(pruned, loaded(done), TRANSLATION)
    else:
        with pytest.raises(ValueError, match=r"--encoder-layers-to-keep.*need each other"):
            loaded(done)


def untrained(path, *args, **fields):
    """A checkpoint of a new model with random norms and biases, and an optimiser's state."""
    save_untrained(placed(config_of(*args, **fields), path.parent), path)
    state = load_checkpoint(path)
    randomise(state["model"])
    state["last_optimizer_state"] = {"state": {0: {"exp_avg": torch.ones(3)}}}
    save_checkpoint(state, path)
    return path


def scored(output):
    rows = [line.split("\t") for line in output.splitlines() if line.startswith("H-")]
    return {int(number[2:]): (float(score), text) for number, score, text in rows}


@pytest.mark.slow
@pytest.mark.parametrize(("order", "groups"), [("pre", 0), ("post", 4)])
def test_generate_and_interactive(order, groups, translation_data, tmp_path, capsys):
    """Same hypotheses, scores within 1e-4, for batches of unequal lengths; and no training begins with it."""
    fields = {"norm": "power", "norm_groups": groups, **ordered(order)}
    path = untrained(tmp_path / "checkpoint.pt", translation_data, "translation", TRANSLATION, **fields)
    folded = tmp_path / "folded.pt"
    assert main(["fold", str(path), "-o", str(folded)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^encoder_final +1 power  into k_proj, v_proj", printed, re.MULTILINE)
    assert re.search(r"^decoder_cross +2 power ", printed, re.MULTILINE)
    assert f"{folded}: all {12 if order == 'pre' else 10} norms folded" in printed
    kept = load_checkpoint(folded)
    assert kept["last_optimizer_state"] is None
    assert note_of(kept)["folded"]["encoder_self"] == ("linear" if order == "pre" else "residual")
    flags = [translation_data, "--user-dir", PLUGIN, "--max-len-b", 12, "--beam", 5, "--batch-size", 7]
    flags += ["--required-batch-size-multiple", 1, "--num-workers", 0, "--path"]
    found = [scored(in_this_process("fairseq-generate", *flags, checkpoint)) for checkpoint in (path, folded)]
    if order == "pre":
        typed = ["--input", translation_data.parent / "test.de", "--buffer-size", 7]
        found.append(scored(in_this_process("fairseq-interactive", *flags, folded, *typed)))
    assert len(found[0]) == 20
    for others in found[1:]:
        for number, (score, text) in found[0].items():
            assert others[number][1] == text
            assert others[number][0] == pytest.approx(score, abs=1e-4)
    if order == "pre":
        # Without layer scale nothing is left at most sites, which could also be loaded as a model without norms.
        train = [
            translation_data, "--user-dir", PLUGIN, "--task", "translation", "--arch", TRANSLATION, "--norm", "none",
            "--optimizer", "adam", "--max-tokens", 500, "--max-update", 9, "--num-workers", 0,
            "--save-dir", tmp_path / "run",
        ]  # fmt: skip
        for flag in ("--restore-file", "--finetune-from-model"):
            with pytest.raises(ValueError, match=r"folded.pt is folded for inference and cannot be trained: give the"):
                in_this_process("fairseq-train", *train, flag, folded)


@pytest.mark.slow
def test_eval_lm(language_model_data, tmp_path, caplog):
    """Word by word the same log-probabilities."""
    fields = {"norm": "batch", "decoder_normalize_before": False}
    path = untrained(tmp_path / "checkpoint.pt", language_model_data, "language_modeling", LANGUAGE_MODEL, **fields)
    fold_checkpoint(path, tmp_path / "folded.pt")
    words = []
    for checkpoint in (path, tmp_path / "folded.pt"):
        caplog.clear()
        with caplog.at_level("INFO"):
            in_this_process(
                "fairseq-eval-lm", language_model_data, "--path", checkpoint, "--user-dir", PLUGIN, "--gen-subset",
                "valid", "--batch-size", 3, "--required-batch-size-multiple", 1, "--num-workers", 0,
                "--output-word-probs", "--sample-break-mode", "none", "--tokens-per-sample", 24, "--context-window", 7,
            )  # fmt: skip
        words.append([float(number) for number in re.findall(r"\[(-[0-9.]+)\]", caplog.text)])
    assert len(words[0]) == len(words[1]) > 500
    assert max(abs(one - two) for one, two in zip(*words)) <= 1e-4


def test_a_folded_model_is_not_trained():
    _, state = model_and_state(LANGUAGE_MODEL, norm="power")
    done, _ = fold(state, PATH)
    with pytest.raises(ValueError, match="cannot be trained: train the checkpoint that was given"):
        loaded(done).train()
    with pytest.raises(UserError, match="is folded for inference already"):
        fold(done, PATH)


def test_refused_by_other_commands(tmp_path, capsys):
    _, state = model_and_state(LANGUAGE_MODEL, norm="power")
    path, folded = tmp_path / "checkpoint.pt", tmp_path / "folded.pt"
    save_checkpoint(state, path)
    assert main(["fold", str(path), "-o", str(path)]) == 1
    assert "the output would replace" in capsys.readouterr().err
    fold_checkpoint(path, folded)
    for command in (
        ["fold", folded, "-o", tmp_path / "again.pt"],
        ["average", "--inputs", folded, "--output", tmp_path / "again.pt"],
        ["reestimate", folded, "--output", tmp_path / "again.pt"],
    ):
        assert main([str(part) for part in command]) == 1
        assert "is folded for inference already: give the checkpoint that it was made from" in capsys.readouterr().err
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint.pt", "folded.pt"]


def test_shadow_models(tmp_path):
    """The shadow model of an EMA is left out, or it is what is folded."""
    model, state = model_and_state(LANGUAGE_MODEL, norm="power")
    shadow = {key: value.clone() for key, value in state["model"].items()}
    randomise(shadow, seed=5)
    path, folded = tmp_path / "checkpoint.pt", tmp_path / "folded.pt"
    save_checkpoint({**state, "extra_state": {"ema": shadow, "epoch": 3}}, path)
    fold_checkpoint(path, folded)
    assert set(load_checkpoint(folded)["extra_state"]) == {"epoch", "powernorm_fairseq", "train_iterator"}
    assert_equal(model, loaded(load_checkpoint(folded)), LANGUAGE_MODEL)
    assert main(["fold", str(path), "--ema", "-o", str(folded)]) == 0
    model.load_state_dict(shadow)
    assert_equal(model, loaded(load_checkpoint(folded)), LANGUAGE_MODEL)


def test_norms_that_stay(tmp_path, capsys):
    """A model without anything to fold is written as it is, so that a script can treat all norms alike."""
    model, state = model_and_state(TRANSLATION, norm="layer")
    save_checkpoint(state, tmp_path / "checkpoint.pt")
    assert main(["fold", str(tmp_path / "checkpoint.pt"), "-o", str(tmp_path / "folded.pt")]) == 0
    assert "no norm folds, the model is as it was" in capsys.readouterr().out
    done = load_checkpoint(tmp_path / "folded.pt")
    assert "folded" not in note_of(done) and done["cfg"].model.norm_folded is None
    assert_equal(model, loaded(done).train().eval(), TRANSLATION)


def test_what_cannot_be_folded(capsys):
    _, state = model_and_state(LANGUAGE_MODEL, norm="batch")
    entries, key = state["model"], "decoder.layers.1.final_layer_norm"

    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            fold({**state, **changes}, PATH)

    refused("has no config", cfg=None)
    refused(
        "holds transformer_lm; only models of this plugin", cfg=OmegaConf.create({"model": {"_name": "transformer_lm"}})
    )
    noisy = OmegaConf.create(OmegaConf.to_container(state["cfg"]))
    noisy.model.quant_noise_pq = 0.1
    refused("quantisation noise", cfg=noisy)
    less = {name: value for name, value in entries.items() if not name.startswith(key)}
    refused(f"{key} is not what the config says", model=less)
    bad = entries[f"{key}.running_var"].clone()
    bad[3] = math.nan
    refused(f"{key}: gains or statistics are not finite", model={**entries, f"{key}.running_var": bad})
    new = {name: value * 0 if name.endswith("updates_tracked") else value for name, value in entries.items()}
    fold({**state, "model": new}, PATH)
    assert "the statistics of 7 norms have followed no update" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["decoder_self", "decoder_self=away", "encoder_self=linear"])
def test_a_config_that_the_command_did_not_write(text):
    with pytest.raises(ValueError, match=r"norm.folded"):
        build(hydra(LANGUAGE_MODEL, norm="power", norm_folded=text))


def test_configs_of_before():
    """A checkpoint from when the config had no such field."""
    model, state = model_and_state(LANGUAGE_MODEL, norm="power")
    cfg = OmegaConf.create(OmegaConf.to_container(state["cfg"]))
    del cfg.model["norm_folded"]
    done, _ = fold({**state, "cfg": cfg}, PATH)
    assert_equal(model, loaded(done), LANGUAGE_MODEL)
