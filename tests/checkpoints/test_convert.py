"""Checkpoints of the released PowerNorm code, built here under the key names and options of its fairseq 0.8."""

import math
import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging import meters
from fairseq.modules import SinusoidalPositionalEmbedding

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.convert import (
    build_model,
    convert_model,
    convert_state,
    converted_norm,
    load_released,
    model_fields,
    run_config,
)
from powernorm_fairseq.checkpoints.inspect import averaged_statistics
from powernorm_fairseq.norms import BatchNorm, LayerNorm, PowerNorm
from powernorm_fairseq.processes import UserError
from tests.commands import PLUGIN, hypotheses, in_this_process
from tests.models.helpers import sentences
from tests.norms.helpers import close, step

WIDTH, HIDDEN, HEADS, LAYERS = 16, 24, 4, 2
PUBLISHED = ("power", "power", "layer", "layer")


def options(norms=PUBLISHED, **more):
    """A namespace as fairseq 0.8 stores it; ``norms`` in the order of the fork's scripts."""
    stack = {"embed_path": None, "embed_dim": WIDTH, "ffn_embed_dim": HIDDEN, "layers": LAYERS}
    stack.update(attention_heads=HEADS, normalize_before=True, learned_pos=False, layerdrop=0, layers_to_keep=None)
    both = {f"{name}_{key}": value for name in ("encoder", "decoder") for key, value in stack.items()}
    flags = dict(zip(("encoder_norm_self", "encoder_norm_ff", "decoder_norm_self", "decoder_norm_ff"), norms))
    flags.update(encoder_spec_norm=False, dropout_type="none", dropout_gama=0.5, tbmf_wrapper=False)
    flags.update(arch="transformer_iwslt_de_en_v2", task="translation", source_lang="de", target_lang="en")
    flags.update(data="data-bin/iwslt14.tokenized.de-en.joined/", left_pad_source="True", left_pad_target="False")
    flags.update(raw_text=False, lazy_load=False, max_source_positions=1024, max_target_positions=1024)
    flags.update(upsample_primary=1, dropout=0.3, attention_dropout=0.1, activation_dropout=0.0, relu_dropout=0.1)
    flags.update(activation_fn="relu", share_all_embeddings=True, share_decoder_input_output_embed=True)
    flags.update(adaptive_softmax_cutoff=None, adaptive_softmax_dropout=0, adaptive_input=False)
    flags.update(no_token_positional_embeddings=False, no_cross_attention=False, cross_self_attention=False)
    flags.update(layer_wise_attention=False, decoder_input_dim=WIDTH, decoder_output_dim=WIDTH)
    flags.update(criterion="label_smoothed_cross_entropy", label_smoothing=0.1, optimizer="adam", adam_eps=1e-8)
    flags.update(adam_betas="(0.9, 0.98)", weight_decay=1e-4, lr=[0.0015], min_lr=1e-9, clip_norm=0.0)
    flags.update(lr_scheduler="inverse_sqrt", warmup_updates=8000, warmup_init_lr=1e-7, update_freq=[1])
    flags.update(max_tokens=4096, max_sentences=None, max_sentences_valid=None, max_tokens_valid=4096)
    flags.update(ddp_backend="no_c10d", early_stop=5, keep_last_epochs=5, save_dir="log/it's [here]", seed=1)
    flags.update(user_dir="/gone/plugin", fp16=False, sentence_avg=False, log_interval=50, max_update=0)
    # And what the fork's parser leaves in each checkpoint.
    flags.update(
        no_progress_bar=True, log_format="simple", tensorboard_logdir="", cpu=False, memory_efficient_fp16=False
    )
    flags.update(fp16_init_scale=128, fp16_scale_window=None, fp16_scale_tolerance=0.0, min_loss_scale=1e-4)
    flags.update(threshold_loss_scale=None, empty_cache_freq=0, tokenizer=None, bpe=None, num_workers=1)
    flags.update(skip_invalid_size_inputs_valid_test=False, required_batch_size_multiple=8, dataset_impl=None)
    flags.update(train_subset="train", valid_subset="valid", validate_interval=1, fixed_validation_seed=None)
    flags.update(disable_validation=False, curriculum=0, distributed_world_size=4, distributed_rank=0, device_id=0)
    flags.update(distributed_backend="nccl", distributed_init_method="tcp://localhost:17000", distributed_port=-1)
    flags.update(distributed_no_spawn=False, bucket_cap_mb=25, fix_batches_to_gpus=False, fast_stat_sync=False)
    flags.update(find_unused_parameters=False, max_epoch=0, use_bmuf=False, restore_file="checkpoint_last.pt")
    flags.update(reset_dataloader=False, reset_lr_scheduler=False, reset_meters=False, reset_optimizer=False)
    flags.update(optimizer_overrides="{}", save_interval=1, save_interval_updates=10000, keep_interval_updates=20)
    flags.update(no_save=False, no_epoch_checkpoints=False, no_last_checkpoints=False, no_save_optimizer_state=False)
    flags.update(best_checkpoint_metric="loss", maximize_best_checkpoint_metric=False, load_alignments=False)
    return Namespace(**{**both, **flags, **more})


