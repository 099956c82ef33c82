"""``powernorm_fairseq inspect``: the running statistics in checkpoints, and what looks wrong with them.

Prints a table of the norms that keep running statistics and then, in words, what looks wrong. With several checkpoints
it also prints how each differs from the first: the copies of several workers, or before and after.

The exit code is 0 if nothing looks wrong, 3 if something does, and 1 if a checkpoint cannot be read.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch
from torch import Tensor

from powernorm_fairseq.checkpoints.average import load_checkpoint, note_of
from powernorm_fairseq.norms import RunningNorm
from powernorm_fairseq.processes import UserError

LOOKS_WRONG = 3

# Thresholds; each is a factor to the median over a norm's channels.
LARGEST_STATISTIC = 1e4
SMALLEST_STATISTIC = 1e-6
LARGEST_GAIN = 100.0

COUNTERS = RunningNorm.COUNTERS
HALF = (torch.float16, torch.bfloat16)
STATISTICS = ("running_psi_sq", "running_nu", "running_mean", "running_var")

Norms = Dict[str, Dict[str, Tensor]]


def running_norms(model: Mapping[str, Any]) -> Norms:
    """The norms with running statistics in a state dict: path of the module -> its entries by their own names."""
    norms: Norms = {}
    for key in model:
        site, _, entry = key.rpartition(".")
        if entry in ("running_psi_sq", "running_var"):
            norms[site] = {}
    for key, value in model.items():
        site, _, entry = key.rpartition(".")
        if site in norms and isinstance(value, Tensor):
            norms[site][entry] = value
    return norms


def kind_of(norm: Mapping[str, Tensor]) -> str:
    """``power``, ``power_v`` or ``batch``, by the norm's buffers."""
    if "running_var" in norm:
        return "batch"
    return "power" if "running_nu" in norm else "power_v"


def scale_of(norm: Mapping[str, Tensor]) -> Tensor:
    """(C,) psi^2, or the variance of ``batch``, in double precision."""
    return norm["running_var" if "running_var" in norm else "running_psi_sq"].double().flatten()


def counter(norm: Mapping[str, Tensor], name: str) -> float:
    """A norm's counter; 0 where it has none."""
    return float(norm[name].double().flatten()[0]) if name in norm else 0.0


