"""The YAML of a run, and the ``fairseq-train`` command line that means the same; fairseq-hydra-train reads it as is."""

import ast
from argparse import Action, ArgumentParser
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from powernorm_fairseq.evaluation.kinds import check_kinds
from powernorm_fairseq.evaluation.units import UNITS
from powernorm_fairseq.evaluation.windows import Window, window_of
from powernorm_fairseq.processes import UserError

# What fairseq-train has no flags for. `scoring` is read here alone: fairseq's schema leaves that group open, where
# fairseq-hydra-train would refuse a group of another name.
NOT_FOR_TRAINING = ("generation", "eval_lm", "scoring", "hydra")

# The part of `common` that scoring needs as well.
COMMON_TO_ALL = ("cpu", "fp16", "memory_efficient_fp16", "fp16_no_flatten_grads", "bf16", "seed", "user_dir")

# Groups whose class is chosen by ``_name``, and the flag that chooses it.
CHOICES = {
    "task": "--task",
    "model": "--arch",
    "criterion": "--criterion",
    "optimizer": "--optimizer",
    "lr_scheduler": "--lr-scheduler",
}

# Options that say nothing of what is trained and scored, or what a record says apart.
INDIFFERENT = {
    "common.seed", "common.cpu", "common.user_dir", "common.log_format", "common.log_interval", "common.log_file",
    "common.tensorboard_logdir", "common.wandb_project", "task.data", "checkpoint.save_dir", "dataset.num_workers",
    "model.norm_log_interval", "scoring.max_tokens", "scoring.batch_size",
}  # fmt: skip

# Which family of models publishes a norm; other norms are set on the family that has no placement of its own.
FAMILIES = {"layer": "norm", "power": "pn", "batch": "bn", "ada": "adanorm"}

Config = Dict[str, Any]


def load_config(path: Path) -> Config:
    """Read a YAML, with OmegaConf's rules for numbers (``1e-7`` is one) and interpolations.

    Raises:
        UserError: no such file, no mapping of groups, or a group that neither fairseq nor this package knows.
    """
    try:
        read = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise UserError(f"no config {path}") from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(read, dict) or not all(isinstance(group, dict) for group in read.values()):
        raise UserError(f"{path}: a config is a mapping of groups, each a mapping of options")
    unknown = sorted(set(map(str, read)) - {*_fairseq_groups(), "hydra"})
    if unknown:
        raise UserError(f"{path}: no such group: {', '.join(unknown)}")
    for group in ("task", "model"):
        if "_name" not in read.get(group, {}):
            raise UserError(f"{path}: {group}._name is missing")
    config = {str(group): dict(options) for group, options in read.items()}
    scoring_of(config)
    return config


def override(config: Config, assignments: Iterable[str]) -> Config:
    """A copy of ``config`` with ``group.option=value`` set; values are read as YAML.

    Raises:
        UserError: an assignment is not of that form.
    """
    changed = {group: dict(options) for group, options in config.items()}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        group, dot, option = name.partition(".")
        if not (equals and dot and group and option):
            raise UserError(f"{assignment!r} is not of the form group.option=value")
        if group not in {*_fairseq_groups(), "hydra"}:
            raise UserError(f"{assignment!r}: no such group")
        try:
            value = OmegaConf.to_container(OmegaConf.create("value: " + text))["value"]  # type: ignore[index,call-overload]
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise UserError(f"{assignment!r}: {error}") from None
        options = changed.setdefault(group, {})
        *parents, last = option.split(".")
        for parent in parents:
            options[parent] = options = dict(options.get(parent) or {})
        options[last] = value
    return changed


def changes_of(config: Config, assignments: Iterable[str]) -> List[str]:
    """Those of ``assignments`` that make another experiment of ``config``, each option once, as ``group.option=value``.

    The seed, places, devices and what is logged do not.
    """
    last = {assignment.partition("=")[0]: assignment for assignment in assignments}
    return [
        assignment
        for name, assignment in last.items()
        if name not in INDIFFERENT and override(config, [assignment]) != config
    ]


def with_norm(config: Config, norm: str) -> Config:
    """A copy of ``config`` whose model uses ``norm``, placed as published where there is a published placement.

    The model must be of the family without a placement (``transformer_norm...``, ``transformer_lm_norm...``).

    Raises:
        UserError: it is not, or there is no such norm.
    """
    from powernorm_fairseq.norms import NORMS

    if norm not in NORMS:
        raise UserError(f"no norm {norm!r}; there are {', '.join(NORMS)}")
    name = config["model"]["_name"]
    for base in ("transformer_lm_norm", "transformer_norm"):
        if name == base or name.startswith(base + "_"):
            changed = {group: dict(options) for group, options in config.items()}
            stem, size = base[: -len("norm")], name[len(base) :]
            changed["model"]["_name"] = stem + FAMILIES.get(norm, "norm") + size
            if norm not in FAMILIES:
                changed["model"]["norm"] = norm
            return changed
    raise UserError(f"model {name!r} already stands for a norm; start from one named transformer_[lm_]norm")


@dataclass
class Scoring:
    """How a run is scored: the group ``scoring`` of its YAML.

    Attributes:
        metric: ``bleu`` or ``perplexity``.
        subsets: what is scored, the last being the one that is reported first.
        average: how many of the last checkpoints are averaged; 0: none, the one named by ``checkpoint`` is scored.
        checkpoint: ``best`` (lowest validation loss) or ``last``.
        reestimate: on how many training batches running statistics are measured anew for the checkpoint that is scored,
            average or not; 0: they stay as they are.
        kinds: BLEU: what is computed of one decoding, ``tokenised``, ``compound``, ``sacrebleu`` or ``chrf`` (see
            evaluation/kinds.py); the first is the score of the run.
        reference: BLEU: file of the references, as people write them, in the data folder; ``{subset}`` and ``{target}``
            are filled in.
        tokenised: BLEU: the same in tokens, for the kinds ``tokenised`` and ``compound``.
        lowercase: BLEU: ignore case, for text that was lower-cased in preparation.
        post_process: BLEU: the kind of subwords to be joined again.
        tokens_per_sample: perplexity: the window, including the context; default: the task's.
        stride: perplexity: tokens scored in each window, the rest of it being context; default: what
            ``eval_lm.context_window`` leaves of it.
        unit: perplexity: ``word``, ``token`` or ``character`` (each token being one); words in pieces are put together
            as ``post_process`` says.
        max_tokens, batch_size: the size of a batch; they have no influence on scores.
    """

    metric: str = "bleu"
    subsets: List[str] = field(default_factory=lambda: ["valid", "test"])
    average: int = 0
    checkpoint: str = "best"
    reestimate: int = 0
    kinds: List[str] = field(default_factory=lambda: ["sacrebleu"])
    reference: str = "reference.{subset}.{target}"
    tokenised: str = "tokenised.{subset}.{target}"
    lowercase: bool = False
    post_process: str = "subword_nmt"
    tokens_per_sample: Optional[int] = None
    stride: Optional[int] = None
    unit: str = "word"
    max_tokens: Optional[int] = None
    batch_size: Optional[int] = None


def scoring_of(config: Config) -> Scoring:
    """The group ``scoring``, checked.

    Raises:
        UserError: an option that there is not, or a value that cannot be.
    """
    options = config.get("scoring", {})
    unknown = sorted(set(options) - {item.name for item in fields(Scoring)})
    if unknown:
        raise UserError(f"no option {', '.join(unknown)} in scoring")
    scoring = Scoring(**options)
    for name, value, allowed in (
        ("metric", scoring.metric, ("bleu", "perplexity")),
        ("checkpoint", scoring.checkpoint, ("best", "last")),
        ("unit", scoring.unit, UNITS),
    ):
        if value not in allowed:
            raise UserError(f"scoring.{name} is {value!r}, and must be one of {', '.join(allowed)}")
    check_kinds(scoring.kinds)
    if not isinstance(scoring.reestimate, int) or scoring.reestimate < 0:
        raise UserError(f"scoring.reestimate is {scoring.reestimate!r}, and must be a number of batches, or 0")
    if not scoring.subsets:
        raise UserError("scoring.subsets is empty")
    return scoring


def scoring_window(config: Config) -> Window:
    """The window that perplexity is measured with.

    Raises:
        UserError: it cannot be.
    """
    scoring = scoring_of(config)
    length = scoring.tokens_per_sample or config["task"].get("tokens_per_sample")
    if length is None:
        raise UserError("perplexity needs a window: set scoring.tokens_per_sample or task.tokens_per_sample")
    # 0 is fairseq's default, which says nothing against a stride.
    return window_of(length, scoring.stride, config.get("eval_lm", {}).get("context_window") or None)


def train_arguments(config: Config) -> List[str]:
    """The arguments of ``fairseq-train`` that mean the same as ``config``.

    Raises:
        UserError: an option that its group does not have, or a value that a flag cannot express.
    """
    return _arguments({group: options for group, options in config.items() if group not in NOT_FOR_TRAINING})


