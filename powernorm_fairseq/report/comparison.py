"""How the scores of two finished runs differ, and whether that could be chance, from what the runs have left."""

import math
from pathlib import Path
from typing import Any, Dict, Optional

from powernorm_fairseq.evaluation.perplexity import nats_by_sample
from powernorm_fairseq.evaluation.significance import SEED, TRIALS, compare, sign_flips
from powernorm_fairseq.experiment import record as results
from powernorm_fairseq.experiment.config import scoring_of
from powernorm_fairseq.processes import UserError


def compare_runs(baseline: Path, folder: Path) -> Optional[Dict[str, Any]]:
    """Compare the run in ``folder`` with the one in ``baseline`` on the subset that is reported.

    Returns:
        ``difference`` (run minus baseline: sacreBLEU of detokenised text, or nats per token), ``p_randomisation``,
        ``metric``, ``units`` (sentences, or samples of the text), ``trials``, ``seed``; for translation ``p_bootstrap``
        too. None where a run has no scores, or what they were made from is gone.
    """
    ours, theirs = results.read(folder), results.read(baseline)
    if not (ours and theirs and ours.get("scores") and theirs.get("scores")) or ours["kind"] != theirs["kind"]:
        return None
    one = _translations if ours["kind"] == "bleu" else _language_models
    try:
        return one(baseline, folder, ours)
    except FileNotFoundError:
        return None


def _translations(baseline: Path, folder: Path, result: Dict[str, Any]) -> Dict[str, Any]:
    from sacrebleu.metrics import BLEU

    from powernorm_fairseq.corpora.translation import read_lines

    scoring, task = scoring_of(result["config"]), result["config"]["task"]
    subset, target = result["reported"], task["target_lang"]
    references = read_lines(Path(task["data"]) / scoring.reference.format(subset=subset, target=target))
    name = f"{subset}.{target}"
    systems = [(str(one), read_lines(one / "hypotheses" / name)) for one in (baseline, folder)]
    try:
        found = compare(systems, references, {"BLEU": BLEU(lowercase=scoring.lowercase)})
    except UserError:  # a model that says nothing at all
        return {"difference": None, "p_randomisation": None, "metric": "sacreBLEU"}
    row = found["metrics"][0]["systems"][1]
    return {
        "metric": "sacreBLEU",
        "difference": row["difference"],
        "p_randomisation": row["p_randomisation"],
        "p_bootstrap": row["p_bootstrap"],
        "units": found["lines"],
        "trials": found["trials"],
        "seed": found["seed"],
    }


def _language_models(baseline: Path, folder: Path, result: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    name = f"{result['reported']}.eval-lm.txt"
    theirs, ours = (
        nats_by_sample((one / "hypotheses" / name).read_text(encoding="utf-8")) for one in (baseline, folder)
    )
    if set(ours) != set(theirs) or any(ours[sample][1] != theirs[sample][1] for sample in ours):
        return None  # cut in another way, so that samples are no pairs
    differences = [ours[sample][0] - theirs[sample][0] for sample in sorted(ours)]
    if not all(map(math.isfinite, differences)):  # a model that gives no probabilities any more
        return {"difference": None, "p_randomisation": None, "metric": "nats per token"}
    tokens = sum(count for _, count in ours.values())
    return {
        "metric": "nats per token",
        "difference": sum(differences) / tokens,
        "p_randomisation": sign_flips(differences),
        "units": len(differences),
        "trials": TRIALS,
        "seed": SEED,
    }
