"""A whole training step of a Transformer, and what part of it the norms are.

python -m benchmarks.step [--full]
"""

import sys
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import Tensor, nn

from benchmarks import models, records, targets, timing
from benchmarks.naive import NaivePowerNorm
from powernorm_fairseq.norms import Norm, PowerNorm, kernels

TARGET = 0.97
LENGTH = 32  # tokens of the longest sentence in a batch

# Name -> architecture, flags, implementation.
FLAGS = ["--norm-warmup-updates", "0"]
SETTINGS: Dict[str, List[Any]] = {
    "LayerNorm": ["transformer_norm", ["--norm", "layer"], "auto"],
    "PowerNorm everywhere": ["transformer_norm", ["--norm", "power", *FLAGS], "auto"],
    "PowerNorm in the encoder": ["transformer_pn", FLAGS, "auto"],
    "PowerNorm everywhere, naive": ["transformer_norm", ["--norm", "power", *FLAGS], "naive"],
}
MORE: Dict[str, List[Any]] = {
    "PowerNorm everywhere, plain PyTorch": ["transformer_norm", ["--norm", "power", *FLAGS], "torch"],
    "AdaNorm": ["transformer_adanorm", [], "auto"],
    "RMSNorm": ["transformer_norm", ["--norm", "rms"], "auto"],
    "BatchNorm in the encoder": ["transformer_bn", [], "auto"],
}


class Stand(Norm):
    """The stand-in for the released code, as a norm of the models here."""

    token_wise = False

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__(dim)
        self.naive = NaivePowerNorm(dim, groups)

    def normalize(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        return self.naive(x, None if padding is None else padding.t())


def norms_of(model: nn.Module) -> List[str]:
    """The names of a model's norms."""
    return [name for name, module in model.named_modules() if isinstance(module, Norm)]


def replace_by_naive(model: nn.Module) -> None:
    """Puts the stand-in for the released code in the place of each PowerNorm."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PowerNorm):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Stand(module.dim, module.groups))


def context_of(path: str) -> Any:
    """What chooses an implementation."""
    return lambda: kernels.use(path if path in kernels.CHOICES else "auto")


def step_job(arch: str, flags: Sequence[str], path: str, tokens: int, size: str, words: Any) -> timing.Job:
    """A training step: forward pass, loss, backward pass, Adam, running statistics."""
    cfg = models.config(f"{arch}_{size}", *flags)
    model = models.build(cfg, words).train()
    if path == "naive":
        replace_by_naive(model)
    net_input, target = models.batch(tokens, LENGTH, len(words))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, betas=(0.9, 0.98))
    updates = iter(range(1, 1 << 40))
    listeners = [module for module in model.modules() if hasattr(module, "set_num_updates")]

    def run() -> None:
        number = next(updates)
        for module in listeners:
            module.set_num_updates(number)
        optimizer.zero_grad(set_to_none=True)
        models.loss_of(model, net_input, target).backward()
        optimizer.step()

    return timing.Job(run, context_of(path), {"model": model, "real": int(target.ne(1).sum())})


def norm_jobs(model: nn.Module, tokens: int, path: str) -> Dict[str, timing.Job]:
    """For each kind of norm in a model, forward and backward pass of one at the model's shape."""
    found: Dict[str, timing.Job] = {}
    for name in norms_of(model):
        module = model.get_submodule(name)
        if type(module).__name__ not in found:
            found[type(module).__name__] = _norm_job(module, tokens, path)
    return found


def _norm_job(module: Any, tokens: int, path: str) -> timing.Job:
    padding = models.batch(tokens, LENGTH, 10)[1].eq(1)
    x = torch.randn(*padding.t().shape, module.dim, requires_grad=True)
    dy = torch.randn_like(x)
    arguments = () if module.token_wise else (padding,)

    def run() -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        if hasattr(module, "commit"):
            module.commit()
        module(x, *arguments).backward(dy)

    return timing.Job(run, context_of(path))


def measure(
    settings: Dict[str, List[Any]], tokens: int, rounds: int, seconds: float, size: str = models.SIZE,
    words: int = models.WORDS, clock: Optional[timing.Clock] = None,
) -> List[Dict[str, Any]]:  # fmt: skip
    """Steps of all settings, side by side; a record for each."""
    vocabulary = models.dictionary(words)
    clock = clock or timing.Clock()
    jobs = {name: step_job(*setting, tokens, size, vocabulary) for name, setting in settings.items()}
    timing.alternate(jobs, "LayerNorm", rounds, seconds, clock)
    found = []
    for name, job in jobs.items():
        model, path = job.about["model"], settings[name][2]
        times = list(job.times.values())
        ratio = timing.spread(timing.ratios(jobs["LayerNorm"], job))  # of tokens per second
        record = {
            "family": "step",
            "setting": name,
            "size": size,
            "tokens": tokens,
            "threads": torch.get_num_threads(),
            "seconds": timing.spread(times),
            "rounds": len(times),
            "tokens_per_second": timing.rounded(job.about["real"] / timing.quantile(times, 0.5)),
            "rate": ratio,
            "targets": [],
        }
        if path == "auto" and name.startswith("PowerNorm"):
            record["targets"] = [targets.target("tokens/s of LayerNorm's", TARGET, ratio["median"], at_most=False)]
        found.append({**record, **_share(model, tokens, path, record["seconds"]["median"], clock)})
    return found


def _share(model: nn.Module, tokens: int, path: str, seconds: float, clock: timing.Clock) -> Dict[str, Any]:
    """The norms alone, by number and kind, as a share of the step."""
    alone = norm_jobs(model, tokens, path)
    total = 0.0
    names = norms_of(model)
    for kind, job in alone.items():
        clock(job, 2)
        one = timing.quantile([clock(job, 3) for _ in range(5)], 0.5)
        total += one * sum(type(model.get_submodule(name)).__name__ == kind for name in names)
    return {"norms": len(names), "norms_seconds": timing.rounded(total), "share": timing.rounded(total / seconds)}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measures everything and stores the records."""
    args = records.parser("A whole training step of a 6-layer encoder-decoder.").parse_args(argv)
    run = records.Run("step", args.output)
    settings = {**SETTINGS, **(MORE if args.full else {})}
    for threads in [1, 2] if args.full else [1]:
        torch.set_num_threads(threads)
        around = records.circumstances(threads)
        tokens, rounds, seconds = (4096, 9, 900.0) if args.full else (1024, 9, 70.0)
        for record in measure(settings, tokens, rounds, seconds):
            run.add([{**record, "circumstances": around}])
    run.finish()
    return 0


if __name__ == "__main__":
    records.start_again("benchmarks.step")
    sys.exit(main())