def norm_entries(name, rand):
    entries = {"weight": 0.5 + rand(WIDTH), "bias": rand(WIDTH) - 0.5}
    if name == "power":
        entries["running_phi"] = 0.2 + rand(1, WIDTH, 1, 1)
        entries["ema_gz"] = rand(1, WIDTH, 1, 1) - 0.5
        entries["iters"] = torch.tensor([321])
    if name == "batch":
        entries.update(running_mean=rand(WIDTH) - 0.5, running_var=0.2 + rand(WIDTH))
        entries["num_batches_tracked"] = torch.tensor(321)
    return entries


def weights(args, words, target_words=None):
    """A state dict in the fork's layout, with random numbers."""
    generator = torch.Generator().manual_seed(5)
    state = OrderedDict()
    state._metadata = OrderedDict({"": {"version": 1}})  # torch's

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    def linear(name, inputs, outputs):
        state[f"{name}.weight"] = (rand(outputs, inputs) - 0.5) * 2 / math.sqrt(inputs)
        state[f"{name}.bias"] = rand(outputs) - 0.5

    for stack, size in (("encoder", words), ("decoder", target_words or words)):
        option = vars(args).get
        norms = {"self": option(f"{stack}_norm_self"), "ff": option(f"{stack}_norm_ff")}
        state[f"{stack}.version"] = torch.tensor([3.0])
        state[f"{stack}.embed_tokens.weight"] = rand(size, WIDTH) / 4
        if option(f"{stack}_learned_pos"):
            state[f"{stack}.embed_positions.weight"] = rand(1024 + 2, WIDTH)
        else:
            state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        sites = [("self_attn", norms["self"])]
        if stack == "decoder" and not args.no_cross_attention:
            sites.append(("encoder_attn", norms["self"]))
        for layer in range(option(f"{stack}_layers")):
            place = f"{stack}.layers.{layer}"
            for attention, norm in sites:
                for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    linear(f"{place}.{attention}.{part}", WIDTH, WIDTH)
                entries = norm_entries(norm, rand)
                state.update({f"{place}.{attention}_layer_norm.{key}": value for key, value in entries.items()})
            linear(f"{place}.fc1", WIDTH, HIDDEN)
            linear(f"{place}.fc2", HIDDEN, WIDTH)
            entries = norm_entries(norms["ff"], rand)
            state.update({f"{place}.final_layer_norm.{key}": value for key, value in entries.items()})
        if option(f"{stack}_normalize_before"):
            entries = norm_entries(norms["ff"], rand)
            state.update({f"{stack}.layer_norm.{key}": value for key, value in entries.items()})
    if args.share_all_embeddings:
        state["decoder.embed_tokens.weight"] = state["encoder.embed_tokens.weight"]
    elif not args.share_decoder_input_output_embed:
        state["decoder.embed_out"] = rand(target_words or words, WIDTH)
    return state


