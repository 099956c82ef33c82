"""The fused implementation for CPUs: a library of C++ loops (csrc/) that is built at installation, called by ctypes.

The library knows nothing of Python and torch, so that one build serves all versions of both. It takes contiguous
tensors and runs in as many threads as torch does; its results do not depend on how many these are. It has builds for
AVX2, for AVX-512 and for any processor, and takes the best that the processor at hand can run.

Functions here have the names, arguments and results of the plain implementations in ``norms.rows`` and
``norms.formulas``; vectors are in the computing type where nothing else is said.
"""

import ctypes
import filecmp
import importlib.util
import logging
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from powernorm_fairseq.norms.rows import Backward, Forward, compute_dtype

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
NAME = "_native.so"
ABI = 2  # csrc/native.h
# A binding fits the torch that it was built with, so that its name says which this is.
BINDING = "_binding_" + re.sub(r"\W", "_", torch.__version__)
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
INSTRUCTIONS = ("portable", "avx2", "avx512")

_POINTER, _COUNT, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_bool
_SHAPE = [ctypes.c_int, ctypes.c_int, _COUNT, _COUNT, _COUNT, _NUMBER, _POINTER]
_SIGNATURES = {
    "forward_pass": [*_SHAPE, *[_POINTER] * 9],
    "backward_pass": [*_SHAPE, *[_POINTER] * 10],
    "moments": [*_SHAPE, *[_POINTER] * 4],
    "standardize": [*_SHAPE[:2], _COUNT, _COUNT, *[_NUMBER] * 3, *[_FLAG] * 3, *[_POINTER] * 5],
    "power_forward": [*_SHAPE, _FLAG, _FLAG, *[_POINTER] * 7],
    "power_backward": [*_SHAPE, _NUMBER, *[_POINTER] * 10],
    "power_v_forward": [*_SHAPE, *[_POINTER] * 6],
    "power_v_backward": [*_SHAPE, *[_POINTER] * 9],
    "batch_forward": [*_SHAPE, *[_POINTER] * 6],
    "batch_backward": [*_SHAPE, *[_POINTER] * 9],
    "power_absorb": [ctypes.c_int, _COUNT, *[_NUMBER] * 4, _FLAG, *[_POINTER] * 6],
    "power_v_absorb": [ctypes.c_int, _COUNT, _NUMBER, *[_POINTER] * 5],
    "batch_absorb": [ctypes.c_int, _COUNT, _NUMBER, *[_POINTER] * 6],
}


def built(here: Path = HERE) -> Path:
    """The folder of the libraries: ``here``, or, for a checkout, that of an installed package with equal sources."""
    sources = [path.name for path in here.glob("csrc/*")]
    for there in (here, *(Path(entry, "powernorm_fairseq", "norms", "kernels") for entry in sys.path)):
        if (there / NAME).exists():
            equal, *_ = filecmp.cmpfiles(here / "csrc", there / "csrc", sources, shallow=False)
            if equal == sources:
                return there
    return here


LIBRARY = built() / NAME


def load(path: Path = LIBRARY) -> Any:
    """The library, or None (and one line in the log) where it was not built or does not fit this machine."""
    if not path.exists():
        reason = "were not built of these sources when powernorm_fairseq was installed (no C++ compiler?)"
    else:
        try:
            library = ctypes.CDLL(str(path))
            if library.powernorm_abi() == ABI:
                for name, arguments in _SIGNATURES.items():
                    function = getattr(library, f"powernorm_{name}")
                    function.argtypes = arguments
                    function.restype = ctypes.c_int
                return library
            reason = f"in {path} are of another version"
        except (OSError, AttributeError) as error:
            reason = f"in {path} cannot be used ({error})"
    logger.warning(f"the norms' fused CPU kernels {reason}: plain PyTorch is used, which is several times slower")
    return None


def load_binding() -> Any:
    """The differentiable functions in C++ (csrc/binding.cpp), or None where they were not built with this torch."""
    if library is None:
        return None
    spec = PathFinder.find_spec(BINDING, [str(LIBRARY.parent)])
    if spec is None or spec.loader is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:  # autograd functions in Python do the same
        return None
    return module if getattr(module, "ABI", None) == ABI else None


library = load()
binding = load_binding()


def usable() -> bool:
    """Whether there is a library."""
    return library is not None


def instructions() -> str:
    """Which of ``INSTRUCTIONS`` the library runs with."""
    return INSTRUCTIONS[library.powernorm_instructions()]


def use_instructions(name: str) -> bool:
    """Switches to another set of instructions (for tests); False if this processor or build has not got it."""
    library.powernorm_use_instructions.restype = ctypes.c_bool
    return bool(library.powernorm_use_instructions(INSTRUCTIONS.index(name)))