def run_updates(state: Mapping[str, Any]) -> int:
    """The number of updates of the run that wrote a checkpoint; 0 where it does not say."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates") or 0)


def averaged_statistics(state: Mapping[str, Any]) -> Optional[str]:
    """A warning if a checkpoint's running statistics are a mixture of several moments of training; otherwise None.

    fairseq's ``scripts/average_checkpoints.py`` averages every floating-point entry and keeps the rest of one file, and
    EMA decays them all: the counters of updates are then less than the run's number of updates, or no whole number.
    Statistics that were measured anew for the averaged parameters are as they should be.

    Args:
        state: a fairseq checkpoint.
    """
    norms, updates = running_norms(state["model"]), run_updates(state)
    if not norms or updates == 0 or "reestimated" in note_of(dict(state)):
        return None
    tracked = [counter(norm, "updates_tracked") for norm in norms.values() if "updates_tracked" in norm]
    skipped = [counter(norm, "updates_skipped") for norm in norms.values()]
    if not tracked:
        return None
    most = max(tracked)
    advice = (
        "They are statistics of no single model: write the average with `powernorm_fairseq average ... --reestimate`, "
        "which measures them anew."
    )
    if not all(value.is_integer() for value in tracked):
        odd = next(value for value in tracked if not value.is_integer())
        return (
            f"the running statistics were averaged or decayed like parameters (updates_tracked is {odd:g}, no whole "
            f"number). {advice}"
        )
    if most < updates - max(skipped) and not _layerdrop(state):
        return (
            f"the running statistics follow {most:g} of the run's {updates} updates: they were averaged or decayed "
            f"like parameters, or not tracked. {advice}"
        )
    return None


def findings(state: Mapping[str, Any]) -> List[str]:
    """What looks wrong with the running statistics of a checkpoint, each in words; empty if nothing does.

    Args:
        state: a fairseq checkpoint; ``optimizer_history`` may be missing.
    """
    norms = running_norms(state["model"])
    found: Dict[str, List[str]] = {}
    for site, norm in norms.items():
        for text in _findings_of(norm):
            found.setdefault(text, []).append(site)
    said = [f"{_sites(sites)}: {text}" for text, sites in found.items()]
    averaged = averaged_statistics(state)
    disagreement = None if averaged else _disagreement(norms, state)
    note = note_of(dict(state))
    mean = None
    if norms and len(note.get("averaged") or ()) > 1 and "reestimated" not in note:
        mean = (
            f"the running statistics are the mean of {len(note['averaged'])} checkpoints', and not those of the "
            "averaged parameters; `powernorm_fairseq average ... --reestimate` measures them anew"
        )
    return [text for text in (averaged, disagreement, mean) if text] + said


def _sites(sites: Sequence[str]) -> str:
    more = f" and {len(sites) - 2} more" if len(sites) > 2 else ""
    return ", ".join(sites[:2]) + more


def _disagreement(norms: Norms, state: Mapping[str, Any]) -> Optional[str]:
    # A norm has seen at least its `tracked` and at most its `tracked + skipped` updates.
    least = {site: counter(norm, "updates_tracked") for site, norm in norms.items() if "updates_tracked" in norm}
    if not least or _layerdrop(state):
        return None
    most = {site: value + counter(norms[site], "updates_skipped") for site, value in least.items()}
    low, high = min(most, key=lambda site: most[site]), max(least, key=lambda site: least[site])
    if least[high] <= most[low]:
        return None
    return f"updates_tracked differs between norms: {least[low]:g} in {low}, {least[high]:g} in {high}"


def _layerdrop(state: Mapping[str, Any]) -> bool:
    """Whether the run left out layers at random, so that norms have rightly seen fewer updates."""
    cfg = state.get("cfg") or {}
    model = cfg["model"] if "model" in cfg else None  # noqa: SIM401 - `get` of omegaconf 2.0 raises for missing keys
    settings = vars(model) if isinstance(model, argparse.Namespace) else model or {}
    names = ("encoder_layerdrop", "decoder_layerdrop")
    return any(name in settings and settings[name] for name in names)


def _findings_of(norm: Mapping[str, Tensor]) -> List[str]:
    found = []
    label = "var" if kind_of(norm) == "batch" else "psi^2"
    missing = [name for name in ("updates_tracked", "updates_skipped") if name not in norm]
    if missing:
        found.append(f"has no {', '.join(missing)}")
    half = sorted(name for name in (*STATISTICS, *COUNTERS) if name in norm and norm[name].dtype in HALF)
    if half:
        found.append(f"kept in half precision: {', '.join(half)}")
    for name in (*STATISTICS, "weight", "bias"):
        bad = int((~torch.isfinite(norm[name].double())).sum()) if name in norm else 0
        if bad:
            found.append(f"{name} is not finite in {bad} of {norm[name].numel()} channels")
    tracked, skipped, bounded = (counter(norm, name) for name in COUNTERS)
    if tracked > 0 and _initial(norm):
        found.append(f"statistics are at their initial values, though {tracked:g} updates were counted")
    elif "running_nu" in norm and tracked > 0 and not bool(norm["running_nu"].double().any()):
        found.append(f"running_nu is 0 everywhere, though {tracked:g} updates were counted")
    found += _scale_findings(scale_of(norm), label)
    if skipped > 0:
        share = f"{skipped / (tracked + skipped):.2%}"
        found.append(f"{skipped:g} updates skipped ({share}), since a sum was not finite")
    if bounded > 0:
        share = f" ({bounded / tracked:.2%})" if tracked > 0 else ""
        found.append(f"the bound on nu acted in {bounded:g} updates{share}")
    if "weight" in norm:
        gain = norm["weight"].double().abs().flatten()
        gain = gain[torch.isfinite(gain)]
        middle = float(gain.median()) if gain.numel() else 0.0
        if gain.numel() and float(gain.max()) > LARGEST_GAIN * middle:
            largest = f"{float(gain.max()):.3g}"
            found.append(f"the largest |gain|, {largest}, is more than {LARGEST_GAIN:g} times the median {middle:.3g}")
    return found


def _initial(norm: Mapping[str, Tensor]) -> bool:
    moved = "running_mean" in norm and bool(norm["running_mean"].double().any())
    return not moved and bool((scale_of(norm) == 1).all())


def _scale_findings(scale: Tensor, label: str) -> List[str]:
    found = []
    channels = scale.numel()
    scale = scale[torch.isfinite(scale)]
    zero = int((scale <= 0).sum())
    if zero:
        found.append(f"{label} is 0 or less in {zero} of {channels} channels")
    scale = scale[scale > 0]
    if not scale.numel():
        return found
    middle = float(scale.median())
    large = int((scale > LARGEST_STATISTIC * middle).sum())
    if large:
        found.append(
            f"{label} exceeds {LARGEST_STATISTIC:g} times its median {middle:.3g} in {large} of {channels} channels "
            f"(largest {float(scale.max()):.3g})"
        )
    dead = int((scale < SMALLEST_STATISTIC * middle).sum())
    if dead:
        found.append(
            f"{label} is below {SMALLEST_STATISTIC:g} of its median {middle:.3g} in {dead} of {channels} channels, "
            "which are dead"
        )
    return found


def summary(norm: Mapping[str, Tensor]) -> Dict[str, Any]:
    """The numbers of one norm's row; what a norm does not have is None."""
    kind, scale = kind_of(norm), scale_of(norm)

    def largest(name: str) -> Optional[float]:
        return float(norm[name].double().abs().max()) if name in norm else None

    return {
        "kind": kind,
        **{name: counter(norm, name) if name in norm else None for name in COUNTERS},
        "scale": "var" if kind == "batch" else "psi_sq",
        "min": float(scale.min()),
        "median": float(scale.median()),
        "max": float(scale.max()),
        "max_abs_mean": largest("running_mean"),
        "max_abs_nu": largest("running_nu"),
        "max_abs_gain": largest("weight"),
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; a NaN is then equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    parts = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*parts)


