"""The translation models: fairseq's Transformer with a norm of choice at each site."""

import logging
from argparse import ArgumentParser, Namespace
from typing import Any, Dict, List, Mapping, Optional

from fairseq.models import MODEL_DATACLASS_REGISTRY, BaseFairseqModel
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase, TransformerEncoderBase
from fairseq.models.transformer.transformer_base import TransformerModelBase
from torch import Tensor, nn

from powernorm_fairseq.models.config import add_flags, flat_settings, run_setting, run_warmup_updates
from powernorm_fairseq.models.folding import fold_post_norm, refuse_training, with_bias
from powernorm_fairseq.models.layers import NormDecoderLayer, NormEncoderLayer, initialise, token_scope, wrapped
from powernorm_fairseq.models.placement import Placement, batch_first
from powernorm_fairseq.norms import NORMS, RunningNorm
from powernorm_fairseq.norms.base import Norm

logger = logging.getLogger(__name__)

DEFAULT_MAX_POSITIONS = 1024


class NormEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder with the norms of ``cfg.placement``."""

    layer_norm: Optional[Norm]
    layernorm_embedding: Optional[Norm]

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, return_fc: bool = False) -> None:
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        if self.layer_norm is not None:
            self.layer_norm = cfg.placement.create("encoder_final", cfg.encoder.embed_dim)
        if not cfg.encoder.normalize_before:
            fold_post_norm(self.layers, cfg.placement, "encoder", cfg.encoder.embed_dim)
        if self.layernorm_embedding is not None:
            self.layernorm_embedding = batch_first(cfg.placement.create("encoder_embedding", cfg.encoder.embed_dim))

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return wrapped(NormEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward(self, src_tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        with token_scope(src_tokens, self.padding_idx, self.layer_norm, self.layernorm_embedding):
            return super().forward(src_tokens, *args, **kwargs)


class NormDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder with the norms of ``cfg.placement``; also the whole of a language model."""

    layer_norm: Optional[Norm]
    layernorm_embedding: Optional[Norm]

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=no_encoder_attn)
        if self.layer_norm is not None:
            self.layer_norm = cfg.placement.create("decoder_final", self.embed_dim)
        if not cfg.decoder.normalize_before:
            fold_post_norm(self.layers, cfg.placement, "decoder", self.embed_dim)
        if cfg.placement.folded.get("decoder_final") == "linear":
            with_bias(self.output_projection if self.project_out_dim is None else self.project_out_dim)
        if self.layernorm_embedding is not None:
            self.layernorm_embedding = batch_first(cfg.placement.create("decoder_embedding", self.embed_dim))

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return wrapped(NormDecoderLayer(cfg, no_encoder_attn), cfg)

    def train(self, mode: bool = True) -> "NormDecoder":
        if mode:
            refuse_training(self.cfg.placement.folded)
        super().train(mode)
        return self

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Any, incremental_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # With an incremental state fairseq computes the last position alone.
        tokens = prev_output_tokens if incremental_state is None else prev_output_tokens[:, -1:]
        with token_scope(tokens, self.padding_idx, self.layer_norm, self.layernorm_embedding):
            return super().extract_features(prev_output_tokens, encoder_out, incremental_state, *args, **kwargs)


def refuse_shared_widths(settings: Namespace, shared: bool) -> None:
    """ValueError where the output layer is asked to share a matrix of another width with the embeddings."""
    if shared and settings.decoder_input_dim != settings.decoder_output_dim:
        raise ValueError(
            f"shared embeddings need one width: --decoder-input-dim {settings.decoder_input_dim}, "
            f"--decoder-output-dim {settings.decoder_output_dim}; or --no-share-decoder-input-output-embed "
            "(translation: also --no-share-all-embeddings)"
        )


def default_norms(settings: Namespace, published: Mapping[str, str]) -> Mapping[str, str]:
    """The norm of each stack where a site names none: ``--norm`` in the models that have it."""
    return {stack: settings.norm for stack in published} if hasattr(settings, "norm") else published


def placed(cfg: Any, settings: Namespace, published: Mapping[str, str]) -> Placement:
    """The placement that a model's config asks for; logged, since it decides what is being measured."""
    placement = Placement(settings, default_norms(settings, published), run_warmup_updates(cfg))
    logger.info("norms: " + placement.describe())
    running = sorted({name for name in placement.names.values() if issubclass(NORMS[name], RunningNorm)})
    if running:
        refuse_backends(cfg, running, settings.norm_sync)
    return placement


def refuse_backends(cfg: Any, norms: List[str], sync: Optional[str]) -> None:
    """ValueError where a run's workers would silently keep different running statistics, or wrong ones."""
    backend = run_setting(cfg, "distributed_training", "ddp_backend")
    workers = run_setting(cfg, "distributed_training", "distributed_world_size") or 1
    refused = {
        "--ddp-backend fully_sharded": backend == "fully_sharded",
        "--ddp-backend slowmo": backend == "slowmo" and workers > 1,
        "--use-bmuf": bool(run_setting(cfg, "optimization", "use_bmuf")) and workers > 1,
        "--pipeline-model-parallel": bool(run_setting(cfg, "distributed_training", "pipeline_model_parallel")),
        "--model-parallel-size": (run_setting(cfg, "common", "model_parallel_size") or 1) > 1,
        "--tpu": bool(run_setting(cfg, "common", "tpu")),
    }
    for option, given in refused.items():
        if given:
            raise ValueError(
                f"{option} does not work with {', '.join(norms)}, whose running statistics must be the same on all "
                "workers: use --ddp-backend c10d or legacy_ddp, or norms without running statistics"
            )
    if sync == "none" and workers > 1:
        logger.warning(
            f"--norm-sync none: each of the {workers} workers keeps statistics of its own ({', '.join(norms)}), and "
            "checkpoints hold those of the first"
        )


class NormTransformer(TransformerModelBase):
    """An encoder-decoder Transformer with a norm of choice at each site.

    Attributes:
        name: as registered.
        published: the norm of each stack where the config names none.
    """

    name: str
    published: Dict[str, str] = {"encoder": "layer", "decoder": "layer"}

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        add_flags(parser, MODEL_DATACLASS_REGISTRY[cls.name])
        # Not the parent's, whose flags are those of fairseq's nested config.
        BaseFairseqModel.add_args.__func__(cls, parser)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "NormTransformer":
        settings = flat_settings(cfg)
        for name in ("max_source_positions", "max_target_positions"):
            if getattr(settings, name) is None:
                setattr(settings, name, run_setting(cfg, "task", name) or DEFAULT_MAX_POSITIONS)
        refuse_shared_widths(settings, settings.share_all_embeddings or settings.share_decoder_input_output_embed)
        nested = TransformerConfig.from_namespace(settings)
        nested.placement = placed(cfg, settings, cls.published)
        model = super().build_model(nested, task)
        initialise(model.encoder, settings.init)
        initialise(model.decoder, settings.init)
        return model

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Module) -> NormEncoder:
        return NormEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Module) -> NormDecoder:
        return NormDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