def _at(tensor: Optional[Tensor]) -> Optional[int]:
    return None if tensor is None else tensor.data_ptr()  # ctypes makes None a null pointer


def _check(result: int) -> None:
    if result:
        raise MemoryError("no memory for the sums of a norm's kernel")


def _shape(x: Tensor, padding: Optional[Tensor], groups: int, eps: float = 0.0) -> Tuple[Any, ...]:
    rows, channels = x.shape
    if groups and channels % groups:
        raise ValueError(f"{groups} groups of {channels} channels")
    return TYPES[x.dtype], torch.get_num_threads(), rows, channels, groups, eps, _at(padding)


def _scales(x: Tensor, groups: int) -> Optional[Tensor]:
    return torch.empty(x.shape[0], groups, dtype=compute_dtype(x)) if groups else None


def _vectors(x: Tensor, number: int) -> Tensor:
    return torch.empty(number, x.shape[1], dtype=compute_dtype(x))


def _sums(x: Tensor) -> Tuple[Tensor, Tensor]:
    dtype = compute_dtype(x)
    return torch.empty(x.shape[1], dtype=dtype), torch.empty(x.shape[1], dtype=dtype)


def _contribution(x: Tensor, sums: int) -> Tensor:
    return torch.empty(2 + sums * x.shape[1], dtype=torch.float64)


def forward_pass(
    x: Tensor,
    padding: Optional[Tensor],
    groups: int,
    eps: float,
    a: Optional[Tensor] = None,
    b: Optional[Tensor] = None,
    s: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    want_y: bool = True,
    want_sum_sq: bool = True,
    gain: Optional[Tensor] = None,
) -> Forward:
    """See :func:`norms.rows.forward_pass`."""
    y = torch.empty_like(x) if want_y else None
    new_s = _scales(x, groups) if s is None else None
    sum_sq = torch.empty(x.shape[1], dtype=compute_dtype(x)) if want_sum_sq else None
    _check(
        library.powernorm_forward_pass(
            *_shape(x, padding, groups, eps), *map(_at, (x, s, new_s, a, gain, b, shift, y, sum_sq))
        )
    )
    return Forward(y, s if new_s is None else new_s, sum_sq)


def backward_pass(
    x: Tensor,
    dy: Tensor,
    padding: Optional[Tensor],
    s: Optional[Tensor],
    a: Optional[Tensor] = None,
    b: Optional[Tensor] = None,
    d: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    want_dx: bool = True,
    want_sums: bool = True,
) -> Backward:
    """See :func:`norms.rows.backward_pass`."""
    dx = torch.empty_like(x) if want_dx else None
    sum_dy, sum_dy_h = _sums(x) if want_sums else (None, None)
    dy = dy.contiguous()  # a name, so that it lives until the library returns
    _check(
        library.powernorm_backward_pass(
            *_shape(x, padding, 0 if s is None else s.shape[1]),
            *map(_at, (x, dy, s, a, b, d, shift, dx, sum_dy, sum_dy_h)),
        )
    )
    return Backward(dx, sum_dy, sum_dy_h)


def moments(
    x: Tensor, padding: Optional[Tensor], groups: int, eps: float
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:
    """See :func:`norms.rows.moments`."""
    s, stats = _scales(x, groups), _vectors(x, 2)
    _check(library.powernorm_moments(*_shape(x, padding, groups, eps), _at(x), _at(s), _at(stats[0]), _at(stats[1])))
    count = x.shape[0] if padding is None else int((~padding).sum())
    return s, torch.full((), count, dtype=stats.dtype), stats[0], stats[1]


def standardize_forward(x: Tensor, eps: float, released: bool, scale: float, k: float) -> Tuple[Tensor, Tensor, Tensor]:
    """See :func:`norms.rows.standardize_forward`."""
    z, mean = torch.empty_like(x), torch.empty(x.shape[0], 1, dtype=compute_dtype(x))
    inverse = torch.empty_like(mean)
    _standardize(x, None, mean, inverse, z, eps, released, False, False, scale, k)
    return z, mean, inverse


def standardize_backward(
    x: Tensor,
    dz: Tensor,
    mean: Tensor,
    inverse: Tensor,
    eps: float,
    released: bool,
    detach_mean: bool,
    detach_sigma: bool,
    scale: float,
    k: float,
) -> Tensor:
    """See :func:`norms.rows.standardize_backward`."""
    dx = torch.empty_like(x)
    dz = dz.contiguous()
    _standardize(x, dz, mean, inverse, dx, eps, released, detach_mean, detach_sigma, scale, k)
    return dx


def _standardize(
    x: Tensor, dz: Optional[Tensor], mean: Tensor, inverse: Tensor, out: Tensor, eps: float, released: bool,
    detach_mean: bool, detach_sigma: bool, scale: float, k: float,
) -> None:  # fmt: skip
    _check(
        library.powernorm_standardize(
            TYPES[x.dtype],
            torch.get_num_threads(),
            *x.shape,
            eps,
            scale,
            k,
            released,
            detach_mean,
            detach_sigma,
            *map(_at, (x, dz, mean, inverse, out)),
        )
    )


def power_norm_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], psi_sq: Tensor,
    groups: int, eps: float, use_batch_psi: bool, released: bool,
) -> Tuple[Tensor, Optional[Tensor], Tensor]:  # fmt: skip
    """See :func:`norms.formulas.power_norm_forward`."""
    y, s, stats = torch.empty_like(x), _scales(x, groups), _vectors(x, 3)
    _check(
        library.powernorm_power_forward(
            *_shape(x, padding, groups, eps), use_batch_psi, released, *map(_at, (x, psi_sq, weight, bias, y, s, stats))
        )
    )
    return y, s, stats