def checkpoint(args, words=50, target_words=None):
    history = {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    history.update(lr_scheduler_state={"best": None}, num_updates=321)
    return {
        "args": args,
        "model": weights(args, words, target_words),
        "optimizer_history": [history],
        "extra_state": {
            "train_iterator": {"epoch": 7, "iterations_in_epoch": 12},
            "val_loss": 4.2,
            "train_meters": {"loss": meters.AverageMeter(), "wall": meters.TimeMeter()},
        },
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.001}]},
    }


@pytest.fixture
def save(monkeypatch):
    """Saves as the fork does: torch's old file format, and meters of the module where fairseq 0.8 had them."""

    def write(state, path):
        with monkeypatch.context() as patch:
            for kind in (meters.AverageMeter, meters.TimeMeter):
                patch.setattr(kind, "__module__", "fairseq.meters")
            torch.save(state, path, _use_new_zipfile_serialization=False)
        return path

    return write


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
def test_a_converted_model_computes_what_the_released_one_does(
    norms, more, name, translation_data, words, save, tmp_path
):
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


def test_the_config_is_the_runs(save, words, translation_data, tmp_path):
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
def test_fairseq_generates_validates_and_trains_on(save, words, translation_data, tmp_path, capsys):
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


def test_nothing_is_written_when_something_is_refused(save, tmp_path, capsys):
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


class Trap:
    """Unpickled as usual, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"state_dict": {}}, "no fairseq checkpoint"),
        ([1], "no fairseq checkpoint"),
        ({"model": {}, "args": None, "cfg": {}}, "written by fairseq 0.10 or later"),
        ({"model": {}, "args": Namespace(arch="transformer")}, "another fairseq than the released PowerNorm code"),
    ],
)
def test_files_of_other_programs_are_refused(state, message, tmp_path):
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match=message):
        load_released(tmp_path / "other.pt")


def dotted(code):
    """A pickle that calls eval, found by a path of names that begins with one that is allowed."""

    def text(word):
        return pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode()

    def call(argument):
        return text(argument) + pickle.TUPLE1 + pickle.REDUCE

    name = text("torch._utils") + text("_rebuild_tensor.__builtins__.__getitem__") + pickle.STACK_GLOBAL
    return pickle.PROTO + bytes([4]) + name + call("eval") + call(code) + pickle.STOP


def test_broken_files_are_refused_and_no_code_in_a_file_runs(save, tmp_path, capsys):
    with pytest.raises(UserError, match="no checkpoint"):
        load_released(tmp_path / "none.pt")
    old = checkpoint(options())
    whole = save({**old, "trap": Trap(tmp_path / "trapped")}, tmp_path / "old.pt")
    assert load_released(whole)["args"] == old["args"]
    assert not (tmp_path / "trapped").exists()
    with zipfile.ZipFile(tmp_path / "path.pt", "w") as archive:
        archive.writestr("a/data.pkl", dotted(f"open({str(tmp_path / 'trapped')!r}, 'w')"))
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")
    with pytest.raises(UserError):
        load_released(tmp_path / "path.pt")
    assert not (tmp_path / "trapped").exists()
    (tmp_path / "half.pt").write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        load_released(tmp_path / "half.pt")
    before = whole.read_bytes()
    assert main(["convert", str(whole), "--output", str(whole)]) == 1
    assert main(["convert", str(whole), "--output", str(tmp_path / "no" / "new.pt")]) == 1
    errors = capsys.readouterr().err
    assert "the output would replace" in errors and "no folder" in errors
    assert whole.read_bytes() == before


def test_both_of_torchs_file_formats(tmp_path):
    old = checkpoint(options())
    torch.save(old, tmp_path / "zip.pt")
    loaded = load_released(tmp_path / "zip.pt")
    assert all(torch.equal(value, loaded["model"][key]) for key, value in old["model"].items())
