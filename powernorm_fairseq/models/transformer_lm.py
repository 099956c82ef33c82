"""The language models: fairseq's Transformer decoder alone, with a norm of choice at each site."""

from argparse import ArgumentParser, Namespace
from typing import Any, Dict

from fairseq.models import MODEL_DATACLASS_REGISTRY, FairseqLanguageModel
from fairseq.models.transformer import Embedding, TransformerConfig
from fairseq.modules import AdaptiveInput
from fairseq.utils import eval_str_list
from torch import nn

from powernorm_fairseq.models.config import add_flags, flat_settings, run_setting
from powernorm_fairseq.models.layers import initialise
from powernorm_fairseq.models.transformer import DEFAULT_MAX_POSITIONS, NormDecoder, placed, refuse_shared_widths


class NormLanguageModel(FairseqLanguageModel):
    """A causal Transformer language model with a norm of choice at each site.

    Attributes:
        name: as registered.
        published: the norm of the decoder where the config names none.
    """

    name: str
    published: Dict[str, str] = {"decoder": "layer"}

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        add_flags(parser, MODEL_DATACLASS_REGISTRY[cls.name])
        super().add_args(parser)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "NormLanguageModel":
        settings = flat_settings(cfg)
        if settings.max_target_positions is None:
            settings.max_target_positions = (
                run_setting(cfg, "task", "max_target_positions")
                or run_setting(cfg, "task", "tokens_per_sample")
                or DEFAULT_MAX_POSITIONS
            )
        if settings.decoder_layers_to_keep:
            settings.decoder_layers = len(settings.decoder_layers_to_keep.split(","))
        settings.no_cross_attention = True
        shared = settings.share_decoder_input_output_embed
        if shared and settings.adaptive_input:
            raise ValueError(
                "--adaptive-input has a matrix per band, which the output layer cannot share: add "
                "--no-share-decoder-input-output-embed, and --tie-adaptive-weights to tie the bands"
            )
        refuse_shared_widths(settings, shared)
        refuse_untied_bands(settings)
        nested = TransformerConfig.from_namespace(settings)
        nested.placement = placed(cfg, settings, cls.published)
        embed_tokens = build_embeddings(settings, task.source_dictionary)
        model = cls(NormDecoder(nested, task.target_dictionary, embed_tokens, no_encoder_attn=True))
        initialise(model.decoder, settings.init)
        return model


def refuse_untied_bands(settings: Namespace) -> None:
    """ValueError where adaptive input and softmax cannot be tied as ``tie_adaptive_weights`` asks."""
    if not settings.tie_adaptive_weights:
        return
    pairs = {
        "cutoff": (settings.adaptive_input_cutoff, settings.adaptive_softmax_cutoff),
        "factor": (settings.adaptive_input_factor, settings.adaptive_softmax_factor),
        "width": (settings.decoder_input_dim, settings.decoder_output_dim),
    }
    if not settings.adaptive_input:
        raise ValueError("--tie-adaptive-weights needs --adaptive-input")
    for what, (given, wanted) in pairs.items():
        if given != wanted:
            raise ValueError(f"--tie-adaptive-weights needs one {what} on both sides: input {given}, output {wanted}")


def build_embeddings(settings: Namespace, dictionary: Any) -> nn.Module:
    """One table of embeddings, or one per frequency band (``adaptive_input``)."""
    if not settings.adaptive_input:
        return Embedding(len(dictionary), settings.decoder_input_dim, dictionary.pad())
    cutoff = eval_str_list(settings.adaptive_input_cutoff, type=int)
    if not cutoff or cutoff[-1] > len(dictionary):
        raise ValueError(
            f"--adaptive-input-cutoff {settings.adaptive_input_cutoff}: the dictionary has {len(dictionary)} words"
        )
    return AdaptiveInput(
        len(dictionary),
        dictionary.pad(),
        settings.decoder_input_dim,
        settings.adaptive_input_factor,
        settings.decoder_embed_dim,
        cutoff,
        settings.quant_noise_pq,
        settings.quant_noise_pq_block_size,
    )
