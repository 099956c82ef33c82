"""Running statistics over several workers (``torch.distributed``).

Statistics travel as gradients do: gathered by each worker's backward passes, and added up once per update. One
all-reduce carries the sums of all norms of a model, of the same length on every worker whatever its backward passes
reached, so that LayerDrop, unused branches and workers out of memory leave no worker waiting.
"""

from functools import partial
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powernorm_fairseq.norms.running import RunningNorm, Workers


class _Group(Workers):
    """The workers of a process group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def add_up(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values


class _Total:
    """The bucket of an asynchronous all-reduce, and who waits for it."""

    def __init__(self, work: Any, bucket: Tensor) -> None:
        self.work = work
        self.bucket = bucket

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def part(self, where: slice) -> Tensor:
        self.wait()
        return self.bucket[where]


class SharedStatistics:
    """Adds up the running statistics of a model's norms over workers.

    In a plain training loop::

        shared = SharedStatistics(model)        # on every worker, before training
        ...
        loss.backward()                         # once or, with gradient accumulation, several times
        shared.reduce()                         # then once per update, on every worker
        optimizer.step()

    fairseq's trainer is connected by ``powernorm_fairseq.trainer``. Norms with ``sync="none"`` are left alone.

    Args:
        model: the same on every worker.
        group: process group; a new one of all workers by default, so that collectives here never wait for others.
            Each worker must get here then.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        self.group = dist.new_group() if group is None else group
        self.workers = _Group(self.group)
        self.norms = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, RunningNorm) and module.sync != "none"
        }
        self._last: Optional[_Total] = None
        for norm in self.norms.values():
            norm.shared = True
            norm.workers = self.workers if norm.sync == "batch" else None

    @torch.no_grad()
    def reduce(self, absorb: bool = True) -> None:
        """Adds up what the backward passes since the last call have gathered; each worker must call it.

        Args:
            absorb: False only starts to, and returns at once. A norm then waits for the sums when it absorbs them, by
                ``commit()`` or ``set_num_updates``, which all workers must do at the same place; ``discard_pending()``
                gives up an update that failed.
        """
        if not self.norms:
            return
        if self._last is not None:
            self._last.wait()  # long done; of an update that was given up, nobody has waited
        parts = [norm.give_pending() for norm in self.norms.values()]
        bucket = torch.cat(parts)
        self._last = _Total(dist.all_reduce(bucket, group=self.group, async_op=True), bucket)
        start = 0
        for norm, part in zip(self.norms.values(), parts):
            norm.take_total(partial(self._last.part, slice(start, start + part.numel())))
            start += part.numel()
        if absorb:
            self.commit()

    def commit(self) -> None:
        """Ends the update at all norms."""
        for norm in self.norms.values():
            norm.commit()

    @torch.no_grad()
    def differences(self) -> List[str]:
        """The statistics in which the workers differ, with the size of the difference; each worker must call it.

        Workers hold equal statistics, to the last bit, since each absorbs the same sums.
        """
        if not self.norms:
            return []
        self.commit()
        names, values = [], []
        for name, norm in self.norms.items():
            for key, buffer in norm.named_buffers(recurse=False):
                names += [f"{name}.{key}".lstrip(".")] * buffer.numel()
                values.append(buffer.reshape(-1).double())
        mine = torch.nan_to_num(torch.cat(values), nan=torch.finfo(torch.float64).max / 2)
        extremes = torch.cat([mine, -mine])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = extremes[: len(mine)], -extremes[len(mine) :]
        spread = (highest - lowest).cpu()
        worst: Dict[str, float] = {}
        for index in spread.nonzero().view(-1).tolist():
            worst[names[index]] = max(float(spread[index]), worst.get(names[index], 0.0))
        return [f"{name} by {size:.3g}" for name, size in worst.items()]
