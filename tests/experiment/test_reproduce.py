"""A row from its name to its number: what is printed, what is started, and the whole with two workers."""

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.experiment import record, reproduce
from powernorm_fairseq.experiment.config import load_config, override
from powernorm_fairseq.experiment.launch import Launch
from powernorm_fairseq.experiment.rows import row_of, rows
from powernorm_fairseq.processes import UserError, environment
from tests.commands import ROOT, sample_reference

CONFIGS = ROOT / "configs"


def test_rows_have_names_with_and_without_their_kind():
    names = [row.name for row in rows(CONFIGS)]
    assert len(names) == len(set(names)) and "mt/sample/power" in names and "lm/ptb/layer" in names
    row = row_of("iwslt14_de_en/power", CONFIGS)
    assert row == row_of("mt/iwslt14_de_en/power", CONFIGS)
    assert (row.kind, row.group, row.norm, row.corpus()) == ("mt", "iwslt14_de_en", "power", "iwslt14-de-en")
    assert row.paper().startswith("35.9 BLEU") and "35.9" in reproduce.published(row)
    sample = row_of("lm/sample/ada", CONFIGS)
    assert sample.config()["model"]["_name"] == "transformer_lm_adanorm_tiny" and sample.corpus() == "sample-lm"
    assert sample.paper() == ""


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("iwslt14_de_en/powr", r"(?s)no row iwslt14_de_en/powr; there are.*mt/iwslt14_de_en/: ada, batch, .*lm/ptb/: "),
        ("sample/power", "mt/sample/power or lm/sample/power; say which"),
    ],
)
def test_rows_that_there_are_not(name, complaint):
    with pytest.raises(UserError, match=complaint):
        row_of(name, CONFIGS)


def test_every_corpus_can_be_prepared():
    from powernorm_fairseq.corpora.prepare import CORPORA

    assert {row.corpus() for row in rows(CONFIGS)} <= set(CORPORA)


def test_a_dry_run_prints_every_command_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--configs", str(CONFIGS), "--dry-run"]
    line = ["reproduce", "wmt14_en_de/power", *options, "--gpus", "8", "--nodes", "2", "--node-rank", "0"]
    line += ["--rendezvous", "head", "--seeds", "1", "2", "--archive", "a.tgz", "--set", "scoring.reestimate=9"]
    assert main(line) == 0
    said = capsys.readouterr().out.splitlines()
    assert "16 workers (2 nodes of 8); paper: 30.1" in said[0]
    commands = [shlex.split(text) for text in said if not text.startswith("#")]
    programs = [
        words[:2] if words[0] == "mkdir" else Path(words[0]).name if "generate" in words[0] else words[2:4]
        for words in commands
    ]
    scores = ["fairseq-generate", *[["powernorm_fairseq", "score"]] * 3] * 2
    stages = [["powernorm_fairseq", "average"], ["powernorm_fairseq", "reestimate"], ["mkdir", "-p"], *scores]
    training = ["torch.distributed.run", "--nproc_per_node=8"]
    assert programs == [["powernorm_fairseq", "prepare"], *[training, *stages] * 2]
    assert commands[0][4:6] == ["wmt14-en-de", "--output"] and commands[0][-2:] == ["--archive", "a.tgz"]
    assert "# an update is over 524288 tokens: 4096 x 8 (update_freq) x 16 workers (2 nodes of 8)" in said
    first, second = (words for words in commands if words[2] == "torch.distributed.run")
    assert first[first.index("--update-freq") + 1] == "[8]" and first[first.index("--seed") + 1] == "1"
    assert second[second.index("--seed") + 1] == "2" and "runs/mt/wmt14_en_de/power/seed2/checkpoints" in second
    ports = [next(word for word in words if word.startswith("--master_port")) for words in (first, second)]
    assert ports == ["--master_port=29511", "--master_port=29512"]
    again = [words for words in commands if "reestimate" in words]
    assert [words[words.index("--seed") + 1] for words in again] == ["1", "2"]
    assert all(words[words.index("--data") + 1] == "runs/data/wmt14-en-de/binarised" for words in again)
    assert list(tmp_path.iterdir()) == []
    # What is printed can be pasted: each is understood by its own parser.
    from powernorm_fairseq.__main__ import build_parser

    for words in commands:
        if words[2] == "powernorm_fairseq":
            assert build_parser().parse_args(words[3:]).command == words[3]

    assert main(["reproduce", "lm/ptb/power", *options]) == 0
    said = capsys.readouterr().out
    assert "fairseq-eval-lm" in said and " average " not in said and "1 worker;" in said


