"""Checkpoints of the released PowerNorm code, built here under the key names and options of its fairseq 0.8."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.modules import SinusoidalPositionalEmbedding

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.convert import (
    build_model,
    convert_model,
    convert_state,
    converted_norm,
    model_fields,
    run_config,
)
from powernorm_fairseq.checkpoints.inspect import averaged_statistics
from powernorm_fairseq.norms import BatchNorm, LayerNorm, PowerNorm
from powernorm_fairseq.processes import UserError
from tests.checkpoints.released import (
    HEADS,
    HIDDEN,
    LAYERS,
    PUBLISHED,
    WIDTH,
    checkpoint,
    norm_entries,
    options,
    save,
    weights,
)
from tests.commands import PLUGIN, hypotheses, in_this_process
from tests.models.helpers import sentences
from tests.norms.helpers import close, step


def convert(path, output):
    assert main(["convert", str(path), "--output", str(output)]) == 0
    return output


def load(path, data):
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data)})
    return models[0].eval(), cfg, task


def encoded(state, tokens, padding_idx=1, post=False):
    """The encoder's output (T, B, C) by the released formulas; a norm is recognised by its entries."""

    def norm(x, site):
        weight, bias = state[f"{site}.weight"], state[f"{site}.bias"]
        if f"{site}.running_phi" in state:
            groups = x.view(*x.shape[:2], HEADS, -1)
            h = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(x.shape)
            return weight * h / (state[f"{site}.running_phi"].view(-1) + 1e-5).sqrt() + bias
        if f"{site}.running_var" in state:
            h = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return weight * (h - state[f"{site}.running_mean"]) / (state[f"{site}.running_var"] + 1e-5).sqrt() + bias
        return F.layer_norm(x, (WIDTH,), weight, bias, 1e-5)

    padding = tokens.eq(padding_idx)
    places = torch.cumsum((~padding).long(), 1) * (~padding) + padding_idx
    table = SinusoidalPositionalEmbedding.get_embedding(64, WIDTH, padding_idx)
    x = (math.sqrt(WIDTH) * state["encoder.embed_tokens.weight"][tokens] + table[places]).transpose(0, 1)
    for layer in range(LAYERS):
        place = f"encoder.layers.{layer}"

        def linear(name, x, place=place):
            return F.linear(x, state[f"{place}.{name}.weight"], state[f"{place}.{name}.bias"])

        def attention(x, linear=linear):
            q, k, v = (
                linear(f"self_attn.{part}_proj", x).view(*x.shape[:2], HEADS, -1).permute(1, 2, 0, 3) for part in "qkv"
            )
            scores = (q @ k.transpose(2, 3) / math.sqrt(WIDTH / HEADS)).masked_fill(padding[:, None, None], -math.inf)
            return linear("self_attn.out_proj", (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(x.shape))

        def feed_forward(x, linear=linear):
            return linear("fc2", F.relu(linear("fc1", x)))

        for part, site in ((attention, "self_attn_layer_norm"), (feed_forward, "final_layer_norm")):
            x = norm(x + part(x), f"{place}.{site}") if post else x + part(norm(x, f"{place}.{site}"))
    return x if post else norm(x, "encoder.layer_norm")


@pytest.fixture(scope="module")
def words(translation_data):
    return len(Dictionary.load(str(translation_data / "dict.de.txt")))


POST = {"encoder_normalize_before": False, "decoder_normalize_before": False}
SEPARATE = {"share_all_embeddings": False, "share_decoder_input_output_embed": False}
CASES = [
    (PUBLISHED, {}, "transformer_pn"),
    (PUBLISHED, POST, "transformer_pn"),
    (("batch", "batch", "layer", "layer"), {}, "transformer_bn"),
    (("layer", "power", "power", "layer"), SEPARATE, "transformer_norm"),
    (("power", "power", "power", "power"), POST, "transformer_norm"),
    (("layer", "layer", "layer", "batch"), {"decoder_normalize_before": False}, "transformer_norm"),
    (("layer", "layer", "layer", "layer"), {}, "transformer_norm"),
]
KINDS = {"power": PowerNorm, "batch": BatchNorm, "layer": LayerNorm}


@pytest.mark.parametrize(("norms", "more", "name"), CASES)
def test_a_converted_model_computes_what_the_released_one_does(norms, more, name, translation_data, words, tmp_path):
    """Trap 21: checkpoints of the released code, with the options of fairseq 0.8 and other names and shapes."""
    old = checkpoint(options(norms, **more), words)
    new = convert(save(old, tmp_path / "old.pt"), tmp_path / "new.pt")
    model, cfg, _ = load(new, translation_data)
    assert cfg.model._name == name
    tokens = sentences(7, 5, 2, words=words, left=True)
    with torch.no_grad():
        actual = model.encoder(tokens, tokens.ne(1).sum(1))["encoder_out"][0]
    wanted = encoded(old["model"], tokens, post="encoder_normalize_before" in more)
    real = tokens.ne(1).t()
    torch.testing.assert_close(actual[real], wanted[real], rtol=1e-4, atol=1e-5)

    kinds = [KINDS[norm] for norm in norms]
    for layer in model.encoder.layers:
        assert [type(layer.self_attn_layer_norm), type(layer.final_layer_norm)] == kinds[:2]
    for layer in model.decoder.layers:
        assert [type(layer.self_attn_layer_norm), type(layer.encoder_attn_layer_norm)] == [kinds[2]] * 2
        assert type(layer.final_layer_norm) is kinds[3]
    for stack, kind in ((model.encoder, kinds[1]), (model.decoder, kinds[3])):
        assert stack.layer_norm is None or type(stack.layer_norm) is kind
    for site, norm in model.named_modules():
        if isinstance(norm, PowerNorm):
            warmup = 1000 if site == "encoder.layer_norm" else 8000
            assert (norm.groups, norm.numerics, norm.warmup_updates) == (HEADS, "released", warmup)
            assert torch.equal(norm.running_psi_sq, old["model"][f"{site}.running_phi"].flatten())
            torch.testing.assert_close(norm.running_nu, 0.1 * old["model"][f"{site}.ema_gz"].flatten())
        if isinstance(norm, BatchNorm):
            assert (norm.groups, norm.momentum) == (1, 0.05)
        if isinstance(norm, (PowerNorm, BatchNorm)):
            assert (norm.updates_tracked, norm.updates_skipped, norm.eps) == (321, 0, 1e-5)


def test_the_config_is_the_runs(words, translation_data, tmp_path):
    path = save(checkpoint(options(warmup_updates=4000), words), tmp_path / "old.pt")
    new = convert(path, tmp_path / "new.pt")
    state = checkpoint_utils.load_checkpoint_to_cpu(str(new))
    cfg, model = state["cfg"], state["cfg"].model
    shape = [model[f"{stack}_{key}"] for stack in ("encoder", "decoder") for key in ("embed_dim", "ffn_embed_dim")]
    assert shape == [WIDTH, HIDDEN] * 2 and (model.encoder_layers, model.decoder_attention_heads) == (LAYERS, HEADS)
    assert (model.dropout, model.attention_dropout, model.activation_dropout) == (0.3, 0.1, 0.1)  # from relu_dropout
    assert model.norm_numerics == "released" and model.norm_warmup_updates == 4000
    assert (cfg.task.source_lang, cfg.task.left_pad_source, cfg.task.left_pad_target) == ("de", True, False)
    assert cfg.criterion.label_smoothing == 0.1 and cfg.lr_scheduler.warmup_updates == 4000
    assert (cfg.dataset.max_tokens, cfg.optimizer.weight_decay) == (4096, 1e-4)
    assert cfg.checkpoint.save_dir == "log/it's [here]" and cfg.common.user_dir is None
    assert state["last_optimizer_state"] is None and state["optimizer_history"][-1]["num_updates"] == 321
    assert averaged_statistics(state) is None


@pytest.mark.slow
def test_fairseq_generates_validates_and_trains_on(words, translation_data, tmp_path, capsys):
    new = convert(save(checkpoint(options(), words), tmp_path / "old.pt"), tmp_path / "new.pt")
    shown = capsys.readouterr().out
    assert "without the optimiser's state" in shown and "--finetune-from-model" in shown
    common = [translation_data, "--user-dir", PLUGIN, "--path", new]
    output = in_this_process("fairseq-generate", *common, "--batch-size", 20, "--max-len-b", 10, "--beam", 2)
    assert len(hypotheses(output)) == 20
    in_this_process("fairseq-validate", *common, "--task", "translation", "--batch-size", 20)
    arguments = ["--arch", "transformer_pn", "--optimizer", "adam", "--max-update", 2, "--max-tokens", 1000]
    for stack in ("encoder", "decoder"):
        arguments += [f"--{stack}-embed-dim", WIDTH, f"--{stack}-ffn-embed-dim", HIDDEN, f"--{stack}-layers", LAYERS]
        arguments += [f"--{stack}-attention-heads", HEADS]
    arguments += ["--num-workers", 0, "--required-batch-size-multiple", 1, "--disable-validation"]
    arguments += ["--norm-numerics", "released", "--save-dir", tmp_path / "more", "--no-epoch-checkpoints"]
    in_this_process(
        "fairseq-train", translation_data, "--user-dir", PLUGIN, *arguments, "--finetune-from-model", new
    )  # fmt: skip
    trained = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "more" / "checkpoint_last.pt"))
    assert trained["model"]["encoder.layer_norm.updates_tracked"] == 323 and averaged_statistics(trained) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["pn_g1_warm3", "pn_g2_warm0"])
