"""Running statistics: gathered in the backward pass, committed once per update.

A forward pass may be repeated, recomputed or thrown away; the backward pass of a micro-batch that counts runs once.
So a norm's contribution (a token count and sums over tokens) is recorded when the backward pass reaches it, and all
contributions of an update are absorbed in one step.
"""

import logging
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from powernorm_fairseq.norms import kernels, operators
from powernorm_fairseq.norms.base import Norm, choice, divisor
from powernorm_fairseq.norms.formulas import contribution
from powernorm_fairseq.norms.loss_scale import get_gradient_scale

logger = logging.getLogger(__name__)


def inside_backward() -> bool:
    """Whether this thread is executing a backward pass, as it is when activation checkpointing recomputes."""
    if hasattr(torch._C, "_current_graph_task_id"):
        return torch._C._current_graph_task_id() != -1
    try:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: None)
    except RuntimeError:  # older torch has no better question: callbacks are accepted in a backward pass only
        return False
    return True


def _seen(statistic: Any) -> Any:
    """By what a change shows: a copy on CPUs, where looking at the values is cheap, else the version; or None."""
    if type(statistic) is Tensor and statistic.device.type == "cpu":
        return statistic.clone()
    return None if statistic.is_inference() else statistic._version


def _plus(total: Optional[Tensor], new: Tensor) -> Tensor:
    return new if total is None else total + new


