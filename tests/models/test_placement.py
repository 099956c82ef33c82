"""Which norm stands where, which options reach it, and what is refused."""

import pytest

from powernorm_fairseq.models.placement import DECODER_SITES, ENCODER_SITES, field_of
from powernorm_fairseq.norms import NORMS
from tests.models.helpers import build, command_line, hydra, small

POST = {"encoder_normalize_before": False, "decoder_normalize_before": False}


def placed(model):
    """Site -> norm, read from the modules."""
    found = {}
    if hasattr(model, "encoder"):
        for layer in model.encoder.layers:
            found.setdefault("encoder_self", set()).add(type(layer.self_attn_layer_norm))
            found.setdefault("encoder_ff", set()).add(type(layer.final_layer_norm))
        found["encoder_final"] = {type(model.encoder.layer_norm)}
        found["encoder_embedding"] = {type(model.encoder.layernorm_embedding)}
    for layer in model.decoder.layers:
        found.setdefault("decoder_self", set()).add(type(layer.self_attn_layer_norm))
        if layer.encoder_attn is not None:
            found.setdefault("decoder_cross", set()).add(type(layer.encoder_attn_layer_norm))
        found.setdefault("decoder_ff", set()).add(type(layer.final_layer_norm))
    found["decoder_final"] = {type(model.decoder.layer_norm)}
    found["decoder_embedding"] = {type(model.decoder.layernorm_embedding)}
    names = {norm: name for name, norm in NORMS.items()}
    assert all(len(types) == 1 for types in found.values())
    return {site: names[next(iter(types))] for site, types in found.items() if types != {type(None)}}


def sites(encoder, decoder):
    return {**dict.fromkeys(ENCODER_SITES, encoder), **dict.fromkeys(DECODER_SITES, decoder)}


def without(table, *left_out):
    return {site: name for site, name in table.items() if not site.endswith(left_out)}


@pytest.mark.parametrize(
    ("family", "encoder", "decoder"),
    [("pn", "power", "layer"), ("bn", "batch", "layer"), ("adanorm", "ada", "ada"), ("norm", "layer", "layer")],
)
def test_published_translation_placement(family, encoder, decoder):
    name = f"transformer_{family}_tiny"
    everywhere = sites(encoder, decoder)
    assert placed(small(name)) == without(everywhere, "embedding")
    assert placed(small(name, **POST)) == without(everywhere, "embedding", "final")
    assert placed(small(name, layernorm_embedding=True)) == everywhere


@pytest.mark.parametrize(("family", "norm"), [("pn", "power"), ("bn", "batch"), ("adanorm", "ada"), ("norm", "layer")])
def test_published_language_model_placement(family, norm):
    everywhere = dict.fromkeys(["decoder_self", "decoder_ff", "decoder_final", "decoder_embedding"], norm)
    name = f"transformer_lm_{family}_tiny"
    assert placed(small(name)) == without(everywhere, "embedding")
    assert placed(small(name, decoder_normalize_before=False)) == without(everywhere, "embedding", "final")
    assert placed(small(name, layernorm_embedding=True)) == everywhere


@pytest.mark.parametrize("norm", NORMS)
def test_one_norm_everywhere(norm):
    assert set(placed(small(norm=norm, layernorm_embedding=True)).values()) == {norm}
    assert set(placed(small("transformer_lm_norm_tiny", norm=norm)).values()) == {norm}


@pytest.mark.parametrize("site", ENCODER_SITES + DECODER_SITES)
def test_each_site_has_its_own_flag(site):
    """One site is set to RMSNorm; all the others stay as published."""
    flag = "--" + field_of(site).replace("_", "-")
    model = build(command_line("transformer_pn_tiny", "--layernorm-embedding", flag, "rms"))
    assert placed(model) == {**sites("power", "layer"), site: "rms"}


