"""With how many workers a training starts, and that it trains with no other number."""

import argparse
import os
import subprocess
import sys

import pytest

from powernorm_fairseq.experiment import launch, training, worker
from powernorm_fairseq.experiment.config import load_config, override
from powernorm_fairseq.experiment.launch import Launch, adapted, command, launch_of
from powernorm_fairseq.processes import PACKAGE, UserError, environment
from tests.commands import ROOT

SAMPLE = ROOT / "configs" / "mt" / "sample.yaml"
WMT = ROOT / "configs" / "mt" / "wmt14_en_de" / "power.yaml"
IWSLT = ROOT / "configs" / "mt" / "iwslt14_de_en" / "power.yaml"
PTB = ROOT / "configs" / "lm" / "ptb" / "power.yaml"


def arguments(line=""):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return parser.parse_args(line.split())


@pytest.mark.parametrize(
    "path, workers, size, frequency",
    [
        (WMT, 128, 4096, 1), (WMT, 8, 4096, 16), (WMT, 1, 4096, 128), (WMT, 256, 2048, 1), (WMT, 96, None, None),
        (IWSLT, 1, 4096, 1), (IWSLT, 4, 1024, 1), (IWSLT, 3, None, None), (PTB, 8, 15, 1), (PTB, 7, None, None),
    ],
)  # fmt: skip
def test_an_update_stays_over_as_many_tokens(path, workers, size, frequency):
    config = load_config(path)
    name = "batch_size" if path is PTB else "max_tokens"
    published = config["dataset"][name] * config["optimization"]["update_freq"][0]
    published *= config["distributed_training"]["distributed_world_size"]
    if size is None:
        with pytest.raises(UserError, match=rf"cannot be shared by {workers} workers; these numbers can: 1, 2, "):
            adapted(config, Launch(workers))
        return
    changed, words = adapted(config, Launch(workers))
    assert changed["dataset"][name] == size and changed["optimization"]["update_freq"] == [frequency]
    assert changed["distributed_training"]["distributed_world_size"] == workers
    assert (
        size * frequency * workers == published and f"{size} x {frequency} (update_freq) x {workers} worker" in words[0]
    )
    assert (len(words) == 2) == (size != config["dataset"][name])  # smaller batches are said


def test_an_update_of_several_batches_on_workers_that_do_not_divide_them():
    """Three batches for two workers: three times half a batch for each; nodes count as their workers do."""
    config = override(load_config(PTB), ["optimization.update_freq=[3]"])
    for launch_, size, frequency in ((Launch(2), 60, 3), (Launch(2, 2), 30, 3), (Launch(6), 60, 1)):
        changed, _ = adapted(config, launch_)
        assert (changed["dataset"]["batch_size"], changed["optimization"]["update_freq"]) == (size, [frequency])
        assert size * frequency * launch_.workers == 3 * 120


def test_the_config_of_its_own_number_of_workers_is_left_alone():
    config = load_config(SAMPLE)
    assert adapted(config, Launch(1))[0] == config


def test_a_config_that_does_not_say_its_workers_is_for_one():
    """fairseq would take all GPUs, and an update would be over as many times more."""
    config = load_config(SAMPLE)
    del config["distributed_training"]["distributed_world_size"]
    line = command(adapted(config, Launch(1))[0], Launch(1))
    assert line[line.index("--distributed-world-size") + 1] == "1"


def test_update_freq_by_epoch_is_for_its_own_number_of_workers():
    config = override(load_config(SAMPLE), ["optimization.update_freq=[4, 2]"])
    assert adapted(config, Launch(1))[0]["optimization"]["update_freq"] == [4, 2]
    with pytest.raises(UserError, match="changes from epoch to epoch; the config is for 1 workers"):
        adapted(config, Launch(2))


def test_numbers_that_are_offered_are_accepted():
    with pytest.raises(UserError) as error:
        adapted(load_config(PTB), Launch(7))
    offered = str(error.value).partition("can: ")[2].rpartition(", ...")[0].split(", ")
    assert offered[:6] == ["1", "2", "3", "4", "5", "6"] and "7" not in offered
    for count in offered:
        adapted(load_config(PTB), Launch(int(count)))


