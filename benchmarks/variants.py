"""The norms, settings and implementations that ``benchmarks.norms`` compares."""

import importlib.util
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from benchmarks import compiled, naive
from benchmarks.timing import Job
from powernorm_fairseq.norms import create_norm, kernels

GROUPS = 4
LAYER_NORM = "LayerNorm"
SENTENCES = 32  # in a batch of the naive implementation, whose tokens are laid out (T, B, C)

# Reads and writes of rows x channels that training (forward and backward pass) and evaluation take at least.
PASSES = {"layer": 5, "power": 5, "power_v": 8, "batch": 8, "ada": 5, "rms": 5}
PASSES_IN_WARMUP = 6
PASSES_IN_EVALUATION = 2


@dataclass
class Variant:
    """One line of the comparison.

    Attributes:
        norm: as ``create_norm`` names it.
        path: who computes it: ``native``, ``gpu``, ``torch`` (this project's), ``compile``, ``naive``, or ``pytorch``
            for torch.nn's own.
        variant: what is special about it; empty for the ordinary case.
        module: makes the module for a number of channels.
        masked: with a padding mask, about a fifth of the tokens.
        dtype: of input and parameters.
        full: part of the long run only.
        modes: in which it is measured.
    """

    norm: str
    path: str
    variant: str
    module: Callable[[int], nn.Module]
    masked: bool = False
    dtype: torch.dtype = torch.float32
    full: bool = False
    modes: List[str] = field(default_factory=lambda: ["train", "eval"])

    @property
    def passes(self) -> int:
        """Reads and writes of the input's size in training that nothing can do without."""
        return PASSES_IN_WARMUP if "warm-up" in self.variant else PASSES[self.norm]

    @property
    def key(self) -> str:
        """Tells it from all others."""
        return "/".join([self.norm, self.path, self.variant, str(self.dtype)])


def _ours(name: str, path: str, variant: str = "", **settings: Any) -> Variant:
    options = settings.pop("options", {})
    if name in ("power", "power_v"):
        options = {"groups": GROUPS, **options}
    return Variant(name, path, variant, partial(_create, name, options), **settings)


def _create(name: str, options: Dict[str, Any], channels: int) -> nn.Module:
    return create_norm(name, channels, options)


def _naive(channels: int, warmup: int = 0) -> nn.Module:
    return naive.NaivePowerNorm(channels, GROUPS, warmup)


