"""Each mend of powernorm_fairseq.compat, n1 to n14 as docs/compatibility.md numbers them, seen from the outside."""

import argparse
import copy
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from omegaconf import OmegaConf

import powernorm_fairseq
from powernorm_fairseq import compat
from tests.commands import PLUGIN, ROOT, hypotheses, in_a_group, in_this_process, write_lines
from tests.conftest import sample_lines

fairseq = pytest.importorskip("fairseq")
from fairseq import checkpoint_utils, models, options, utils  # noqa: E402
from fairseq.dataclass.configs import DistributedTrainingConfig  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402
from fairseq.tasks import setup_task  # noqa: E402

STOCK = compat._numbers(fairseq.__version__) == (0, 12) and not fairseq.__version__.startswith("0.12.3")
TINY = ("--encoder-layers", 1, "--decoder-layers", 1, "--encoder-attention-heads", 2,
        "--decoder-attention-heads", 2, "--encoder-embed-dim", 16, "--decoder-embed-dim", 16,
        "--encoder-ffn-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--share-all-embeddings")  # fmt: skip


def training(data: Path, save: Path, updates: int, arch: str = "transformer") -> list:
    """Arguments of fairseq-train for a few updates of a tiny model, fairseq's own if not told otherwise."""
    return [data, "--user-dir", PLUGIN, "--cpu", "--arch", arch, *TINY, "--optimizer", "adam", "--lr", 1e-3,
            "--batch-size", 16, "--max-update", updates, "--save-dir", save, "--log-format", "simple", "--seed", 1,
            "--num-workers", 0, "--no-epoch-checkpoints", "--disable-validation"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(translation_data, tmp_path_factory) -> Path:
    """A checkpoint of three updates."""
    save = tmp_path_factory.mktemp("compat")
    in_this_process("fairseq-train", *training(translation_data, save, 3))
    return save / "checkpoint_last.pt"


def config(*arguments: object):
    """The config that fairseq-train makes of a command line."""
    with mock.patch.object(sys, "argv", ["fairseq-train", "--user-dir", str(PLUGIN), *map(str, arguments)]):
        parser = options.get_training_parser()
        return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser))


def updates_of(path: Path) -> int:
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    return int(state["optimizer_history"][-1]["num_updates"])


class TestN1Checkpoints:
    def test_namespace_and_numpy_numbers_load(self, tmp_path):
        state = {
            "args": argparse.Namespace(arch="transformer"),
            "best": numpy.float64(1.5),
            "count": numpy.int64(7),
            "half": numpy.float32(0.5),
        }
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt") == state

    @pytest.mark.skipif(compat._numbers(torch.__version__) < (2, 6), reason="this torch loads everything")
    def test_loading_stays_safe(self, tmp_path):
        torch.save({"file": Path("x")}, tmp_path / "state.pt")
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            torch.load(tmp_path / "state.pt")

    def test_training_resumes(self, checkpoint, translation_data, tmp_path):
        shutil.copy(checkpoint, tmp_path)
        in_this_process("fairseq-train", *training(translation_data, tmp_path, 4))
        assert updates_of(tmp_path / "checkpoint_last.pt") == 4

    def test_validate(self, checkpoint, translation_data):
        in_this_process(
            "fairseq-validate", translation_data, "--user-dir", PLUGIN, "--cpu", "--path", checkpoint,
            "--batch-size", 16, "--task", "translation",
        )  # fmt: skip


class TestN2LastBatch:
    @pytest.mark.parametrize(("sentences", "batch"), [(100, 8), (5, 8), (16, 8), (1, 64), (9, 64)])
    def test_every_index_is_in_a_batch(self, sentences, batch):
        from fairseq.data import data_utils

        indices = numpy.arange(sentences)[::-1].copy()
        for lengths in (dict(num_tokens_vec=numpy.ones(sentences, dtype=numpy.int64)), {}):
            batches = data_utils.batch_by_size(
                indices, lambda index: 1, max_sentences=batch, required_batch_size_multiple=8, **lengths
            )
            assert numpy.concatenate(batches).tolist() == indices.tolist()
            assert max(map(len, batches)) <= batch
        assert (
            list(data_utils.batch_by_size([], lambda index: 1, max_sentences=batch, required_batch_size_multiple=8))
            == []
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [100, 5])
    def test_a_hypothesis_for_every_sentence(self, checkpoint, translation_data, tmp_path, count):
        for language in ("de", "en"):
            write_lines(tmp_path / f"test.{language}", sample_lines("train", language, count))
        in_this_process(
            "fairseq-preprocess", "--source-lang", "de", "--target-lang", "en", "--testpref", tmp_path / "test",
            "--srcdict", translation_data / "dict.de.txt", "--tgtdict", translation_data / "dict.en.txt",
            "--destdir", tmp_path / "bin", "--workers", 1,
        )  # fmt: skip
        output = in_this_process(
            "fairseq-generate", tmp_path / "bin", "--user-dir", PLUGIN, "--cpu", "--path", checkpoint, "--beam", 1,
            "--max-len-a", 0, "--max-len-b", 3, "--batch-size", 16,
        )  # fmt: skip
        assert len(hypotheses(output)) == count

    @pytest.mark.parametrize(("split", "count"), [("train", 300), ("valid", 40), ("test", 20)])
    def test_no_sentence_is_lost_in_training_and_validation(self, translation_data, split, count):
        task = setup_task(config(translation_data, "--arch", "transformer").task)
        task.load_dataset(split)
        batches = task.get_batch_iterator(task.dataset(split), max_sentences=64, required_batch_size_multiple=8)
        samples = batches.next_epoch_itr(shuffle=split == "train")
        assert sorted(index for sample in samples for index in sample["id"].tolist()) == list(range(count))