def test_gpus_of_this_machine(monkeypatch):
    config = load_config(WMT)
    monkeypatch.setattr(launch, "_gpus", lambda: 4)
    assert launch_of(arguments(), config, {}) == Launch(4)
    assert launch_of(arguments("--gpus 2"), config, {}) == Launch(2)
    assert launch_of(arguments(), load_config(IWSLT), {}) == Launch(1)
    with pytest.raises(UserError, match="--gpus 8, but this machine has 4"):
        launch_of(arguments("--gpus 8"), config, {})
    with pytest.raises(UserError, match="--gpus 0: it takes one at least"):
        launch_of(arguments("--gpus 0"), config, {})
    # What is only printed is what would be started here, or asked for.
    assert launch_of(arguments(), config, {}, anywhere=True) == Launch(4)
    assert launch_of(arguments("--gpus 8"), config, {}, anywhere=True) == Launch(8)
    monkeypatch.setattr(launch, "_gpus", lambda: 0)
    assert launch_of(arguments(), config, {}, anywhere=True) == Launch(128)
    with pytest.raises(UserError, match=r"no GPU here.*--set common\.cpu=true"):
        launch_of(arguments(), config, {})
    assert launch_of(arguments("--gpus 2"), override(config, ["common.cpu=true"]), {}) == Launch(2)
    assert launch_of(arguments(), load_config(SAMPLE), {}) == Launch(1)


