"""The named models: dimensions, sizes, and the same model from both entry points."""

import subprocess
import sys

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

from powernorm_fairseq import compat
from powernorm_fairseq.models.architectures import (
    LANGUAGE_MODEL_FAMILIES,
    LANGUAGE_MODEL_SIZES,
    TRANSLATION_FAMILIES,
    TRANSLATION_SIZES,
    sized_name,
)
from tests.commands import ROOT
from tests.models.helpers import build, command_line, composed, hydra, inputs_for, is_language_model

TRANSLATION = [
    sized_name(f"transformer_{family}", size) for family in TRANSLATION_FAMILIES for size in TRANSLATION_SIZES
]
LANGUAGE_MODELS = [
    sized_name(f"transformer_lm_{family}", size) for family in LANGUAGE_MODEL_FAMILIES for size in LANGUAGE_MODEL_SIZES
]

# Layers, width, feed-forward width, heads, and the number of parameters with LayerNorm at every site, the embeddings
# left out (one matrix of the vocabulary's size times the width).
TRANSLATION_DIMS = {
    "": (6, 512, 2048, 8, 44_140_544),
    "iwslt_de_en": (6, 512, 1024, 4, 31_545_344),
    "wmt_en_de": (6, 512, 2048, 8, 44_140_544),
    "wmt_en_de_big": (6, 1024, 4096, 16, 176_361_472),
    "tiny": (2, 128, 256, 4, 663_040),
}
LANGUAGE_MODEL_DIMS = {
    "": (6, 512, 2048, 8, 18_915_328),
    "ptb": (3, 256, 2100, 1, 4_025_244),
    "tiny": (2, 128, 512, 4, 396_800),
}


def test_all_are_registered():
    assert len(TRANSLATION) == 20 and len(LANGUAGE_MODELS) == 16
    assert set(TRANSLATION + LANGUAGE_MODELS) <= set(MODEL_REGISTRY)


def transformer_parameters(layers, width, inner, norm=2, cross=False, final=True):
    """Parameters of a stack, written out: ``norm`` vectors of the width per norm."""
    attention = 4 * (width * width + width)
    feed_forward = width * inner + inner + inner * width + width
    sites = 3 if cross else 2
    layer = attention * (2 if cross else 1) + feed_forward + sites * norm * width
    return layers * layer + (norm * width if final else 0)


@pytest.mark.parametrize("name", TRANSLATION)
def test_translation_dims(name):
    size = name.split("_", 2)[2:]
    layers, width, inner, heads, count = TRANSLATION_DIMS[size[0] if size else ""]
    config = MODEL_DATACLASS_REGISTRY[name]()
    for stack in ("encoder", "decoder"):
        dims = [getattr(config, f"{stack}_{what}") for what in ("layers", "embed_dim", "ffn_embed_dim")]
        assert dims == [layers, width, inner]
        assert getattr(config, f"{stack}_attention_heads") == heads
        assert getattr(config, f"{stack}_normalize_before")
    assert config.share_all_embeddings
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.3, 0.1, 0.1)
    assert count == transformer_parameters(layers, width, inner) + transformer_parameters(
        layers, width, inner, cross=True
    )


@pytest.mark.parametrize("name", [name for name in LANGUAGE_MODELS if "wiki103" not in name])
def test_language_model_dims(name):
    size = name.split("_", 3)[3:]
    layers, width, inner, heads, count = LANGUAGE_MODEL_DIMS[size[0] if size else ""]
    config = MODEL_DATACLASS_REGISTRY[name]()
    assert [config.decoder_layers, config.decoder_embed_dim, config.decoder_ffn_embed_dim] == [layers, width, inner]
    assert config.decoder_attention_heads == heads
    assert config.share_decoder_input_output_embed and not config.adaptive_input
    post_norm = size == ["ptb"]
    assert config.decoder_normalize_before is not post_norm
    drops = (0.3, 0.0, 0.0) if post_norm else (0.3, 0.1, 0.1)
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == drops
    assert count == transformer_parameters(layers, width, inner, final=not post_norm)


