"""The published rows: what their files say, that rows of a group are comparable, and that each one trains."""

import re

import pytest
import torch
from omegaconf import OmegaConf

from powernorm_fairseq.experiment.config import load_config, override, scoring_of, train_arguments
from powernorm_fairseq.norms import NORMS
from powernorm_fairseq.processes import PACKAGE, differences
from powernorm_fairseq.report import published
from tests.commands import ROOT

ROWS = sorted((ROOT / "configs").glob("*/*/*.yaml"))
IDS = [f"{path.parent.name}/{path.stem}" for path in ROWS]

POWERNORM = {"layer", "batch", "power_v", "power"}
XU = {"layer_simple", "detach", "ada", "none"}
EXPECTED = {
    "iwslt14_de_en": {*POWERNORM, *XU, "layer_adanorm_recipe"},
    "iwslt15_en_vi": {*XU, "layer"},
    "wmt14_en_de": POWERNORM,
    "ptb": POWERNORM,
    "wikitext103": POWERNORM,
    "enwik8": {*XU, "layer"},
}

# Where the two recipes of IWSLT14 differ; elsewhere rows of a group differ in the model alone.
RECIPE = {
    "optimization.max_update",
    "optimization.update_freq",
    "checkpoint.patience",
    "checkpoint.keep_last_epochs",
    "checkpoint.no_epoch_checkpoints",
    "checkpoint.save_interval_updates",
    "checkpoint.keep_interval_updates",
    "scoring.average",
    "scoring.checkpoint",
}
MODEL = re.compile(r"model\.(_name|norm|norm_\w+|\w+_norm_\w+)")


def header(path):
    """The fields of the comment that a file opens with."""
    lines = path.read_text(encoding="utf-8").partition("\ncommon:")[0].splitlines()
    assert all(line.startswith("# ") and len(line) <= 120 for line in lines)
    fields, key = {}, None
    for line in lines:
        match = re.match(r"# (\w+): +(.*)", line)
        key = match.group(1) if match else key
        fields[key] = f"{fields[key]} {line[1:].strip()}" if not match else match.group(2)
    return fields


def test_every_published_row_has_a_file():
    found = {}
    for path in ROWS:
        found.setdefault(path.parent.name, set()).add(path.stem)
    assert found == EXPECTED
    assert sorted(published.names()) == sorted(IDS)


@pytest.mark.parametrize("path", ROWS, ids=IDS)
def test_a_row_says_where_it_comes_from(path):
    said, row = header(path), f"{path.parent.name}/{path.stem}"
    assert said["Reproduce"] == f"powernorm_fairseq reproduce {row}"
    assert f"configs/{path.parent.parent.name}/{row}.yaml" in said["Run"]
    assert "Xu et al." in said["Row"] or "Shen et al." in said["Row"]
    theirs = published.score(path.parent.name, path.stem)
    digits = 2 if path.parent.name == "enwik8" else 1
    assert re.search(rf"\b{re.escape(f'{theirs.value:.{digits}f}')}\b", said["Paper"])
    assert ("(recalled" in said["Paper"]) == theirs.recalled
    assert "released" in said["Values"] or "chosen here" in said["Values"]
    if path.parent.name in ("ptb", "wikitext103"):
        assert "causal mask and never applies it" in said["Warning"]
    config = load_config(path)
    gpus = config["distributed_training"]["distributed_world_size"]
    assert said["GPUs"].startswith(str(gpus))
    assert config["task"]["data"] == f"runs/data/{said['Data'].split()[-1]}/binarised"
    assert config["dataset"]["required_batch_size_multiple"] == 1 and not config["common"].get("cpu")
    # The shortened run that the header proposes has fewer epochs than are averaged.
    shortened = override(config, said["Override"].partition("--set ")[2].split())
    assert shortened["optimization"]["max_update"] == 2000 and scoring_of(shortened).average <= 1
    assert (config["scoring"]["metric"] == "bleu") == (path.parent.parent.name == "mt")


@pytest.mark.parametrize("group", EXPECTED)
def test_rows_of_a_group_differ_in_the_norm_and_the_recipe_alone(group):
    paths = [path for path in ROWS if path.parent.name == group]
    first = load_config(paths[0])
    for path in paths[1:]:
        for change in differences(first, load_config(path)):
            name = change.partition(":")[0]
            recipe = RECIPE | {"model.init"} if group == "iwslt14_de_en" else set()
            assert MODEL.fullmatch(name) or name in recipe, (path, change)


