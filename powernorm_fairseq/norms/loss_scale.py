"""The factor by which mixed precision has scaled the loss, and so the gradients that norms see."""

import ctypes
from contextlib import contextmanager
from typing import Iterator

_gradient_scale = ctypes.c_double(1.0)
ADDRESS = ctypes.addressof(_gradient_scale)  # where the C++ binding looks when a backward pass runs


def set_gradient_scale(scale: float) -> None:
    """Says that the gradients of coming backward passes are ``scale`` times those of the loss (default 1)."""
    if not 0 < scale < float("inf"):
        raise ValueError(f"the gradient scale must be positive and finite, not {scale}")
    _gradient_scale.value = scale


def get_gradient_scale() -> float:
    """The factor that :func:`set_gradient_scale` has set."""
    return _gradient_scale.value


@contextmanager
def gradient_scale(scale: float) -> Iterator[None]:
    """:func:`set_gradient_scale` for a block of code; the backward passes in it count.

    The factor belongs to the process, not to the thread: on an accelerator backward passes run in other threads.
    """
    before = get_gradient_scale()
    set_gradient_scale(scale)
    try:
        yield
    finally:
        set_gradient_scale(before)
