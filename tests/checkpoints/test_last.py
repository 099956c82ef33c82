"""A ``checkpoint_last.pt`` that is cut off or missing."""

import logging
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from powernorm_fairseq.checkpoints.last import around_load_checkpoint, mend_last_checkpoint, why_broken
from tests.commands import PLUGIN, in_this_process


def state(updates):
    return {
        "args": None,
        "cfg": None,
        "model": {"w": torch.full((1000,), float(updates)), "v": torch.ones(3, dtype=torch.float16)},
        "optimizer_history": [{"num_updates": updates, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}],
        "last_optimizer_state": None,
        "extra_state": {"train_iterator": {"epoch": 1}},
    }


def checkpoint(path, updates, age=0, **how):
    torch.save(state(updates), path, **how)
    os.utime(path, (1e9 - age, 1e9 - age))


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def updates_in(path):
    return int(torch.load(str(path))["model"]["w"][0])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


ZIP, LEGACY = [dict(_use_new_zipfile_serialization=new) for new in (True, False)]


@pytest.mark.parametrize("how", [ZIP, LEGACY])
def test_every_cut_is_found(how, tmp_path):
    """Also in the format before torch 1.6, which is no archive; and a whole file is whole in both."""
    path = tmp_path / "checkpoint_last.pt"
    checkpoint(path, 7, **how)
    content = path.read_bytes()
    assert content.startswith(b"PK") is (how is ZIP)
    assert why_broken(path) is None
    for length in [0, 1, 2, 3, 20, *range(100, len(content), 311), len(content) - 30, len(content) - 1]:
        path.write_bytes(content[:length])
        assert why_broken(path), length


