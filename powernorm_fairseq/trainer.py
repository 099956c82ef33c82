"""What norms with running statistics need of fairseq's trainer.

Statistics share the fate of gradients. They are gathered by the same backward passes, thrown away where gradients are
(``Trainer.zero_grad``: a loss-scale overflow, a repeated try, a batch that ran out of memory), added up over workers
where gradients are, and absorbed when the update is done (``Trainer.set_num_updates``). Each function here is put
around the one of fairseq that it names.
"""

import logging
import os
from typing import Any, Callable, List, Optional

from powernorm_fairseq.checkpoints import last, loading, patience
from powernorm_fairseq.compat import wrap
from powernorm_fairseq.norms import RunningNorm, gradient_scale
from powernorm_fairseq.norms.sharing import SharedStatistics
from powernorm_fairseq.norms.watching import seen, watch

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

SHARED = "_powernorm_shared_statistics"


def apply() -> None:
    """Connects the norms to fairseq's trainer; a second call does nothing."""
    from fairseq import checkpoint_utils, models
    from fairseq.models.ema.ema import EMA
    from fairseq.optim.amp_optimizer import AMPOptimizer
    from fairseq.optim.fairseq_optimizer import FairseqOptimizer
    from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
    from fairseq.trainer import Trainer

    wrap(Trainer, "train_step", train_step)
    wrap(Trainer, "zero_grad", zero_grad)
    wrap(Trainer, "set_num_updates", set_num_updates)
    wrap(Trainer, "state_dict", state_dict)
    wrap(Trainer, "_prepare_sample", prepare_sample)
    wrap(Trainer, "_build_ema", build_ema)
    wrap(models, "DistributedFairseqModel", distributed_model)
    wrap(FairseqOptimizer, "all_reduce_grads", all_reduce_grads)
    wrap(checkpoint_utils, "save_checkpoint", save_checkpoint)
    wrap(checkpoint_utils, "load_checkpoint", last.around_load_checkpoint)
    wrap(Trainer, "save_checkpoint", patience.around_save)
    wrap(Trainer, "load_checkpoint", loading.around_trainer_load)
    wrap(checkpoint_utils, "load_checkpoint", patience.around_load)
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", loading.around_load_checkpoint_to_cpu)
    wrap(EMA, "restore", loading.around_ema_restore)
    for optimizer in (_FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin, AMPOptimizer):
        wrap(optimizer, "backward", backward)


def running_norms(model: Any) -> List[RunningNorm]:
    """The norms of a model that have running statistics."""
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


def log_interval(trainer: Any) -> int:
    """Every so many updates batch statistics are compared with running ones; 0: never."""
    return getattr(trainer.cfg.model, "norm_log_interval", 0) or 0


def shared_statistics(model: Any) -> Optional[SharedStatistics]:
    """What adds up the statistics of a model that :func:`distributed_model` has wrapped; None for others."""
    return model.__dict__.get(SHARED) if model is not None else None


def train_step(original: Original, trainer: Any, samples: Any, raise_oom: bool = False) -> Any:
    """Around ``Trainer.train_step``: an update that was given up leaves nothing behind, not even for a validation.

    Raises:
        RuntimeError: out of memory, where fairseq would leave out the batch: the other workers wait for its share of
            their batch statistics.
    """
    shared = shared_statistics(trainer._wrapped_model)
    interval = log_interval(trainer)
    if interval:
        watch(trainer.get_model(), (trainer.get_num_updates() + 1) % interval == 0)
    in_step = shared is not None and any(norm.workers is not None for norm in shared.norms.values())
    try:
        return original(trainer, samples, raise_oom or in_step)
    except RuntimeError as error:
        if in_step and "out of memory" in str(error):
            logger.error("with --norm-sync batch a worker cannot leave out a batch for which it has no memory")
        raise
    finally:
        for norm in running_norms(trainer.get_model()):
            norm.discard_pending()


def zero_grad(original: Original, trainer: Any) -> None:
    """Around ``Trainer.zero_grad``: what was gathered since the last finished update belongs to a try that failed."""
    original(trainer)
    for norm in running_norms(trainer.get_model()):
        norm.discard_pending()