def compare(first: Mapping[str, Any], other: Mapping[str, Any]) -> Dict[str, Any]:
    """How the model of one checkpoint differs from that of the first.

    Returns:
        ``only_first``, ``only_other``: keys; ``norms``: for each norm of both (and, as "everything else", all other
        entries) whether it is ``equal`` to the bit; the largest ``absolute`` difference of an element, counters left
        out, and the largest ``relative`` one, to the largest number of its entry; and the entry ``where`` that is.
    """
    one, two = first["model"], other["model"]
    sites = running_norms(one)
    rows: Dict[str, Dict[str, Any]] = {site: _row() for site in sites if site in running_norms(two)}
    rest = _row()
    for key, value in one.items():
        if key not in two or not isinstance(value, Tensor):
            continue
        site, _, entry = key.rpartition(".")
        _differ(rows[site], entry, value, two[key]) if site in rows else _differ(rest, key, value, two[key])
    return {
        "only_first": sorted(set(one) - set(two)),
        "only_other": sorted(set(two) - set(one)),
        "norms": {**rows, "everything else": rest},
    }


def _row() -> Dict[str, Any]:
    return {"equal": True, "absolute": 0.0, "relative": 0.0, "where": None}


def _differ(row: Dict[str, Any], entry: str, one: Tensor, two: Tensor) -> None:
    if same_bits(one, two):
        return
    row["equal"] = False
    row["where"] = row["where"] or entry
    if entry in COUNTERS:
        return
    absolute = relative = math.inf
    if one.shape == two.shape:
        a, b = one.double(), two.double()
        gap = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
        absolute = float(torch.nan_to_num(gap, nan=math.inf).max())
        if math.isfinite(absolute):
            relative = absolute / float(torch.max(a.abs(), b.abs()).max()) if absolute else 0.0
    row["absolute"] = max(row["absolute"], absolute)
    if relative > row["relative"]:
        row["relative"], row["where"] = relative, entry


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _number(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.4g}"