def test_what_is_missing_is_said_before_anything_starts(tmp_path, monkeypatch, capsys):
    from powernorm_fairseq.experiment import launch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_gpus", lambda: 0)
    assert main(["reproduce", "ptb/power", "--configs", str(CONFIGS)]) == 1
    assert "no GPU here" in capsys.readouterr().err
    assert main(["reproduce", "ptb/power"]) == 1
    assert "start this in the project's folder" in capsys.readouterr().err
    monkeypatch.setattr(launch, "_gpus", lambda: 1)
    monkeypatch.setattr(reproduce.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1e8}))
    assert main(["reproduce", "wmt14_en_de/power", "--configs", str(CONFIGS)]) == 1
    assert "GB, and " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_disk_space_of_a_row():
    """The big model has 176 million parameters without embeddings; a checkpoint has three numbers for each."""
    config = load_config(CONFIGS / "mt" / "wmt14_en_de" / "layer.yaml")
    assert reproduce.disk_needed(config) == pytest.approx(176.3e6 * 12 * 14, rel=0.01)
    assert reproduce.disk_needed(load_config(CONFIGS / "lm" / "sample.yaml")) < 1e8


def test_checkpoints_that_are_there_count_as_room(tmp_path, monkeypatch):
    config = load_config(CONFIGS / "lm" / "sample.yaml")
    usage = type("Usage", (), {"free": reproduce.disk_needed(config) - 1000})
    monkeypatch.setattr(reproduce.shutil, "disk_usage", lambda path: usage)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="take another folder with --runs"):
        reproduce.check_disk(config, tmp_path)
    (tmp_path / "checkpoints" / "checkpoint_last.pt").write_bytes(b"x" * 1000)
    reproduce.check_disk(config, tmp_path)
    (tmp_path / "checkpoints" / "checkpoint_last.pt").unlink()
    (tmp_path / "trained.json").write_text("{}")
    reproduce.check_disk(config, tmp_path)