class Workers:
    """Adds up a batch's statistics over workers.

    Attributes:
        batch_counts: False while this worker runs a batch that only keeps it in step (a dummy batch).
    """

    batch_counts: bool = True

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of ``values`` (K,) over all workers. A collective: each worker must call it."""
        raise NotImplementedError


class _Update:
    """What changes in each update. Not attributes of the module, which takes ten times as long to set them.

    Attributes:
        pending: contributions since the last commit.
        added_up: gives those of all workers.
        ever_given: whether any were given to be added up.
        gradients: sums of a watched update.
        stated: finished updates, as ``set_num_updates`` said last.
        told: whether it said so, for ``torch.compile``, which would make a graph anew for each number.
        counted: finished updates, as counted here.
        constants: what evaluation computed of the statistics, and by what it is known whether they are still the same.
    """

    def __init__(self, stated: Optional[int] = None, told: bool = False, counted: int = 0) -> None:
        self.pending: Optional[Tensor] = None
        self.added_up: Optional[Callable[[], Tensor]] = None
        self.ever_given = False
        self.gradients: Optional[Tensor] = None
        self.stated = stated
        self.told = told
        self.counted = counted
        self.constants: Optional[Tuple[List[Tuple[str, Any, Any]], Tuple[Tensor, ...]]] = None


class _Recorder:
    """Hands contributions to :meth:`RunningNorm.record` of a norm that it does not keep alive.

    Python's collector cannot look into graphs of C++: a norm that stores its own output would never be collected.
    """

    def __init__(self, norm: "RunningNorm") -> None:
        self.norm = weakref.ref(norm)

    def __call__(self, contribution: Tensor) -> None:
        norm = self.norm()
        if norm is not None:
            norm.record(contribution)


class RunningNorm(Norm):
    """A norm with statistics over tokens that survive the batch.

    Subclasses hand their ``recorder`` (to ``torch.compile`` their ``token``) to their backward pass and say in
    :meth:`absorb` what one update's sums do to the buffers. Statistics are float32 (float64 after ``.double()``)
    whatever ``.half()`` or ``.bfloat16()`` says.

    When contributions are absorbed:

    * ``set_num_updates(n)`` with a new n. Calls with the same n are micro-batches of one update.
    * ``eval()``, and when the ``state_dict`` is taken.
    * Where ``set_num_updates`` was never called: at the next training forward, so each backward is an update.

    Until then, forward and backward use the statistics of the last update.

    With several workers (``norms.sharing``) an update ends when the sums have been added up over the workers; what has
    not been, stays pending.

    Args:
        dim: number of channels C.
        groups: channel groups of the layer scale in front, 0 for none.
        eps: inside the roots.
        affine: gain and bias per channel.
        sync: what several workers share: ``running`` statistics, ``batch`` statistics too (one collective in the
            forward pass, and one in the backward pass where the gradient is exact), or ``none``.

    Attributes:
        STATISTICS: the buffers on which evaluation depends.
        sums_recorded: how many sums (C,) a backward pass records.
        shared: whether sums are added up over workers before they are absorbed.
        measuring: training forwards are measured instead (``norms.measuring``), which adds to ``tally``
            (dropped batches, count, sums).
        watched: whether coming training batches are compared with the running statistics.
        seen: what the last update that was watched gave, by name (see :meth:`compare`).
        workers: with ``sync="batch"`` what adds up a batch's statistics over workers, else None.
        updates_tracked: updates absorbed.
        updates_skipped: updates in which a contribution was dropped because a sum was not finite.
        updates_bounded: updates in which a bound on the recursion acted (PowerNorm only).
        recorder: what a backward pass calls with its contribution (:meth:`record`).
        token: by which operators that ``torch.compile`` has put into a graph find the norm.
    """

    COUNTERS = ("updates_tracked", "updates_skipped", "updates_bounded")
    STATISTICS: Tuple[str, ...]

    token_wise = False
    sums_recorded: int

    updates_tracked: Tensor
    updates_skipped: Tensor
    updates_bounded: Tensor

    def __init__(self, dim: int, groups: int, eps: float, affine: bool, sync: str) -> None:
        super().__init__(dim, eps)
        self.groups = divisor(groups, dim)
        self.affine = affine
        self.sync = choice("sync", sync, ["running", "batch", "none"])
        self.shared = False
        self.workers: Optional[Workers] = None
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None
        # Counters are floating point: scripts that average or decay all buffers fail on integers.
        for name in self.COUNTERS:
            self.register_buffer(name, torch.zeros((), dtype=torch.float32))
        self.measuring = False
        self.tally: Optional[Tensor] = None
        self.watched = False
        self.seen: Dict[str, Tensor] = {}
        self._update = _Update()
        self._introduce()

    def _introduce(self) -> None:
        """Makes what graphs know this norm by."""
        self.recorder = _Recorder(self)
        self.token = operators.token_of(self)

    @property
    def num_updates(self) -> int:
        """Finished updates: as ``set_num_updates`` said last, else as counted here."""
        return self._update.counted if self._update.stated is None else self._update.stated

    def set_num_updates(self, num_updates: int) -> None:
        """Takes the number of finished updates; a new number ends the update that was being gathered."""
        if num_updates == self._update.stated:
            return
        self.commit()
        if self._update.pending is not None:
            raise RuntimeError(
                "a new update begins, but the statistics of the last have not been added up over the workers: call "
                "SharedStatistics.reduce() after the last backward pass of each update"
            )
        self._update.stated, self._update.told = num_updates, True

    def normalize(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        if not self.training:
            return self.normalize_by_statistics(x, padding)
        if "_is_replica" in self.__dict__:
            raise RuntimeError(
                "torch.nn.DataParallel throws away what its replicas gather, so that running statistics would never "
                "change: use DistributedDataParallel with norms.sharing.SharedStatistics"
            )
        if self.measuring:
            with torch.no_grad():
                self.tally = _plus(self.tally, contribution(True, *self.measure(x, padding)))
        elif operators.tracing():
            # Whether there is an update to absorb shows when the graph runs.
            if not self._update.told:
                operators.begin(self.token, list(self.buffers(recurse=False)))
        else:
            self.begin_forward()
        return self.normalize_in_training(x, padding)

    def begin_forward(self) -> None:
        """Before a training forward: where nobody says when an update ends, the last one has ended now."""
        if not self._update.told and self._has_update() and not inside_backward():
            self.commit()

    def _has_update(self) -> bool:
        return self._update.added_up is not None if self.shared else self._update.pending is not None

    def normalize_in_training(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        """The norm of a training batch, whose backward pass calls :meth:`record`."""
        raise NotImplementedError

    def normalize_by_statistics(self, x: Tensor, padding: Optional[Tensor]) -> Tensor:
        """The norm in evaluation, from committed statistics only."""
        raise NotImplementedError

    def constants(self) -> Tuple[Tensor, ...]:
        """:meth:`constants_of_statistics`, computed once and kept until a statistic has changed.

        Changes by a collective or through ``.data`` are noticed on CPUs only; elsewhere they want a call of ``eval()``.
        """
        kept, buffers = self._update.constants, self._buffers
        if operators.tracing() or kernels.jit_tracing():
            return self.constants_of_statistics()
        if kept is not None:
            for name, before, known in kept[0]:
                now: Any = buffers[name]
                if now is not before or (now._version != known if type(known) is int else not torch.equal(now, known)):
                    break
            else:
                return kept[1]
        with torch.inference_mode(False), torch.no_grad():
            constants = self.constants_of_statistics()
        seen = [(name, buffers[name], _seen(buffers[name])) for name in self.STATISTICS]
        self._update.constants = None if any(known is None for *_, known in seen) else (seen, constants)
        return constants

    def constants_of_statistics(self) -> Tuple[Tensor, ...]:
        """What evaluation computes of the running statistics alone."""
        raise NotImplementedError

    def absorb(self, count: Tensor, sums: Tensor) -> None:
        """Changes the buffers by one update.

        Args:
            count: () number of tokens; where it is 0 nothing may change.
            sums: (K, C) the K sums that were recorded.
        """
        raise NotImplementedError

    def absorb_fused(self, absorb: Callable[..., bool], contribution: Tensor) -> bool:
        """:meth:`absorb` and the counters by a fused implementation (``kernels.native.absorb``), if there is one."""
        return False

    def counters(self) -> List[Tensor]:
        """updates_tracked, updates_skipped, updates_bounded."""
        return [self._buffers[name] for name in self.COUNTERS]  # type: ignore[misc]

    def measure(self, x: Tensor, padding: Optional[Tensor]) -> Tuple[Tensor, ...]:
        """What evaluation needs of a batch: its count () of real tokens and sums (C,) for :meth:`assign`."""
        raise NotImplementedError

    def assign(self, count: Tensor, *sums: Tensor) -> None:
        """Sets the statistics that evaluation uses to those of the tokens in ``sums``, as measured."""
        raise NotImplementedError

    def compare(self, count: Tensor, sums: Tensor, gradients: Optional[Tensor]) -> Dict[str, Tensor]:
        """How one update's batch statistics differ from the running ones of before it (``norms.watching``).

        Args:
            count, sums: as :meth:`absorb` gets them.
            gradients: what was handed to :meth:`record_gradient`, (1 + K, C), the count in the first row; None if
                nothing was.

        Returns:
            name -> () Euclidean norm of a difference or of a gradient statistic, divided by the number of channels.
        """
        raise NotImplementedError

    def record_gradient(self, live: Tensor, count: Tensor, *sums: Tensor) -> None:
        """Adds a backward pass to the gradient statistics of a watched update; they are this worker's own.

        Args:
            live: () bool, False if the upstream gradient was zero everywhere (dummy batches): adds nothing.
            count: () number of real tokens.
            sums: (C,) each, of gradients that are ``get_gradient_scale()`` times those of the loss.
        """
        rows = torch.stack([count.to(sums[0].dtype).expand(self.dim), *(part / get_gradient_scale() for part in sums)])
        self._update.gradients = _plus(self._update.gradients, torch.where(live, rows, torch.zeros_like(rows)))

    def _size(self, vector: Tensor) -> Tensor:
        return torch.linalg.vector_norm(vector) / self.dim

    def record(self, contribution: Tensor) -> None:
        """Adds one backward pass to what is pending.

        Args:
            contribution: (2 + K C,) as :func:`norms.formulas.contribution` makes it of K sums.
        """
        self._update.pending = _plus(self._update.pending, contribution)

    def give_pending(self) -> Tensor:
        """What is pending (dropped, count, sums...), of a length that does not depend on what there is; it is given up.

        For whoever adds it up over the workers and hands the total to :meth:`take_total`.
        """
        self.commit()
        self._update.ever_given = True
        pending, self._update.pending = self._update.pending, None
        if pending is None:
            device = self.updates_tracked.device
            dtype = torch.float32 if device.type == "mps" else torch.float64
            pending = torch.zeros(2 + self.sums_recorded * self.dim, dtype=dtype, device=device)
        return pending

    def take_total(self, total: Callable[[], Tensor]) -> None:
        """Takes what :meth:`give_pending` gave, added up over the workers; it is asked for when it is absorbed."""
        self._update.added_up = total

    def commit(self) -> None:
        """Ends the update that is being gathered: absorbs what is pending, if anything is.

        With several workers, what has been added up over them.
        """
        if self.shared:
            pending = None if self._update.added_up is None else self._update.added_up()
            self._update.added_up = None
            if self._update.pending is not None and not self._update.ever_given:
                self._update.ever_given = True  # says it once
                logger.warning(
                    "SharedStatistics.reduce() was never called, so that running statistics stay as they are"
                )
        else:
            pending, self._update.pending = self._update.pending, None
        if pending is None:
            return
        if self.watched:
            self._compare(pending)
        self._update.constants = None  # a fused implementation changes tensors without their noticing
        fused = kernels.fused(pending)
        if not hasattr(fused, "absorb") or not self.absorb_fused(fused.absorb, pending):
            self._absorb(pending)
        if self._update.stated is None:
            self._update.counted = int(self.updates_tracked)

    def _parts(self, contribution: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """dropped (), count () and sums (K, C), where the norm is."""
        contribution = contribution.to(self.updates_tracked.device)
        return contribution[0], contribution[1], contribution[2:].view(-1, self.dim)

    @torch.no_grad()
    def _absorb(self, contribution: Tensor) -> None:
        dropped, count, sums = self._parts(contribution)
        self.absorb(count, sums)
        self.updates_tracked.add_(count > 0)
        self.updates_skipped.add_(dropped > 0)

    @torch.no_grad()
    def _compare(self, contribution: Tensor) -> None:
        _, count, sums = self._parts(contribution)
        self.seen, self._update.gradients = self.compare(count, sums, self._update.gradients), None

    def discard_pending(self) -> None:
        """Forgets what was gathered since the last commit: the update failed and will be tried again."""
        self._update.pending = self._update.added_up = self._update.gradients = None

    def train(self, mode: bool = True) -> "RunningNorm":
        if not mode:
            self.commit()
        self._update.constants = None
        super().train(mode)
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.commit()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.discard_pending()
        super()._load_from_state_dict(*args, **kwargs)
        for (
            name,
            buffer,
        ) in self._buffers.items():  # `load_state_dict(assign=True)` takes half-precision ones as they are
            if buffer is not None and buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.float()
        # What a trainer said belongs to the state that is gone; fairseq says it again before the next forward.
        self._update.stated = None
        self._update.told = False
        if not self.updates_tracked.is_meta:
            self._update.counted = int(self.updates_tracked)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "RunningNorm":
        before = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, buffer in self._buffers.items():
            kept = before[name]
            if buffer is not None and kept is not None and buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.float() if kept.is_meta else kept.to(buffer.device)
        return self

    def __getstate__(self) -> Dict[str, Any]:
        # A copy starts with nothing pending, and alone: backward passes through the original are not the copy's.
        update = _Update(self._update.stated, self._update.told, self._update.counted)
        nothing: Dict[str, Any] = {"measuring": False, "tally": None, "watched": False, "seen": {}}
        nothing.update(recorder=None, token=None)
        return {**self.__dict__, **nothing, "_update": update, "shared": False, "workers": None}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        self._introduce()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}, affine={self.affine}, sync={self.sync}"