def test_a_converted_powernorm_goes_on_like_the_released_one(golden, case, dtype):
    """From every state of the recorded run: evaluation after the last, else the next training step."""
    _, _, channels, groups, warmup, steps, _ = (int(value) for value in golden[f"{case}/meta"])

    def array(key):
        return torch.as_tensor(golden[f"{case}/{key}"], dtype=dtype)

    for index in range(steps):
        old = {"weight": array("weight"), "bias": array("bias"), "iters": torch.tensor([index + 1])}
        for name in ("running_phi", "ema_gz"):
            old[name] = array(f"{index}/{name}").view(1, channels, 1, 1)
        norm = PowerNorm(channels, groups, warmup_updates=warmup, numerics="released").to(dtype)
        norm.load_state_dict(converted_norm("power", old))
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        if index == steps - 1:
            close(norm.eval()(array("eval/x")), golden[f"{case}/eval/y"], tolerance)
        else:
            y, dx = step(norm, array(f"{index + 1}/x"), array(f"{index + 1}/grad_y"))
            norm.commit()
            close(y, golden[f"{case}/{index + 1}/y"], tolerance)
            close(dx, golden[f"{case}/{index + 1}/grad_x"], tolerance)
            close(norm.running_psi_sq, golden[f"{case}/{index + 1}/running_phi"], tolerance)
            close(norm.running_nu * 10, golden[f"{case}/{index + 1}/ema_gz"], tolerance)