def test_released_flags():
    """The four flags of the released code, as its script gives them."""
    names = ["power", "power", "layer", "layer"]
    flags = ["--encoder-norm-self", "--encoder-norm-ff", "--decoder-norm-self", "--decoder-norm-ff"]
    pairs = [part for pair in zip(flags, names) for part in pair]
    assert placed(build(command_line("transformer_norm_tiny", *pairs))) == {
        **without(sites("layer", "layer"), "embedding"),
        "encoder_self": "power",
        "encoder_ff": "power",
    }


def test_options_reach_power_norm():
    flags = ["--norm-groups", 2, "--norm-alpha-fwd", 0.8, "--norm-alpha-bkw", 0.7, "--norm-eps", 0.001]
    flags += ["--norm-numerics", "released", "--no-norm-affine", "--norm-warmup-updates", 11]
    norm = build(command_line("transformer_pn_tiny", *flags)).encoder.layers[1].final_layer_norm
    assert (norm.groups, norm.alpha_fwd, norm.alpha_bkw, norm.eps) == (2, 0.8, 0.7, 0.001)
    assert (norm.numerics, norm.weight, norm.bias, norm.warmup_updates) == ("released", None, None, 11)


def test_options_reach_the_other_norms():
    batch = small("transformer_bn_tiny", norm_momentum=0.05, norm_groups=4).encoder.layer_norm
    assert (batch.momentum, batch.groups) == (0.05, 4)
    assert small("transformer_bn_tiny", norm_cumulative=True).encoder.layer_norm.momentum is None
    ada = small("transformer_adanorm_tiny", norm_scale=2.0, norm_k=0.2, norm_numerics="released").decoder.layer_norm
    assert (ada.scale, ada.k, ada.numerics) == (2.0, 0.2, "released")
    assert small(norm="detach", norm_detach="sigma").encoder.layer_norm.detach == "sigma"


def test_groups_are_the_attention_heads_of_the_stack():
    fields = {"norm": "power", "encoder_attention_heads": 8, "decoder_attention_heads": 2}
    model = small(**fields)
    assert {layer.self_attn_layer_norm.groups for layer in model.encoder.layers} == {8}
    assert model.decoder.layers[0].encoder_attn_layer_norm.groups == 2
    assert small(norm="power_v").encoder.layer_norm.groups == 4
    assert small("transformer_bn_tiny").encoder.layer_norm.groups == 0
    assert small("transformer_pn_tiny", norm_groups=0).encoder.layer_norm.groups == 0


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("transformer_norm_tiny", {"norm": "layers"}, "--norm layers: no such norm; choose one of .*power"),
        ("transformer_pn_tiny", {"encoder_norm_self": "pn"}, "--encoder-norm-self pn: no such norm"),
        ("transformer_pn_tiny", {"encoder_norm_final": "rms", **POST}, "--encoder-norm-final rms: a post-norm"),
        ("transformer_lm_pn_ptb", {"decoder_norm_final": "rms"}, "--decoder-norm-final rms: a post-norm decoder"),
        ("transformer_pn_tiny", {"decoder_norm_final": "rms", "no_decoder_final_norm": True}, "leaves it out"),
        ("transformer_pn_tiny", {"decoder_norm_embedding": "rms"}, "--layernorm-embedding"),
        ("transformer_pn_tiny", {"decoder_norm_cross": "rms", "no_cross_attention": True}, "--no-cross-attention"),
        ("transformer_pn_tiny", {"norm_groups": 3}, "--encoder-norm-self power: groups .*3"),
        ("transformer_norm_tiny", {"norm_groups": 4}, "--norm-groups has no effect: .*power.* and the model has layer"),
        ("transformer_pn_tiny", {"norm_momentum": 0.1}, "--norm-momentum has no effect: batch take"),
        ("transformer_adanorm_tiny", {"norm_affine": False}, "--norm-affine has no effect"),
        ("transformer_norm_tiny", {"norm_warmup_updates": 5}, "--norm-warmup-updates has no effect"),
        ("transformer_norm_tiny", {"norm_warmup_updates": 0}, "--norm-warmup-updates has no effect"),
        ("transformer_pn_tiny", {"norm_warmup_updates_final": 5, **POST}, "--norm-warmup-updates-final has no effect"),
        ("transformer_pn_tiny", {"norm_warmup_updates_final": 0, **POST}, "--norm-warmup-updates-final has no effect"),
        ("transformer_bn_tiny", {"norm_cumulative": True, "norm_momentum": 0.3}, "--norm-momentum has no effect"),
        ("transformer_pn_tiny", {"decoder_output_dim": 64}, "need one width: --decoder-input-dim 128, .* 64"),
        ("transformer_lm_pn_tiny", {"adaptive_input": True}, "--no-share-decoder-input-output-embed"),
        ("transformer_pn_tiny", {"norm_alpha_fwd": 1.0}, "alpha_fwd must be at least 0 and less than 1"),
        ("transformer_pn_tiny", {"norm_warmup_updates": -1}, "must not be negative"),
        ("transformer_pn_tiny", {"norm_log_interval": -1}, "--norm-log-interval must not be negative"),
        ("transformer_adanorm_tiny", {"norm_log_interval": 5}, "--norm-log-interval has no effect"),
        ("transformer_pn_tiny", {"norm_numerics": "exact"}, "numerics must be one of paper, released"),
        ("transformer_lm_pn_tiny", {"tie_adaptive_weights": True}, "needs --adaptive-input"),
        ("transformer_lm_pn_wiki103", {"adaptive_softmax_factor": 4.0}, "one factor on both sides"),
        ("transformer_lm_pn_wiki103", {}, "--adaptive-input-cutoff 20000,40000,200000: the dictionary has 50 words"),
    ],
)
def test_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        build(hydra(name, **fields))


