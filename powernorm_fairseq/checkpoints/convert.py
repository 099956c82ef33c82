"""``powernorm_fairseq convert``: a checkpoint of the authors' PowerNorm code for this plugin.

The released code of the PowerNorm paper is a fork of fairseq 0.8 (GitHub sIncerass/powernorm). The new file loads with
fairseq 0.12 and this plugin for generation, validation and training with a new optimiser; the optimiser's state and
the place in the data are left out. What has no counterpart is refused by name, and nothing is written then.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.checkpoints.average import check_output, save_checkpoint
from powernorm_fairseq.checkpoints.inspect import findings
from powernorm_fairseq.checkpoints.released import load_released
from powernorm_fairseq.processes import UserError

# What the released code fixes: its PowerNorm's two decays, its BatchNorm's momentum and layer scale over all channels,
# and the warm-up of the norms behind the last layers.
ALPHA_BKW = 0.9
BATCH_MOMENTUM = 0.05
BATCH_GROUPS = 1
FINAL_WARMUP = 1000

# Its options offer `group` and `none` too, for which it builds no module, so that no model with them ever ran.
NORM_NAMES = ("layer", "batch", "power")
# Norm -> its buffers -> ours.
BUFFERS = {
    "layer": {},
    "power": {"running_phi": "running_psi_sq", "ema_gz": "running_nu", "iters": "updates_tracked"},
    "batch": {
        "running_mean": "running_mean",
        "running_var": "running_var",
        "num_batches_tracked": "updates_tracked",
    },
}

# Site -> the option that chooses its norm. Cross-attention and final norms have no option of their own.
SITES = {
    "encoder_norm_self": "encoder_norm_self",
    "encoder_norm_ff": "encoder_norm_ff",
    "encoder_norm_final": "encoder_norm_ff",
    "decoder_norm_self": "decoder_norm_self",
    "decoder_norm_cross": "decoder_norm_self",
    "decoder_norm_ff": "decoder_norm_ff",
    "decoder_norm_final": "decoder_norm_ff",
}

# Options of a model that stand in ours under the same name -> what the fork takes where a checkpoint lacks them.
MODEL_OPTIONS: Dict[str, Any] = {
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "encoder_normalize_before": False,
    "encoder_learned_pos": False,
    "encoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "decoder_normalize_before": False,
    "decoder_learned_pos": False,
    "decoder_layerdrop": 0.0,
    "share_decoder_input_output_embed": False,
    "share_all_embeddings": False,
    "no_token_positional_embeddings": False,
    "adaptive_softmax_dropout": 0.0,
    "adaptive_softmax_factor": 4.0,
    "no_cross_attention": False,
    "cross_self_attention": False,
    "no_decoder_final_norm": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
}
# Weights are in the checkpoint, and the files that some came from need not be there; pruning was done by the fork.
EMPTIED = ("encoder_embed_path", "decoder_embed_path", "encoder_layers_to_keep", "decoder_layers_to_keep", "user_dir")
# What changes a model and has no counterpart.
WITHOUT_COUNTERPART = {
    "encoder_spec_norm": "spectral normalization of the encoder's attention",
    "layer_wise_attention": "layer-wise attention",
    "adaptive_input": "adaptive input embeddings",
    "tie_adaptive_weights": "a softmax tied to adaptive input embeddings",
    "char_inputs": "character inputs",
}
OUTPUT = "decoder.output_projection.weight"  # the fork: decoder.embed_out
# Positions that fairseq computes anew; some of its versions keep them as entries, and add them where they are missing.
COMPUTED = ("embed_positions.weights", "embed_positions._float_tensor")


def model_fields(args: argparse.Namespace) -> Dict[str, Any]:
    """The fields of our model that is the released one with these options; ``_name`` is the model's.

    Raises:
        UserError: the options ask for something that has no counterpart here; all such options are named.
    """
    refused = [f"{option} ({text})" for option, text in WITHOUT_COUNTERPART.items() if getattr(args, option, False)]
    task, arch = getattr(args, "task", "translation"), str(getattr(args, "arch", None))
    if task != "translation":
        refused.append(f"task {task}")
    if not arch.startswith("transformer") or arch.startswith(
        ("transformer_lm", "transformer_align", "transformer_from")
    ):
        refused.append(f"arch {arch}")
    options = sorted(set(SITES.values()))
    names = {option: getattr(args, option, "layer") for option in options}
    refused += [f"{option} {names[option]}" for option in options if names[option] not in NORM_NAMES]
    if refused:
        raise UserError(f"no counterpart here for {', '.join(refused)}")

    fields = {option: getattr(args, option, default) for option, default in MODEL_OPTIONS.items()}
    fields["activation_dropout"] = fields["activation_dropout"] or getattr(args, "relu_dropout", 0.0)
    for option in ("embed_dim", "ffn_embed_dim"):
        fields[f"decoder_{option}"] = getattr(args, f"decoder_{option}", fields[f"encoder_{option}"])
    # The fork's target embeddings are always as wide as its decoder.
    fields["decoder_input_dim"] = fields["decoder_embed_dim"]
    fields["decoder_output_dim"] = getattr(args, "decoder_output_dim", fields["decoder_embed_dim"])
    if fields["share_all_embeddings"]:
        fields["share_decoder_input_output_embed"] = True
    cutoff = getattr(args, "adaptive_softmax_cutoff", None)
    fields["adaptive_softmax_cutoff"] = _numbers(cutoff) if cutoff else None
    fields.update(_norm_fields(args, names, fields))
    return fields


def _numbers(text: Any) -> List[int]:
    return [int(part) for part in (text.strip("[]()").split(",") if isinstance(text, str) else text)]


def _norm_fields(args: argparse.Namespace, names: Mapping[str, str], fields: Mapping[str, Any]) -> Dict[str, Any]:
    sites = {site: names[option] for site, option in SITES.items()}
    if not fields["encoder_normalize_before"]:
        del sites["encoder_norm_final"]
    if not fields["decoder_normalize_before"] or fields["no_decoder_final_norm"]:
        del sites["decoder_norm_final"]
    if fields["no_cross_attention"]:
        del sites["decoder_norm_cross"]
    used = set(sites.values())
    found: Dict[str, Any] = {**dict.fromkeys(SITES, ""), **sites}
    if "power" in used:
        if not hasattr(args, "warmup_updates"):
            raise UserError("the checkpoint's options have no warmup_updates, which its PowerNorm's warm-up is")
        found["norm_numerics"] = "released"
        found["norm_warmup_updates"] = int(args.warmup_updates)
        if sites.get("encoder_norm_final") == "power":
            found["norm_warmup_updates_final"] = FINAL_WARMUP
    if "batch" in used:
        heads = {site: fields[f"{site.split('_')[0]}_attention_heads"] for site in sites if sites[site] == "power"}
        odd = sorted(site for site, number in heads.items() if number != BATCH_GROUPS)
        if odd:
            raise UserError(
                "no counterpart here for a model with both PowerNorm and BatchNorm: norm_groups is one option, and "
                f"{', '.join(odd)} would have {heads[odd[0]]} groups, BatchNorm {BATCH_GROUPS}"
            )
        found["norm_groups"] = BATCH_GROUPS
        found["norm_momentum"] = BATCH_MOMENTUM
    stacks = {
        stack: {name for site, name in sites.items() if site.startswith(stack)} for stack in ("encoder", "decoder")
    }
    family = {"power": "pn", "batch": "bn"}.get("".join(stacks["encoder"])) if stacks["decoder"] == {"layer"} else None
    found["_name"] = f"transformer_{family or 'norm'}"
    return found


def run_config(args: argparse.Namespace, fields: Mapping[str, Any]) -> Any:
    """The config that fairseq 0.12 stores, from the options of 0.8 and the fields of the model.

    Raises:
        UserError: an option has a value that fairseq 0.12 refuses.
    """
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.registry import REGISTRIES

    new = argparse.Namespace(**vars(args))
    for option in EMPTIED:
        setattr(new, option, None)
    for option, value in fields.items():
        setattr(new, option, value)
    new.arch = fields["_name"]
    new.task = "translation"
    for text in ("left_pad_source", "left_pad_target"):
        if isinstance(getattr(new, text, None), str):
            setattr(new, text, getattr(new, text) == "True")
    # Names that fairseq 0.12 has changed.
    for old, now in (("max_sentences", "batch_size"), ("max_sentences_valid", "batch_size_valid")):
        setattr(new, now, getattr(args, old, None))
    if hasattr(args, "min_lr"):
        new.stop_min_lr = args.min_lr
    if isinstance(getattr(args, "lr", None), float):
        new.lr = [args.lr]
    if isinstance(getattr(args, "data", None), list):
        new.data = args.data[0]
    if getattr(args, "raw_text", False) or getattr(args, "lazy_load", False):
        new.dataset_impl = "raw" if getattr(args, "raw_text", False) else "lazy"
    criterion = str(getattr(args, "criterion", "cross_entropy"))
    if criterion not in REGISTRIES["criterion"]["registry"]:  # the fork has one with regularization in training
        new.criterion = "label_smoothed_cross_entropy" if criterion.startswith("label_smoothed") else "cross_entropy"
    for choice in ("optimizer", "lr_scheduler"):
        if getattr(args, choice, None) not in REGISTRIES[choice]["registry"]:
            setattr(new, choice, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra's, about how fairseq calls it
            return convert_namespace_to_omegaconf(new)
    except Exception as error:  # Hydra has errors of many types
        raise UserError(f"fairseq does not take the checkpoint's options: {error}") from error


def build_model(cfg: Any, words: Mapping[str, int]) -> Any:
    """The model of a config, with vocabularies of so many ``encoder`` and ``decoder`` entries."""
    from fairseq import models
    from fairseq.data import Dictionary

    def dictionary(size: int) -> Any:
        made = Dictionary()
        for number in range(size - len(made)):
            made.add_symbol(f"word{number}")
        return made

    task = argparse.Namespace(
        source_dictionary=dictionary(words["encoder"]), target_dictionary=dictionary(words["decoder"])
    )
    try:
        return models.build_model(cfg.model, task)
    except (ValueError, AssertionError) as error:
        raise UserError(f"no such model here: {error}") from error


def converted_norm(name: str, old: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The state of one of our norms from that of the released one.

    The released PowerNorm keeps ema_gz = nu / (1 - alpha_bkw); its statistics have shape (1, C, 1, 1), its counter
    (1,). Statistics stay float64 or become float32. The counter is taken as it is: it counts forward passes.

    Args:
        name: ``power``, ``batch`` or ``layer``.
        old: entries by their name within the norm (``weight``, ``running_phi``, ...).

    Raises:
        UserError: an entry is missing or unknown; all are named.
    """
    known = {"weight": "weight", "bias": "bias", **BUFFERS[name]}
    missing, unknown = sorted(set(known) - set(old)), sorted(set(old) - set(known))
    if missing or unknown:
        raise UserError("; ".join(_said([("missing", missing), ("unknown", unknown)])))
    new: Dict[str, Tensor] = {}
    for entry, value in old.items():
        if entry in BUFFERS[name]:
            value = value if value.dtype == torch.float64 else value.float()
        if entry == "ema_gz":
            value = value * (1 - ALPHA_BKW)
        if entry in ("iters", "num_batches_tracked"):
            value = value.float().reshape(())
        elif entry in BUFFERS[name]:
            value = value.reshape(-1)
        new[known[entry]] = value
    if name != "layer":
        new.update({counter: torch.zeros(()) for counter in ("updates_skipped", "updates_bounded")})
    return new


