"""How far batch statistics are from the running ones: what the PowerNorm paper's figures show of a training.

In watched updates each norm compares, just before it absorbs them, the statistics of the update's batches with its
running ones. Nothing else changes: a watched update gives the same parameters to the bit.
"""

from typing import Dict

from torch import Tensor, nn

from powernorm_fairseq.norms.running import RunningNorm


def watch(model: nn.Module, on: bool = True) -> None:
    """Says whether coming updates are watched; to be said between updates."""
    for module in model.modules():
        if isinstance(module, RunningNorm):
            module.watched, module.seen = on, {}


def seen(model: nn.Module) -> Dict[str, Tensor]:
    """``WHAT/NAME`` of the norm -> () what the last watched update gave; empty where none was.

    Each is the Euclidean norm of a vector over the C channels, divided by C, as in Shen et al. 2020, figures 2 and 3.
    With g = dL/dy * weight of the summed loss L, and means over the real tokens of an update:

    * ``fwd_mean``, ``fwd_var``: mu_B - mu and sigma_B^2 - sigma^2 (BatchNorm).
    * ``fwd_psi_sq``: psi_B^2 - psi^2 (PowerNorm, PN-V).
    * ``bkw_mean``, ``bkw_var``: the means of g and of g * xhat (BatchNorm).
    * ``bkw_psi_sq``: the mean of g * xhat (PowerNorm: Lambda; PN-V).
    * ``bkw_nu``: Lambda - Gamma * nu, by which nu moves (PowerNorm).

    With several workers forward statistics, Lambda and Gamma are those of all workers, the other gradient statistics
    those of this worker.
    """
    return {
        f"{what}/{name}": value
        for name, module in model.named_modules()
        if isinstance(module, RunningNorm)
        for what, value in module.seen.items()
    }
