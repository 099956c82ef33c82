"""What is put around fairseq's functions that load a state: a warning, and a mend for the shadow model of an EMA."""

import logging
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Set

logger = logging.getLogger(__name__)

_warned: Set[str] = set()
_silent = False
_training = False


@contextmanager
def without_warnings() -> Iterator[None]:
    """For this package's own commands, which speak for themselves."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def around_trainer_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``Trainer.load_checkpoint``: what is loaded within is to be trained on."""
    global _training
    before, _training = _training, True
    try:
        return original(*args, **kwargs)
    finally:
        _training = before


def around_load_checkpoint_to_cpu(original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``fairseq.checkpoint_utils.load_checkpoint_to_cpu``: warns of averaged statistics, once for each file.

    fairseq's ``scripts/average_checkpoints.py`` averages all that is floating point, statistics and counters too. The
    result loads and works, but evaluation then uses statistics of no single model.

    Raises:
        ValueError: training is to begin with a checkpoint whose norms are folded. Where no norm stands any more, it
            would also fit a model without norms.
    """
    from powernorm_fairseq.checkpoints.average import note_of
    from powernorm_fairseq.checkpoints.inspect import averaged_statistics

    state = original(path, *args, **kwargs)
    if _training and isinstance(state, dict) and "folded" in note_of(state):
        raise ValueError(
            f"{path} is folded for inference and cannot be trained: give the checkpoint that it was made from"
        )
    if not _silent and str(path) not in _warned and isinstance(state, dict) and isinstance(state.get("model"), dict):
        warning = averaged_statistics(state)
        if warning:
            _warned.add(str(path))
            logger.warning("%s: %s", path, warning)
    return state


def around_ema_restore(original: Callable[..., Any], ema: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``EMA.restore``, which each update calls: the shadow model keeps its final norms.

    fairseq leaves a model's ``version`` out of what it restores. A state without version is taken for one of an old
    model without final norms, so the shadow of a pre-norm Transformer silently loses its own, whichever norm it is.
    """
    versions = {key: value for key, value in ema.model.state_dict().items() if key.endswith("version")}
    return original(ema, {**versions, **state_dict}, *args, **kwargs)
