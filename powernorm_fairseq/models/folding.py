"""Models whose norms have been folded for inference (``powernorm_fairseq fold``): what stands at a folded site.

``norm_folded`` in a model's config says for each such site where the constants of its norm, y = h * gain + shift, went.
The algebra is in docs/checkpoints.md.
"""

import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import torch
from torch import Tensor, nn

from powernorm_fairseq.norms.base import Norm
from powernorm_fairseq.norms.constant import what_stays

# linear: into the linear layers that read the norm.
# residual: into these, and into the sum that the norm also enters: the gain into a scale of the residual, the shift
#   into the bias of what is added to it.
# constant: into a gain and a shift that stay where the norm was.
FATES = ("linear", "residual", "constant")

Folded = Dict[str, str]


def written(folded: Folded) -> str:
    """The value of ``norm_folded``: ``encoder_self=linear,encoder_final=constant``."""
    return ",".join(f"{site}={fate}" for site, fate in folded.items())


def read(text: Optional[str]) -> Folded:
    """What :func:`written` wrote.

    Raises:
        ValueError: it did not write this.
    """
    folded = {}
    for part in filter(None, (text or "").split(",")):
        site, _, fate = part.partition("=")
        if fate not in FATES:
            raise ValueError(f"norm_folded is written by `powernorm_fairseq fold`, which did not write {part!r}")
        folded[site] = fate
    return folded


def remainder(norm: Norm, fate: Optional[str]) -> Norm:
    """What stands in the place of ``norm``; itself where it is not folded."""
    return norm if fate is None else what_stays(norm, affine=fate == "constant")


def refuse_training(folded: Folded) -> None:
    """ValueError for a model that is folded."""
    if folded:
        raise ValueError(
            "the norms of this model are folded into its linear layers for inference, so that it cannot be trained: "
            "train the checkpoint that was given to `powernorm_fairseq fold`"
        )


class _Gains(threading.local):
    def __init__(self) -> None:
        self.coming: List[Iterator[Optional[Tensor]]] = []


_gains = _Gains()


class FoldedResiduals(nn.Module):
    """For a Transformer layer whose residual connections scale what they carry past a folded norm.

    fairseq's layers do not say which of their residual connections is being computed, but always compute them in the
    same order, so a forward pass has a list of their gains; each thread has its own.
    """

    sublayers: List[str]  # that have a residual connection, in order
    has_gains = False

    def add_gains(self, names: List[str], dim: int) -> None:
        """Buffers (C,) for the residual connections of these sublayers."""
        self.has_gains = bool(names)
        for name in self.sublayers:
            self.register_buffer(f"residual_gain_{name}", torch.ones(dim) if name in names else None)

    @contextmanager
    def residual_scope(self) -> Iterator[None]:
        """Around a forward pass."""
        if not self.has_gains:
            yield
            return
        _gains.coming.append(iter([getattr(self, f"residual_gain_{name}") for name in self.sublayers]))
        try:
            yield
        finally:
            _gains.coming.pop()

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        gain = next(_gains.coming[-1]) if self.has_gains else None
        if gain is None:
            return super().residual_connection(x, residual)  # type: ignore[misc]
        return torch.addcmul(x, residual, gain)


def after_each(sublayers: List[str]) -> Dict[str, str]:
    """Sublayer -> the one that reads its post-norm: the next, or the first of the next layer."""
    return dict(zip(sublayers, sublayers[1:] + sublayers[:1]))


def fold_post_norm(layers: Any, placement: Any, stack: str, dim: int) -> None:
    """Completes the layers of a post-norm ``encoder`` or ``decoder``, which they cannot do alone.

    The last norm of a layer enters the first sum of the next layer; that of the last layer enters none, and goes by the
    name of the final norm.
    """
    if not placement.folded:
        return
    scaled = [name for name in layers[0].sublayers if placement.folded.get(f"{stack}_{name}") == "residual"]
    for number, layer in enumerate(layers):
        following = after_each(layer.sublayers)
        last = layer.sublayers[-1]
        layer.add_gains([following[name] for name in scaled if number or name != last], dim)
    norm = placement.create_unfolded(f"{stack}_ff", dim)
    layers[-1].final_layer_norm = remainder(norm, placement.folded.get(f"{stack}_final"))


def with_bias(linear: nn.Linear) -> None:
    """Gives a linear layer without bias one."""
    linear.bias = nn.Parameter(torch.zeros(linear.out_features))
