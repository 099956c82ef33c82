"""What the installed fairseq, torch and Python need before the plugin can work.

``check_versions`` refuses what cannot work, ``apply`` mends fairseq in memory. The mends are numbered as in
docs/compatibility.md, which also lists what a plugin cannot reach. Each is active only where the installed versions
need it, and sits at a place that training, generation, scoring and averaging pass through, whether ``fairseq-train``
imports the plugin (while it creates its parser) or ``fairseq-hydra-train`` does (later, in ``main``).
"""

import argparse
import functools
import io
import logging
import os
import pickle
import platform
import re
import sys
import traceback
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, FrozenSet, Optional, Tuple

from powernorm_fairseq.version import __version__

logger = logging.getLogger(__name__)

PYTHON = (3, 8)
TORCH = (1, 12)
FAIRSEQ = (0, 12)
# Distributions that install a package named `fairseq`: two of them overwrite each other's files.
FAIRSEQ_DISTRIBUTIONS = ("fairseq", "ve-fairseq", "fairseq-fixed", "fairseq-built")

Original = Callable[..., Any]


def _numbers(version: str) -> Tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" gives (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _written(version: Tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _fairseq_to_install() -> str:
    """The requirement that setup.py chooses for this Python."""
    if sys.version_info < (3, 11):
        return "'fairseq==0.12.2'"
    if sys.version_info < (3, 13) and sys.platform == "linux" and platform.machine() == "x86_64":
        return "'ve-fairseq==0.12.3'"
    return "'fairseq-fixed==0.12.3.1'"


def check_versions() -> None:
    """Raise ImportError that names what to install when Python, torch or fairseq cannot work.

    A missing fairseq is no error: the norms need torch alone.
    """
    if sys.version_info < PYTHON:
        raise ImportError(
            f"powernorm_fairseq needs Python {_written(PYTHON)} or later, this is {sys.version.split()[0]}."
        )
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"powernorm_fairseq needs torch: pip install 'torch>={_written(TORCH)}' ({error})."
        ) from error
    if _numbers(torch.__version__) < TORCH:
        raise ImportError(
            f"powernorm_fairseq needs torch {_written(TORCH)} or later, found {torch.__version__}: "
            f"pip install 'torch>={_written(TORCH)}'."
        )
    if find_spec("fairseq") is not None:
        _check_fairseq()


def _check_fairseq() -> None:
    found = [name for name in FAIRSEQ_DISTRIBUTIONS if any(True for _ in metadata.distributions(name=name))]
    if len(found) > 1:
        raise ImportError(
            f"{' and '.join(found)} are installed together; each overwrites the other's files. Run "
            f"`pip uninstall -y {' '.join(found)}` and then `pip install {_fairseq_to_install()}`."
        )
    advice = f"powernorm_fairseq works on this Python with {_fairseq_to_install()} (pip install); see its setup.py."
    try:
        import fairseq
    # Anything may come out of an import that fails: fairseq 0.12.2 on Python 3.11 raises ValueError, with numpy 1.24
    # AttributeError.
    except Exception as error:
        raise ImportError(f"fairseq does not import: {type(error).__name__}: {error}. {advice}") from error
    version = getattr(fairseq, "__version__", None)
    if version is None:
        raise ImportError(
            f"`fairseq` is a folder without fairseq in it ({list(fairseq.__path__)}), which hides or replaces the "
            f"real one: start Python elsewhere. {advice}"
        )
    if _numbers(version) < FAIRSEQ:
        raise ImportError(f"fairseq {version} is older than {_written(FAIRSEQ)}. {advice}")