def test_a_converted_batchnorm_goes_on_like_the_released_one(golden):
    def array(key):
        return torch.as_tensor(golden[f"bn_nopad/{key}"])

    old = {name: array(f"2/{name}") for name in ("running_mean", "running_var")}
    old.update(weight=array("weight"), bias=array("bias"), num_batches_tracked=torch.tensor(3))
    norm = BatchNorm(8, momentum=0.05, groups=1).double()
    norm.load_state_dict(converted_norm("batch", old))
    y, dx = step(norm, array("3/x"), array("3/grad_y"))
    norm.commit()
    for value, key in (
        (y, "y"),
        (dx, "grad_x"),
        (norm.running_mean, "running_mean"),
        (norm.running_var, "running_var"),
    ):
        close(value, golden[f"bn_nopad/3/{key}"], 1e-12)


def test_half_precision_statistics_become_single_precision():
    old = {key: value.half() for key, value in norm_entries("power", torch.rand).items() if key != "iters"}
    new = converted_norm("power", {**old, "iters": torch.tensor([70000])})
    assert new["weight"].dtype == torch.half
    assert {new[key].dtype for key in ("running_psi_sq", "running_nu", "updates_tracked")} == {torch.float32}
    assert new["updates_tracked"] == 70000 and new["running_psi_sq"].shape == (WIDTH,)


@pytest.fixture(scope="module")
def target():
    """The model that the published options describe."""
    args = options()
    return build_model(run_config(args, model_fields(args)), {"encoder": 50, "decoder": 50})


def test_one_attention_matrix_and_old_position_tables(target):
    state = weights(options(), 50)
    wanted = convert_model(state, target)
    for kind in ("weight", "bias"):
        parts = [state.pop(f"encoder.layers.0.self_attn.{part}_proj.{kind}") for part in "qkv"]
        state[f"encoder.layers.0.self_attn.in_proj_{kind}"] = torch.cat(parts)
    state["encoder.embed_positions.weights"] = torch.rand(1026, WIDTH)
    actual = convert_model(state, target)
    assert list(actual) == list(wanted) and all(torch.equal(actual[key], wanted[key]) for key in wanted)


def test_separate_vocabularies_learned_positions_and_adaptive_softmax():
    more = dict(share_all_embeddings=False, encoder_learned_pos=True, share_decoder_input_output_embed=False)
    old = checkpoint(options(**more), 50, 60)
    new = convert_state(old)[0]["model"]
    assert torch.equal(new["decoder.output_projection.weight"], old["model"]["decoder.embed_out"])
    assert new["encoder.embed_tokens.weight"].shape == (50, WIDTH)
    assert new["encoder.embed_positions.weight"].shape == (1026, WIDTH)
    old["args"].adaptive_softmax_cutoff = "20,40"
    del old["model"]["decoder.embed_out"]
    # The head has the 20 words and a class for each of two bands, which are 1/4 and 1/16 as wide.
    shapes = {"head.weight": (22, 16), "tail.0.0.weight": (4, 16), "tail.0.2.weight": (20, 4)}
    shapes.update({"tail.1.0.weight": (1, 16), "tail.1.2.weight": (20, 1), "version": (1,)})
    old["model"].update({f"decoder.adaptive_softmax.{key}": torch.rand(shape) for key, shape in shapes.items()})
    state = convert_state(old)[0]
    assert list(state["cfg"].model.adaptive_softmax_cutoff) == [20, 40]
    assert "decoder.adaptive_softmax.head.weight" in state["model"] and "decoder.embed_out" not in state["model"]


