"""The named models: every size is a model of its own, with its own dataclass.

So ``--arch NAME``, ``model=NAME`` and ``model._name=NAME`` give the same model; architecture functions, which fairseq
applies on the command line alone, are not used.
"""

from dataclasses import field, fields
from typing import Any, Dict

from powernorm_fairseq import compat
from powernorm_fairseq.models.config import LanguageModelConfig, OneNorm, TranslationConfig, derived
from powernorm_fairseq.models.stored import stored_when_asked_for
from powernorm_fairseq.models.transformer import NormTransformer
from powernorm_fairseq.models.transformer_lm import NormLanguageModel

# Published placements; "norm" has none and takes --norm.
TRANSLATION_FAMILIES = {
    "pn": {"encoder": "power", "decoder": "layer"},
    "bn": {"encoder": "batch", "decoder": "layer"},
    "adanorm": {"encoder": "ada", "decoder": "ada"},
    "norm": {"encoder": "layer", "decoder": "layer"},
}
LANGUAGE_MODEL_FAMILIES = {
    "pn": {"decoder": "power"},
    "bn": {"decoder": "batch"},
    "adanorm": {"decoder": "ada"},
    "norm": {"decoder": "layer"},
}


def both(**dims: int) -> Dict[str, Any]:
    """The same dimensions for encoder and decoder."""
    return {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in dims.items()}


TRANSLATION_SIZES: Dict[str, Dict[str, Any]] = {
    "": both(layers=6, embed_dim=512, ffn_embed_dim=2048, attention_heads=8),
    "iwslt_de_en": both(layers=6, embed_dim=512, ffn_embed_dim=1024, attention_heads=4),
    "wmt_en_de": both(layers=6, embed_dim=512, ffn_embed_dim=2048, attention_heads=8),
    "wmt_en_de_big": both(layers=6, embed_dim=1024, ffn_embed_dim=4096, attention_heads=16),
    "tiny": both(layers=2, embed_dim=128, ffn_embed_dim=256, attention_heads=4),
}

# The published language models are post-norm with one attention head; their attention itself is another.
PUBLISHED_LM = {
    "decoder_embed_dim": 256,
    "decoder_ffn_embed_dim": 2100,
    "decoder_attention_heads": 1,
    "decoder_normalize_before": False,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
# Cut-offs as published; "div 1" is a factor of 1: every band as wide as the model.
PUBLISHED_BANDS = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "20000,40000,200000",
    "adaptive_input_factor": 1.0,
    "adaptive_softmax_cutoff": "20000,40000,200000",
    "adaptive_softmax_factor": 1.0,
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "share_decoder_input_output_embed": False,
}
LANGUAGE_MODEL_SIZES: Dict[str, Dict[str, Any]] = {
    "": {
        "decoder_layers": 6,
        "decoder_embed_dim": 512,
        "decoder_ffn_embed_dim": 2048,
        "decoder_attention_heads": 8,
    },
    "ptb": {**PUBLISHED_LM, "decoder_layers": 3, "dropout": 0.3},
    "wiki103": {**PUBLISHED_LM, **PUBLISHED_BANDS, "decoder_layers": 6, "dropout": 0.1},
    "tiny": {
        "decoder_layers": 2,
        "decoder_embed_dim": 128,
        "decoder_ffn_embed_dim": 512,
        "decoder_attention_heads": 4,
    },
}


def register(name: str, defaults: Dict[str, Any], model: Any, config: Any, published: Dict[str, str]) -> None:
    """Registers ``model`` as ``name``, with ``config`` under other defaults. A second call changes nothing."""
    title = "".join(part.capitalize() for part in name.split("_"))
    kept = {item.name: item for item in fields(config)}
    sized = [
        (key, kept[key].type, field(default=value, metadata=kept[key].metadata)) for key, value in defaults.items()
    ]
    dataclass = derived(f"{title}Config", (config,), sized, f"Config of {name}.")
    body = {"__module__": __name__, "__doc__": f"The model {name}.", "name": name, "published": published}
    globals()[title] = compat.register_model(name, dataclass)(type(title, (model,), body))


def register_all() -> None:
    for family, published in TRANSLATION_FAMILIES.items():
        config: Any = TranslationConfig
        if family == "norm":
            config = derived("OneNormTranslationConfig", (OneNorm, TranslationConfig), [], "With --norm.")
        for size, defaults in TRANSLATION_SIZES.items():
            register(sized_name(f"transformer_{family}", size), defaults, NormTransformer, config, published)
    for family, published in LANGUAGE_MODEL_FAMILIES.items():
        config = LanguageModelConfig
        if family == "norm":
            config = derived("OneNormLanguageModelConfig", (OneNorm, LanguageModelConfig), [], "With --norm.")
        for size, defaults in LANGUAGE_MODEL_SIZES.items():
            register(sized_name(f"transformer_lm_{family}", size), defaults, NormLanguageModel, config, published)


def sized_name(stem: str, size: str) -> str:
    return f"{stem}_{size}" if size else stem


with stored_when_asked_for("model"):
    register_all()