def apply() -> None:
    """Mend fairseq in place, only what the installed versions need; a second call does nothing."""
    for mend in MENDS:
        mend()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let ``around(original, *args, **kwargs)`` answer calls of ``owner.name``; done once, however often asked."""
    original = getattr(owner, name)
    done: FrozenSet[str] = getattr(original, "_answered_by", frozenset())
    if around.__qualname__ in done:
        return

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    answer._answered_by = done | {around.__qualname__}  # type: ignore[attr-defined]
    setattr(owner, name, answer)


def _n1_checkpoints_load() -> None:
    """torch 2.6 and later load only what they know, and fairseq's checkpoints hold a Namespace and numpy scalars.

    Adding these to what is safe keeps the loading safe. Between workers fairseq sends a whole omegaconf tree through
    torch.load, too deep to list; it is our own first worker's, so pickle may read it.
    """
    import numpy
    import torch
    from fairseq.distributed import utils

    if _numbers(torch.__version__) < (2, 6):
        return
    scalar = numpy.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")  # as numpy 1 and numpy 2 write it
    dtypes = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefd"]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, numpy.dtype, *dtypes, *((scalar, name) for name in names)]  # type: ignore[list-item]
    )

    def broadcast(original: Original, obj: Any, src_rank: int, group: Any, dist_device: Any) -> Any:
        sends = utils.get_rank(group) == src_rank
        pickled = pickle.dumps(obj) if sends else b""
        length = torch.tensor([len(pickled)], device=dist_device)
        utils.broadcast(length, src=src_rank, group=group)
        data = torch.empty(int(length), dtype=torch.uint8, device=dist_device)
        if sends:
            data.copy_(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        utils.broadcast(data, src=src_rank, group=group)
        return obj if sends else pickle.load(io.BytesIO(data.cpu().numpy().tobytes()))

    wrap(utils, "_broadcast_object_slow", broadcast)


def _n2_last_batch_kept() -> None:
    """The forks drop the last batch unless its size is a multiple of --required-batch-size-multiple (default 8)."""
    import numpy
    from fairseq.data import data_utils

    def batch_by_size(original: Original, indices: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(indices, numpy.ndarray):
            indices = numpy.fromiter(indices, dtype=numpy.int64, count=-1)
        if len(indices) == 0:  # the forks look at the last batch without asking whether there is one
            return []
        batches = original(indices, *args, **kwargs)
        fixed_shapes = kwargs.get("fixed_shapes", args[5] if len(args) > 5 else None)
        if fixed_shapes is None:  # batches follow the order of indices, so what is missing is the end
            kept = sum(len(batch) for batch in batches)
            if kept < len(indices):
                batches = [*batches, indices[kept:]]
        return batches

    one_too_many = numpy.arange(3)
    batches = data_utils.batch_by_size(
        one_too_many,
        None,
        num_tokens_vec=numpy.ones_like(one_too_many),
        max_sentences=2,
        required_batch_size_multiple=2,
    )
    if sum(map(len, batches)) < 3:
        wrap(data_utils, "batch_by_size", batch_by_size)


def _n3_no_fast_path() -> None:
    """fairseq 0.12.2 computes a loaded post-norm encoder layer in C++ from its norms' weights, without calling them.

    A norm other than LayerNorm is then silently replaced, and torch 1.13 and later refuse the call.
    """
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    if "_load_from_state_dict" not in vars(TransformerEncoderLayerBase):  # what a layer with a fast path is known by
        return

    def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.can_use_fastpath = False

    wrap(TransformerEncoderLayerBase, "__init__", init)


def _n6_hydra_shows_errors() -> None:
    """hydra 1.0 prints an error with an argument that Python 3.10 removed, so its own failure hides the error."""
    import hydra
    from hydra._internal import utils

    if sys.version_info < (3, 10) or _numbers(hydra.__version__) >= (1, 1):
        return

    def print_exception(original: Original, etype: Any = None, value: Any = None, tb: Any = None) -> None:
        traceback.print_exception(type(value), value, tb)

    wrap(utils, "print_exception", print_exception)


def _n7_torchrun_without_gpu() -> None:
    """The forks take the rank modulo the number of GPUs, also when there is none."""
    import torch
    from fairseq.distributed import utils

    def infer(original: Original, cfg: Any) -> None:
        try:
            original(cfg)
        except ZeroDivisionError:  # raised after everything but these two
            cfg.device_id = 0
            cfg.distributed_no_spawn = True

    if torch.cuda.device_count() == 0:
        wrap(utils, "_infer_torch_distributed_launch_init", infer)


def _n8_ddp_on_cpu() -> None:
    """--ddp-backend c10d, the default, names a GPU to DistributedDataParallel even for a model on the CPU."""
    from fairseq.models import distributed_fairseq_model
    from torch.nn.parallel import DistributedDataParallel

    class DistributedDataParallelOnAnyDevice(DistributedDataParallel):
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
            if all(parameter.device.type == "cpu" for parameter in module.parameters()):
                device_ids = output_device = None
            super().__init__(module, device_ids=device_ids, output_device=output_device, **kwargs)

    if distributed_fairseq_model.DistributedDataParallel is DistributedDataParallel:
        distributed_fairseq_model.DistributedDataParallel = DistributedDataParallelOnAnyDevice


def _n9_half_precision_without_gpu() -> None:
    """--bf16 means a TPU to fairseq's option parser; --fp16 flattens gradients and notes overflows on a GPU."""
    import torch
    from fairseq import options
    from fairseq.trainer import Trainer

    def parse(original: Original, *args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        given = kwargs.get("input_args", args[1] if len(args) > 1 else None) or sys.argv
        if getattr(namespace, "bf16", False) and "--tpu" not in given:
            namespace.tpu = False
        return parsed

    def build_optimizer(original: Original, self: Any) -> None:
        if self.cfg.common.fp16 and self.device.type == "cpu":
            self.cfg.common.fp16_no_flatten_grads = True
        original(self)

    def train_step(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
        to_gpu = torch.Tensor.cuda
        torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
        try:
            return original(self, *args, **kwargs)
        finally:
            torch.Tensor.cuda = to_gpu  # type: ignore[method-assign]

    if find_spec("torch_xla") is None:
        wrap(options, "parse_args_and_arch", parse)
    wrap(Trainer, "_build_optimizer", build_optimizer)
    if not torch.cuda.is_available():
        wrap(Trainer, "train_step", train_step)


def _n10_refuse_lonely_workers() -> None:
    """Two launches end well without the training that was meant; refuse them.

    Under fairseq-hydra-train the plugin comes after the launch, so there the trainer is the first place to ask.
    """
    import torch
    from fairseq.distributed import utils
    from fairseq.trainer import Trainer

    def call_main(original: Original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        distributed = cfg.distributed_training
        if distributed.distributed_init_method is None:
            utils.infer_init_method(distributed)
        _check_world_size(distributed)
        if (
            distributed.distributed_init_method is not None
            and not distributed.distributed_no_spawn
            and torch.cuda.device_count() == 0
        ):
            raise ValueError(
                "There is no GPU, so fairseq would start no worker at all and end as if all went well. Start workers "
                "on the CPU with torchrun, --distributed-no-spawn and --distributed-backend gloo: see "
                "docs/compatibility.md."
            )
        return original(cfg, *args, **kwargs)

    def init(original: Original, self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(cfg, "distributed_training"):
            _check_world_size(cfg.distributed_training)
        original(self, cfg, *args, **kwargs)

    wrap(utils, "call_main", call_main)
    wrap(Trainer, "__init__", init)


def _check_world_size(distributed: Any) -> None:
    launched = all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"))
    workers = int(os.environ["WORLD_SIZE"]) if launched else 1
    expected = distributed.distributed_world_size
    if workers > 1 and expected != workers and not distributed.pipeline_model_parallel:
        raise ValueError(
            f"torchrun started {workers} workers, but fairseq was told of {expected}: they would train {workers} "
            "separate models into one folder, or wait for each other for ever. Give "
            f"--distributed-world-size {workers} (Hydra: distributed_training.distributed_world_size={workers})."
        )


def _n12_second_copy_of_the_plugin() -> None:
    """fairseq refuses a --user-dir whose name is imported already from elsewhere, by a link or as installed package."""
    from fairseq import utils

    here = Path(__file__).parent

    def import_user_module(original: Original, args: Any) -> None:
        path = Path(getattr(args, "user_dir", None) or "")
        if not path.exists():  # as fairseq looks it up
            path = Path(utils.__file__).parent.parent / path
        version_file = path / "version.py"
        if path.resolve().name != here.name or not version_file.exists():
            return original(args)
        if not path.samefile(here):
            if f'"{__version__}"' not in version_file.read_text(encoding="utf-8"):
                raise ImportError(
                    f"powernorm_fairseq {__version__} is imported from {here} already; --user-dir {path} is another "
                    "version. Give the first as --user-dir, or uninstall one of them."
                )
            logger.warning("powernorm_fairseq is imported from %s already; the copy at %s is not used", here, path)
        return None

    wrap(utils, "import_user_module", import_user_module)


def _n14_no_uninitialised_buffer() -> None:
    """fairseq 0.12.2 saves a number that it never sets, so that the checkpoints of equal runs differ."""
    from fairseq.modules import SinusoidalPositionalEmbedding

    def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._float_tensor.zero_()

    def load(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)  # of a state to which fairseq's models have added such a number
        self._float_tensor.zero_()

    if "_float_tensor" in SinusoidalPositionalEmbedding(4, 0, 1)._buffers:
        wrap(SinusoidalPositionalEmbedding, "__init__", init)
        wrap(SinusoidalPositionalEmbedding, "_load_from_state_dict", load)


def register_model(name: str, dataclass: Optional[type] = None) -> Callable[[type], type]:
    """fairseq's decorator, safe when the plugin is imported under two names, as by a link or a renamed --user-dir.

    fairseq 0.12.2 raises then, and the forks return whatever class has that name already. Here the same class of
    another import is kept, and a foreign class raises ValueError that names it.
    """
    from fairseq import models

    def register(cls: type) -> type:
        known = models.MODEL_REGISTRY.get(name)
        if known is None:
            registered: type = models.register_model(name, dataclass=dataclass)(cls)
            return registered

        def place(model: type) -> Tuple[str, str]:
            return model.__module__.partition(".")[2], model.__qualname__

        if place(known) != place(cls):
            raise ValueError(f"model {name} is registered already, by {known.__module__}.{known.__qualname__}")
        return known

    return register


# n4, n5, n11 and n13 are out of a mend's reach or need none here: see docs/compatibility.md.
MENDS = (
    _n1_checkpoints_load,
    _n2_last_batch_kept,
    _n3_no_fast_path,
    _n6_hydra_shows_errors,
    _n7_torchrun_without_gpu,
    _n8_ddp_on_cpu,
    _n9_half_precision_without_gpu,
    _n10_refuse_lonely_workers,
    _n12_second_copy_of_the_plugin,
    _n14_no_uninitialised_buffer,
)
