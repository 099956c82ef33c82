"""fairseq's own commands on real text, with the norms of the sample runs."""

import re

import pytest
import torch
from fairseq import utils
from fairseq.trainer import Trainer

from tests.commands import PLUGIN, checked, in_this_process, write_lines

pytestmark = pytest.mark.slow

POST = {"translation": ["--no-encoder-normalize-before", "--no-decoder-normalize-before"]}
POST["language_modeling"] = ["--no-decoder-normalize-before"]
LENGTH = ["--max-len-b", 15]
RUNS = [(norm, order) for norm in ("power", "batch") for order in ("pre", "post")] + [("ada", "pre"), ("layer", "post")]


def train_flags(data, task, save_dir, *flags):
    arch = "transformer_norm_tiny" if task == "translation" else "transformer_lm_norm_tiny"
    common = [data, "--user-dir", PLUGIN, "--task", task, "--arch", arch, "--save-dir", save_dir]
    common += ["--optimizer", "adam", "--lr", 0.002, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", 10]
    common += ["--max-tokens", 1000, "--max-update", 12, "--seed", 1, "--log-format", "simple", "--log-interval", 6]
    common += ["--no-epoch-checkpoints", "--required-batch-size-multiple", 1, "--num-workers", 0]
    if task == "language_modeling":
        common += ["--tokens-per-sample", 64]
    return [*common, *flags]


def train(monkeypatch, *flags):
    """fairseq-train in this process; returns its trainer, whose model is the one that trained."""
    trainers = []
    original = Trainer.__init__

    def keep(self, *args, **kwargs):
        original(self, *args, **kwargs)
        trainers.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", keep)
        in_this_process("fairseq-train", *flags)
    return trainers[0]


def scored(output):
    """Sentence number -> (score, hypothesis) of fairseq-generate's output."""
    rows = [line.split("\t") for line in output.splitlines() if line.startswith("H-")]
    return {int(number[2:]): (float(score), text) for number, score, text in rows}


def decode_in_memory(trainer, data):
    """Beam search over the test set with the model that trained, one batch of all sentences."""
    task, model = trainer.task, trainer.get_model()
    task.load_dataset("test")
    model.eval()
    generator = task.build_generator([model], trainer.cfg.generation)
    generator.max_len_b = LENGTH[1]
    found = {}
    for sample in task.get_batch_iterator(task.dataset("test"), max_sentences=7).next_epoch_itr(shuffle=False):
        for number, beams in zip(sample["id"].tolist(), task.inference_step(generator, [model], sample)):
            text = task.target_dictionary.string(beams[0]["tokens"])
            found[number] = (float(beams[0]["score"]) / 0.6931471805599453, text)
    return found


def assert_same(one, other):
    assert {number: text for number, (_, text) in one.items()} == {number: text for number, (_, text) in other.items()}
    for number, (score, _) in one.items():
        assert other[number][0] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(("norm", "order"), RUNS)
def test_translation(norm, order, translation_data, tmp_path, monkeypatch):
    """Traps 1 and 10: generate and interactive; hypotheses depend on neither batches nor padding nor process."""
    flags = ["--norm", norm] + (POST["translation"] if order == "post" else [])
    trainer = train(monkeypatch, *train_flags(translation_data, "translation", tmp_path, *flags))
    memory = decode_in_memory(trainer, translation_data)
    assert len(memory) == 20
    checkpoint = ["--path", tmp_path / "checkpoint_last.pt", "--user-dir", PLUGIN]
    each = in_this_process("fairseq-generate", translation_data, *checkpoint, "--batch-size", 1, *LENGTH)
    assert_same(memory, scored(each))
    together = in_this_process("fairseq-generate", translation_data, *checkpoint, "--batch-size", 20, *LENGTH)
    assert_same(memory, scored(together))

    source = trainer.task.dataset("test").src
    lines = [trainer.task.source_dictionary.string(source[number]) for number in range(20)]
    write_lines(tmp_path / "source.de", lines)
    typed = in_this_process(
        "fairseq-interactive", translation_data, *checkpoint, "--input", tmp_path / "source.de", "--buffer-size", 8,
        "--batch-size", 3, *LENGTH,
    )  # fmt: skip
    assert_same(memory, scored(typed))

    in_this_process("fairseq-validate", translation_data, *checkpoint, "--task", "translation", "--batch-size", 7)
    if (norm, order) in (("power", "pre"), ("power", "post"), ("batch", "post")):
        reader = ["--num-workers", 1 if (norm, order) == ("power", "pre") else 0]  # one is the default
        fresh = checked("fairseq-generate", translation_data, *checkpoint, "--batch-size", 5, *LENGTH, *reader)
        assert_same(memory, scored(fresh))


@pytest.mark.parametrize(("norm", "order"), RUNS)
def test_language_model(norm, order, language_model_data, tmp_path, monkeypatch, caplog):
    """Train, validate and eval-lm agree on the loss of the validation set."""
    flags = ["--norm", norm] + (POST["language_modeling"] if order == "post" else [])
    flags += ["--sample-break-mode", "none", "--max-update", 8]
    train(monkeypatch, *train_flags(language_model_data, "language_modeling", tmp_path, *flags))
    checkpoint = ["--path", tmp_path / "checkpoint_last.pt", "--user-dir", PLUGIN]
    losses = []
    for program, more in (
        ("fairseq-eval-lm", ["--gen-subset", "valid", "--tokens-per-sample", 64, "--batch-size", 3]),
        ("fairseq-validate", ["--task", "language_modeling", "--batch-size", 5]),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            output = in_this_process(program, language_model_data, *checkpoint, *more)
        # fairseq-validate sets up logging to the standard output anew.
        losses.append(float(re.findall(r"(?:Loss \(base 2\): |\| loss )([0-9.]+)", caplog.text + output)[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_adaptive_softmax_language_model(language_model_data, tmp_path, monkeypatch):
    """The WikiText model with its bands made to fit the vocabulary."""
    bands = ["--adaptive-input-cutoff", "20,60", "--adaptive-softmax-cutoff", "20,60", "--decoder-layers", 2]
    flags = train_flags(language_model_data, "language_modeling", tmp_path, *bands, "--criterion", "adaptive_loss")
    flags += ["--ddp-backend", "legacy_ddp"]
    flags[flags.index("transformer_lm_norm_tiny")] = "transformer_lm_pn_wiki103"
    trainer = train(monkeypatch, *flags, "--max-update", 4)
    assert len(trainer.get_model().decoder.adaptive_softmax.cutoff) == 3
    checkpoint = ["--path", tmp_path / "checkpoint_last.pt", "--user-dir", PLUGIN]
    in_this_process("fairseq-eval-lm", language_model_data, *checkpoint, "--gen-subset", "valid", "--batch-size", 3)


HYDRA = """# @package _global_
common: {{user_dir: {plugin}, seed: 1, log_format: simple, no_progress_bar: true}}
task: {{_name: {task}, data: {data}{task_fields}}}
model: {{_name: {name}, {fields}}}
criterion: {{_name: cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 10}}
optimization: {{lr: [0.002], max_update: 3}}
dataset: {{max_tokens: 1000, required_batch_size_multiple: 1, num_workers: 0}}
checkpoint: {{save_dir: {save_dir}, no_epoch_checkpoints: true}}
distributed_training: {{distributed_world_size: 1}}
"""


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("task", ["translation", "language_modeling"])
def test_a_resumed_run_is_the_uninterrupted_one(task, order, translation_data, language_model_data, tmp_path):
    """Stopped in the middle of an epoch and of the warm-up: the same parameters, statistics and optimiser, bitwise."""
    data = translation_data if task == "translation" else language_model_data
    flags = ["--norm", "power", "--norm-warmup-updates", 3] + (POST[task] if order == "post" else [])
    states = []
    for folder, stops in (("whole", [5]), ("stopped", [2, 5])):
        for stop in stops:
            in_this_process(
                "fairseq-train", *train_flags(data, task, tmp_path / folder, *flags, "--max-update", stop),
                "--max-tokens", 500, "--save-interval-updates", 2,
            )  # fmt: skip
        states.append(torch.load(tmp_path / folder / "checkpoint_last.pt"))
    whole, stopped = states
    assert whole["optimizer_history"][-1]["num_updates"] == 5
    assert any(key.endswith("running_nu") and value.abs().sum() > 0 for key, value in whole["model"].items())
    for key, value in whole["model"].items():
        assert torch.equal(value, stopped["model"][key]), key
    for number, moments in whole["last_optimizer_state"]["state"].items():
        other = stopped["last_optimizer_state"]["state"][number]
        assert all(torch.equal(torch.as_tensor(moments[key]), torch.as_tensor(other[key])) for key in moments)


@pytest.mark.parametrize("task", ["translation", "language_modeling"])
def test_fairseq_hydra_train_is_fairseq_train(task, translation_data, language_model_data, tmp_path):
    """Trap 3: real processes: the same YAML fields and flags give bitwise the same model after three updates."""
    name, data, fields, flags, task_fields = {
        "translation": (
            "transformer_pn_tiny", translation_data, "decoder_norm_self: rms, norm_alpha_fwd: 0.8",
            ["--decoder-norm-self", "rms", "--norm-alpha-fwd", 0.8], "",
        ),
        "language_modeling": (
            "transformer_lm_bn_tiny", language_model_data, "norm_momentum: 0.3, decoder_normalize_before: false",
            ["--norm-momentum", 0.3, "--no-decoder-normalize-before"], ", tokens_per_sample: 64",
        ),
    }[task]  # fmt: skip
    config = HYDRA.format(
        plugin=PLUGIN, task=task, data=data, name=name, fields=fields, save_dir=tmp_path / "hydra",
        task_fields=task_fields,
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(config, encoding="utf-8")
    checked("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "run", "hydra.run.dir=.", cwd=tmp_path)
    arguments = train_flags(data, task, tmp_path / "flags", *flags, "--max-update", 3)
    arguments[arguments.index("--arch") + 1] = name
    checked("fairseq-train", *arguments, cwd=tmp_path)
    states = [load(tmp_path / folder / "checkpoint_last.pt")["model"] for folder in ("hydra", "flags")]
    assert list(states[0]) == list(states[1])
    assert any("running" in key for key in states[0])
    for key in states[0]:
        assert torch.equal(states[0][key], states[1][key]), key


def load(path):
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    return load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--norm", "nonsense"], "no such norm"),
        (["--norm", "power", "--norm-groups", 5], "groups must be 0"),
        (["--decoder-norm-embedding", "rms"], "--layernorm-embedding"),
    ],
)
def test_refused_before_data_is_loaded(flags, message, translation_data, tmp_path, monkeypatch):
    from fairseq.tasks.translation import TranslationTask

    def load_dataset(*args, **kwargs):
        raise AssertionError("data is loaded")

    monkeypatch.setattr(TranslationTask, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=message):
        in_this_process("fairseq-train", *train_flags(translation_data, "translation", tmp_path, *flags))


def test_resumed_under_another_scheduler(translation_data, tmp_path, monkeypatch):
    """The scheduler's settings decide the norms' warm-up of a run, not whether its checkpoint loads."""
    flags = train_flags(translation_data, "translation", tmp_path, "--norm", "power")
    train(monkeypatch, *flags, "--max-update", 2)
    more = ["--reset-lr-scheduler", "--lr-scheduler", "triangular", "--max-lr", 0.01, "--max-update", 4]
    stripped = [part for part in flags if part not in ("--warmup-updates", 10, "--lr-scheduler", "inverse_sqrt")]
    trainer = train(monkeypatch, *stripped, *more)
    assert trainer.get_num_updates() == 4
    norm = trainer.get_model().encoder.layers[0].self_attn_layer_norm
    assert (float(norm.updates_tracked), norm.warmup_updates) == (4, 0)
    utils.set_torch_seed(1)
    in_this_process(
        "fairseq-generate", translation_data, "--path", tmp_path / "checkpoint_last.pt", "--user-dir", PLUGIN,
        "--batch-size", 20,
    )  # fmt: skip