def power_norm_backward(
    x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor], s: Optional[Tensor], stats: Tensor,
    nu: Tensor, scale: float, want_dx: bool,
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`norms.formulas.power_norm_backward`."""
    dx = torch.empty_like(x)  # also if it is not wanted, so that the sums are added up in the same order
    (dweight, dbias), row = _sums(x), _contribution(x, 3)
    dy = dy.contiguous()  # a name, so that it lives until the library returns
    _check(
        library.powernorm_power_backward(
            *_shape(x, padding, 0 if s is None else s.shape[1]),
            scale,
            *map(_at, (x, dy, s, stats, nu, weight, dx, dweight, dbias, row)),
        )
    )
    return dx if want_dx else None, dweight, dbias, row


def power_norm_v_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], groups: int, eps: float
) -> Tuple[Tensor, Optional[Tensor], Tensor]:
    """See :func:`norms.formulas.power_norm_v_forward`."""
    y, s, stats = torch.empty_like(x), _scales(x, groups), _vectors(x, 2)
    pointers = map(_at, (x, weight, bias, y, s, stats))
    _check(library.powernorm_power_v_forward(*_shape(x, padding, groups, eps), *pointers))
    return y, s, stats


def batch_norm_forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], padding: Optional[Tensor], groups: int, eps: float
) -> Tuple[Tensor, Optional[Tensor], Tensor]:
    """See :func:`norms.formulas.batch_norm_forward`."""
    y, s, stats = torch.empty_like(x), _scales(x, groups), _vectors(x, 3)
    pointers = map(_at, (x, weight, bias, y, s, stats))
    _check(library.powernorm_batch_forward(*_shape(x, padding, groups, eps), *pointers))
    return y, s, stats


def power_norm_v_backward(*args: Any) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:
    """See :func:`norms.formulas.power_norm_v_backward`."""
    return _exact_backward(library.powernorm_power_v_backward, 1, *args)


def batch_norm_backward(*args: Any) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:
    """See :func:`norms.formulas.batch_norm_backward`."""
    return _exact_backward(library.powernorm_batch_backward, 2, *args)


def _exact_backward(
    function: Any, sums: int, x: Tensor, dy: Tensor, weight: Optional[Tensor], padding: Optional[Tensor],
    s: Optional[Tensor], stats: Tensor, want_dx: bool,
) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x) if want_dx else None
    (dweight, dbias), row = _sums(x), _contribution(x, sums)
    dy = dy.contiguous()
    pointers = map(_at, (x, dy, s, stats, weight, dx, dweight, dbias, row))
    _check(function(*_shape(x, padding, 0 if s is None else s.shape[1]), *pointers))
    return dx, dweight, dbias, row


def absorb(
    name: str, contribution: Tensor, counters: Sequence[Tensor], statistics: Sequence[Tensor], *numbers: Any
) -> bool:
    """Ends an update: statistics and counters of a ``power``, ``power_v`` or ``batch`` norm take in a contribution.

    Args:
        numbers: what the norm's recursion depends on, in the order of the library's function.

    Returns:
        False if the library cannot do it; nothing has changed then.
    """
    if binding is not None:
        return getattr(binding, f"{name}_absorb")(contribution, *counters, *statistics, *numbers)
    first = statistics[0]
    dtype = first.dtype
    if first.device.type != "cpu" or dtype not in (torch.float32, torch.float64) or contribution.dtype != torch.float64:
        return False
    pointers = [contribution.data_ptr()]
    for tensor in (*counters, *statistics):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            return False
        pointers.append(tensor.data_ptr())
    getattr(library, f"powernorm_{name}_absorb")(TYPES[dtype], first.shape[0], *numbers, *pointers)
    return True