def test_what_is_no_checkpoint_is_broken_and_what_does_not_load_is_not(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    path.write_text("<html>not found</html>")
    assert "no checkpoint" in why_broken(path)
    for how in (ZIP, LEGACY):
        torch.save({"place": Path("x"), "w": torch.ones(3)}, path, **how)  # torch 2.6 refuses to make a Path
        assert why_broken(path) is None


def test_half_a_checkpoint_gives_way_to_the_newest_other(tmp_path):
    """The newest after updates, in the file's name or in the file, and not by the clock."""
    checkpoint(tmp_path / "checkpoint_1_100.pt", 100, age=0)
    checkpoint(tmp_path / "checkpoint_1_90.pt", 90, age=10)
    checkpoint(tmp_path / "checkpoint_2_220.pt", 220, age=30)
    checkpoint(tmp_path / "checkpoint_best.pt", 80, age=20)
    checkpoint(tmp_path / "checkpoint_last.pt", 221)
    cut(tmp_path / "checkpoint_last.pt")
    said = mend_last_checkpoint(tmp_path)
    assert len(said) == 2
    assert said[0].startswith("checkpoint_last.pt is broken and now called checkpoint_last.pt.broken (it is cut off")
    assert said[1] == "training continues from checkpoint_2_220.pt, update 220"
    assert updates_in(tmp_path / "checkpoint_last.pt") == 220
    assert len(names(tmp_path)) == 6 and "checkpoint_last.pt.broken" in names(tmp_path)
    # fairseq writes into the file that it finds, which must not be the other one's
    assert not os.path.samefile(tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_2_220.pt")
    assert mend_last_checkpoint(tmp_path) == []


@pytest.mark.parametrize("newest", ["checkpoint10.pt", "checkpoint_best.pt", "checkpoint.best_loss_-2.5000.pt"])
def test_updates_of_checkpoints_by_epoch_and_of_the_best(newest, tmp_path):
    for name, updates in (("checkpoint9.pt", 230), ("checkpoint10.pt", 240), ("checkpoint_9_200.pt", 200),
                          ("checkpoint_best.pt", 205), ("checkpoint.best_loss_-2.5000.pt", 206)):  # fmt: skip
        checkpoint(tmp_path / name, 250 if name == newest else updates, age=updates)
    (tmp_path / "checkpoint_last.pt").touch()
    assert mend_last_checkpoint(tmp_path)[-1] == f"training continues from {newest}, update 250"
    assert updates_in(tmp_path / "checkpoint_last.pt") == 250


def test_other_broken_ones_are_put_aside_and_those_that_do_not_load_stay(tmp_path):
    checkpoint(tmp_path / "checkpoint_1_100.pt", 100)
    checkpoint(tmp_path / "checkpoint_1_200.pt", 200, **LEGACY)
    for name in ("checkpoint_1_300.pt", "checkpoint_best.pt", "checkpoint_last.pt"):
        checkpoint(tmp_path / name, 300)
        cut(tmp_path / name, 0.9)
    torch.save({"nothing": 1}, tmp_path / "checkpoint3.pt")
    said = mend_last_checkpoint(tmp_path)
    assert [words.split()[0] for words in said[:3]] == [
        "checkpoint_last.pt",
        "checkpoint_1_300.pt",
        "checkpoint_best.pt",
    ]
    assert "checkpoint3.pt cannot be read as a checkpoint" in said[3]
    assert said[4:] == ["training continues from checkpoint_1_200.pt, update 200"]
    assert names(tmp_path) == sorted(
        ["checkpoint_1_100.pt", "checkpoint_1_200.pt", "checkpoint3.pt", "checkpoint_last.pt"]
        + [f"{name}.broken" for name in ("checkpoint_1_300.pt", "checkpoint_best.pt", "checkpoint_last.pt")]
    )


@pytest.mark.parametrize("how", [ZIP, LEGACY])
def test_whole_ones_stay(how, tmp_path):
    checkpoint(tmp_path / "checkpoint_last.pt", 100, age=30, **how)
    checkpoint(tmp_path / "checkpoint_1_200.pt", 200)
    assert mend_last_checkpoint(tmp_path) == mend_last_checkpoint(tmp_path, replace_missing=True) == []
    assert updates_in(tmp_path / "checkpoint_last.pt") == 100


def test_with_no_other_training_starts_anew_and_nothing_is_deleted(tmp_path):
    for content in (b"", b"PK\3\4", b"\x80\2"):
        (tmp_path / "checkpoint_last.pt").write_bytes(content)
        assert mend_last_checkpoint(tmp_path)[1:] == ["there is no other whole checkpoint, so training starts anew"]
    kept = [f"checkpoint_last.pt.broken{number}" for number in ("", 2, 3)]
    assert names(tmp_path) == kept
    assert [(tmp_path / name).read_bytes() for name in kept] == [b"", b"PK\3\4", b"\x80\2"]


def test_files_of_another_suffix_are_of_another_run(tmp_path):
    for name, updates in (("checkpoint_1_100-a.pt", 100), ("checkpoint_1_300.pt", 300), ("checkpoint_1_400-b.pt", 400),
                          ("checkpoint.best_loss_2.50-b.pt", 400), ("checkpoint_last-a.pt", 101)):  # fmt: skip
        checkpoint(tmp_path / name, updates)
    for suffix in ("-a", ""):
        cut(tmp_path / "checkpoint_last-a.pt")
        checkpoint(tmp_path / "checkpoint_last.pt", 301)
        cut(tmp_path / "checkpoint_last.pt")
        mend_last_checkpoint(tmp_path, suffix)
    assert updates_in(tmp_path / "checkpoint_last.pt") == 300
    assert why_broken(tmp_path / "checkpoint_last-a.pt")
    mend_last_checkpoint(tmp_path, "-a")
    assert updates_in(tmp_path / "checkpoint_last-a.pt") == 100


def test_a_missing_one_is_told_or_replaced(tmp_path):
    assert mend_last_checkpoint(tmp_path / "nowhere") == mend_last_checkpoint(tmp_path) == []
    assert mend_last_checkpoint(tmp_path, replace_missing=True) == []
    checkpoint(tmp_path / "checkpoint1.pt", 100)
    checkpoint(tmp_path / "checkpoint_best.pt", 80)
    [said] = mend_last_checkpoint(tmp_path)
    assert "starts anew" in said and "checkpoint1.pt, checkpoint_best.pt" in said
    assert names(tmp_path) == ["checkpoint1.pt", "checkpoint_best.pt"]
    said = mend_last_checkpoint(tmp_path, replace_missing=True)
    assert said == ["there is no checkpoint_last.pt", "training continues from checkpoint1.pt, update 100"]
    assert updates_in(tmp_path / "checkpoint_last.pt") == 100


def worker(rank=0, size=1, suffix=""):
    return SimpleNamespace(
        checkpoint_suffix=suffix, data_parallel_rank=rank, data_parallel_world_size=size, device=torch.device("cpu"),
        data_parallel_process_group=torch.distributed.group.WORLD if size > 1 else None,
    )  # fmt: skip


def options_of(folder, restore_file="checkpoint_last.pt"):
    return SimpleNamespace(save_dir=str(folder), restore_file=restore_file)


@pytest.mark.parametrize(("restore_file", "suffix"), [("other.pt", ""), ("checkpoint_last.pt", "-shard0")])
def test_what_is_left_to_fairseq(restore_file, suffix, tmp_path, caplog):
    """A file that the user named, and the parts of a sharded model, which must be of one update."""
    checkpoint(tmp_path / f"checkpoint_1_100{suffix}.pt", 100)
    (tmp_path / f"checkpoint_last{suffix}.pt").touch()
    around_load_checkpoint(lambda *args, **kwargs: None, options_of(tmp_path, restore_file), worker(suffix=suffix))
    assert len(names(tmp_path)) == 2 and not caplog.records


def load_in_worker(rank, folder, answers):
    def load(cfg, trainer, **kwargs):
        assert kwargs == {"disable_iterator_cache": False}
        return updates_in(folder / "checkpoint_last.pt")

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        found = around_load_checkpoint(load, options_of(folder), worker(rank, 2), disable_iterator_cache=False)
    except Exception as error:
        found = type(error).__name__
    answers.put((rank, found))
    torch.distributed.barrier()


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_of_two_workers_mends_and_the_other_waits(fails, tmp_path, monkeypatch):
    """An error of the first ends the other too."""
    pytest.importorskip("fairseq")
    checkpoint(tmp_path / "checkpoint_1_100.pt", 100)
    (tmp_path / "checkpoint_last.pt").touch()
    if fails:
        monkeypatch.setattr("shutil.copyfile", lambda *_: Path("/no/space/left").read_bytes())
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=load_in_worker, args=(rank, tmp_path, answers)) for rank in (1, 0)]
    for one in workers:
        one.start()
    try:
        found = dict(answers.get(timeout=30) for _ in workers)
        for one in workers:
            one.join(timeout=30)
    finally:
        for one in workers:
            one.kill()
    assert found == ({0: "FileNotFoundError", 1: "RuntimeError"} if fails else {0: 100, 1: 100})
    assert [name for name in names(tmp_path) if "broken" in name] == ["checkpoint_last.pt.broken"]


