"""``powernorm_fairseq fold``: a checkpoint for inference, whose norms are folded into its linear layers.

In evaluation `power`, `power_v` and `batch` are y = h * gain + shift with constant vectors, and so are `rms` and
`scale` without shift; h is the input, or the input divided by the root mean square of each channel group (layer scale).
The vectors are multiplied into what reads the norm: the weights and biases of linear layers and, in post-norm, the
residual. What stays is the division, if there is one. Scores and hypotheses stay the same up to rounding.
"""

import argparse
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.checkpoints.average import (
    check_output,
    load_checkpoint,
    note_of,
    refuse_folded,
    save_checkpoint,
    to_stderr,
    with_note,
)
from powernorm_fairseq.norms import Norm, RunningNorm
from powernorm_fairseq.norms.constant import Constants, constants
from powernorm_fairseq.processes import UserError

Say = Callable[[str], None]


class Sublayer(NamedTuple):
    """A part of a Transformer layer with its own residual connection: its norm, what reads it, what enters the sum."""

    norm: str
    reads: Tuple[str, ...]
    adds: str


SUBLAYERS = {
    "self": Sublayer(
        "self_attn_layer_norm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj"
    ),
    "cross": Sublayer("encoder_attn_layer_norm", ("encoder_attn.q_proj",), "encoder_attn.out_proj"),
    "ff": Sublayer("final_layer_norm", ("fc1",), "fc2"),
}


class Place(NamedTuple):
    """One norm of a model.

    Attributes:
        site: as in ``Placement``; the last norm of a post-norm stack is its final one.
        key: where it stands in the state.
        readers: the linear layers that read it.
        residual: (layer, sublayer) whose sum it also enters, in post-norm.
        obstacle: why it cannot go into what reads it.
    """

    site: str
    key: str
    readers: List[str] = []
    residual: Optional[Tuple[str, str]] = None
    obstacle: str = ""


class Row(NamedTuple):
    """What was done at a site: the norm's name, how many there are, and words."""

    site: str
    norm: str
    number: int
    done: str


def places(settings: Namespace, stacks: List[str]) -> Iterator[Place]:
    """All norms of a model with these settings."""
    from powernorm_fairseq.models.folding import after_each

    for stack in stacks:
        pre, layers = getattr(settings, f"{stack}_normalize_before"), getattr(settings, f"{stack}_layers")
        sublayers = (
            ["self", "cross", "ff"] if stack == "decoder" and not settings.no_cross_attention else ["self", "ff"]
        )
        if settings.layernorm_embedding:
            yield Place(f"{stack}_embedding", f"{stack}.layernorm_embedding", obstacle="the residual begins with it")
        for number in range(layers):
            for name in sublayers:
                site, key = f"{stack}_{name}", f"{stack}.layers.{number}.{SUBLAYERS[name].norm}"
                if pre:
                    yield place(settings, site, key, f"{stack}.layers.{number}", name)
                elif name != sublayers[-1]:
                    yield place(settings, site, key, f"{stack}.layers.{number}", after_each(sublayers)[name])
                elif number < layers - 1:
                    yield place(settings, site, key, f"{stack}.layers.{number + 1}", sublayers[0])
                else:
                    yield final_place(settings, stack, key)
        if pre and not (stack == "decoder" and settings.no_decoder_final_norm):
            yield final_place(settings, stack, f"{stack}.layer_norm")


def place(settings: Namespace, site: str, key: str, layer: str, reader: str) -> Place:
    """A norm that is read by the sublayer ``reader`` of ``layer``."""
    stack = site.split("_")[0]
    readers = [f"{layer}.{name}" for name in SUBLAYERS[reader].reads]
    if stack == "decoder" and reader == "self" and settings.cross_self_attention:
        return Place(site, key, obstacle="the same layers read the encoder's output (--cross-self-attention)")
    if getattr(settings, f"{stack}_normalize_before"):
        return Place(site, key, readers)
    scales = {"self": ("scale_attn", "scale_heads"), "ff": ("scale_resids",)}
    for scale in scales.get(reader, ()) if stack == "decoder" else ():
        if getattr(settings, scale, False):
            return Place(site, key, obstacle=f"--{scale.replace('_', '-')} scales the sum that it enters")
    return Place(site, key, readers, (layer, reader))


def final_place(settings: Namespace, stack: str, key: str) -> Place:
    """The norm that makes the output of a stack."""
    site = f"{stack}_final"
    if stack == "encoder":
        if settings.cross_self_attention:
            return Place(site, key, obstacle="the decoder's self-attention reads it too (--cross-self-attention)")
        if settings.no_cross_attention:
            return Place(site, key, obstacle="nothing reads it (--no-cross-attention)")
        layers = [f"decoder.layers.{number}.encoder_attn" for number in range(settings.decoder_layers)]
        return Place(site, key, [f"{layer}.{name}" for layer in layers for name in ("k_proj", "v_proj")])
    if settings.decoder_output_dim != settings.decoder_embed_dim and not settings.tie_adaptive_weights:
        return Place(site, key, ["decoder.project_out_dim"])
    if settings.adaptive_softmax_cutoff is not None:
        return Place(site, key, obstacle="adaptive softmax reads it")
    if settings.share_decoder_input_output_embed or getattr(settings, "share_all_embeddings", False):
        # To untie them would double the largest matrix, and so the memory that small models need, to save one pass
        # over rows x channels beside a product with rows x channels x vocabulary.
        return Place(site, key, obstacle="the output layer shares its matrix with the embeddings")
    return Place(site, key, ["decoder.output_projection"])