def test_several_nodes_by_arguments_and_by_slurm(monkeypatch):
    monkeypatch.setattr(launch, "_gpus", lambda: 8)
    config = load_config(WMT)
    line = "--nodes 16 --node-rank 3 --rendezvous head:1234"
    assert launch_of(arguments(line), config, {}) == Launch(8, 16, 3, "head", 1234)
    slurm = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    for listed, first in (("gpu[07-08]", "gpu07"), ("gpu[07,09]", "gpu07"), ("a-1,b-2", "a-1"), ("one", "one")):
        expected = Launch(8, 2, 1, first, launch.PORT)
        assert launch_of(arguments(), config, {**slurm, "SLURM_STEP_NODELIST": listed}) == expected
    assert launch_of(arguments(), config, {**slurm, "MASTER_ADDR": "h", "MASTER_PORT": "5"}) == Launch(8, 2, 1, "h", 5)
    with pytest.raises(UserError, match="several tasks on a node"):
        launch_of(arguments(), config, {**slurm, "SLURM_STEP_NUM_TASKS": "16", "MASTER_ADDR": "h"})
    # The batch script itself, outside of srun, is one process on one node.
    assert launch_of(arguments(), config, {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NNODES": "2"}) == Launch(8)
    for wrong, complaint in (
        ("--nodes 2", "need --node-rank and --rendezvous"),
        ("--nodes 2 --node-rank 2 --rendezvous h", "the first is 0"),
        ("--node-rank 1", "are for several --nodes"),
        ("--nodes 0", "it takes one at least"),
        ("--nodes 2 --node-rank 0 --rendezvous h:x", "not HOST or HOST:PORT"),
    ):
        with pytest.raises(UserError, match=complaint):
            launch_of(arguments(wrong), config, {})


def test_command_lines():
    config = load_config(SAMPLE)
    assert "torch.distributed.run" not in " ".join(command(config, Launch(1)))
    with pytest.raises(UserError, match="the config is for 1 workers, and 2 would be started"):
        command(config, Launch(2))
    two = command(adapted(config, Launch(2))[0], Launch(2))
    assert two[1:5] == ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    assert two[5:7] == [str(PACKAGE / "experiment" / "worker.py"), "2"]
    spread = Launch(2, 2, 1, "head", 77)
    several = command(adapted(config, spread)[0], spread)
    for part in ("--nnodes=2", "--node_rank=1", "--master_addr=head", "--master_port=77"):
        assert part in several
    assert several[several.index(two[5]) + 1] == "4" and "--standalone" not in several


def test_a_worker_is_told_its_rank():
    surroundings = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    said = worker.arguments_of(surroundings, 4, ["data", "--cpu"])
    assert said[:2] == ["data", "--cpu"] and said[-1] == "--distributed-no-spawn"
    pairs = dict(zip(said[2:-1:2], said[3:-1:2]))
    assert pairs["--distributed-rank"] == "3" and pairs["--device-id"] == "1"
    assert pairs["--distributed-world-size"] == "4" and pairs["--distributed-backend"] == "gloo"
    assert "nccl" in worker.arguments_of(surroundings, 4, ["data"])


@pytest.mark.slow
def test_a_worker_runs_the_code_that_started_it(tmp_path):
    """And not that of the current folder."""
    decoy = tmp_path / PACKAGE.name
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('of another state')")
    line = command(adapted(load_config(SAMPLE), Launch(2))[0], Launch(2))
    told = {**environment(1), "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, *line[5:]], cwd=str(tmp_path), env=told, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "meant for 2 workers, and 1 were started" in done.stderr


def test_a_worker_in_a_group_of_another_size_trains_nothing(monkeypatch):
    import torch.distributed as dist

    for surroundings in ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {}):
        with pytest.raises(SystemExit, match="meant for 2 workers, and 1 were started"):
            worker.arguments_of(surroundings, 2, [])
    trained = []
    train = worker.checked(lambda *args: trained.append(args), 2)
    with pytest.raises(SystemExit, match="sees 1 workers, and 2 were started: they would train 2 models"):
        train("cfg")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert trained == []
    train("cfg")
    assert trained == [("cfg",)]


def test_a_worker_that_is_alone_ends_with_an_error(monkeypatch):
    """As it would be started if torchrun had lost one of two: nothing of fairseq is begun."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["worker", "2", "data", "--cpu"])
    with pytest.raises(SystemExit, match="nothing is trained"):
        worker.main()


def test_what_a_job_left_in_the_environment_is_not_passed_on(tmp_path, monkeypatch):
    """With torchrun's or SLURM's variables fairseq would take one worker for one of many."""
    for name in launch.LAUNCHERS:
        monkeypatch.setenv(name, "8")
    names = ["MASTER_ADDR", "WORLD_SIZE", "SLURM_JOB_NODELIST", "PYTHONPATH", "OMP_NUM_THREADS"]
    program = f"import os; print({{n: os.environ.get(n) for n in {names}}})"
    monkeypatch.setattr(training, "command", lambda *args: [sys.executable, "-c", program])
    log = tmp_path / "log"
    training._start({}, log, 7, Launch(2)).wait()
    seen = eval(log.read_text().splitlines()[-1])
    assert [seen[name] for name in names[:3]] == [None] * 3
    assert seen["OMP_NUM_THREADS"] == "3"  # the workers of a node share its threads
    assert seen["PYTHONPATH"].split(os.pathsep)[0] == str(PACKAGE.parent)


def test_another_node_only_takes_part_in_the_training(tmp_path, monkeypatch):
    from powernorm_fairseq.experiment import run

    config = load_config(SAMPLE)
    said, second = [], Launch(1, 2, 1, "head")
    folder = tmp_path / "run"
    monkeypatch.setattr(training, "command", lambda *args: [sys.executable, "-c", "print('worked')"])
    assert run.run(config, folder, launch=second, say=said.append) == {}
    assert "worked" in (folder / "train.node1.log").read_text() and not (folder / "config.yaml").exists()
    monkeypatch.setattr(training, "command", lambda *args: [sys.executable, "-c", "raise SystemExit('went wrong')"])
    with pytest.raises(UserError, match="went wrong"):
        run.run(config, folder, launch=second, say=said.append)
    (folder / "trained.json").write_text("{}")
    assert run.run(config, folder, launch=second, say=said.append) == {}
    assert said[-1] == "training has ended before"
