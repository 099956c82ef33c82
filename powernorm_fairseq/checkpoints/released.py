"""Checkpoints of the authors' PowerNorm code, a fork of fairseq 0.8, read without running code that a file names."""

import argparse
import pickle
from pathlib import Path
from typing import Any, Dict

import torch

from powernorm_fairseq.checkpoints.average import unreadable
from powernorm_fairseq.processes import UserError


class _LeftOut:
    """Stands for an object of a class that a conversion has no use for, such as the fork's timers."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_LeftOut":
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Builds tensors, plain containers and option namespaces, and runs no other code that a file names."""

    # Whole names: pickle takes a name with dots for a path, which leads anywhere.
    ALLOWED = {("argparse", "Namespace"), ("collections", "OrderedDict"), ("torch", "Size"), ("_codecs", "encode")}
    ALLOWED |= {("torch._utils", f"_rebuild_{what}") for what in ("tensor", "tensor_v2", "parameter")}
    ALLOWED |= {
        ("torch", f"{kind}Storage")
        for kind in ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
    }

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in self.ALLOWED else _LeftOut


class _Pickle:
    """What torch.load takes as ``pickle_module``."""

    Unpickler = _Unpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def load_released(path: Path) -> Dict[str, Any]:
    """A checkpoint of the released code as it is, on the CPU; objects that fairseq 0.12 does not have are left out.

    Raises:
        UserError: no such file, or it is something else; the message says what.
    """
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", pickle_module=_Pickle)
    except Exception as error:  # torch raises whatever the bytes happen to lead to
        raise UserError(f"{path} cannot be read as a checkpoint: {unreadable(error)}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError(f"{path} is no fairseq checkpoint: it has no model")
    args = state.get("args")
    if not isinstance(args, argparse.Namespace):
        raise UserError(
            f"{path} was written by fairseq 0.10 or later, not by the released PowerNorm code (fairseq 0.8)"
        )
    if not hasattr(args, "encoder_norm_self"):
        raise UserError(
            f"{path} was written by another fairseq than the released PowerNorm code: its options have no "
            "encoder_norm_self"
        )
    return state