def _said(lists: List[Tuple[str, List[str]]]) -> List[str]:
    return [f"{text}: {', '.join(entries)}" for text, entries in lists if entries]


def convert_model(old: Mapping[str, Tensor], model: Any) -> Dict[str, Tensor]:
    """The state dict of ``model`` from the one of the released code.

    Raises:
        UserError: entries are missing or unknown, or have other shapes; all are named.
    """
    from powernorm_fairseq.norms import NORMS
    from powernorm_fairseq.norms.base import Norm

    classes = {kind: name for name, kind in NORMS.items()}
    left = {key: value for key, value in old.items() if not key.endswith(COMPUTED)}
    new: Dict[str, Tensor] = {}
    missing, unknown, broken = [], [], []
    for site, module in model.named_modules():
        if not isinstance(module, Norm):
            continue
        name = classes[type(module)]
        known = {"weight", "bias", *BUFFERS[name]}
        entries = {key[len(site) + 1 :]: left.pop(key) for key in list(left) if key.startswith(f"{site}.")}
        if set(entries) == known:
            new.update({f"{site}.{entry}": value for entry, value in converted_norm(name, entries).items()})
        else:
            broken.append(site)
            missing += [f"{site}.{entry}" for entry in sorted(known - set(entries))]
            unknown += [f"{site}.{entry}" for entry in sorted(set(entries) - known)]
    for key, value in left.items():
        stem, _, entry = key.rpartition(".")
        if entry in ("in_proj_weight", "in_proj_bias"):  # one matrix in older versions yet
            for part, third in zip("qkv", value.chunk(3)):
                new[f"{stem}.{part}_proj.{entry[len('in_proj_') :]}"] = third.clone()
        elif key == "decoder.embed_out":
            new[OUTPUT] = value
        else:
            new[key] = value
    wanted = {key: value for key, value in model.state_dict().items() if not key.endswith(COMPUTED)}
    shared = "decoder.embed_tokens.weight"
    if model.decoder.share_input_output_embed and model.decoder.adaptive_softmax is None and shared in new:
        new[OUTPUT] = new[shared]
    absent = [key for key in wanted if key not in new and key.rpartition(".")[0] not in broken]
    missing += ["decoder.embed_out" if key == OUTPUT else key for key in absent]
    unknown += [key for key in new if key not in wanted]
    shapes = [
        f"{key} is {tuple(new[key].shape)}, by its options {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in new and new[key].shape != value.shape
    ]
    refused = _said([("missing entries", missing), ("unknown entries", unknown), ("other shapes", shapes)])
    if refused:
        raise UserError("the checkpoint's model is not the one that its options describe; " + "; ".join(refused))
    versions = [key for key in ("encoder.version", "decoder.version") if float(new[key].flatten()[0]) < 3]
    if versions:  # fairseq would drop the final norms of such a model
        raise UserError(f"{' and '.join(versions)} below 3: older than the released code")
    return {key: new[key] for key in wanted}