def table(norms: Norms) -> str:
    """One row for each norm."""
    rows = [["norm", "kind", "tracked", "skipped", "bounded", "of", "min", "median", "max", "max|mean|", "max|nu|"]]
    rows[0].append("max|gain|")
    for site, norm in norms.items():
        line = summary(norm)
        counts = ["-" if line[name] is None else f"{line[name]:.10g}" for name in COUNTERS]
        numbers = [
            _number(line[name]) for name in ("min", "median", "max", "max_abs_mean", "max_abs_nu", "max_abs_gain")
        ]
        rows.append([site, line["kind"], *counts, line["scale"].replace("_sq", "^2"), *numbers])
    return in_columns(rows)


def differences(compared: Mapping[str, Any]) -> str:
    """What :func:`compare` found, as text."""
    lines = []
    for side, text in (("only_first", "only in the first"), ("only_other", "only in this one")):
        if compared[side]:
            lines.append(f"{text}: {', '.join(compared[side])}")
    rows = [["norm", "to the bit", "absolute", "relative", "where"]]
    for site, row in compared["norms"].items():
        equal = "equal" if row["equal"] else "differs"
        rows.append([site, equal, _number(row["absolute"]), _number(row["relative"]), row["where"] or "-"])
    return "\n".join([*lines, in_columns(rows)])


def differs(compared: Mapping[str, Any]) -> bool:
    """Whether :func:`compare` found any difference."""
    same = all(row["equal"] for row in compared["norms"].values())
    return bool(compared["only_first"] or compared["only_other"]) or not same


def finite(value: Any) -> Any:
    """``value`` for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list) else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="checkpoints of fairseq")
    parser.add_argument(
        "--equal",
        action="store_true",
        help="a difference between the checkpoints looks wrong too, as between the copies of several workers",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for scripts; NaN and infinity are null")
    parser.epilog = (
        f"Looks wrong: statistics, gains or biases that are not finite; psi^2 or var of 0, above {LARGEST_STATISTIC:g} "
        f"times or below {SMALLEST_STATISTIC:g} of the norm's median, or still at its initial value after updates; a "
        f"|gain| above {LARGEST_GAIN:g} times the median; statistics in half precision; updates skipped or bounded; "
        "numbers of tracked updates that are no whole numbers, less than the run's, or different between norms (these "
        "two not in runs with LayerDrop); averaged statistics that were not measured anew."
    )


def main(args: argparse.Namespace) -> int:
    """Inspect what the arguments name."""
    say: Callable[[str], None] = (lambda text: None) if args.json else print
    records, comparisons = [], []
    first: Dict[str, Any] = {}
    wrong = False
    for path in args.checkpoints:
        state = load_checkpoint(path)
        try:
            norms, found = running_norms(state["model"]), findings(state)
            summaries = {site: summary(norm) for site, norm in norms.items()}
            shown = table(norms) if norms else "no norm with running statistics"
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{path} is a damaged checkpoint: {type(error).__name__}: {error}") from error
        released = [key for key in state["model"] if key.endswith(".running_phi")]
        if released:
            raise UserError(
                f"{path} is a checkpoint of the released PowerNorm code: `powernorm_fairseq convert` it first"
            )
        wrong = wrong or bool(found)
        say(f"{path}: {run_updates(state)} updates")
        say(shown)
        for text in found:
            say(f"* {text}")
        if not found:
            say("nothing looks wrong")
        record = {"path": str(path), "num_updates": run_updates(state), "norms": summaries, "findings": found}
        records.append(record)
        if first:
            compared = compare(first, state)
            wrong = wrong or (args.equal and differs(compared))
            comparisons.append({"first": str(args.checkpoints[0]), "other": str(path), **compared})
            say(f"differences from {args.checkpoints[0]}")
            say(differences(compared))
        else:
            first = state
        say("")
    if args.json:
        print(json.dumps(finite({"checkpoints": records, "differences": comparisons}), indent=2, allow_nan=False))
    return LOOKS_WRONG if wrong else 0
