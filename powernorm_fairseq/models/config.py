"""Flat configurations of the models, so that the command line and Hydra both see every field under one name.

fairseq's own Transformer config is nested (``encoder``, ``decoder``, ``quant_noise``), which its command line cannot
set on a model with a dataclass. Its fields are taken over here under the names that the command line has for them.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, Dict, List, Optional, Tuple

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import DictConfig, OmegaConf

INIT_CHOICES = ChoiceEnum(["fairseq", "kaiming"])

# base_*: BASE layers bring a LayerNorm of their own and need several GPUs. export: a LayerNorm switch.
# char_inputs, character_*: character embeddings. The rest are settings of the task, which `run_setting` looks up.
LEFT_OUT = {"_name", "export", "char_inputs", "base_layers", "base_sublayers", "base_shuffle", "character_embeddings"}
LEFT_OUT |= {"character_filters", "character_embedding_dim", "char_embedder_highway_layers"}
LEFT_OUT |= {"add_bos_token", "tokens_per_sample", "tpu"}

FieldTriple = Tuple[str, Any, Any]


def flat_fields(config: Any, prefix: str = "") -> List[FieldTriple]:
    """The fields of a fairseq dataclass as (name, type, field), those of nested dataclasses under prefixed names."""
    found: List[FieldTriple] = []
    for item in fields(config):
        if item.name in LEFT_OUT:
            continue
        if is_dataclass(item.type):
            found += flat_fields(item.type, f"{prefix}{item.name}_")
        elif item.default_factory is not MISSING:
            found.append(
                (prefix + item.name, item.type, field(default_factory=item.default_factory, metadata=item.metadata))
            )
        else:
            found.append((prefix + item.name, item.type, field(default=item.default, metadata=item.metadata)))
    return found


def derived(name: str, bases: Tuple[Any, ...], new_fields: List[FieldTriple], doc: str) -> Any:
    """A dataclass with the fields of ``bases`` and new ones; an attribute of this module, so that it can be pickled.

    A second call with a name, as when the plugin is imported under another name too, gives what the first made.
    """
    if name not in globals():
        namespace = {"__module__": __name__, "__doc__": doc}
        globals()[name] = make_dataclass(name, new_fields, bases=bases, namespace=namespace)
    return globals()[name]


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


FlatTransformer: Any = derived(
    "FlatTransformer", (FairseqDataclass,), flat_fields(TransformerConfig), "fairseq's TransformerConfig, flat."
)
FlatLanguageModel: Any = derived(
    "FlatLanguageModel",
    (FairseqDataclass,),
    flat_fields(TransformerLanguageModelConfig),
    "fairseq's TransformerLanguageModelConfig without what the models here do not have.",
)

SITE_HELP = "empty: as the model publishes it"


@dataclass
class NormOptions(FairseqDataclass):
    """Options of the norms; None means the norm's own default. Each must concern a norm that the model has."""

    norm_groups: Optional[int] = option(
        None,
        "layer scale: channel groups divided by their root mean square before the norm; 0: none "
        "(default: attention heads for power and power_v, 0 for batch)",
    )
    norm_alpha_fwd: Optional[float] = option(None, "power, power_v: decay of the running psi^2 (default: 0.9)")
    norm_alpha_bkw: Optional[float] = option(None, "power: decay of the running nu of the backward pass (default: 0.9)")
    norm_eps: Optional[float] = option(None, "all norms: added inside the root (default: 1e-5)")
    norm_affine: bool = option(True, "learn a gain and a bias, in norms that have them")
    norm_warmup_updates: Optional[int] = option(
        None,
        "power: optimiser updates in which the forward pass divides by the batch's own psi "
        "(default: the warm-up updates of the learning-rate scheduler, 0 if it has none)",
    )
    norm_numerics: Optional[str] = option(
        None, "power, ada, layer_simple, detach: paper (default) or released, the arithmetic of the authors' code"
    )
    norm_momentum: Optional[float] = option(
        None, "batch: weight of the new batch in the running statistics (default: 0.1)"
    )
    norm_cumulative: bool = option(False, "batch: running statistics are the mean over all updates so far")
    norm_scale: Optional[float] = option(None, "ada: the factor C (default: 1.0)")
    norm_k: Optional[float] = option(None, "ada: the slope k (default: 0.1)")
    norm_detach: Optional[str] = option(
        None, "detach: what is a constant in the backward pass: both (default), mean or sigma"
    )
    norm_sync: Optional[str] = option(
        None,
        "power, power_v, batch: what several workers share; running: the running statistics (default), "
        "batch: the statistics of each batch too, none: nothing",
    )
    norm_log_interval: int = option(
        0, "every so many updates, log how far batch statistics are from running ones at each norm; 0: never"
    )
    norm_folded: Optional[str] = option(
        None, "not for training: written by `powernorm_fairseq fold`, the sites whose norms it has folded"
    )
    init: INIT_CHOICES = field(  # type: ignore[valid-type]
        default="fairseq",
        metadata={"help": "initial values of the linear layers; kaiming: uniform, a = 1, as in AdaNorm's recipe"},
    )


@dataclass
class DecoderNorms(NormOptions):
    """The norm at each site of a decoder without cross-attention."""

    decoder_norm_self: str = option("", f"norm at decoder self-attention ({SITE_HELP})")
    decoder_norm_ff: str = option("", f"norm at the decoder's feed-forward network ({SITE_HELP})")
    decoder_norm_final: str = option("", f"norm after the last decoder layer, pre-norm only ({SITE_HELP})")
    decoder_norm_embedding: str = option("", f"norm of the decoder's embeddings, --layernorm-embedding ({SITE_HELP})")