def convert_state(old: Mapping[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """A checkpoint for fairseq 0.12 and this plugin from a loaded one of the released code.

    Returns:
        The checkpoint, and what a user should know about it, in sentences.

    Raises:
        UserError: something has no counterpart, is missing or is unknown.
    """
    args = old["args"]
    fields = model_fields(args)
    words = {}
    for stack in ("encoder", "decoder"):
        key = f"{stack}.embed_tokens.weight"
        if key not in old["model"]:
            raise UserError(f"missing entries: {key}")
        words[stack] = old["model"][key].shape[0]
    cfg = run_config(args, fields)
    history = (old.get("optimizer_history") or [{}])[-1]
    state = {
        "args": None,
        "cfg": cfg,
        "model": convert_model(old["model"], build_model(cfg, words)),
        "optimizer_history": [
            {
                "criterion_name": history.get("criterion_name", ""),
                "optimizer_name": history.get("optimizer_name", ""),
                "lr_scheduler_state": {},
                "num_updates": int(history.get("num_updates", 0)),
            }
        ],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "version": 2, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
    }
    notes = []
    if cfg.criterion._name != getattr(args, "criterion", cfg.criterion._name):
        notes.append(f"the criterion is {cfg.criterion._name}: there is no {args.criterion} here")
    warmup = fields.get("norm_warmup_updates")
    if fields["decoder_norm_final"] == "power" and warmup != FINAL_WARMUP:
        notes.append(
            f"the final decoder norm had a warm-up of {FINAL_WARMUP}; in further training it has that of the other "
            f"norms, {warmup}"
        )
    return state, notes + findings(state)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("checkpoint", type=Path, metavar="OLD.pt", help="checkpoint of the released code")
    parser.add_argument("--output", type=Path, required=True, metavar="NEW.pt", help="file to write")


def main(args: argparse.Namespace) -> int:
    """Convert what the arguments name."""
    check_output(args.output, [args.checkpoint])
    state, notes = convert_state(load_released(args.checkpoint))
    for note in notes:
        print(f"note: {note}")
    updates = state["optimizer_history"][-1]["num_updates"]
    name = state["cfg"].model._name
    save_checkpoint(state, args.output)
    print(f"{args.output}: {name} after {updates} updates, without the optimiser's state")
    print(f"train on with: fairseq-train ... --arch {name} --finetune-from-model {args.output}")
    return 0
