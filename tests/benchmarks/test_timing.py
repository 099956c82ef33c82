"""The statistics, the roofline and the memory of the benchmarks."""

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Job


class Turns:
    """A clock for jobs that say how long they take."""

    def __init__(self):
        self.calls, self.shortest = [], 1.0

    def __call__(self, job, calls):
        self.calls.append((job.about["name"], calls))
        return job.run()


def jobs_of(**seconds):
    return {name: Job(lambda time=time: time, about={"name": name}) for name, time in seconds.items()}


def test_median_and_quartiles():
    assert timing.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert timing.spread([1.0, 2.0]) == {"median": 1.5, "low": 1.25, "high": 1.75}
    assert timing.rounded(0.0123456) == 0.01235


def test_jobs_alternate_in_changing_order():
    clock, jobs = Turns(), jobs_of(base=2.0, other=1.0)
    timing.alternate(jobs, "base", 8, 60, clock)
    timed = [name for name, _ in clock.calls][2:]
    rounds = [tuple(timed[at : at + 2]) for at in range(0, len(timed), 2)]
    assert len(rounds) == 8 and set(rounds) == {("base", "other"), ("other", "base")}
    assert timing.ratios(jobs["other"], jobs["base"]) == [0.5] * 8


def test_short_jobs_are_repeated_and_warmed_and_slow_ones_take_fewer_turns():
    clock, jobs = Turns(), jobs_of(base=1e-3, slow=20e-3)
    clock.shortest = 4e-3
    timing.alternate(jobs, "base", 10, 60, clock)
    assert clock.calls.count(("base", 4)) == 10 and clock.calls.count(("base", 1)) == 12
    assert sorted(jobs["slow"].times) == [0, 5] and timing.ratios(jobs["slow"], jobs["base"]) == [20.0] * 2


def test_a_drift_of_the_machine_cancels():
    jobs = jobs_of(base=2.0, other=3.0)
    for number in range(6):  # slower and slower
        for job in jobs.values():
            job.times[number] = job.run() * (1 + number)
    assert timing.ratios(jobs["other"], jobs["base"]) == [1.5] * 6


def test_roofline():
    # Five passes over 8 MB at 10 GB/s take 4 ms at least.
    assert timing.roofline_share(5, 8_000_000, 5e-3, 10e9) == pytest.approx(0.8)
    assert timing.bandwidth(size=1 << 20, repeats=3) > 1e7


def test_peak_memory_counts_what_is_alive_together():
    x = torch.zeros(1 << 16)

    def both():
        y = x + 1
        z = y + 1  # two at once
        del y
        return z + 1  # two again

    assert timing.peak_memory(Job(both)) == pytest.approx(2 * 4 << 16, rel=1e-3)

    weight = torch.zeros(1 << 16, requires_grad=True)

    def backward():
        weight.grad = None
        y = weight * 2
        y.backward(x)

    # The result is alive until the gradient is there.
    assert timing.peak_memory(Job(backward)) == pytest.approx(2 * 4 << 16, rel=1e-3)
