"""``--patience`` over an interruption.

fairseq counts the validations that were no better in its process alone. A training that is continued would count from
0, take its first validation for the best, end later than an uninterrupted one, and average other checkpoints. So each
checkpoint gets the count, and a training that is continued goes on counting from there.
"""

import sys
from typing import Any, Callable, Dict, List

# In a checkpoint's ``extra_state``: ``best``, the best validation so far, and ``num_runs``, how many since were not.
STATE = "powernorm_fairseq_patience"


def _counters() -> List[Any]:
    """The function of fairseq-train that keeps the count as its own attributes, wherever it was started from."""
    modules = [sys.modules.get(name) for name in ("fairseq_cli.train", "__main__")]
    found = [getattr(module, "should_stop_early", None) for module in modules]
    return [function for function in found if function is not None]


def around_save(original: Callable[..., Any], trainer: Any, filename: str, extra_state: Dict[str, Any]) -> Any:
    """Around ``Trainer.save_checkpoint``, which comes after the count of the validation that goes with it."""
    for counter in _counters() if trainer.cfg.checkpoint.patience > 0 else []:
        if hasattr(counter, "best"):
            state = {"best": float(counter.best), "num_runs": int(counter.num_runs)}
            return original(trainer, filename, {**extra_state, STATE: state})
    return original(trainer, filename, extra_state)


def around_load(original: Callable[..., Any], cfg: Any, trainer: Any, **passthrough_args: Any) -> Any:
    """Around ``checkpoint_utils.load_checkpoint``: the count goes on where a training does, and only there."""
    extra_state, iterator = original(cfg, trainer, **passthrough_args)
    goes_on = trainer.get_num_updates() > 0 and not cfg.reset_optimizer and not cfg.reset_meters
    state = (extra_state or {}).get(STATE) if goes_on else None
    if state:
        for counter in _counters():
            counter.best, counter.num_runs = state["best"], state["num_runs"]
    return extra_state, iterator