def test_the_two_recipes_of_iwslt14():
    folder = ROOT / "configs" / "mt" / "iwslt14_de_en"
    for norm in EXPECTED["iwslt14_de_en"]:
        config = load_config(folder / f"{norm}.yaml")
        scoring = scoring_of(config)
        assert scoring.kinds[0] == "tokenised"
        if norm in POWERNORM:
            assert (config["checkpoint"]["patience"], scoring.average, config["optimization"]["update_freq"]) == (
                5,
                5,
                [1],
            )
        else:
            assert (config["model"]["init"], scoring.average, scoring.checkpoint) == ("kaiming", 0, "best")
            assert (config["optimization"]["max_update"], config["optimization"]["update_freq"]) == (90000, [2])


@pytest.mark.parametrize("path", ROWS, ids=IDS)
def test_a_row_has_the_norm_of_its_name(path):
    model = load_config(path)["model"]
    norm = path.stem.split("_adanorm_recipe")[0]
    assert norm in NORMS
    family = {"power": "pn", "batch": "bn", "ada": "adanorm"}.get(norm, "norm")
    assert re.match(rf"transformer_(lm_)?{family}(_|$)", model["_name"])
    if family == "norm":
        chosen = {value for key, value in model.items() if re.fullmatch(r"norm|encoder_norm_\w+", key)}
        assert chosen == {norm}


# What makes a row small enough for a test.
SMALL = [
    "common.cpu=true", "common.log_interval=1", "optimization.max_update=2", "dataset.num_workers=0",
    "distributed_training.distributed_world_size=1", "optimization.update_freq=[1]", "model.dropout=0.0",
]  # fmt: skip
SMALL_MT = ["dataset.max_tokens=256", "task.source_lang=de", "task.target_lang=en"]
SMALL_LM = ["dataset.batch_size=4", "task.tokens_per_sample=16"]


def small(path, data, folder):
    """A row's config with tiny dimensions, and what was changed."""
    config = load_config(path)
    stacks = ("encoder", "decoder") if path.parent.parent.name == "mt" else ("decoder",)
    changes = [*SMALL, *(SMALL_MT if len(stacks) == 2 else SMALL_LM)]
    for stack in stacks:
        changes += [f"model.{stack}_layers=1", f"model.{stack}_embed_dim=16", f"model.{stack}_ffn_embed_dim=16"]
    if "wiki103" in config["model"]["_name"]:
        changes += [f"model.adaptive_{part}_cutoff='20,60'" for part in ("input", "softmax")]
    changes += [f"task.data={data}", f"checkpoint.save_dir={folder}", f"common.user_dir={PACKAGE}"]
    return override(config, changes)


def by_command(config):
    """The config that fairseq-train makes of the command line."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args = options.parse_args_and_arch(options.get_training_parser(), input_args=train_arguments(config))
    return convert_namespace_to_omegaconf(args)


def by_hydra(config, folder):
    """The config that fairseq-hydra-train makes of the file, up to where it begins to train."""
    from fairseq.dataclass.initialize import add_defaults, hydra_init
    from fairseq.dataclass.utils import omegaconf_no_object_check
    from hydra.core.global_hydra import GlobalHydra

    from powernorm_fairseq.experiment.config import dump

    try:
        from hydra import compose, initialize_config_dir
    except ImportError:  # 1.0
        from hydra.experimental import compose, initialize_config_dir

    dump(config, folder / "experiment.yaml")
    GlobalHydra.instance().clear()
    hydra_init("experiment")
    with initialize_config_dir(config_dir=str(folder)):
        cfg = compose("experiment")
    add_defaults(cfg)
    with omegaconf_no_object_check():
        cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    OmegaConf.set_struct(cfg, True)
    return cfg


# Groups that are no part of training.
APART = ("generation", "eval_lm", "scoring", "hydra", "_name")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ROWS, ids=IDS)
def test_a_row_trains_and_means_the_same_to_both_entry_points(path, request, tmp_path):
    """Every row by Hydra's config; fairseq-train's is equal, and so is training with it."""
    from fairseq_cli import train

    from powernorm_fairseq.checkpoints.average import load_checkpoint

    kind = path.parent.parent.name
    data = request.getfixturevalue("translation_data" if kind == "mt" else "language_model_data")
    config = small(path, data, tmp_path / "checkpoints")
    cfg = by_hydra(config, tmp_path)
    plain = [OmegaConf.to_container(each, resolve=True, enum_to_str=True) for each in (cfg, by_command(config))]
    for each in plain:
        for group in APART:
            each.pop(group, None)
    assert differences(*plain) == []

    train.main(cfg)
    state = load_checkpoint(tmp_path / "checkpoints" / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 2
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    statistics = {key.rsplit(".")[-1] for key in state["model"] if "running_" in key}
    expected = {"power": {"running_psi_sq", "running_nu"}, "power_v": {"running_psi_sq"}}
    expected["batch"] = {"running_mean", "running_var"}
    assert statistics == expected.get(path.stem, set())
