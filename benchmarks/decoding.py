"""Beam search on the sample text: LayerNorm, PowerNorm, and PowerNorm folded away.

    python -m benchmarks.decoding [--full]

Models have random weights, and each hypothesis is made to have the same length, so that all models take the same
number of steps; what a step costs does not depend on the weights.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from benchmarks import models, records, timing
from benchmarks.records import ROOT
from powernorm_fairseq.__main__ import COMMANDS
from powernorm_fairseq.__main__ import main as command
from powernorm_fairseq.norms import RunningNorm

BEAM = 5
# Name -> architecture, flags. PowerNorm in both stacks, since most of the time goes into the decoder.
SETTINGS: Dict[str, Tuple[str, List[str]]] = {
    "LayerNorm": ("transformer_norm", ["--norm", "layer"]),
    "PowerNorm": ("transformer_norm", ["--norm", "power"]),
    "PowerNorm without layer scale": ("transformer_norm", ["--norm", "power", "--norm-groups", "0"]),
}
FOLDED = ", folded"


def sample_sentences(count: int) -> List[str]:
    """The first sentences of the sample's German test text, lower-cased, of 5 to 20 words."""
    text = (ROOT / "data" / "sample" / "ui-de-en" / "test.de").read_text(encoding="utf-8").lower()
    return [line for line in text.splitlines() if 5 <= len(line.split()) <= 20][:count]


def write_dictionaries(folder: Path, words: int) -> None:
    """Dictionaries of the most frequent words of the sample, filled up to the given size."""
    from fairseq.data import Dictionary

    made = Dictionary()
    for line in (ROOT / "data" / "sample" / "ui-de-en" / "train.de").read_text(encoding="utf-8").lower().splitlines():
        for word in line.split():
            made.add_symbol(word)
    made.finalize(nwords=words, padding_factor=1)
    for number in range(words - len(made)):
        made.add_symbol(f"filling{number}")
    for language in ("de", "en"):
        made.save(str(folder / f"dict.{language}.txt"))


def save_model(folder: Path, name: str, arch: str, flags: Sequence[str], size: str) -> Path:
    """A checkpoint with random weights and statistics, as fairseq-train writes it."""
    from fairseq.data import Dictionary
    from omegaconf import OmegaConf

    words = Dictionary.load(str(folder / "dict.de.txt"))
    cfg = models.config(f"{arch}_{size}", *flags, "--source-lang", "de", "--target-lang", "en")
    cfg.task.data = str(folder)
    model = models.build(cfg, words)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, RunningNorm):
            module.running_psi_sq.uniform_(0.5, 2.0, generator=generator)
            module.updates_tracked.fill_(1)  # else folding warns of initial values
    path = folder / f"{name}.pt"
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    state = {
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True), "args": None, "model": model.state_dict(),
        "criterion": None, "optimizer_history": [history], "task_state": {}, "last_optimizer_state": None,
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }  # fmt: skip
    torch.save(state, str(path))
    return path


def prepare(folder: Path, size: str, words: int) -> Dict[str, Path]:
    """Checkpoints of all settings, the PowerNorm ones folded as well."""
    write_dictionaries(folder, words)
    found = {}
    for number, (name, (arch, flags)) in enumerate(SETTINGS.items()):
        found[name] = save_model(folder, f"model{number}", arch, flags, size)
        if name == "LayerNorm":
            continue
        if "fold" not in COMMANDS:
            print("there is no command `fold` here: folded models are left out", flush=True)
            continue
        folded = folder / f"folded{number}.pt"
        if command(["fold", str(found[name]), "-o", str(folded)]) != 0:
            raise RuntimeError(f"`powernorm_fairseq fold` failed on {name}")
        found[name + FOLDED] = folded
    return found