@pytest.fixture
def plugin(monkeypatch):
    """fairseq as the plugin leaves it, in the state of a new process."""
    checkpoint_utils = pytest.importorskip("fairseq.checkpoint_utils")
    import powernorm_fairseq  # noqa: F401

    monkeypatch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)


def flags(data, folder, updates):
    return [data, "--user-dir", PLUGIN, "--arch", "transformer_pn_tiny", "--optimizer", "adam", "--lr", 1e-3,
            "--max-tokens", 500, "--max-update", updates, "--save-dir", folder, "--save-interval-updates", 2,
            "--no-epoch-checkpoints", "--num-workers", 0, "--seed", 1]  # fmt: skip


@pytest.mark.slow
def test_fairseq_train_continues_from_the_one_before(plugin, translation_data, tmp_path, monkeypatch, caplog):
    """Trap 20: killed while fairseq copied the checkpoint of update 5."""
    from fairseq.trainer import Trainer

    in_this_process("fairseq-train", *flags(translation_data, tmp_path, 5))
    assert names(tmp_path) == [f"checkpoint_{name}.pt" for name in ("1_2", "1_4", "best", "last")]
    for name in ("best", "last"):
        cut(tmp_path / f"checkpoint_{name}.pt")
    seen = []
    original = Trainer.train_step
    monkeypatch.setattr(
        Trainer, "train_step", lambda self, *args: seen.append(self.get_num_updates()) or original(self, *args)
    )
    with caplog.at_level(logging.WARNING):
        in_this_process("fairseq-train", *flags(translation_data, tmp_path, 6))
    assert seen == [4, 5]
    warnings = [record.getMessage() for record in caplog.records if record.name == "powernorm_fairseq.checkpoints.last"]
    assert len(warnings) == 3 and all(words.startswith(f"{tmp_path}: ") for words in warnings)
    assert warnings[0].startswith(f"{tmp_path}: checkpoint_last.pt is broken and now called checkpoint_last.pt.broken")
    assert warnings[2].endswith("training continues from checkpoint_1_4.pt, update 4")
    assert torch.load(str(tmp_path / "checkpoint_last.pt"))["optimizer_history"][-1]["num_updates"] == 6
    assert [name for name in names(tmp_path) if "broken" in name] == [
        f"checkpoint_{name}.pt.broken" for name in ("best", "last")
    ]


@pytest.mark.slow
def test_fairseq_train_starts_anew_where_the_last_is_missing(plugin, translation_data, tmp_path, caplog):
    checkpoint(tmp_path / "checkpoint_1_2.pt", 2)
    with caplog.at_level(logging.WARNING):
        in_this_process("fairseq-train", *flags(translation_data, tmp_path, 1))
    assert "there is no checkpoint_last.pt, so training starts anew" in caplog.text
    assert torch.load(str(tmp_path / "checkpoint_last.pt"))["optimizer_history"][-1]["num_updates"] == 1