class Compiled(nn.Module):
    """A norm without parameters, compiled."""

    def __init__(self, formula: Callable[[Tensor], Tensor], compiler: Any) -> None:
        super().__init__()
        self.formula = compiler(formula)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of ``x``."""
        return self.formula(x)


def layer_norms(device: str) -> List[Variant]:
    """What everything is compared with: torch.nn.LayerNorm in each type."""
    types = [torch.float32, torch.bfloat16, torch.float16]
    return [
        Variant("layer", "pytorch", "" if dtype == torch.float32 else _short(dtype), nn.LayerNorm, dtype=dtype,
                full=dtype == torch.float16 and device == "cpu")
        for dtype in types
    ]  # fmt: skip


def variants(device: str = "cpu", compiler: Optional[Any] = None) -> List[Variant]:
    """All variants that can run here.

    Args:
        compiler: ``torch.compile``; None leaves compiled formulas out.
    """
    fused = {"cpu": "native"}.get(device, "gpu")
    found = layer_norms(device)
    paths = [fused, "torch"] if kernels.available(fused) is not None else ["torch"]
    for path in paths:
        second = path == "torch"  # of the plain path the short run measures what there are targets for
        warm: Dict[str, Any] = {"options": {"warmup_updates": 1 << 40}, "modes": ["train"]}
        found += [
            _ours("power", path),
            _ours("power", path, "warm-up", **warm),
            _ours("power", path, "masked", masked=True),
            _ours("power", path, "warm-up, masked", masked=True, full=second, **warm),
            _ours("power", path, "bf16", dtype=torch.bfloat16),
            _ours("power", path, "warm-up, bf16", dtype=torch.bfloat16, full=True, **warm),
            _ours("power", path, "fp16", dtype=torch.float16, full=device == "cpu"),
            _ours("power", path, "released", options={"numerics": "released"}, modes=["train"], full=second),
            _ours("power", path, "no layer scale", options={"groups": 0}, full=second),
            _ours("power_v", path, modes=["train"]),
            _ours("ada", path),
            _ours("ada", path, "released", options={"numerics": "released"}),
            _ours("batch", path),
            _ours("batch", path, "masked", masked=True, full=second),
            _ours("rms", path),
        ]
    found += [
        Variant("batch", "pytorch", "", nn.BatchNorm1d),
        Variant("power", "naive", "", _naive),
        Variant("power", "naive", "warm-up", partial(_naive, warmup=1 << 40), full=True, modes=["train"]),
        Variant("power", "naive", "masked", _naive, masked=True, full=True, modes=["train"]),
        Variant("ada", "naive", "released", naive.NaiveAdaNorm),
    ]
    if hasattr(nn, "RMSNorm"):
        found.append(Variant("rms", "pytorch", "", partial(_rms_norm, nn.RMSNorm)))
    if compiler is not None:
        found += [
            Variant("power", "compile", "", partial(compiled.CompiledPowerNorm, groups=GROUPS, compiler=compiler)),
            Variant("ada", "compile", "", lambda channels: Compiled(compiled.ada, compiler), full=True),
        ]
    if device != "cpu" and importlib.util.find_spec("apex") is not None:
        from apex.normalization import FusedLayerNorm

        found.append(Variant("layer", "apex", "", FusedLayerNorm))
    return [one for one in found if one.dtype != torch.float16 or _halves(device)]


def _halves(device: str) -> bool:
    """Whether torch has LayerNorm in half precision there: on CPUs not before torch 2.1."""
    try:
        nn.LayerNorm(2, device=device, dtype=torch.float16)(torch.ones(1, 2, device=device, dtype=torch.float16))
    except RuntimeError:
        return False
    return True


def _rms_norm(module: Any, channels: int) -> nn.Module:
    return module(channels, eps=1e-5)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def compiler() -> Optional[Any]:
    """``torch.compile`` if it works here, else None."""
    if not hasattr(torch, "compile"):
        return None
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2))
    except Exception as error:  # no C++ compiler, no Triton, a Python that it does not know, ...
        print(f"torch.compile does not work here and is left out: {str(error).splitlines()[0]}")
        return None
    return torch.compile


@lru_cache(maxsize=3)
def _batch(rows: int, channels: int, dtype: torch.dtype, device: str) -> Tuple[Tensor, Tensor, Tensor]:
    """x, dy and a mask. All variants of a type share them, so that they lie in the cache for all or for none."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, channels, generator=generator) + 0.1
    dy = torch.randn(rows, channels, generator=generator)
    padding = torch.rand(rows, generator=generator) < 0.2
    return x.to(device=device, dtype=dtype), dy.to(device=device, dtype=dtype), padding.to(device)


def job(variant: Variant, mode: str, rows: int, channels: int, device: str = "cpu") -> Job:
    """One training step of a norm (all that an update costs, its running statistics too), or one evaluation."""
    x, dy, mask = _batch(rows, channels, variant.dtype, device)
    padding = mask if variant.masked else None
    module = variant.module(channels).to(device=device, dtype=variant.dtype).train(mode == "train")
    if variant.path == "naive" and variant.norm == "power":
        # A view of the same memory as sentences; gradients of shorter batches come in the same shape.
        sentences = SENTENCES if rows % SENTENCES == 0 else 1
        x, dy = (tensor.view(rows // sentences, sentences, channels) for tensor in (x, dy))
        padding = None if padding is None else padding.view(rows // sentences, sentences).t()
    arguments = () if padding is None else (padding,)
    path = variant.path
    context = partial(kernels.use, path) if path in kernels.CHOICES else None
    if mode == "eval":

        def evaluate() -> Tensor:
            with torch.no_grad():
                return module(x, *arguments)

        return Job(evaluate, context)

    x = x.detach().requires_grad_()
    parameters = list(module.parameters())
    ends_update = getattr(module, "set_num_updates", None)
    updates = iter(range(1, 1 << 40))

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        if ends_update is not None:
            ends_update(next(updates))
        y = module(x, *arguments)
        y.backward(dy)
        x.grad = None  # dozens of jobs wait for each other, and each would hold one as large as x

    return Job(train, context)