def decoding_job(path: Path, sentences: int, steps: int, folder: Path) -> timing.Job:
    """Beam search over one batch."""
    from fairseq import checkpoint_utils
    from fairseq.sequence_generator import SequenceGenerator

    overrides = {"data": str(folder)}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=overrides)
    model.eval()
    model.prepare_for_inference_(_generation_config())
    words = task.source_dictionary
    text = [words.encode_line(line, append_eos=True, add_if_not_exist=False) for line in sample_sentences(sentences)]
    text.sort(key=len)
    source = torch.full((len(text), max(map(len, text))), words.pad())
    for row, line in enumerate(text):
        source[row, source.shape[1] - len(line) :] = line
    lengths = torch.tensor([len(line) for line in text])
    # Hypotheses are of exactly this length: the end is forbidden before and forced there.
    generator = SequenceGenerator(
        [model], task.target_dictionary, beam_size=BEAM, min_len=steps, max_len_a=0, max_len_b=steps
    )
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}

    def run() -> Any:
        with torch.no_grad():
            return generator.generate([model], sample)

    made = run()
    found = {len(one["tokens"]) for hypotheses in made for one in hypotheses}
    if found != {steps + 1}:  # and the end of the sentence
        raise RuntimeError(f"hypotheses of {found} tokens, not of {steps + 1}: the comparison would be unfair")
    return timing.Job(run, about={"made": made})


def _generation_config() -> Any:
    from fairseq.dataclass.configs import FairseqConfig

    return FairseqConfig()


def measure(
    paths: Dict[str, Path], folder: Path, sentences: int, steps: int, rounds: int, seconds: float, size: str,
    clock: Optional[timing.Clock] = None,
) -> List[Dict[str, Any]]:  # fmt: skip
    """All models side by side on the same sentences in one batch; a record for each."""
    jobs = {name: decoding_job(path, sentences, steps, folder) for name, path in paths.items()}
    timing.alternate(jobs, "LayerNorm", rounds, seconds, clock or timing.Clock())
    found = []
    for name, job in jobs.items():
        times = list(job.times.values())
        median = timing.quantile(times, 0.5)
        record = {
            "family": "decoding",
            "setting": name,
            "size": size,
            "batch": sentences,
            "beam": BEAM,
            "steps": steps + 1,
            "threads": torch.get_num_threads(),
            "seconds": timing.spread(times),
            "rounds": len(times),
            "ratio": timing.spread(timing.ratios(job, jobs["LayerNorm"])),
            "rate": {"sentences_per_second": timing.rounded(sentences / median)},
            "tokens_per_second": timing.rounded(sentences * (steps + 1) / median),
        }
        if name.endswith(FOLDED):
            plain = jobs[name[: -len(FOLDED)]]
            record["against"] = {"not folded": timing.spread(timing.ratios(job, plain))}
            record["note"] = f"{_same(job, plain)} of {sentences} best hypotheses are the same as not folded"
        found.append(record)
    return found


def _same(job: timing.Job, other: timing.Job) -> int:
    pairs = zip(job.about["made"], other.about["made"])
    return sum(torch.equal(one[0]["tokens"], two[0]["tokens"]) for one, two in pairs)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measures everything and stores the records."""
    args = records.parser("Beam search with LayerNorm, PowerNorm and folded PowerNorm.").parse_args(argv)
    run = records.Run("decoding", args.output)
    torch.set_num_threads(1)
    around = records.circumstances(1)
    plan = [(1, 30, 40, 200.0), (64, 30, 15, 900.0)] if args.full else [(1, 15, 15, 25.0), (64, 10, 4, 40.0)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = prepare(folder, models.SIZE, models.WORDS)
        os.chdir(folder)  # where fairseq may look for relative paths there is nothing
        for sentences, steps, rounds, seconds in plan:
            for record in measure(paths, folder, sentences, steps, rounds, seconds, models.SIZE):
                run.add([{**record, "circumstances": around}])
        os.chdir(ROOT)
    run.finish()
    return 0


if __name__ == "__main__":
    records.start_again("benchmarks.decoding")
    sys.exit(main())