def test_preparation_is_done_once_by_the_first_node(tmp_path, monkeypatch, capfd):
    data, said = tmp_path / "binarised", []
    make = f"import pathlib as p; d = p.Path({str(data)!r}); d.mkdir(); (d / 'dict.txt').write_text('a 1')"
    with pytest.raises(UserError, match=r"the text was not prepared: .* ended with code 3"):
        reproduce.prepare(["python3", "-c", "raise SystemExit(3)"], data, Launch(), said.append)
    monkeypatch.setattr(reproduce, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(reproduce.time, "sleep", lambda seconds: exec(make))
    reproduce.prepare(["false"], data, Launch(1, 2, 1, "head"), said.append)
    assert "waiting for the first node" in said[-1]
    reproduce.prepare(["false"], data, Launch(), said.append)
    assert "prepared before" in said[-1]


def result(seed, bleu):
    return {
        "kind": "bleu", "seed": seed, "reported": "test", "outcome": "finished",
        "scores": {"test": {"bleu": bleu, "label": "tokenised BLEU"}},
    }  # fmt: skip


def test_the_number_stands_beside_the_papers():
    row = row_of("iwslt14_de_en/power", CONFIGS)
    said = reproduce.summary(row, [result(1, 35.0), result(2, 36.0)]).splitlines()
    assert said[1] == "    seed 1: test BLEU 35.00 (tokenised BLEU)"
    assert said[3] == "    mean of 2 seeds: 35.5, standard deviation 0.71"
    assert said[4].startswith("    paper: 35.9 ")
    changed = {**result(1, 35.0), "set": ["optimization.max_update=9"]}
    said = reproduce.summary(row, [changed]).splitlines()
    assert said[2] == "    with other values than the row's: optimization.max_update=9"
    bits = {"perplexity": 2.1, "bits_per_character": 1.07}
    characters = {**result(1, 0), "kind": "perplexity", "scores": {"test": bits}}
    said = reproduce.summary(row_of("enwik8/ada", CONFIGS), [characters]).splitlines()
    assert said[1] == "    seed 1: test bits per character 1.070" and "1.07 bits per character" in said[2]
    gone = {**result(1, 0), "scores": {}, "outcome": "diverged", "training": {"updates": 7}}
    assert "seed 1: diverged after 7 updates" in reproduce.summary(row, [gone])


def test_the_batch_script_starts_one_task_on_each_node(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$MASTER_PORT" "$@"\n')
    srun.chmod(0o755)
    script = ROOT / "scripts" / "slurm" / "reproduce.sbatch"
    surroundings = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "41234", "SLURM_GPUS_ON_NODE": "4"}
    surroundings["SLURM_CPUS_PER_TASK"] = "16"
    for extra, seeds in (({}, []), ({"SLURM_ARRAY_TASK_ID": "7"}, ["--seeds", "7"])):
        done = subprocess.run(
            ["bash", str(script), "ptb/power", "--set", "common.fp16=true"],
            env={**surroundings, **extra}, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        port, *words = done.stdout.splitlines()
        assert port == "21234"
        assert words[:3] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=16"]
        command = ["-m", "powernorm_fairseq", "reproduce", "ptb/power", "--set", "common.fp16=true"]
        assert words[4:] == [*command, *seeds, "--gpus", "4"]


def test_make_starts_the_script():
    words = ["make", "-n", "reproduce", "ROW=ptb/power", "GPUS=2", "SEEDS=1 2", "ARGS=--dry-run"]
    done = subprocess.run(words, cwd=str(ROOT), stdout=subprocess.PIPE, text=True, check=True)
    said = 'GPUS="2" SEEDS="1 2" PYTHON=".venv/bin/python" scripts/reproduce.sh ptb/power --dry-run'
    assert said in done.stdout


def processes_with(text):
    """Command lines of running processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and "pytest" not in line:
            found.append(line)
    return found


@pytest.mark.slow
def test_the_script_with_two_workers_interrupted_and_continued(translation_data, tmp_path, capfd):
    """Training, averaging, decoding, scoring and the record; the text is there, as after `prepare`."""
    sample_reference(translation_data, "test", "en", 20)
    runs = tmp_path / "runs"
    few = [
        "optimization.max_update=30", "checkpoint.save_interval_updates=10", "common.log_interval=1",
        "dataset.max_tokens=512", "scoring.subsets=[test]", "scoring.average=2", "scoring.kinds=[sacrebleu, chrf]",
        f"task.data={translation_data}", "generation.beam=1", "generation.max_len_b=5",
    ]  # fmt: skip
    line = ["mt/sample/power", "--runs", runs, "--records", tmp_path / "records", "--threads", 2, "--set", *few]
    line = list(map(str, line))
    surroundings = {**environment(1), "PYTHON": shlex.quote(reproduce.sys.executable), "GPUS": "2", "SEEDS": "3"}
    folder = runs / "mt" / "sample" / "power" / "seed3"
    script = subprocess.Popen(
        [str(ROOT / "scripts" / "reproduce.sh"), *line],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # What started the tests in the background may have made them, and so this, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 200
        while not (folder / "checkpoints" / "checkpoint_last.pt").exists():
            assert script.poll() is None and time.monotonic() < deadline, script.stdout.read().decode()
            time.sleep(0.02)
        script.send_signal(signal.SIGINT)
        output = script.communicate(timeout=60)[0].decode()
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 130 and "the same command continues" in output
    assert "an update is over 1024 tokens" not in output and "512 tokens: 256 x 1 (update_freq) x 2 workers" in output
    assert processes_with(str(folder)) == []
    assert record.read(folder) is None

    assert main(["reproduce", *line, "--gpus", "2", "--seeds", "3", "--configs", str(CONFIGS)]) == 0, capfd.readouterr()
    printed = capfd.readouterr().out
    assert "training goes on" in printed and "seed 3: test BLEU" in printed
    found = record.read(folder)
    assert (found["training"]["workers"], found["training"]["updates"], found["seed"]) == (2, 30, 3)
    assert (found["group"], found["norm"], found["checkpoint"]) == ("sample", "power", "averaged.pt")
    assert "optimization.max_update=30" in found["set"]
    assert set(found["scores"]["test"]["kinds"]) == {"sacrebleu", "chrf"}
    log = (folder / "train.log").read_text()
    assert "training on 2 devices" in log and log.count("powernorm_fairseq/experiment/worker.py 2") == 2
    config = override(load_config(folder / "config.yaml"), [])
    assert config["distributed_training"]["distributed_world_size"] == 2 and config["dataset"]["max_tokens"] == 256
    collected = tmp_path / "records" / "mt-sample.jsonl"
    assert [json.loads(text)["seed"] for text in collected.read_text().splitlines()] == [3]