@pytest.mark.parametrize(
    ("group", "option", "value", "words"),
    [
        (
            "distributed_training",
            "ddp_backend",
            "fully_sharded",
            "--ddp-backend fully_sharded does not work with power",
        ),
        ("distributed_training", "ddp_backend", "slowmo", "--ddp-backend slowmo"),
        ("distributed_training", "pipeline_model_parallel", True, "--pipeline-model-parallel"),
        ("optimization", "use_bmuf", True, "--use-bmuf"),
        ("common", "model_parallel_size", 2, "--model-parallel-size"),
        ("common", "tpu", True, "--tpu"),
    ],
)
def test_backends_that_would_keep_wrong_statistics_are_refused(group, option, value, words):
    """Trap 17: where workers cannot share running statistics, norms that have them are refused; others are not."""
    for name in ("transformer_pn_tiny", "transformer_adanorm_tiny"):
        cfg = hydra(name)
        cfg.distributed_training.distributed_world_size = 2
        build(cfg)
        cfg[group][option] = value
        if name == "transformer_adanorm_tiny":
            build(cfg)
        else:
            with pytest.raises(ValueError, match=words):
                build(cfg)


def test_what_workers_share_is_an_option(caplog):
    cfg = hydra("transformer_bn_tiny", norm_sync="none")
    cfg.distributed_training.distributed_world_size = 2
    assert build(cfg).encoder.layer_norm.sync == "none"
    assert "each of the 2 workers keeps statistics of its own (batch)" in caplog.text
    assert small("transformer_pn_tiny", norm_sync="batch").encoder.layer_norm.sync == "batch"
    with pytest.raises(ValueError, match="--norm-sync has no effect"):
        build(hydra("transformer_adanorm_tiny", norm_sync="batch"))
    with pytest.raises(ValueError, match="sync must be one of running, batch, none"):
        build(hydra("transformer_pn_tiny", norm_sync="all"))
    with pytest.raises(ValueError, match="wait for each other for ever"):
        build(hydra("transformer_pn_tiny", norm_sync="batch", encoder_layerdrop=0.1))


def test_a_placement_may_not_be_named_by_norm_alone():
    """--norm would be read as a placement of its own by the models that have a published one."""
    with pytest.raises(SystemExit):
        command_line("transformer_pn_tiny", "--norm", "layer")
