"""One YAML, two entry points: the command line made from it and the file itself mean the same."""

import pytest

from powernorm_fairseq.experiment.config import (
    changes_of,
    dump,
    load_config,
    number,
    override,
    scoring_arguments,
    scoring_of,
    train_arguments,
    with_norm,
)
from powernorm_fairseq.processes import UserError
from tests.commands import ROOT

SHIPPED = sorted((ROOT / "configs").glob("*/*.yaml"))


def parsed(config):
    """The namespace that fairseq-train makes of a config's command line."""
    from fairseq import options

    return options.parse_args_and_arch(options.get_training_parser(), input_args=train_arguments(config))


def test_configs_are_shipped_for_both_tasks():
    assert {path.parent.name for path in SHIPPED} == {"mt", "lm"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_value_of_a_shipped_config_reaches_the_command_line(path):
    config = load_config(path)
    namespace = vars(parsed(config))
    for group in set(config) - {"generation", "eval_lm", "scoring", "hydra"}:
        for option, value in config[group].items():
            name = {"_name": "arch" if group == "model" else group}.get(option, option)
            said = namespace[name]
            if said in ("True", "False"):  # fairseq reads options whose default is another option as text at first
                said = said == "True"
            assert (list(said) if isinstance(value, list) else said) == value, (group, option)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_config_says_where_its_values_come_from(path):
    head = path.read_text(encoding="utf-8").partition("\ncommon:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("Values:", "Run:", "Override:", "Hydra:", "powernorm_fairseq run"):
        assert word in head, word
    config = load_config(path)
    assert config["dataset"]["required_batch_size_multiple"] == 1
    assert config["common"]["log_format"] == "json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_config_written_and_read_is_the_same(path, tmp_path):
    config = load_config(path)
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


MT, LM = ROOT / "configs" / "mt" / "sample.yaml", ROOT / "configs" / "lm" / "sample.yaml"


def test_switches_of_every_kind():
    """On by default in fairseq (a flag of the same name turns it off), off by default, and ours (--x and --no-x)."""
    config = override(
        load_config(MT),
        [
            "optimizer.use_old_adam=true",
            "criterion.report_accuracy=true",
            "dataset.grouped_shuffling=false",
            "checkpoint.save_interval_updates=7",
            "model.encoder_normalize_before=false",
            "model.decoder_normalize_before=true",
            "model.share_all_embeddings=false",
        ],
    )
    said = parsed(config)
    assert said.use_old_adam and said.report_accuracy and not said.grouped_shuffling
    assert said.save_interval_updates == 7
    assert not said.encoder_normalize_before and said.decoder_normalize_before and not said.share_all_embeddings


def test_a_switch_that_is_on_by_default_in_fairseq_can_be_turned_off():
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    assert FairseqConfig.__dataclass_fields__["common"].type().reset_logging in (True, False)
    from argparse import ArgumentParser

    from powernorm_fairseq.experiment import config as module

    parser = ArgumentParser()
    gen_parser_from_dataclass(parser, FairseqConfig.__dataclass_fields__["distributed_training"].type())
    on = [action for action in parser._actions if action.nargs == 0 and action.default is True]
    for action in on:
        flags = module._flags_of("distributed_training", None)[action.dest]
        assert module._flag("here", flags, False) == [action.option_strings[0]]
        assert module._flag("here", flags, True) == []


@pytest.mark.parametrize(
    "norm, model, extra",
    [
        ("layer", "transformer_norm_tiny", {}),
        ("power", "transformer_pn_tiny", {}),
        ("batch", "transformer_bn_tiny", {}),
        ("ada", "transformer_adanorm_tiny", {}),
        ("rms", "transformer_norm_tiny", {"norm": "rms"}),
    ],
)
def test_a_norm_takes_its_published_placement(norm, model, extra):
    changed = with_norm(load_config(MT), norm)["model"]
    assert changed["_name"] == model
    assert {key: value for key, value in changed.items() if key == "norm"} == extra
    assert with_norm(load_config(LM), norm)["model"]["_name"] == model.replace("transformer", "transformer_lm")
    assert parsed(with_norm(load_config(MT), norm)).arch == model


def test_norms_that_there_are_not():
    with pytest.raises(UserError, match=r"no norm 'powr'; there are layer, .*power"):
        with_norm(load_config(MT), "powr")
    with pytest.raises(UserError, match="already stands for a norm"):
        with_norm(with_norm(load_config(MT), "power"), "batch")


def test_override_reads_values_as_yaml():
    changed = override(
        {"task": {"_name": "translation"}},
        [
            "optimization.lr=[0.002, 1e-4]",
            "common.cpu=false",
            "optimizer.adam_betas=(0.9, 0.98)",
            "task.left_pad_source=null",
        ],
    )
    assert changed["optimization"]["lr"] == [0.002, 1e-4]
    assert changed["common"]["cpu"] is False
    assert changed["optimizer"]["adam_betas"] == "(0.9, 0.98)"
    assert changed["task"]["left_pad_source"] is None
    assert number(changed, "optimization", "lr", 0) == 0.002
    assert number(changed, "optimization", "max_update", 9) == 9


@pytest.mark.parametrize(
    "assignment, complaint",
    [
        ("max_update=3", "form group.option=value"),
        ("optimization.max_update", "form group.option=value"),
        ("optimisation.max_update=3", "no such group"),
        ("optimization.lr=[", "optimization.lr"),
    ],
)
def test_overrides_that_cannot_be(assignment, complaint):
    with pytest.raises(UserError, match=complaint):
        override(load_config(MT), [assignment])


@pytest.mark.parametrize(
    "assignment, complaint",
    [
        ("optimization.max_updates=3", "no option 'max_updates' in optimization"),
        ("model.norm_alfa=0.9", "no option 'norm_alfa' in model .transformer_norm_tiny"),
        ("model._name=transformer_np", "no model is named 'transformer_np'"),
        ("task._name=translating", "no task is named"),
        ("optimizer._name=adamm", "no optimizer is named"),
        ("optimization.lr={a: 1}", "cannot hold a mapping"),
        ("dataset.num_workers=null", "cannot say null"),
        ("common._name=x", "cannot be given on a command line"),
    ],
)
def test_what_a_command_line_cannot_say(assignment, complaint):
    with pytest.raises(UserError, match=complaint):
        train_arguments(override(load_config(MT), [assignment]))


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("a: [", "sample.yaml"),
        ("- a", "mapping of groups"),
        ("task: {_name: translation}\nmodel: {_name: m}\nevaluation: {}", "no such group: evaluation"),
        ("task: {_name: translation}", "model._name is missing"),
        ("task: {_name: t}\nmodel: {_name: m}\nscoring: {metrics: bleu}", "no option metrics in scoring"),
        ("task: {_name: t}\nmodel: {_name: m}\nscoring: {metric: rouge}", "must be one of bleu, perplexity"),
        ("task: {_name: t}\nmodel: {_name: m}\nscoring: {subsets: []}", "subsets is empty"),
    ],
)
def test_files_that_are_no_config(text, complaint, tmp_path):
    path = tmp_path / "sample.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint):
        load_config(path)


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no config"):
        load_config(tmp_path / "sample.yaml")