def scoring_arguments(config: Config, checkpoint: Path, subset: str) -> List[str]:
    """The arguments of ``fairseq-generate`` or ``fairseq-eval-lm`` that score ``checkpoint`` on ``subset``."""
    scoring = scoring_of(config)
    common = {name: value for name, value in config.get("common", {}).items() if name in COMMON_TO_ALL}
    task = dict(config["task"])
    batch = {"max_tokens": scoring.max_tokens, "batch_size": scoring.batch_size, "gen_subset": subset}
    # Nothing of the text may be left out; see the trap of the forks in the sample configs.
    batch.update(required_batch_size_multiple=1, num_workers=0)
    groups: Config = {"common": common, "task": task, "dataset": batch}
    if scoring.metric == "bleu":
        groups["generation"] = config.get("generation", {})
        own = ["--post-process", scoring.post_process] if scoring.post_process else []
    else:
        window = scoring_window(config)
        task["tokens_per_sample"] = window.length
        own_options = {"context_window": window.context, "output_word_probs": True}
        groups["eval_lm"] = {**config.get("eval_lm", {}), **own_options}
        own = []
    return [*_arguments(groups), "--path", str(checkpoint), *own]


def _arguments(config: Config) -> List[str]:
    """Flags for all options of all groups; what is positional comes first."""
    arguments: List[str] = []
    positional: List[str] = []
    for group, options in config.items():
        flags = _flags_of(group, options.get("_name"))
        if "_name" in options:
            if group not in CHOICES:
                raise UserError(f"{group}._name cannot be given on a command line")
            arguments += [CHOICES[group], options["_name"]]
        for option, value in options.items():
            if option == "_name":
                continue
            if option not in flags:
                raise UserError(f"no option {option!r} in {group} ({options.get('_name', 'fairseq')})")
            if not flags[option][0].option_strings:
                positional.append(str(value))
            else:
                arguments += _flag(f"{group}.{option}", flags[option], value)
    return positional + arguments


def _flag(where: str, actions: Sequence[Action], value: Any) -> List[str]:
    """The flag of one option; a switch appears only where it differs from its default."""
    default = actions[0].default
    if value is None:
        if default not in (None, ""):
            raise UserError(f"{where}: a command line cannot say null where the default is {default!r}")
        return []
    if isinstance(value, Mapping):
        raise UserError(f"{where}: a command line cannot hold a mapping")
    if isinstance(value, bool):
        switches = [action for action in actions if action.nargs == 0 and action.const is value]
        if switches:
            return [switches[0].option_strings[0]]
        if any(action.nargs == 0 for action in actions):
            return []  # the only switch says the opposite, so leaving it out says this
    return [actions[0].option_strings[0], repr(list(value)) if isinstance(value, (list, tuple)) else str(value)]


def _flags_of(group: str, name: Optional[str]) -> Dict[str, List[Action]]:
    """Option -> its flags, as fairseq itself would add them to its parser.

    Asking fairseq is safer than a rule: a switch that is on by default has a flag of the same name that turns it off
    in fairseq's own classes, and two flags, ``--x`` and ``--no-x``, in others.
    """
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.utils import gen_parser_from_dataclass
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    if group in CHOICES:
        registries = {"task": TASK_REGISTRY, "model": ARCH_MODEL_REGISTRY}
        registry = registries.get(group) or REGISTRIES[group]["registry"]
        if name not in registry:
            raise UserError(f"no {group} is named {name!r}")
        chosen = registry[name]
        if hasattr(chosen, "add_args"):
            chosen.add_args(parser)
        elif getattr(chosen, "__dataclass", None) is not None:
            gen_parser_from_dataclass(parser, vars(chosen)["__dataclass"]())
    else:
        dataclasses: Dict[str, Any] = {item.name: item.type for item in fields(FairseqConfig)}
        gen_parser_from_dataclass(parser, dataclasses[group]())
    flags: Dict[str, List[Action]] = {}
    for action in parser._actions:
        flags.setdefault(action.dest, []).append(action)
    return flags


def _fairseq_groups() -> List[str]:
    from fairseq.dataclass.configs import FairseqConfig

    return [item.name for item in fields(FairseqConfig) if not item.name.startswith("_")]


def number(config: Config, group: str, option: str, default: float) -> float:
    """One number of a config; the first where there is a list of them (``lr: [0.003]``)."""
    value = config.get(group, {}).get(option, default)
    if isinstance(value, str):
        value = ast.literal_eval(value)
    return value[0] if isinstance(value, (list, tuple)) else value


def dump(config: Config, path: Path) -> None:
    """Write a config as YAML that ``load_config`` reads back equal."""
    from powernorm_fairseq.processes import write_atomically

    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(config)))
