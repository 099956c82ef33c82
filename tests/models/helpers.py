"""Configs of a run as the two entry points make them, and models built from them without data on disk."""

import copy
import functools
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import fairseq
import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra.core.global_hydra import GlobalHydra
from hydra.experimental import compose, initialize_config_dir
from omegaconf import OmegaConf

import powernorm_fairseq.models  # noqa: F401

TASKS = {True: "language_modeling", False: "translation"}


def is_language_model(name: str) -> bool:
    return name.startswith("transformer_lm")


def command_line(name: str, *flags: object, scheduler: str = "inverse_sqrt") -> Any:
    """The config of ``fairseq-train DATA --arch name flags``."""
    parser = options.get_training_parser()
    argv = ["DATA", "--task", TASKS[is_language_model(name)], "--arch", name, "--optimizer", "adam"]
    argv += ["--lr-scheduler", scheduler, "--max-tokens", "100", *map(str, flags)]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))


@functools.lru_cache(maxsize=None)
def composed(task: str, scheduler: str, overrides: Tuple[str, ...]) -> Any:
    """The config that Hydra composes, as a container."""
    hydra_init("config")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(fairseq.__file__).parent / "config")):
        cfg = compose(
            "config",
            overrides=[
                f"task={task}",
                "task.data=DATA",
                "criterion=cross_entropy",
                "optimizer=adam",
                f"lr_scheduler={scheduler}",
                *overrides,
            ],
        )
    OmegaConf.set_struct(cfg, False)
    if OmegaConf.is_missing(cfg, "model"):
        cfg.model = None
    add_defaults(cfg)
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)


def hydra(name: str, *overrides: str, scheduler: str = "inverse_sqrt", **model: Any) -> Any:
    """The config of ``fairseq-hydra-train`` with a YAML that holds ``model: {_name: name, **model}``.

    The plugin is imported after Hydra has composed the config there, so the model's dataclass enters by
    ``add_defaults`` in fairseq's ``main``, as here.
    """
    cfg = OmegaConf.create(copy.deepcopy(composed(TASKS[is_language_model(name)], scheduler, overrides)))
    cfg.model = {"_name": name, **model}
    add_defaults(cfg)
    return cfg


def dictionary(words: int = 50) -> Dictionary:
    """A dictionary of exactly ``words`` entries, special ones included."""
    made = Dictionary()
    for number in range(words - len(made)):
        made.add_symbol(f"word{number}")
    return made


def build(cfg: Any, words: int = 50, seed: int = 1, joined: bool = True) -> Any:
    """The model of a run's config; the task is a stand-in that has the dictionaries."""
    source = dictionary(words)
    target = source if joined else dictionary(words + 8)
    torch.manual_seed(seed)
    return models.build_model(cfg.model, Namespace(source_dictionary=source, target_dictionary=target))


def small(name: str = "transformer_norm_tiny", words: int = 50, seed: int = 1, **fields: Any) -> Any:
    """A tiny model without dropout, in double precision."""
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return build(hydra(name, **{**quiet, **fields}), words, seed).double()


def sentences(*lengths: int, words: int = 50, seed: int = 1, pad_to: Optional[int] = None, left: bool = False) -> Any:
    """(B, T) random tokens that end in eos, padded on the right or left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(pad_to or 0, *lengths)
    batch = torch.full((len(lengths), width), 1)
    for row, length in enumerate(lengths):
        tokens = torch.randint(4, words, (length,), generator=generator)
        tokens[-1] = 2
        if left:
            batch[row, width - length :] = tokens
        else:
            batch[row, :length] = tokens
    return batch


def translation_input(more_source: int = 0, more_target: int = 0) -> Dict[str, Any]:
    """Three sentence pairs: left-padded sources, right-padded targets; ``more_*`` columns of padding on top."""
    source = sentences(7, 5, 2, pad_to=7 + more_source, left=True)
    target = sentences(6, 3, 4, seed=2, pad_to=6 + more_target)
    return {
        "src_tokens": source,
        "src_lengths": source.ne(1).sum(1),
        "prev_output_tokens": target,
    }


def inputs_for(name: str, **more: int) -> Dict[str, Any]:
    if is_language_model(name):
        return {"src_tokens": sentences(9, 9, 4, pad_to=9 + more.get("more_target", 0))}
    return translation_input(**more)


def loss_of(model: Any, net_input: Dict[str, Any]) -> torch.Tensor:
    """A loss over the real target tokens alone, as fairseq's criteria take it."""
    logits = model(**net_input)[0]
    tokens = net_input.get("prev_output_tokens", net_input["src_tokens"])
    real = tokens.ne(1)
    return torch.log_softmax(logits[real], -1).square().mean()