def test_decoding_takes_the_settings_of_the_run(tmp_path):
    from fairseq import options

    arguments = scoring_arguments(load_config(MT), tmp_path / "c.pt", "test")
    said = options.parse_args_and_arch(options.get_generation_parser(), input_args=arguments)
    assert (said.beam, said.lenpen, said.max_len_a, said.max_len_b) == (5, 1.0, 1.0, 10)
    assert (said.path, said.gen_subset, said.post_process) == (str(tmp_path / "c.pt"), "test", "subword_nmt")
    assert (said.source_lang, said.target_lang, said.cpu) == ("de", "en", True)
    assert said.required_batch_size_multiple == 1


def test_scoring_a_language_model_takes_its_window(tmp_path):
    from fairseq import options

    arguments = scoring_arguments(load_config(LM), tmp_path / "c.pt", "valid")
    said = options.parse_args_and_arch(options.get_eval_lm_parser(), input_args=arguments)
    assert (said.tokens_per_sample, said.context_window, said.sample_break_mode) == (64, 32, "none")
    assert said.output_word_probs and said.gen_subset == "valid"


def test_defaults_of_scoring():
    scoring = scoring_of({"task": {}, "model": {}})
    assert (scoring.metric, scoring.average, scoring.subsets) == ("bleu", 0, ["valid", "test"])
    assert scoring.reestimate == 0


@pytest.mark.parametrize("value", ["-1", "all", "0.5"])
def test_statistics_are_measured_on_a_number_of_batches(value):
    config = override(load_config(MT), ["scoring.reestimate=200"])
    assert scoring_of(config).reestimate == 200
    with pytest.raises(UserError, match=r"scoring\.reestimate is .* must be a number of batches, or 0"):
        scoring_of(override(config, [f"scoring.reestimate={value}"]))


def test_what_makes_another_experiment_of_a_config():
    config = load_config(ROOT / "configs" / "mt" / "sample.yaml")
    same = ["common.seed=9", "task.data=elsewhere", "common.cpu=true", f"model.dropout={config['model']['dropout']}"]
    assert changes_of(config, same) == []
    assert changes_of(config, [*same, "optimization.lr=[1]", "common.fp16=true", "optimization.lr=[2]"]) == [
        "optimization.lr=[2]",
        "common.fp16=true",
    ]
