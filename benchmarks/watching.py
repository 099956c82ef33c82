"""What ``--norm-log-interval`` costs: updates that are watched against updates that are not.

python -m benchmarks.watching [--full]
"""

import sys
from typing import Any, Dict, List, Optional, Sequence

import torch

from benchmarks import models, records, timing
from powernorm_fairseq.norms import RunningNorm
from powernorm_fairseq.norms.watching import seen, watch

INTERVALS = (1, 20)
LENGTH = 32
WORDS = 2000  # as few as the small models of the sample have: the output layer hides what norms cost


def update_job(cfg: Any, tokens: int, words: Any, watched: bool) -> timing.Job:
    """An update, in which all norms of the model are compared with their running statistics, or not."""
    model = models.build(cfg, words).train()
    net_input, target = models.batch(tokens, LENGTH, len(words))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]

    def run() -> None:
        watch(model, watched)
        optimizer.zero_grad(set_to_none=True)
        models.loss_of(model, net_input, target).backward()
        optimizer.step()
        for module in norms:
            module.commit()
        for value in seen(model).values():
            float(value)

    return timing.Job(run)


def measure(
    norm: str, size: str, tokens: int, rounds: int, seconds: float, words: int = WORDS,
    clock: Optional[timing.Clock] = None,
) -> List[Dict[str, Any]]:  # fmt: skip
    """A record for each interval, of seconds per update as a multiple of those without watching."""
    vocabulary = models.dictionary(words)
    flags = ["--norm", norm, *(["--norm-warmup-updates", "0"] if norm == "power" else [])]
    cfg = models.config(f"transformer_norm_{size}", *flags)
    jobs = {str(on): update_job(cfg, tokens, vocabulary, on) for on in (False, True)}
    timing.alternate(jobs, "False", rounds, seconds, clock or timing.Clock())
    plain = timing.spread(list(jobs["False"].times.values()))
    more = [ratio - 1 for ratio in timing.ratios(jobs["True"], jobs["False"])]
    about = {"family": "watching", "norm": norm, "size": size, "tokens": tokens, "threads": torch.get_num_threads()}
    return [
        {
            **about,
            "interval": interval,
            "seconds": plain,
            "rounds": len(more),
            "adds": timing.spread([one / interval for one in more]),
        }
        for interval in INTERVALS
    ]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measures everything and stores the records."""
    args = records.parser("The cost of --norm-log-interval.").parse_args(argv)
    run = records.Run("watching", args.output)
    torch.set_num_threads(1)
    around = records.circumstances(1)
    sizes = [("tiny", 1024), *([(models.SIZE, 1024)] if args.full else [])]
    for size, tokens in sizes:
        for norm in ("power", "power_v", "batch"):
            rounds, seconds = (15, 300.0) if args.full else (15, 8.0)
            run.add([{**one, "circumstances": around} for one in measure(norm, size, tokens, rounds, seconds)])
    run.finish()
    return 0


if __name__ == "__main__":
    records.start_again("benchmarks.watching")
    sys.exit(main())