class Folding:
    """The state of a model while its norms are folded, each entry being rounded once.

    Args:
        state: the entries of a model; not changed.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state: Any = state.copy() if hasattr(state, "copy") else dict(state)  # keeps fairseq's kind of mapping

    def change(self, key: str, value: Tensor, like: Tensor) -> None:
        """Sets an entry to a float64 ``value`` in the type of ``like``.

        Raises:
            UserError: it is not finite in that type.
        """
        rounded = value.to(like.dtype)
        if not torch.isfinite(rounded).all():
            raise UserError(f"{key} would not be finite in {like.dtype}; `powernorm_fairseq inspect` looks for causes")
        self.state[key] = rounded

    def into_linear(self, name: str, gain: Tensor, shift: Tensor) -> None:
        """W (gain h + shift) + c = (W gain) h + (W shift + c); a layer without bias gets one."""
        weight, bias = self.state[f"{name}.weight"], self.state.get(f"{name}.bias")
        wide = weight.double()
        moved = wide @ shift
        self.change(f"{name}.weight", wide * gain, weight)
        self.change(f"{name}.bias", moved if bias is None else bias.double() + moved, weight if bias is None else bias)

    def into_residual(self, layer: str, sublayer: str, gain: Tensor, shift: Tensor) -> None:
        """(gain h + shift) + f = gain h + (shift + f), where f ends with the bias of a linear layer."""
        key = f"{layer}.{SUBLAYERS[sublayer].adds}.bias"
        bias = self.state[key]
        self.change(f"{layer}.residual_gain_{sublayer}", gain, bias)
        self.change(key, bias.double() + shift, bias)

    def put(self, place: Place, known: Constants) -> Tuple[str, str]:
        """Folds the constants of a norm into what reads it; returns its fate (``models.folding``) and words."""
        stays = f"; the scale of {known.groups} channel group{'s' * (known.groups > 1)} stays" if known.groups else ""
        if place.obstacle:
            like = next(value for value in self.state.values() if value.is_floating_point())
            self.change(f"{place.key}.gain", known.gain, like)
            self.change(f"{place.key}.shift", known.shift, like)
            return "constant", f"into a constant gain and shift{stays}: {place.obstacle}"
        for name in place.readers:
            self.into_linear(name, known.gain, known.shift)
        readers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in place.readers))
        if place.residual is None:
            return "linear", f"into {readers}{stays}"
        self.into_residual(*place.residual, known.gain, known.shift)
        return "residual", f"into {readers} and the residual{stays}"

    def remove(self, prefix: str) -> Dict[str, Tensor]:
        """Takes out the entries of a module."""
        keys = [key for key in self.state if key.startswith(prefix + ".")]
        return {key[len(prefix) + 1 :]: self.state.pop(key) for key in keys}


def fold_state(
    settings: Namespace, placement: Any, state: Mapping[str, Tensor], say: Say = to_stderr
) -> Tuple[Any, Dict[str, str], List[Row]]:
    """The entries of a model with its norms folded, where they went (``models.folding``), and a row for each site.

    Args:
        settings, placement: of the model, not folded.
        state: its entries; not changed.

    Raises:
        UserError: entries are missing or not finite.
    """
    folding = Folding(state)
    folded: Dict[str, str] = {}
    rows: Dict[str, Row] = {}
    untrained = 0
    for found in places(settings, list(placement.heads)):
        stack = found.site.split("_")[0]
        # A post-norm stack has no norm of its own at the final site.
        source = found.site if found.site in placement.names else f"{stack}_ff"
        norm = placement.create_unfolded(source, getattr(settings, f"{stack}_embed_dim"))
        if constants(norm) is None:
            done = "stays: it does more to a token than to scale groups of channels"
        elif found.obstacle and not isinstance(norm, RunningNorm):
            done = f"stays: {found.obstacle}"
        else:
            known = load_constants(norm, folding.remove(found.key), found.key)
            untrained += isinstance(norm, RunningNorm) and not norm.updates_tracked
            folded[found.site], done = folding.put(found, known)
        number = rows[found.site].number + 1 if found.site in rows else 1
        rows[found.site] = Row(found.site, placement.names[source], number, done)
    if untrained:
        say(f"warning: the statistics of {untrained} norms have followed no update; what is folded is initial values")
    return folding.state, folded, list(rows.values())


def load_constants(norm: Norm, entries: Dict[str, Tensor], key: str) -> Constants:
    """The constants of ``norm`` with the ``entries`` of ``key`` in a checkpoint; UserError if they are bad."""
    norm = norm.double()
    try:
        norm.load_state_dict(entries)
    except RuntimeError as error:
        raise UserError(f"{key} is not what the config says: {error}") from error
    known = constants(norm)
    assert known is not None
    if not (torch.isfinite(known.gain).all() and torch.isfinite(known.shift).all()):
        raise UserError(f"{key}: gains or statistics are not finite, see `powernorm_fairseq inspect`")
    return known


def fold(state: Dict[str, Any], source: Path, say: Say = to_stderr) -> Tuple[Dict[str, Any], List[Row]]:
    """A checkpoint with its norms folded, without optimiser state, and a row for each site.

    Args:
        state: a fairseq checkpoint; not changed.
        source: the file that it comes from.
        say: takes warnings.

    Raises:
        UserError: it is folded already, is no model of this package, or cannot be folded.
    """
    from fairseq.checkpoint_utils import prune_state_dict
    from fairseq.models import MODEL_REGISTRY
    from omegaconf import OmegaConf

    from powernorm_fairseq.models.folding import written
    from powernorm_fairseq.models.placement import Placement
    from powernorm_fairseq.models.transformer import NormTransformer, default_norms
    from powernorm_fairseq.models.transformer_lm import NormLanguageModel

    refuse_folded(state, source)
    cfg = config_of(state, source)
    model = MODEL_REGISTRY.get(cfg.model._name)
    if model is None or not issubclass(model, (NormTransformer, NormLanguageModel)):
        raise UserError(f"{source} holds {cfg.model._name}; only models of this plugin can be folded")
    entries = state["model"]
    for stack in ("encoder", "decoder"):
        kept = getattr(cfg.model, f"{stack}_layers_to_keep", None)  # get() of omegaconf 2.0 has no default here
        if kept:
            cfg.model[f"{stack}_layers"] = len(kept.split(","))
    entries = prune_state_dict(entries, cfg.model)
    settings = settings_of(cfg.model)
    if settings.quant_noise_pq or settings.quant_noise_scalar:
        raise UserError(f"{source} was trained with quantisation noise, for weights that are quantised as they are")
    if issubclass(model, NormLanguageModel):
        settings.no_cross_attention, settings.cross_self_attention = True, False
    placement = Placement(settings, default_norms(settings, model.published))
    entries, folded, rows = fold_state(settings, placement, entries, say)
    plain: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    plain["model"]["norm_folded"] = written(folded) or None
    extra = {
        key: value for key, value in (state.get("extra_state") or {}).items() if key not in ("ema", "ema_fp32_params")
    }
    done = {**state, "args": None, "cfg": plain, "model": entries, "extra_state": extra, "last_optimizer_state": None}
    return with_note(done, {**note_of(state), "folded": folded}) if folded else done, rows


def config_of(state: Dict[str, Any], source: Path) -> Any:
    """A copy of a checkpoint's config that can be changed (UserError where there is none)."""
    import copy

    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    cfg = state.get("cfg")
    if cfg is None:
        if state.get("args") is None:
            raise UserError(f"{source} has no config: neither cfg nor args")
        cfg = convert_namespace_to_omegaconf(state["args"])
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_struct(cfg, False)
    return cfg