def test_n3_every_layer_calls_its_norms(checkpoint, translation_data):
    [model], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    calls = []
    model.eval()
    for layer in model.encoder.layers:
        layer.self_attn_layer_norm.register_forward_hook(lambda *_: calls.append("attention"))
        layer.final_layer_norm.register_forward_hook(lambda *_: calls.append("feed-forward"))
    with torch.no_grad():
        model.encoder(torch.tensor([[5, 6, 7, 2], [5, 2, 1, 1]]), src_lengths=torch.tensor([4, 2]))
    assert calls == ["attention", "feed-forward"]


def test_n4_sacrebleu_itself_scores_where_fairseq_score_fails(tmp_path):
    import sacrebleu

    lines = sample_lines("test", "en", 20)
    write_lines(tmp_path / "lines", lines)
    assert sacrebleu.corpus_bleu(lines, [lines]).score == pytest.approx(100)
    with pytest.raises((TypeError, AttributeError)):  # when this passes, the advice in docs/compatibility.md is old
        in_this_process("fairseq-score", "--sacrebleu", "--sys", tmp_path / "lines", "--ref", tmp_path / "lines")


def test_n5_dimensions_from_the_command_line_reach_the_model():
    from fairseq.models.transformer import TransformerConfig

    before = copy.copy(TransformerConfig().encoder.embed_dim)
    arguments = ("--encoder-embed-dim", 40, "--decoder-embed-dim", 40, "--decoder-ffn-embed-dim", 24)
    model = config("DATA", "--arch", "transformer_pn_tiny", *arguments).model
    assert (model.encoder_embed_dim, model.decoder_embed_dim, model.decoder_ffn_embed_dim) == (40, 40, 24)
    assert TransformerConfig().encoder.embed_dim == before


def test_n6_the_width_of_a_hydra_config_reaches_the_output(translation_data):
    task = setup_task(config(translation_data, "--arch", "transformer").task)
    fields = OmegaConf.structured(models.MODEL_DATACLASS_REGISTRY["transformer_pn_tiny"])
    fields.encoder_embed_dim = fields.decoder_embed_dim = 40
    fields._name = "transformer_pn_tiny"
    model = task.build_model(fields)
    assert model.decoder.output_projection.weight.shape == (len(task.target_dictionary), 40)


def test_n6_hydra_shows_the_error(capsys, monkeypatch):
    from hydra._internal.utils import run_and_report

    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def compose():
        raise ValueError("the reason")

    def run_job():
        compose()

    with pytest.raises(SystemExit):
        run_and_report(run_job)
    assert "the reason" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_n7_a_worker_of_torchrun_needs_no_gpu(monkeypatch):
    from fairseq.distributed import utils as distributed

    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    cfg = DistributedTrainingConfig(distributed_world_size=2, tpu=False)
    distributed.infer_init_method(cfg)
    assert (cfg.distributed_init_method, cfg.distributed_world_size, cfg.distributed_rank) == ("env://", 2, 1)
    assert cfg.distributed_no_spawn
    assert cfg.device_id == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_n7_n8_n1_two_workers_resume(translation_data, tmp_path):
    """torchrun as a user types it, with fairseq's default backend; the first worker sends the other its checkpoint."""
    # fairseq 0.12.2's own model has parameters without a gradient, which this backend refuses.
    arch = "transformer_pn_tiny"
    in_this_process("fairseq-train", *training(translation_data, tmp_path, 2, arch))
    two_workers(
        *training(translation_data, tmp_path, 4, arch), "--distributed-world-size", 2, "--distributed-backend", "gloo"
    )
    assert updates_of(tmp_path / "checkpoint_last.pt") == 4


