"""Encoder and decoder layers with norms of choice: fairseq's layers, with other norms and a padding scope around them.

fairseq calls its norms without a padding mask. The scope gives each norm the mask of the tensor that it normalises:
the source mask in the encoder, the target mask in the decoder, also after cross-attention.
"""

from contextlib import contextmanager
from typing import Any, Iterator, Optional

from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from powernorm_fairseq.models.folding import FoldedResiduals
from powernorm_fairseq.norms import padding_scope
from powernorm_fairseq.norms.base import Norm

# fairseq 0.12.2 keeps a second copy of the encoder layer's weights for an inference fast path that computes
# LayerNorm whatever the norms are. The copies get no gradient, so DistributedDataParallel refuses them.
FAST_PATH_PARAMETERS = (
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "fc1_weight",
    "fc1_bias",
    "fc2_weight",
    "fc2_bias",
)


class NormEncoderLayer(FoldedResiduals, TransformerEncoderLayerBase):
    """fairseq's encoder layer with the norms that ``cfg.placement`` names for ``encoder_self`` and ``encoder_ff``."""

    sublayers = ["self", "ff"]

    def __init__(self, cfg: Any, return_fc: bool = False) -> None:
        super().__init__(cfg, return_fc)
        for name in FAST_PATH_PARAMETERS:
            self._parameters.pop(name, None)
        self.can_use_fastpath = False
        self.self_attn_layer_norm = cfg.placement.create("encoder_self", self.embed_dim)
        self.final_layer_norm = cfg.placement.create("encoder_ff", self.embed_dim)

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor], *args: Any, **kwargs: Any) -> Any:
        with padding_scope(encoder_padding_mask), self.residual_scope():
            return super().forward(x, encoder_padding_mask, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in FAST_PATH_PARAMETERS:
            state_dict.pop(prefix + name, None)
        # fairseq 0.12.2 would put the copies back; the next class after its layer is torch's.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class NormDecoderLayer(FoldedResiduals, TransformerDecoderLayerBase):
    """fairseq's decoder layer with the norms that ``cfg.placement`` names for ``decoder_self``, ``_cross``, ``_ff``."""

    def __init__(self, cfg: Any, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn)
        self.self_attn_layer_norm = cfg.placement.create("decoder_self", self.embed_dim)
        self.sublayers = ["self", "ff"]
        if self.encoder_attn is not None:
            self.sublayers.insert(1, "cross")
            self.encoder_attn_layer_norm = cfg.placement.create("decoder_cross", self.embed_dim)
        self.final_layer_norm = cfg.placement.create("decoder_ff", self.embed_dim)

    def forward(
        self,
        x: Tensor,
        encoder_out: Optional[Tensor] = None,
        encoder_padding_mask: Optional[Tensor] = None,
        incremental_state: Any = None,
        prev_self_attn_state: Any = None,
        prev_attn_state: Any = None,
        self_attn_mask: Optional[Tensor] = None,
        self_attn_padding_mask: Optional[Tensor] = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> Any:
        if self.has_gains and encoder_out is None and self.encoder_attn is not None:
            raise ValueError("a folded decoder cannot leave out its cross-attention: it needs the encoder's output")
        with padding_scope(self_attn_padding_mask), self.residual_scope():
            return super().forward(
                x,
                encoder_out,
                encoder_padding_mask,
                incremental_state,
                prev_self_attn_state,
                prev_attn_state,
                self_attn_mask,
                self_attn_padding_mask,
                need_attn,
                need_head_weights,
            )


def wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """``layer`` with activation checkpointing and FSDP as the settings ask; a checkpointed layer is always sharded."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return fsdp_wrap(layer, min_num_params=0)
    return fsdp_wrap(layer, min_num_params=cfg.min_params_to_wrap)


@contextmanager
def token_scope(tokens: Tensor, padding_idx: int, *norms: Optional[Norm]) -> Iterator[None]:
    """A padding scope for the norms of a whole stack, where one of ``norms`` looks beyond its token; otherwise none.

    Args:
        tokens: (B, T), padded with ``padding_idx``.
    """
    if all(norm is None or norm.token_wise for norm in norms):
        yield
        return
    mask = tokens.eq(padding_idx)
    with padding_scope(mask if bool(mask.any()) else None):
        yield


def initialise(stack: Any, init: str) -> None:
    """Draws the linear layers of a stack anew if ``init`` is "kaiming"; "fairseq" leaves them as they are.

    "kaiming" is the `km` setting of AdaNorm's translation recipe: uniform within sqrt(3 / fan_in), which is
    kaiming-uniform with a = 1. Embeddings and the output layer keep fairseq's initial values.
    """
    if init == "kaiming":
        for module in stack.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, a=1)