def expected_parameters(name, words, layers=None):
    """The number of parameters: embeddings, and the stacks with gain and bias where the norm has them."""
    family, _, size = name.replace("transformer_lm_", "").replace("transformer_", "").partition("_")
    norm = 0 if family == "adanorm" else 2
    if is_language_model(name):
        layers, width, inner, _, _ = LANGUAGE_MODEL_DIMS[size]
        return words * width + transformer_parameters(layers, width, inner, norm, final=size != "ptb")
    all_layers, width, inner, _, _ = TRANSLATION_DIMS[size]
    dims = (layers or all_layers, width, inner, norm)
    return words * width + transformer_parameters(*dims) + transformer_parameters(*dims, cross=True)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRANSLATION + LANGUAGE_MODELS if "wiki103" not in name])
def test_both_entry_points_build_the_same_model(name):
    """Parameter count, state keys and one forward pass; the same seed, so the initial values are part of it."""
    # Two models of 176 million parameters take long to draw: only the first of the big ones has all its layers.
    layers = 1 if name.endswith("big") and "_pn_" not in name else None
    flags = ["--encoder-layers", layers, "--decoder-layers", layers] if layers else []
    fields = {"encoder_layers": layers, "decoder_layers": layers} if layers else {}
    configs = [
        command_line(name, "--warmup-updates", 50, *flags),
        hydra(name, "lr_scheduler.warmup_updates=50", **fields),
    ]
    states, outputs = [], []
    for cfg in configs:
        model = build(cfg, words=90).eval()
        assert type(model) is MODEL_REGISTRY[name]
        assert count(model) == expected_parameters(name, 90, layers)
        with torch.no_grad():
            outputs.append(model(**inputs_for(name))[0])
        states.append({key: value.shape for key, value in model.state_dict().items()})
        del model
    assert configs[0].model == configs[1].model
    assert states[0] == states[1]
    assert torch.equal(*outputs)


def wikitext_parameters(norm, words):
    """Parameters of the wiki103 models with ``norm`` vectors per norm; four bands, each with a projection."""
    width, bands = 256, 4
    classes = (bands - 1) * width
    return words * width + bands * width * width + classes + transformer_parameters(6, width, 2100, norm, final=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", LANGUAGE_MODEL_FAMILIES)
def test_wikitext_model(family):
    """Adaptive input and softmax over bands up to 200 000 words, tied, every band as wide as the model."""
    name = f"transformer_lm_{family}_wiki103"
    words = 200_100
    states, outputs = [], []
    for cfg in (command_line(name), hydra(name)):
        model = build(cfg, words).eval()
        assert model.decoder.adaptive_softmax.cutoff == [20_000, 40_000, 200_000, words]
        assert count(model) == wikitext_parameters(0 if family == "adanorm" else 2, words)
        with torch.no_grad():
            outputs.append(model(**inputs_for(name))[0])
        states.append({key: value.shape for key, value in model.state_dict().items()})
    assert states[0] == states[1]
    assert torch.equal(*outputs)


def test_a_model_named_by_its_config_group_is_the_same():
    """``model=NAME`` works where the plugin is imported before Hydra composes."""
    by_group = composed("translation", "inverse_sqrt", ("model=transformer_bn_iwslt_de_en",))["model"]
    assert by_group == dict(hydra("transformer_bn_iwslt_de_en").model)


def test_importing_twice_changes_nothing():
    """As an installed package, as --user-dir by path, and by running the module again."""
    program = """
import importlib, argparse
from fairseq import utils
import powernorm_fairseq
from fairseq.models import MODEL_REGISTRY
before = dict(MODEL_REGISTRY)
utils.import_user_module(argparse.Namespace(user_dir={path!r}))
importlib.reload(powernorm_fairseq.models.architectures)
assert MODEL_REGISTRY == before
assert "transformer_lm_pn_wiki103" in before
"""
    subprocess.run([sys.executable, "-c", program.format(path=str(ROOT / "powernorm_fairseq"))], check=True, cwd=ROOT)


def test_a_name_taken_by_another_plugin_is_refused():
    from powernorm_fairseq.models.architectures import TransformerPnTiny

    class Foreign(TransformerPnTiny):
        pass

    with pytest.raises(ValueError, match="transformer_pn_tiny"):
        compat.register_model("transformer_pn_tiny")(Foreign)