def two_workers(*arguments: object) -> None:
    """fairseq-train under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no_python"]
    program = Path(sys.executable).parent / "fairseq-train"
    in_a_group([sys.executable, *launcher, program, *arguments], timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--bf16", "--fp16"])
def test_n9_half_precision_trains_on_the_cpu(translation_data, tmp_path, flag):
    if flag == "--fp16" and compat._numbers(torch.__version__) < (2, 1):
        pytest.skip("this torch multiplies no half-precision matrices on the CPU")
    in_this_process("fairseq-train", *training(translation_data, tmp_path, 2), flag)
    assert updates_of(tmp_path / "checkpoint_last.pt") == 2
    in_this_process("fairseq-train", *training(translation_data, tmp_path, 3), flag)
    assert updates_of(tmp_path / "checkpoint_last.pt") == 3


@pytest.mark.skipif(compat._numbers(torch.__version__) < (2, 1), reason="no half-precision matrices on the CPU")
def test_n9_half_precision_survives_overflows_on_the_cpu(translation_data, tmp_path, caplog):
    cuda = torch.Tensor.cuda
    with caplog.at_level("INFO"):
        in_this_process("fairseq-train", *training(translation_data, tmp_path, 1), "--fp16", "--fp16-init-scale", 2**20)
    assert "gradient overflow detected" in caplog.text
    assert updates_of(tmp_path / "checkpoint_last.pt") == 1
    assert torch.Tensor.cuda is cuda


@pytest.mark.parametrize(("flags", "tpu"), [(["--bf16"], False), (["--tpu", "--bf16"], True), (["--tpu"], True)])
def test_n9_only_tpu_means_tpu(flags, tpu):
    assert config("DATA", "--arch", "transformer", *flags).common.tpu == tpu


class TestN10Launches:
    @pytest.fixture
    def torchrun(self, monkeypatch):
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
            monkeypatch.setenv(name, value)

    @pytest.mark.skipif(STOCK, reason="fairseq 0.12.2 takes the number of workers from torchrun")
    def test_workers_that_do_not_know_of_each_other(self, torchrun, translation_data, tmp_path):
        with pytest.raises(ValueError, match="--distributed-world-size 2"):
            in_this_process("fairseq-train", *training(translation_data, tmp_path, 1), "--distributed-world-size", 1)
        assert list(tmp_path.iterdir()) == []

    def test_hydra_workers_that_do_not_know_of_each_other(self, torchrun):
        from fairseq.trainer import Trainer

        cfg = SimpleNamespace(distributed_training=DistributedTrainingConfig(distributed_world_size=1))
        with pytest.raises(ValueError, match=r"distributed_training\.distributed_world_size=2"):
            Trainer(cfg, None, None, None)

    @pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
    def test_spawning_no_worker(self, translation_data, tmp_path):
        address = ("--distributed-world-size", 2, "--distributed-init-method", "tcp://localhost:1")
        with pytest.raises(ValueError, match="no GPU"):
            in_this_process("fairseq-train", *training(translation_data, tmp_path, 1), *address)
        assert list(tmp_path.iterdir()) == []


def test_n11_averaging_is_a_command_of_ours(capsys):
    from powernorm_fairseq.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(["average", "--help"])
    assert end.value.code == 0
    assert "checkpoint" in capsys.readouterr().out


class TestN12ImportedTwice:
    @pytest.fixture(autouse=True)
    def modules_and_path(self, monkeypatch):
        """What an import adds goes away after the test."""
        monkeypatch.setattr(sys, "path", list(sys.path))
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            del sys.modules[name]

    def test_by_a_link_of_another_name(self, tmp_path):
        known = dict(models.MODEL_REGISTRY)
        assert "transformer_pn" in known
        (tmp_path / "renamed").symlink_to(PLUGIN)
        utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / "renamed")))
        assert known == models.MODEL_REGISTRY

    def test_under_another_name(self, tmp_path):
        known = dict(models.MODEL_REGISTRY)
        shutil.copytree(PLUGIN, tmp_path / "renamed", ignore=shutil.ignore_patterns("__pycache__"))
        utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / "renamed")))
        assert "renamed.models.architectures" in sys.modules
        assert known == models.MODEL_REGISTRY
        assert pickle.loads(pickle.dumps(models.MODEL_DATACLASS_REGISTRY["transformer_pn"]())).encoder_layers == 6

    @pytest.mark.parametrize("spelling", ["{plugin}", "{plugin}/", "{parent}/tests/../powernorm_fairseq"])
    def test_by_its_own_path(self, spelling):
        given = spelling.format(plugin=PLUGIN, parent=ROOT)
        utils.import_user_module(argparse.Namespace(user_dir=given))

    def test_a_copy(self, tmp_path, caplog):
        shutil.copytree(PLUGIN, tmp_path / PLUGIN.name, ignore=shutil.ignore_patterns("__pycache__"))
        utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / PLUGIN.name)))
        assert "is not used" in caplog.text
        assert sys.modules["powernorm_fairseq"] is powernorm_fairseq

    def test_a_copy_of_another_version(self, tmp_path):
        (tmp_path / PLUGIN.name).mkdir()
        (tmp_path / PLUGIN.name / "version.py").write_text('__version__ = "99.0"\n')
        with pytest.raises(ImportError, match="another version"):
            utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / PLUGIN.name)))

    def test_a_name_that_is_taken(self):
        class Foreign(models.BaseFairseqModel):
            pass

        with pytest.raises(ValueError, match=r"registered already, by fairseq\.models\.transformer"):
            compat.register_model("transformer")(Foreign)


def test_n14_equal_models_have_equal_states():
    """Memory that another tensor had before is not in a checkpoint."""
    from fairseq.modules import SinusoidalPositionalEmbedding

    for number in (1.5, 2.5):
        torch.full((1,), number)  # whose memory the next tensor of this size gets
        state = SinusoidalPositionalEmbedding(8, 1, 4).state_dict()
        assert all(value.item() == 0 for value in state.values())