def set_num_updates(original: Original, trainer: Any, num_updates: int) -> None:
    """Around ``Trainer.set_num_updates``, which a finished update calls: statistics are absorbed, counters logged."""
    from fairseq.logging import metrics

    norms = running_norms(trainer.get_model())
    for norm in norms:
        norm.commit()
    original(trainer, num_updates)
    if norms:
        # Tensors, so that the device is waited for only when a line is printed. The mean of a meter with no weight is
        # its last value.
        for name, counters in (
            ("norm_skipped", [norm.updates_skipped for norm in norms]),
            ("norm_bounded", [norm.updates_bounded for norm in norms]),
        ):
            metrics.log_scalar(name, sum(counters[1:], counters[0].clone()), weight=0, priority=650, round=0)
        if log_interval(trainer):
            for name, value in seen(trainer.get_model()).items():
                metrics.log_scalar(name, value, priority=700)


def state_dict(original: Original, trainer: Any) -> Any:
    """Around ``Trainer.state_dict``: finished updates are absorbed, so what is pending belongs to one that failed."""
    for norm in running_norms(trainer.get_model()):
        norm.discard_pending()
    return original(trainer)


def backward(original: Original, optimizer: Any, loss: Any) -> None:
    """Around ``backward`` of optimizers that scale the loss: nu is kept in units without the scale."""
    scaler = optimizer.scaler
    scale = 1.0
    if scaler is not None:
        scale = scaler.get_scale() if hasattr(scaler, "get_scale") else scaler.loss_scale
    with gradient_scale(scale):
        original(optimizer, loss)


def build_ema(original: Original, trainer: Any) -> None:
    """Around ``Trainer._build_ema``: counters are copied to the shadow model, not decayed."""
    original(trainer)
    if trainer._ema is not None:
        counters = {
            f"{name}.{counter}"
            for name, module in trainer.get_model().named_modules()
            if isinstance(module, RunningNorm)
            for counter in RunningNorm.COUNTERS
        }
        trainer._ema.skip_keys = {*trainer._ema.skip_keys, *counters}


def distributed_model(original: Original, args: Any, model: Any, process_group: Any, device: Any) -> Any:
    """Around ``DistributedFairseqModel``, which wraps a model on each worker: statistics are shared from now on."""
    import torch.distributed as dist
    from fairseq.distributed import utils

    wrapped = original(args, model, process_group, device)
    if running_norms(model):
        if utils.get_world_size(process_group) != dist.get_world_size():
            raise ValueError("running statistics cannot be shared where workers hold parts of a model")
        wrapped.__dict__[SHARED] = SharedStatistics(model)
    return wrapped


def all_reduce_grads(original: Original, optimizer: Any, module: Any) -> None:
    """Around ``FairseqOptimizer.all_reduce_grads``: once per update, on each worker, after its last backward pass."""
    shared = shared_statistics(module)
    if shared is not None:
        shared.reduce(absorb=False)
    original(optimizer, module)


def prepare_sample(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Trainer._prepare_sample``: a dummy batch is no part of statistics that workers share in the batch."""
    sample, is_dummy = original(trainer, *args, **kwargs)
    shared = shared_statistics(trainer._wrapped_model)
    if shared is not None:
        shared.workers.batch_counts = not is_dummy
    return sample, is_dummy


def save_checkpoint(original: Original, cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``checkpoint_utils.save_checkpoint``, which each worker calls: their statistics must be the same.

    Raises:
        RuntimeError: they are not; the first worker's state is kept as ``crash.pt``, as fairseq does when it fails.
    """
    shared = shared_statistics(trainer._wrapped_model)
    differences = shared.differences() if shared is not None else []
    if differences:
        crash = os.path.join(cfg.save_dir, "crash.pt")
        trainer.consolidate_optimizer()
        trainer.save_checkpoint(crash, {})
        listed = "\n  ".join(differences[:10])
        raise RuntimeError(
            f"Running statistics differ between workers, in {len(differences)} places; no checkpoint is written but "
            f"{crash}, which holds the first worker's. Largest differences:\n  {listed}"
        )
    return original(cfg, trainer, *args, **kwargs)
