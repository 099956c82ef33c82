"""The same model from both entry points, and what a field left open means."""

import pickle
from dataclasses import fields

import pytest
from fairseq import options
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY

from powernorm_fairseq.models.config import NormOptions, run_warmup_updates
from tests.models.helpers import build, command_line, hydra

NAMES = [name for name in MODEL_DATACLASS_REGISTRY if "powernorm" in MODEL_DATACLASS_REGISTRY[name].__module__]


def test_published_command_line_keeps_what_it_asks_for():
    flags = ["--encoder-normalize-before", "--decoder-normalize-before", "--share-all-embeddings"]
    model = command_line("transformer_pn_iwslt_de_en", *flags).model
    assert (model.encoder_normalize_before, model.decoder_normalize_before, model.share_all_embeddings) == (True,) * 3


@pytest.mark.parametrize("name", ["transformer_pn_tiny", "transformer_lm_pn_tiny", "transformer_lm_pn_wiki103"])
def test_every_switch_can_be_turned_on_and_off(name):
    switches = [
        item.name
        for item in fields(MODEL_DATACLASS_REGISTRY[name])
        if item.type is bool and not item.name.startswith("no_")
    ]
    assert {"decoder_normalize_before", "norm_affine"} <= set(switches)
    on = command_line(name, *[f"--{switch.replace('_', '-')}" for switch in switches]).model
    off = command_line(name, *[f"--no-{switch.replace('_', '-')}" for switch in switches]).model
    assert {switch: on[switch] for switch in switches} == dict.fromkeys(switches, True)
    assert {switch: off[switch] for switch in switches} == dict.fromkeys(switches, False)


def test_norm_fields_have_flags_with_help():
    for name in NAMES:
        parser = options.get_training_parser()
        from fairseq.models import ARCH_MODEL_REGISTRY

        ARCH_MODEL_REGISTRY[name].add_args(parser)
        helps = {action.dest: action.help for action in parser._actions}
        for item in fields(MODEL_DATACLASS_REGISTRY[name]):
            if "norm" in item.name or item.name in ("init", "dropout"):
                assert helps[item.name], (name, item.name)


def test_no_field_takes_the_name_of_another_groups_option():
    shared = {"max_source_positions", "max_target_positions"}  # left open, they follow the task
    parser = options.get_training_parser()
    taken = {action.dest for action in parser._actions} - {"help"}
    for name in NAMES:
        clash = {item.name for item in fields(MODEL_DATACLASS_REGISTRY[name])} & taken
        assert clash <= shared, name


@pytest.mark.parametrize("scheduler", sorted(LR_SCHEDULER_REGISTRY))
def test_warmup_is_the_schedulers(scheduler):
    has = scheduler not in ("manual", "pass_through", "triangular", "tri_stage")
    flags = ["--warmup-updates", 70] if has else []
    flags += ["--total-num-update", 90] if scheduler == "polynomial_decay" else []
    flags += ["--max-lr", 1] if scheduler == "triangular" else []
    flags += ["--warmup-steps", 60] if scheduler == "tri_stage" else []
    cfg = command_line("transformer_pn_tiny", *flags, scheduler=scheduler)
    expected = 70 if has else {"tri_stage": 60}.get(scheduler, 0)
    assert run_warmup_updates(cfg.model) == expected
    model = build(cfg)
    assert model.encoder.layers[0].self_attn_layer_norm.warmup_updates == expected
    assert model.encoder.layer_norm.warmup_updates == expected  # fewer than 1000


@pytest.mark.parametrize("scheduler", sorted(set(LR_SCHEDULER_REGISTRY) - {"manual"}))
def test_warmup_is_the_schedulers_under_hydra(scheduler):
    fixed = {"triangular": "lr_scheduler.max_lr=1", "tri_stage": "lr_scheduler.warmup_steps=60", "pass_through": None}
    override = fixed.get(scheduler, "lr_scheduler.warmup_updates=70")
    cfg = hydra("transformer_pn_tiny", *([override] if override else []), scheduler=scheduler)
    expected = {"tri_stage": 60, "triangular": 0, "pass_through": 0}.get(scheduler, 70)
    assert build(cfg).encoder.layers[0].self_attn_layer_norm.warmup_updates == expected


def test_warmup_of_a_share_of_the_run():
    flags = ["--phase-ratio", "(0.1,0.4,0.5)", "--max-update", 500]
    cfg = command_line("transformer_pn_tiny", *flags, scheduler="tri_stage")
    assert run_warmup_updates(cfg.model) == 50


def test_published_warmup():
    norms = build(command_line("transformer_pn_iwslt_de_en", "--warmup-updates", 8000)).encoder
    assert norms.layers[3].final_layer_norm.warmup_updates == 8000
    assert norms.layer_norm.warmup_updates == 1000


def test_warmup_of_its_own():
    flags = ["--warmup-updates", 70, "--norm-warmup-updates", 20, "--norm-warmup-updates-final", 5]
    for cfg in (
        command_line("transformer_pn_tiny", *flags),
        hydra(
            "transformer_pn_tiny",
            "lr_scheduler.warmup_updates=70",
            norm_warmup_updates=20,
            norm_warmup_updates_final=5,
        ),
    ):
        encoder = build(cfg).encoder
        assert encoder.layers[1].self_attn_layer_norm.warmup_updates == 20
        assert encoder.layer_norm.warmup_updates == 5


@pytest.mark.parametrize("name", ["transformer_pn_tiny", "transformer_lm_pn_tiny"])
def test_positions_follow_the_task(name):
    for cfg in (
        command_line(name, "--max-target-positions", 77),
        hydra(name, "task.max_target_positions=77"),
    ):
        assert build(cfg).decoder.max_positions() == 77


def test_lm_positions_follow_the_sample_length():
    for cfg in (
        command_line("transformer_lm_pn_tiny", "--tokens-per-sample", 33),
        hydra("transformer_lm_pn_tiny", "task.tokens_per_sample=33"),
    ):
        assert build(cfg).decoder.max_positions() == 33


def test_configs_can_be_pickled():
    for name in NAMES:
        config = MODEL_DATACLASS_REGISTRY[name]()
        assert pickle.loads(pickle.dumps(config)) == config


def test_options_left_open_are_the_norms_own():
    defaults = {item.name: item.default for item in fields(NormOptions)}
    assert {name for name, value in defaults.items() if value is not None} == {
        "_name", "norm_affine", "norm_cumulative", "norm_log_interval", "init",
    } - {"_name"}  # fmt: skip