@dataclass
class EncoderDecoderNorms(DecoderNorms):
    """The norm at each site of an encoder-decoder model."""

    encoder_norm_self: str = option("", f"norm at encoder self-attention ({SITE_HELP})")
    encoder_norm_ff: str = option("", f"norm at the encoder's feed-forward network ({SITE_HELP})")
    encoder_norm_final: str = option("", f"norm after the last encoder layer, pre-norm only ({SITE_HELP})")
    encoder_norm_embedding: str = option("", f"norm of the encoder's embeddings, --layernorm-embedding ({SITE_HELP})")
    decoder_norm_cross: str = option("", f"norm at cross-attention ({SITE_HELP})")
    norm_warmup_updates_final: Optional[int] = option(
        None, "norm_warmup_updates of the final encoder norm (default: 1000, but not more than the others')"
    )


@dataclass
class TranslationConfig(EncoderDecoderNorms, FlatTransformer):
    """An encoder-decoder Transformer: the size of `transformer`, with the published dropout, pre-norm and sharing."""

    dropout: float = option(0.3, "dropout probability")
    attention_dropout: float = option(0.1, "dropout probability of attention weights")
    activation_dropout: float = option(0.1, "dropout probability after the activation of the feed-forward network")
    encoder_normalize_before: bool = option(True, "pre-norm encoder; --no-encoder-normalize-before: post-norm")
    decoder_normalize_before: bool = option(True, "pre-norm decoder; --no-decoder-normalize-before: post-norm")
    share_all_embeddings: bool = option(
        True, "one matrix for source, target and output embeddings; needs a joined dictionary"
    )
    encoder_layers_to_keep: Optional[str] = option(None, "encoder layers to keep when pruning, as 0,2,4")
    decoder_layers_to_keep: Optional[str] = option(None, "decoder layers to keep when pruning, as 0,2,4")
    decoder_input_dim: Optional[int] = option(None, "width of the target embeddings (default: decoder_embed_dim)")
    decoder_output_dim: Optional[int] = option(None, "width of the output layer (default: decoder_embed_dim)")
    max_source_positions: Optional[int] = option(None, "most tokens in a source sentence (default: the task's)")
    max_target_positions: Optional[int] = option(None, "most tokens in a target sentence (default: the task's)")


@dataclass
class LanguageModelConfig(DecoderNorms, FlatLanguageModel):
    """A decoder-only Transformer: the size of `transformer_lm`, pre-norm, with tied embeddings."""

    dropout: float = option(0.3, "dropout probability")
    attention_dropout: float = option(0.1, "dropout probability of attention weights")
    activation_dropout: float = option(0.1, "dropout probability after the activation of the feed-forward network")
    decoder_normalize_before: bool = option(True, "pre-norm; --no-decoder-normalize-before: post-norm")
    share_decoder_input_output_embed: bool = option(True, "one matrix for input and output embeddings")
    decoder_input_dim: Optional[int] = option(None, "width of the embeddings (default: decoder_embed_dim)")
    decoder_output_dim: Optional[int] = option(None, "width of the output layer (default: decoder_embed_dim)")
    max_target_positions: Optional[int] = option(None, "most tokens in a sample (default: the task's)")


@dataclass
class OneNorm(FairseqDataclass):
    """For the models without a published placement."""

    norm: str = option("layer", "the norm at every site that has no flag of its own")


def add_flags(parser: ArgumentParser, config: Any) -> None:
    """Adds ``--x`` and ``--no-x`` for every switch x of a config.

    fairseq would turn a switch that is on by default into a flag that turns it *off* under the same name, so that
    the published command lines (``--encoder-normalize-before --share-all-embeddings``) would undo what they ask for.
    """
    for item in fields(config):
        if item.type is not bool or item.name.startswith("no_"):
            continue
        flag, text = item.name.replace("_", "-"), item.metadata.get("help")
        parser.add_argument(f"--{flag}", dest=item.name, action="store_true", help=text)
        parser.add_argument(f"--no-{flag}", dest=item.name, action="store_false", help=f"the opposite of --{flag}")


def run_setting(cfg: Any, group: str, name: str) -> Any:
    """``group.name`` of the run that a model's config belongs to; None where there is no such run, group or name."""
    if not isinstance(cfg, DictConfig):
        return None
    root: Any = cfg._get_root()
    settings = root.get(group) if group in root else None
    if isinstance(settings, Namespace):
        return getattr(settings, name, None)
    return settings.get(name) if isinstance(settings, DictConfig) and name in settings else None


def run_warmup_updates(cfg: Any) -> int:
    """The learning-rate warm-up of the run that a model's config belongs to, in updates; 0 for schedulers without."""
    updates = run_setting(cfg, "lr_scheduler", "warmup_updates")
    if updates is not None:
        return int(updates)
    ratio = run_setting(cfg, "lr_scheduler", "phase_ratio")  # tri_stage: shares of max_update
    if ratio:
        return int(run_setting(cfg, "optimization", "max_update") * ratio[0])
    return int(run_setting(cfg, "lr_scheduler", "warmup_steps") or 0)


def flat_settings(cfg: Any) -> Namespace:
    """A model's config (DictConfig, dataclass instance or namespace) as a plain namespace, its open widths filled."""
    if isinstance(cfg, DictConfig):
        values: Dict[str, Any] = dict(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))  # type: ignore[arg-type]
    else:
        values = dict(vars(cfg))
    settings = Namespace(**{str(key): value for key, value in values.items()})
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if getattr(settings, name) is None:
            setattr(settings, name, settings.decoder_embed_dim)
    if settings.offload_activations:
        settings.checkpoint_activations = True
    return settings
