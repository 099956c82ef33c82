"""Fused implementations of the passes that norms consist of, and the choice between them and plain PyTorch.

``native`` (C++) serves tensors on CPUs, ``gpu`` (Triton) those on CUDA devices. Either is loaded when the first tensor
asks for it, and where it is missing or cannot be used the plain passes of ``norms.rows`` are taken, which need nothing
but PyTorch.
"""

import importlib
import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

CHOICES = ("auto", "torch", "native", "gpu")
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BACKENDS = {"cpu": "native", "cuda": "gpu"}

# What torch.compile traces must be plain PyTorch; of the norms only rarely used parts are (norms/operators.py).
_compiling = torch.compiler.is_compiling if hasattr(torch, "compiler") else lambda: False

# What a trace of torch.jit records are calls of PyTorch alone: results of kernels would be constants in it.
_jit_state = torch._C._get_tracing_state

_choice = "auto"
_loaded: Dict[str, Any] = {}


def available(name: str) -> Any:
    """The module ``native`` or ``gpu``, or None (and one line in the log, once) where it cannot be used here."""
    if name not in _loaded:
        try:
            module = importlib.import_module(f"{__name__}.{name}")
            _loaded[name] = module if module.usable() else None
        except Exception as error:  # whatever is wrong with a compiler's installation, norms work without
            logger.warning(f"the norms' fused kernels for {name} cannot be used ({error}): plain PyTorch is")
            _loaded[name] = None
    return _loaded[name]


def jit_tracing() -> bool:
    """Whether ``torch.jit`` is recording what is called."""
    return _jit_state() is not None


def fused(x: Tensor) -> Any:
    """The module whose functions are to be used on ``x``, or None for plain PyTorch."""
    if _choice == "torch" or _compiling() or _jit_state() is not None:
        return None
    if type(x) not in (Tensor, nn.Parameter) or x.dtype not in _TYPES:
        return None
    name = "gpu" if _choice == "gpu" else _BACKENDS.get(x.device.type)  # Triton's interpreter takes CPU tensors too
    return None if name is None else _loaded[name] if name in _loaded else available(name)


def binding(x: Tensor) -> Any:
    """The differentiable functions in C++ for ``x``, or None where there are none."""
    return getattr(fused(x), "binding", None)


@contextmanager
def use(choice: str) -> Iterator[None]:
    """For tests and benchmarks: within this context norms run by the implementation that ``choice`` names.

    Args:
        choice: ``torch``, ``native`` or ``gpu``; ``auto`` for what they do otherwise. It holds for the whole process.

    Raises:
        ValueError: there is no such implementation.
        RuntimeError: it cannot be used here.
    """
    global _choice
    if choice not in CHOICES:
        raise ValueError(f"there is no implementation {choice!r}; there are {', '.join(CHOICES)}")
    if choice in _BACKENDS.values() and available(choice) is None:
        raise RuntimeError(f"the implementation {choice!r} cannot be used here; the log says why")
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before
