"""Text that need not fit into memory: lines in chunks, worked on by several processes, written in their order."""

import signal
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Callable, Deque, Iterable, Iterator, List, Tuple, TypeVar

from powernorm_fairseq.processes import UserError, end_with_parent

A = TypeVar("A")
B = TypeVar("B")

# Lines in a chunk: long enough that handing it to another process costs nothing beside the work on it.
CHUNK = 2000


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file, one at a time; only a line feed ends one. Bytes that are no UTF-8 become U+FFFD."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield line[:-1] if line.endswith("\n") else line


def count_lines(path: Path) -> int:
    """How many lines ``lines_of`` gives."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def in_chunks(items: Iterable[A], size: int = CHUNK) -> Iterator[List[A]]:
    """Lists of ``size`` items; the last one may be shorter."""
    iterator = iter(items)
    while True:
        chunk = list(islice(iterator, size))
        if not chunk:
            return
        yield chunk


def _start_worker() -> None:
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def in_order(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[Tuple[A, B]]:
    """``(item, function(item))`` for each item, in order, by ``workers`` processes (1: by this one).

    ``items`` is read only a few items ahead of what has been taken, so that neither it nor the results pile up.

    Raises:
        UserError: a worker was killed.
    """
    if workers == 1:
        for item in items:
            yield item, function(item)
        return
    waiting: Deque[Tuple[A, Future[B]]] = deque()
    with ProcessPoolExecutor(workers, initializer=_start_worker) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(function, item)))
                if len(waiting) >= 3 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise UserError("a worker process was killed, perhaps for want of memory; try fewer --workers") from error
        finally:
            for _, future in waiting:
                future.cancel()


class Progress:
    """Lines that say how far something is, how fast it goes and how long it still takes, every ``every`` seconds.

    Args:
        total: how many there are; 0: nobody knows.
        written: a number of them as people read it.
    """

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None] = partial(print, flush=True),
        every: float = 10.0,
        written: Callable[[float], str] = "{:,.0f}".format,
    ) -> None:
        self.what, self.total, self.say, self.every, self.written = what, total, say, every, written
        self.done = 0
        self.began = self.said = time.monotonic()

    def add(self, count: int) -> None:
        """``count`` more are done."""
        self.done += count
        now = time.monotonic()
        if now - self.said >= self.every:
            self.said = now
            rate = self.done / (now - self.began)
            words = f"{self.what}: {self.written(self.done)}"
            if self.total:
                words += f" of {self.written(self.total)}"
            words += f", {self.written(rate)} a second"
            if self.total and rate:
                words += f", {duration(max(0.0, (self.total - self.done) / rate))} left"
            self.say(words)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