def test_the_warmup_of_a_final_decoder_powernorm_and_a_criterion_are_noted():
    notes = convert_state(checkpoint(options(["power"] * 4, criterion="label_smoothed_cross_entropy_with_reg")))[1]
    assert len(notes) == 2
    assert "criterion is label_smoothed_cross_entropy:" in notes[0] and "warm-up of 1000" in notes[1]


def test_averaged_statistics_are_noted():
    """The fork's averaging script averages the counters too."""
    old = checkpoint(options())
    for key, value in old["model"].items():
        if key.endswith("iters"):
            value.fill_(280)
    notes = convert_state(old)[1]
    assert len(notes) == 1 and "follow 280 of the run's 321 updates" in notes[0]


def test_statistics_that_are_not_finite_are_noted():
    old = checkpoint(options())
    old["model"]["encoder.layers.1.final_layer_norm.ema_gz"][0, 3] = math.nan
    assert convert_state(old)[1] == [
        "encoder.layers.1.final_layer_norm: running_nu is not finite in 1 of 16 channels",
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"norms": ("power", "group", "layer", "none")}, "for decoder_norm_ff none, encoder_norm_ff group"),
        ({"encoder_spec_norm": True}, "encoder_spec_norm"),
        ({"layer_wise_attention": True, "arch": "roberta_base"}, "layer_wise_attention .*, arch roberta_base"),
        ({"arch": "transformer_lm", "task": "language_modeling"}, "task language_modeling, arch transformer_lm"),
        ({"norms": ("power", "batch", "layer", "layer")}, "encoder_norm_self would have 4 groups, BatchNorm 1"),
    ],
)
def test_options_without_counterpart_are_named(more, message):
    with pytest.raises(UserError, match=message):
        model_fields(options(**more))


def test_powernorm_and_batchnorm_with_one_head():
    args = options(("power", "batch", "layer", "layer"), encoder_attention_heads=1)
    model = convert_state(checkpoint(args))[0]["cfg"].model
    assert (model.norm_groups, model.norm_momentum, model.norm_numerics) == (1, 0.05, "released")


def test_a_missing_warmup_is_named():
    args = options()
    del args.warmup_updates
    with pytest.raises(UserError, match="no warmup_updates"):
        model_fields(args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.pop("encoder.layers.0.self_attn_layer_norm.ema_gz"), "missing entries: .*norm.ema_gz$"),
        (lambda model: model.pop("decoder.layers.1.fc2.bias"), r"missing entries: decoder\.layers\.1\.fc2\.bias$"),
        (lambda model: model.update({"encoder.extra.u": torch.ones(1)}), r"unknown entries: encoder\.extra\.u$"),
        (
            lambda model: model.update({"decoder.layer_norm.running_phi": torch.ones(1, 16, 1, 1)}),
            r"unknown entries: decoder\.layer_norm\.running_phi$",
        ),
        (
            lambda model: model.update({"encoder.layers.0.fc1.bias": torch.ones(9)}),
            r"other shapes: encoder\.layers\.0\.fc1\.bias is \(9,\), by its options \(24,\)$",
        ),
        (lambda model: model["decoder.version"].fill_(2), r"decoder\.version below 3"),
    ],
)
def test_entries_that_do_not_fit_are_named(change, message, target):
    state = weights(options(), 50)
    change(state)
    with pytest.raises(UserError, match=message):
        convert_model(state, target)


def test_nothing_is_written_when_something_is_refused(tmp_path, capsys):
    old = checkpoint(options())
    old["model"]["encoder.extra.u"] = torch.ones(1)
    path = save(old, tmp_path / "old.pt")
    assert main(["convert", str(path), "--output", str(tmp_path / "new.pt")]) == 1
    assert "unknown entries: encoder.extra.u" in capsys.readouterr().err
    del old["model"]["decoder.embed_tokens.weight"]
    save(old, path)
    assert main(["convert", str(path), "--output", str(tmp_path / "new.pt")]) == 1
    assert "missing entries: decoder.embed_tokens.weight" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["old.pt"]


def test_missing_and_unknown_entries_of_one_norm_are_named():
    with pytest.raises(UserError, match="missing: bias, ema_gz, iters, weight; unknown: running_mean"):
        converted_norm("power", {"running_phi": torch.ones(1, 4, 1, 1), "running_mean": torch.ones(4)})
