"""Times and memory of jobs that are compared with each other."""

import random
import time
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence

import torch

# A single timing lasts at least this long, so that the clock and the call do not count.
SHORTEST = 4e-3
# Jobs slower than this many times the baseline run in each fifth round only.
SLOW = 10.0
# Seconds from which on a call is timed without another in front of it.
LONG = 0.1


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between the values."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def spread(values: Sequence[float]) -> Dict[str, float]:
    """Median and quartiles, with four digits."""
    return {name: rounded(quantile(values, q)) for name, q in (("median", 0.5), ("low", 0.25), ("high", 0.75))}


def rounded(value: float) -> float:
    """Four digits: more than any measurement here has."""
    return float(f"{value:.4g}")


@dataclass
class Job:
    """Something to be timed.

    Attributes:
        run: does it once.
        context: entered around timings, for instance the choice of an implementation.
        about: what goes into its record.
        times: seconds by round.
    """

    run: Callable[[], Any]
    context: Optional[Callable[[], ContextManager[Any]]] = None
    about: Dict[str, Any] = field(default_factory=dict)
    times: Dict[int, float] = field(default_factory=dict)


class Clock:
    """Seconds of one call of a job: the processor's clock, on a GPU its events."""

    def __init__(self, device: str = "cpu", shortest: float = SHORTEST) -> None:
        self.cuda = device.startswith("cuda")
        self.shortest = shortest

    def __call__(self, job: Job, calls: int) -> float:
        """Seconds of a call, mean of ``calls`` in a row."""
        if job.context is not None:
            with job.context():
                return self._timed(job.run, calls)
        return self._timed(job.run, calls)

    def _timed(self, run: Callable[[], Any], calls: int) -> float:
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / calls
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls


def alternate(jobs: Dict[str, Job], baseline: str, rounds: int, seconds: float, clock: Clock) -> None:
    """Times the jobs in rounds, each once in a round and in another order each time, into ``Job.times``.

    Machines get slower and faster while one measures. Jobs of one round share that, so they are compared by round.
    A call that is not timed precedes the timed ones, so that a job does not pay for the caches that the last one left;
    long jobs (``LONG``) fill them by themselves. A job that is much slower than the baseline runs in each fifth round.

    Args:
        rounds: at least 3 are made, whatever ``seconds`` says.
        seconds: no round begins after them.
    """
    calls, takes = {}, {}
    for name, job in jobs.items():
        took = clock(job, 1)  # allocates and compiles
        if took < 10 * LONG:
            took = max(clock(job, 1), 1e-9)
        calls[name] = max(1, min(1000, round(clock.shortest / took)))
        takes[name] = took
    reference = takes[baseline]
    slow = {name for name, took in takes.items() if took > SLOW * reference}
    order, shuffle = list(jobs), random.Random(1)
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - begin > seconds:
            break
        if takes[baseline] > LONG:
            print(f"  round {number + 1}, {time.perf_counter() - begin:.0f} s", flush=True)
        shuffle.shuffle(order)
        for name in order:
            if name in slow:
                if number % 5 == 0:
                    jobs[name].times[number] = clock(jobs[name], 1)
                continue
            if takes[name] < LONG:
                clock(jobs[name], 1)
            jobs[name].times[number] = clock(jobs[name], calls[name])


def ratios(job: Job, other: Job) -> List[float]:
    """job / other in each round in which both ran."""
    return [seconds / other.times[number] for number, seconds in job.times.items() if number in other.times]


def bandwidth(device: str = "cpu", size: int = 1 << 27, repeats: int = 7) -> float:
    """Bytes read and written per second by a copy that no cache holds, with the threads that torch has now.

    Args:
        size: bytes of the array that is copied.
    """
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    clock, job = Clock(device), Job(lambda: target.copy_(source))
    clock(job, 2)
    return 2 * size / quantile([clock(job, 1) for _ in range(repeats)], 0.5)


def roofline_share(passes: float, size: int, seconds: float, bytes_per_second: float) -> float:
    """The time that reading or writing ``size`` bytes ``passes`` times takes at least, as a share of ``seconds``.

    Above 1 where the data stay in a cache that is faster than the memory.
    """
    return passes * size / bytes_per_second / seconds


def peak_memory(job: Job, device: str = "cpu") -> int:
    """Most bytes that tensors made within one call of the job held at one time.

    On a CPU each allocation and release of torch's allocator counts, as torch's profiler sees them (autograd's and
    those of the C++ kernels too, but not the kernels' own small sums); on a GPU the allocator says it.
    """
    clock = Clock(device)
    clock(job, 1)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        clock(job, 1)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        clock(job, 1)
    events: Any = profile.profiler
    changes = [
        (event.start_ns() if hasattr(event, "start_ns") else event.start_us(), event.nbytes())
        for event in events.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = peak = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        now += change
        peak = max(peak, now)
    return peak
