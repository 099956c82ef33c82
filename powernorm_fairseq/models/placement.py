"""Which norm stands at which site of a model, with which options; refused before anything is built when impossible."""

import inspect
import logging
from argparse import Namespace
from typing import Any, Dict, List, Mapping, Set

from torch import Tensor, nn

from powernorm_fairseq.models import folding
from powernorm_fairseq.norms import NORMS, RunningNorm, create_norm
from powernorm_fairseq.norms.base import Norm

logger = logging.getLogger(__name__)

# "encoder_self" is chosen by the field `encoder_norm_self`, and so on.
ENCODER_SITES = ("encoder_self", "encoder_ff", "encoder_final", "encoder_embedding")
DECODER_SITES = ("decoder_self", "decoder_cross", "decoder_ff", "decoder_final", "decoder_embedding")

# PowerNorm's machine-translation recipe leaves the final encoder norm 1000 warm-up updates.
PUBLISHED_FINAL_WARMUP = 1000

# Fields `norm_<option>`: None (for `affine`: True) leaves the option to the norm's own default.
OPTIONS = ["groups", "alpha_fwd", "alpha_bkw", "eps", "affine", "numerics", "momentum", "cumulative"]
OPTIONS += ["scale", "k", "detach", "sync"]
UNSET = {"affine": True, "cumulative": False}


def field_of(site: str) -> str:
    """The config field of a site: ``encoder_norm_self`` for ``encoder_self``."""
    stack, place = site.split("_")
    return f"{stack}_norm_{place}"


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def missing_sites(settings: Namespace) -> Dict[str, str]:
    """The sites that a model with these settings does not have, each with the reason."""
    missing = {}
    for stack in ("encoder", "decoder"):
        if not getattr(settings, f"{stack}_normalize_before", False):
            missing[f"{stack}_final"] = f"a post-norm {stack} has no final norm"
        if not settings.layernorm_embedding:
            missing[f"{stack}_embedding"] = "embeddings are normalised only with --layernorm-embedding"
    if settings.no_decoder_final_norm:
        missing["decoder_final"] = "--no-decoder-final-norm leaves it out"
    if settings.no_cross_attention:
        missing["decoder_cross"] = "--no-cross-attention leaves it out"
    return missing


def accepted_options(name: str) -> Set[str]:
    """The options that the norm called ``name`` takes."""
    return set(inspect.signature(NORMS[name].__init__).parameters) - {"self", "dim"}