def settings_of(model: Any) -> Namespace:
    """The flat settings of a model's config; fields that are newer than it have their defaults."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    from powernorm_fairseq.models.config import flat_settings

    given = vars(flat_settings(model)) if "decoder_input_dim" in model else dict(model)
    return flat_settings(Namespace(**{**vars(MODEL_DATACLASS_REGISTRY[model._name]()), **given}))


def fold_checkpoint(path: Path, output: Path, ema: bool = False, say: Say = to_stderr) -> List[Row]:
    """Writes the folded checkpoint, whole or not at all; returns a row for each site.

    Args:
        path: a checkpoint of fairseq.
        output: the file to write.
        ema: fold the shadow model that ``--store-ema`` saves.
        say: takes warnings.

    Raises:
        UserError: see :func:`fold`; or the file cannot be read or written.
    """
    from powernorm_fairseq.checkpoints.reestimate import shadow_of

    check_output(output, [path])
    state = load_checkpoint(path)
    if ema:
        state = shadow_of(state, path, say)
    state, rows = fold(state, path, say)
    save_checkpoint(state, output)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint of fairseq, of a model of this plugin"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    parser.add_argument("--ema", action="store_true", help="take the shadow model that --store-ema saves")


def main(args: argparse.Namespace) -> int:
    """Fold what the arguments name."""
    rows = fold_checkpoint(args.checkpoint, args.output, args.ema)
    site, norm = max(len(row.site) for row in rows), max(len(row.norm) for row in rows)
    for row in rows:
        print(f"{row.site:{site}}  {row.number:>2} {row.norm:{norm}}  {row.done}")
    stay, total = sum(row.number for row in rows if row.done.startswith("stays")), sum(row.number for row in rows)
    words = "no norm folds, the model is as it was"
    if stay < total:
        words = f"{total - stay} of {total} norms folded" if stay else f"all {total} norms folded"
        words += "; for inference, training goes on with the checkpoint that was given"
    print(f"{args.output}: {words}")
    return 0
