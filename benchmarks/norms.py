"""Single norms: training and evaluation against torch.nn.LayerNorm, memory, and the share of the memory roofline.

python -m benchmarks.norms [--full] [--device cuda] [--only power,ada]
"""

import argparse
import sys
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from benchmarks import records, targets, timing, variants
from benchmarks.variants import Variant
from powernorm_fairseq.norms import kernels

MORE_SHAPES = [(64, 512), (65536, 512), (4096, 256), (4096, 2048), (16384, 1024)]
# Of the figures: time against rows at 512 channels, and against channels at 4096 rows.
SWEEP = sorted(
    {(rows, 512) for rows in (64, 256, 1024, 4096, 16384)} | {(4096, c) for c in (128, 256, 512, 1024, 2048)}
)
MORE_SWEEP = [(65536, 512), (4096, 4096)]
IN_SWEEP = {("layer", "pytorch"), ("power", "native"), ("power", "gpu"), ("power", "torch"), ("power", "naive")}


def measure(
    chosen: Sequence[Variant],
    mode: str,
    rows: int,
    channels: int,
    bytes_per_second: float,
    rounds: int,
    seconds: float,
    device: str = "cpu",
    clock: Optional[timing.Clock] = None,
    memory: bool = True,
    about: Optional[Dict[str, Any]] = None,
) -> List[Dict[str, Any]]:
    """Measures the variants side by side; returns a record for each.

    Args:
        chosen: among them torch.nn.LayerNorm in each of their types.
        seconds: after which no further round begins.
    """
    clock = clock or timing.Clock(device)
    jobs = {one.key: variants.job(one, mode, rows, channels, device) for one in chosen}
    by_key = {one.key: one for one in chosen}
    baselines = {one.dtype: jobs[one.key] for one in chosen if (one.norm, one.path) == ("layer", "pytorch")}
    first = next(one.key for one in chosen if (one.norm, one.path) == ("layer", "pytorch"))
    timing.alternate(jobs, first, rounds, seconds, clock)
    found = []
    for key, one in by_key.items():
        job, itemsize = jobs[key], torch.empty((), dtype=one.dtype).element_size()
        size = rows * channels * itemsize
        times = list(job.times.values())
        passes = one.passes if mode == "train" else variants.PASSES_IN_EVALUATION
        record: Dict[str, Any] = {
            "norm": one.norm,
            "path": one.path,
            "variant": one.variant,
            "mode": mode,
            "rows": rows,
            "channels": channels,
            "itemsize": itemsize,
            "device": device.partition(":")[0],
            "threads": torch.get_num_threads(),
            **(about or {}),
            "seconds": timing.spread(times),
            "rounds": len(times),
            "ratio": timing.spread(timing.ratios(job, baselines[one.dtype])),
            "against": _against(one, job, jobs, by_key),
            "passes": passes,
            "roofline": timing.rounded(
                timing.roofline_share(passes, size, timing.quantile(times, 0.5), bytes_per_second)
            ),
            "bandwidth": timing.rounded(bytes_per_second),
        }
        if memory:
            record["peak_memory"] = timing.rounded(timing.peak_memory(job, device) / size)
        found.append({**record, "targets": targets.of_norm(record)})
    return found


def _against(one: Variant, job: Any, jobs: Dict[str, Any], by_key: Dict[str, Variant]) -> Dict[str, Dict[str, float]]:
    """The ratio to torch's own norm of the same kind, and for stand-ins to the fused implementation."""
    found = {}
    for key, other in by_key.items():
        if other is one or other.dtype != one.dtype:
            continue
        if other.path == "pytorch" and other.norm == one.norm and one.norm != "layer":
            found[{"batch": "BatchNorm1d", "rms": "RMSNorm"}[one.norm]] = timing.spread(timing.ratios(job, jobs[key]))
        same = (other.norm, other.variant) == (one.norm, one.variant)
        if one.path == "naive" and same and other.path in ("native", "gpu"):
            found["fused"] = timing.spread(timing.ratios(job, jobs[key]))
    return found


def plan(full: bool, device: str) -> Tuple[List[Tuple[int, int]], List[Tuple[int, int]], List[int]]:
    """Shapes for all variants, shapes for the figures, and numbers of threads."""
    threads = [1, 2] if full and device == "cpu" else [1]
    return [*targets.SHAPES, *(MORE_SHAPES if full else [])], [*SWEEP, *(MORE_SWEEP if full else [])], threads


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measures everything and stores the records."""
    parser = records.parser("Single norms against torch.nn.LayerNorm.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--only", default="", help="norms, separated by commas; all others are left out")
    args = parser.parse_args(argv)
    if kernels.available("native" if args.device == "cpu" else "gpu") is None:
        print("there is no fused implementation here: only plain PyTorch is measured")
    run = records.Run("norms", args.output)
    chosen = [
        one
        for one in variants.variants(args.device, variants.compiler())
        if (args.full or not one.full) and (not args.only or one.norm in {"layer", *args.only.split(",")})
    ]
    shapes, sweep, threads = plan(args.full, args.device)
    begin = time.perf_counter()
    for number in threads:
        torch.set_num_threads(number)
        around = records.circumstances(number)
        bandwidth = timing.bandwidth(args.device)
        print(f"{number} threads: a copy moves {bandwidth / 1e9:.1f} GB/s, read and written", flush=True)
        rounds, seconds = (40, 90.0) if args.full else (35, 40.0)
        for rows, channels in shapes:
            for mode in ("train", "eval"):
                part = [one for one in chosen if mode in one.modes]
                print(f"{mode} {rows} x {channels}, {time.perf_counter() - begin:.0f} s", flush=True)
                run.add(_measured(args, part, mode, rows, channels, bandwidth, rounds, seconds, around, {}))
        for rows, channels in sweep:
            part = [one for one in chosen if (one.norm, one.path) in IN_SWEEP and one.variant == ""]
            run.add(_measured(args, part, "train", rows, channels, bandwidth, 12, 8.0, around, {"sweep": True}, False))
    if args.only == "":
        run.finish()
    return 0


def _measured(
    args: argparse.Namespace, part: Sequence[Variant], mode: str, rows: int, channels: int, bandwidth: float,
    rounds: int, seconds: float, around: Dict[str, Any], about: Dict[str, Any], memory: bool = True,
) -> List[Dict[str, Any]]:  # fmt: skip
    found = measure(part, mode, rows, channels, bandwidth, rounds, seconds, args.device, memory=memory, about={**about})
    return [{"family": "norms", **record, "circumstances": around} for record in found]


if __name__ == "__main__":
    records.start_again("benchmarks.norms")
    sys.exit(main())
