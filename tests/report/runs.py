"""Folders of finished runs as `powernorm_fairseq run` leaves them, without the training."""

import json
from pathlib import Path

LINE = "2026-01-01 00:00:00 | INFO | {} | {}\n"
REFERENCES = [
    f"the {word} is here , and it is the best one of all {number} ." for number, word in enumerate("abcdefgh")
]
CIRCUMSTANCES = {
    "versions": {"torch": "2.13.0", "sacrebleu": "2.6.0"},
    "hardware": {"processor": "Some CPU", "system": "Linux", "cores": 2, "threads": 1, "gpus": []},
    "git_commit": "0123456789abcdef",
    "command": [
        "/home/somebody/x/__main__.py",
        "run",
        "/home/somebody/x/configs/mt/sample.yaml",
        "--dir",
        "/d/runs/mt/a",
    ],
}


def finished_run(root, norm, seed=1, *, task="mt", group="sample", score=20.0, statistics=False, wrong=0, **changes):
    """``root/TASK/GROUP/NORM/seedN``; of its translations the first ``wrong`` differ from the references, and a
    language model loses 0.5 nats more on each sample for each of them."""
    folder = Path(root) / task / group / norm / f"seed{seed}"
    (folder / "hypotheses").mkdir(parents=True)
    data = Path(root) / "data"
    data.mkdir(exist_ok=True)
    (data / "reference.test.en").write_text("\n".join(REFERENCES) + "\n")
    kind = "bleu" if task == "mt" else "perplexity"
    if task == "mt":
        lines = [line.replace("best one of all", "thing") if n < wrong else line for n, line in enumerate(REFERENCES)]
        (folder / "hypotheses" / "test.en").write_text("\n".join(lines) + "\n")
    else:
        words = "x [-{:.6f}]\ty [-2.000000]"
        lines = [f"| fairseq_cli.eval_lm | {n} " + words.format(1 + 0.5 * (n < wrong)) for n in range(12)]
        (folder / "hypotheses" / "test.eval-lm.txt").write_text("\n".join(lines) + "\n")
    log = []
    for update in (50, 100):
        numbers = {"loss": "5", "num_updates": str(update)}
        if statistics:
            for place in ("encoder.layers.0.self_attn_layer_norm", "encoder.layer_norm"):
                what = {
                    "batch": ["fwd_mean", "fwd_var", "bkw_mean", "bkw_var"],
                    "power_v": ["fwd_psi_sq", "bkw_psi_sq"],
                }
                for name in what.get(norm, ["fwd_psi_sq", "bkw_psi_sq", "bkw_nu"]):
                    numbers[f"{name}/{place}"] = str(update * 1e-5)
        log.append(LINE.format("train_inner", json.dumps(numbers)))
        valid = {"valid_loss": "6", "valid_nll_loss": str(6 - update / 100), "valid_num_updates": str(update)}
        log.append(LINE.format("valid", json.dumps(valid)))
    (folder / "train.log").write_text("".join(log))
    scoring = {"metric": kind, "lowercase": True}
    result = {
        "kind": kind,
        "outcome": "finished",
        "norm": norm,
        "group": group,
        "task_kind": task,
        "config_file": f"/home/somebody/x/configs/{task}/{group}.yaml",
        "model": "transformer_norm_tiny",
        "scores": {"valid": {kind: score + 1}, "test": {kind: score, "signature": "tok:13a"}},
        "reported": "test",
        "training": {"updates": 100, "seconds": 12.5, "parameters": 1000, "git_commit": "fedcba9876543210"},
        "seed": seed,
        "config": {
            "common": {"seed": seed, "user_dir": "/home/somebody/x"},
            "task": {"_name": "translation", "data": str(data), "target_lang": "en"},
            "model": {"_name": "transformer_norm_tiny"},
            "scoring": scoring,
            "checkpoint": {"save_dir": "/home/somebody/runs"},
        },
        **CIRCUMSTANCES,
        **changes,
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder
