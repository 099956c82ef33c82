"""Statistics measured anew for the parameters that a model has, by forward passes alone.

Averaged parameters give other activations than those that the running statistics were gathered from. Measuring sets
this right as after the averaging of weights by Izmailov et al. 2018 (section 3.2): forward passes over training
batches, each normalised by its own statistics.
"""

from contextlib import contextmanager
from typing import Dict, Iterator

import torch
from torch import nn

from powernorm_fairseq.norms.running import RunningNorm


class Meter:
    """What is being measured; see :func:`measuring`. It can be used within that context only."""

    def __init__(self, model: nn.Module) -> None:
        self.norms: Dict[str, RunningNorm] = {
            name: module for name, module in model.named_modules() if isinstance(module, RunningNorm)
        }

    @property
    def tokens(self) -> Dict[str, int]:
        """Real tokens measured at each norm so far."""
        return {name: 0 if norm.tally is None else int(norm.tally[1]) for name, norm in self.norms.items()}

    @property
    def dropped(self) -> Dict[str, int]:
        """Batches left out at each norm so far, since a sum was not finite."""
        return {name: 0 if norm.tally is None else int(norm.tally[0]) for name, norm in self.norms.items()}

    @torch.no_grad()
    def assign(self) -> None:
        """Sets each norm's statistics for evaluation to the mean over all tokens measured.

        nu, which only training uses, and the counters stay.

        Raises:
            ValueError: a norm has seen no token, or none in a batch with finite sums; nothing is changed then.
        """
        silent, dropped = [name for name, count in self.tokens.items() if count == 0], self.dropped
        for names, words in (
            ([name for name in silent if dropped[name]], "no batch with finite activations was measured at"),
            (silent, "no tokens were measured at"),
        ):
            if names:
                raise ValueError(f"{words} {', '.join(names)}: run training batches through the model in training mode")
        for norm in self.norms.values():
            if norm.tally is not None:
                norm.assign(norm.tally[1], *norm.tally[2:].view(-1, norm.dim))


@contextmanager
def measuring(model: nn.Module) -> Iterator[Meter]:
    """Within this context forward passes in training mode are measured instead of changing the running statistics.

    Each batch is normalised by its own statistics; no backward pass is needed, and none may be run. Nothing changes
    until :meth:`Meter.assign`. With several workers each measures its own batches. Norms that are in evaluation mode
    normalise as always and measure nothing, which :meth:`Meter.assign` refuses.

    Raises:
        RuntimeError: a norm is being measured already.
    """
    meter = Meter(model)
    busy = [name for name, norm in meter.norms.items() if norm.measuring]
    if busy:
        raise RuntimeError(f"being measured already: {', '.join(busy)}")
    for norm in meter.norms.values():
        norm.commit()
        norm.measuring, norm.tally = True, None
    try:
        yield meter
    finally:
        for norm in meter.norms.values():
            norm.measuring, norm.tally = False, None