class Placement:
    """The norms of one model.

    Args:
        settings: the model's flat settings; a site field left empty takes the name in ``published``.
        published: the norm of each stack ("encoder", "decoder"); a model without encoder leaves that key out.
        warmup_updates: what ``norm_warmup_updates`` means where it is not set (the run's learning-rate warm-up).

    Attributes:
        names: site -> name of its norm, for the sites that the model has.
        folded: site -> where its norm went, for the sites that have been folded (``models.folding``).

    Raises:
        ValueError: unknown norm, a norm for a site that the model has not, an option that no norm takes, or an
            option value that a norm refuses. Each norm is built once here, so that a bad value is found at once.
    """

    def __init__(self, settings: Namespace, published: Mapping[str, str], warmup_updates: int = 0) -> None:
        self.heads = {stack: getattr(settings, f"{stack}_attention_heads") for stack in published}
        self.names = self._names(settings, published)
        self.folded = self._folded(settings)
        self.options = self._options(settings)
        if settings.norm_warmup_updates is not None:
            warmup_updates = settings.norm_warmup_updates
        self.warmup_updates = warmup_updates
        self.warmup_updates_final = getattr(settings, "norm_warmup_updates_final", None)
        if self.warmup_updates_final is None:
            self.warmup_updates_final = min(PUBLISHED_FINAL_WARMUP, warmup_updates)
        self._refuse_options_without_effect(settings)
        for site in self.names:
            dim = getattr(settings, f"{site.split('_')[0]}_embed_dim")
            try:
                self.create(site, dim)
            except ValueError as error:
                raise ValueError(f"{flag_of(field_of(site))} {self.names[site]}: {error}") from error

    @staticmethod
    def _names(settings: Namespace, published: Mapping[str, str]) -> Dict[str, str]:
        names: Dict[str, str] = {}
        missing = missing_sites(settings)
        for site in ENCODER_SITES + DECODER_SITES:
            chosen = getattr(settings, field_of(site), None)
            if site in missing:
                if chosen:
                    raise ValueError(f"{flag_of(field_of(site))} {chosen}: {missing[site]}")
                continue
            stack = site.split("_")[0]
            if stack not in published or not hasattr(settings, field_of(site)):
                continue
            names[site] = chosen or published[stack]
            if names[site] not in NORMS:
                flag = flag_of(field_of(site)) if chosen else "--norm"
                raise ValueError(f"{flag} {names[site]}: no such norm; choose one of {', '.join(sorted(NORMS))}")
        return names

    def _folded(self, settings: Namespace) -> folding.Folded:
        folded = folding.read(settings.norm_folded)
        known = {*self.names, *(f"{site.split('_')[0]}_final" for site in self.names)}
        if not known.issuperset(folded):
            raise ValueError(f"--norm-folded {settings.norm_folded}: the model has not all of these sites")
        for stack in self.heads:
            if (
                f"{stack}_final" in folded
                and getattr(settings, f"{stack}_layers_to_keep", None)
                and not getattr(settings, f"{stack}_normalize_before")
            ):
                raise ValueError(
                    f"{flag_of(stack + '_layers_to_keep')}: the layers of a folded post-norm {stack} need each other; "
                    "set it in the config of the checkpoint that `powernorm_fairseq fold` is given"
                )
        return folded

    @staticmethod
    def _options(settings: Namespace) -> Dict[str, Any]:
        chosen = {option: getattr(settings, f"norm_{option}") for option in OPTIONS}
        return {option: value for option, value in chosen.items() if value != UNSET.get(option)}

    def _refuse_options_without_effect(self, settings: Namespace) -> None:
        explicit = list(self.options)
        if settings.norm_warmup_updates is not None:
            explicit.append("warmup_updates")
        taken = set().union(*(accepted_options(name) for name in self.names.values()))
        for option in explicit:
            if option not in taken:
                takers = ", ".join(name for name in sorted(NORMS) if option in accepted_options(name))
                placed = ", ".join(sorted(set(self.names.values())))
                raise ValueError(
                    f"{flag_of('norm_' + option)} has no effect: {takers} take it, and the model has {placed}"
                )
        if settings.norm_log_interval < 0:
            raise ValueError(f"--norm-log-interval must not be negative: {settings.norm_log_interval}")
        if settings.norm_log_interval and not any(issubclass(NORMS[name], RunningNorm) for name in self.names.values()):
            raise ValueError("--norm-log-interval has no effect: no norm of the model has running statistics")
        if settings.norm_cumulative and settings.norm_momentum is not None:
            raise ValueError("--norm-cumulative weighs all updates the same, so --norm-momentum has no effect with it")
        if settings.norm_sync == "batch" and any(
            getattr(settings, f"{stack}_layerdrop", 0) > 0 for stack in ("encoder", "decoder")
        ):
            raise ValueError(
                "--norm-sync batch has a collective in each norm, and with --encoder-layerdrop or --decoder-layerdrop "
                "workers leave out different ones, so that they would wait for each other for ever"
            )
        if getattr(settings, "norm_warmup_updates_final", None) is not None and (
            "warmup_updates" not in accepted_options(self.names.get("encoder_final", "none"))
        ):
            raise ValueError(
                "--norm-warmup-updates-final has no effect: the final encoder norm is "
                + self.names.get("encoder_final", "missing (post-norm)")
            )

    def create(self, site: str, dim: int) -> Norm:
        """A new norm for ``site`` over ``dim`` channels, or what stays of it where it is folded."""
        return folding.remainder(self.create_unfolded(site, dim), self.folded.get(site))

    def create_unfolded(self, site: str, dim: int) -> Norm:
        """A new norm for ``site`` as the model was trained with."""
        name = self.names[site]
        options = dict(self.options)
        if name in ("power", "power_v"):
            options.setdefault("groups", self.heads[site.split("_")[0]])
        options["warmup_updates"] = self.warmup_updates_final if site == "encoder_final" else self.warmup_updates
        return create_norm(name, dim, options)

    def describe(self) -> str:
        """One line for the log."""
        sites: Dict[str, List[str]] = {}
        for site, name in self.names.items():
            sites.setdefault(name, []).append(site)
        text = "; ".join(f"{name} at {', '.join(places)}" for name, places in sites.items())
        if any("warmup_updates" in accepted_options(name) for name in sites):
            text += f"; warm-up {self.warmup_updates} updates"
            if "warmup_updates" in accepted_options(self.names.get("encoder_final", "none")):
                text += f", final encoder norm {self.warmup_updates_final}"
        if self.folded:
            text += f"; folded for inference: {', '.join(self.folded)}"
        return text


def _swap_input(module: nn.Module, args: Any) -> Any:
    return (args[0].transpose(0, 1), *args[1:])


def _swap_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.transpose(0, 1)


def batch_first(norm: Norm) -> Norm:
    """Makes ``norm`` take and return (B, T, C), so that the padding mask of the surrounding scope fits it too.

    fairseq normalises embeddings before it puts time first. Hooks do it rather than a wrapper module, since a
    wrapper would change the names in the state dict.
    """
    norm.register_forward_pre_hook(_swap_input)
    norm.register_forward_hook(_swap_output)
    return norm
