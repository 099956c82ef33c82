"""Normalization layers; torch only."""

import inspect
from typing import Any, Dict, Mapping, Optional, Set, Type

from powernorm_fairseq.norms.ada import AdaNorm, DetachNorm, LayerNormSimple
from powernorm_fairseq.norms.base import Norm, padding_scope
from powernorm_fairseq.norms.batch import BatchNorm
from powernorm_fairseq.norms.layer import LayerNorm
from powernorm_fairseq.norms.loss_scale import gradient_scale, set_gradient_scale
from powernorm_fairseq.norms.none import NoNorm
from powernorm_fairseq.norms.power import PowerNorm, PowerNormV
from powernorm_fairseq.norms.rms import RMSNorm, ScaleNorm
from powernorm_fairseq.norms.running import RunningNorm

__all__ = [
    "NORMS",
    "AdaNorm",
    "BatchNorm",
    "DetachNorm",
    "LayerNorm",
    "LayerNormSimple",
    "NoNorm",
    "Norm",
    "PowerNorm",
    "PowerNormV",
    "RMSNorm",
    "RunningNorm",
    "ScaleNorm",
    "create_norm",
    "gradient_scale",
    "padding_scope",
    "set_gradient_scale",
]

NORMS: Dict[str, Type[Norm]] = {
    "layer": LayerNorm,
    "layer_simple": LayerNormSimple,
    "detach": DetachNorm,
    "ada": AdaNorm,
    "batch": BatchNorm,
    "power": PowerNorm,
    "power_v": PowerNormV,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "none": NoNorm,
}


def _options_of(norm: Type[Norm]) -> Set[str]:
    return set(inspect.signature(norm).parameters) - {"dim"}


def create_norm(name: str, dim: int, options: Optional[Mapping[str, Any]] = None) -> Norm:
    """A norm by its name.

    Args:
        name: a key of ``NORMS``.
        dim: number of channels.
        options: keyword arguments for the constructor. One mapping may serve all norms: each takes those it knows.

    Raises:
        ValueError: no norm has this name, no norm at all knows one of the options, or a value is not allowed.
    """
    if name not in NORMS:
        raise ValueError(f"there is no norm {name!r}; there are {', '.join(NORMS)}")
    options = options or {}
    known = set().union(*map(_options_of, NORMS.values()))
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"no norm knows the option {', '.join(unknown)}; options are {', '.join(sorted(known))}")
    norm = NORMS[name]
    return norm(dim, **{key: value for key, value in options.items() if key in _options_of(norm)})
