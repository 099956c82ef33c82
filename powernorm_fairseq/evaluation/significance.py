"""Whether a difference between two systems' scores could be chance, by sacreBLEU's paired tests."""

import contextlib
import os
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from powernorm_fairseq.evaluation.checks import check_pairs, naming
from powernorm_fairseq.processes import UserError

RESAMPLES, TRIALS, SEED = 1000, 10_000, 12_345  # sacreBLEU's own
TESTS = {"bootstrap": "bs", "randomisation": "ar"}


def compare(
    systems: Sequence[Tuple[str, Sequence[str]]],
    references: Sequence[str],
    metrics: Mapping[str, Metric],
    *,
    resamples: int = RESAMPLES,
    trials: int = TRIALS,
    seed: int = SEED,
) -> Dict[str, Any]:
    """Each system against the first one, by paired bootstrap and by paired approximate randomisation.

    Both ask how often a difference at least as large would be seen if the two systems were equally good, given these
    sentences. Neither knows of other seeds or other training runs.

    Args:
        systems: names and hypotheses; the first is the baseline.
        metrics: sacreBLEU's, by any name; the lines must be prepared for them.
        resamples: of the bootstrap.
        trials: of the randomisation.
        seed: at least 1, as sacreBLEU takes 0 for "any".

    Returns:
        ``baseline``, ``seed``, ``resamples``, ``trials``, ``lines``, and in ``metrics`` for each metric its
        ``metric``, ``signatures`` (by test), and ``systems``: ``name``, ``score``, ``mean`` and ``ci`` (of the
        resamples: the 95 % interval is mean plus or minus ci), and for all but the first ``difference``,
        ``lines_differing``, ``p_bootstrap`` and ``p_randomisation``.

        The p-values are sacreBLEU's with two corrections. It counts what is *larger* than the difference seen, so that
        a system would differ from itself with the smallest p there is: where the scores are equal, p is 1 here. And of
        the 2^k ways to exchange the k lines that differ, two give the very difference seen: their share is added to
        the p-value of the randomisation, which matters only where k is small.

    Raises:
        UserError: fewer than two systems, what ``check_pairs`` refuses, or a number that is too small.
    """
    if len(systems) < 2:
        raise UserError("a comparison needs the hypotheses of two systems or more")
    for name, hypotheses in systems:
        with naming(name):
            check_pairs(hypotheses, references)
    for what, number in (("seed", seed), ("resamples", resamples), ("trials", trials)):
        if number < 1:
            raise UserError(f"{what} must be at least 1, not {number}")
    named: List[Tuple[str, Sequence[str]]] = [(name, list(hypotheses)) for name, hypotheses in systems]
    outcomes, signatures = {}, {}
    with _seeded(seed):
        for test, short in TESTS.items():
            samples = resamples if short == "bs" else trials
            paired = PairedTest(named, metrics, [list(references)], test_type=short, n_samples=samples)
            signatures[test], outcomes[test] = paired()
    compared = []
    for metric in signatures["bootstrap"]:
        rows: List[Dict[str, Any]] = []
        for place, (name, hypotheses) in enumerate(named):
            found: Dict[str, Any] = {test: outcomes[test][metric][place] for test in TESTS}
            row = {
                "name": name,
                "score": float(found["bootstrap"].score),
                "mean": float(found["bootstrap"].mean),
                "ci": float(found["bootstrap"].ci),
            }
            if place:
                difference = row["score"] - rows[0]["score"]
                differing = sum(ours != theirs for ours, theirs in zip(hypotheses, named[0][1]))
                ties = 2.0 * 0.5**differing
                row.update(
                    difference=difference,
                    lines_differing=differing,
                    p_bootstrap=float(found["bootstrap"].p_value) if difference else 1.0,
                    p_randomisation=min(1.0, float(found["randomisation"].p_value) + ties) if difference else 1.0,
                )
            rows.append(row)
        signed = {test: str(signatures[test][metric]) for test in TESTS}
        compared.append({"metric": metric, "signatures": signed, "systems": rows})
    return {
        "baseline": named[0][0],
        "seed": seed,
        "resamples": resamples,
        "trials": trials,
        "lines": len(references),
        "metrics": compared,
    }


def sign_flips(differences: Sequence[float], *, trials: int = TRIALS, seed: int = SEED) -> float:
    """The p-value of paired approximate randomisation for a sum of differences, such as of two models' losses.

    If the two were equally good, each difference could as well have had the other sign. The share of random signs with
    a sum at least as far from 0 as the one seen, which itself counts as one of the trials.

    Args:
        differences: one for each piece of the text.

    Raises:
        UserError: no difference at all, or one that is not finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise UserError("there must be differences, and all must be finite")
    # Sums of the same numbers in another order differ in their last digits.
    seen = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    generator, extreme, left = np.random.default_rng(seed), 0, trials
    while left:
        block = min(left, max(1, 4_000_000 // values.size))
        signs = generator.integers(0, 2, (block, values.size), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ values) >= seen).sum())
        left -= block
    return (extreme + 1) / (trials + 1)


def in_words(comparison: Mapping[str, Any]) -> str:
    """A comparison as a table to be printed."""
    lines = [
        f"compared with {comparison['baseline']} on {comparison['lines']} lines, seed {comparison['seed']}:",
        f"paired bootstrap, {comparison['resamples']} resamples (mean +- half of the 95 % interval, p),",
        f"paired approximate randomisation, {comparison['trials']} trials (p)",
    ]
    for compared in comparison["metrics"]:
        lines += ["", f"{compared['metric']:<7} {'mean':>15} {'difference':>10} {'p boot':>7} {'p rand':>7}  system"]
        for row in compared["systems"]:
            line = f"{row['score']:7.2f} {row['mean']:8.2f} +- {row['ci']:4.2f}"
            if "difference" in row:
                line += f" {row['difference']:+10.2f} {row['p_bootstrap']:7.4f} {row['p_randomisation']:7.4f}"
                line += f"  {row['name']} ({row['lines_differing']} lines differ)"
            else:
                line += f" {'':>26}  {row['name']}"
            lines.append(line)
        lines += [f"{test}: {signature}" for test, signature in compared["signatures"].items()]
    return "\n".join(lines)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Set the environment variable that is sacreBLEU's only way to be given a seed, and put it back."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
