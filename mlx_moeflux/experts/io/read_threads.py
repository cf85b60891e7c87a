"""Threads that work on batches of reads. A caller that hands them one takes no lock.

An interrupt (Ctrl-C) is raised in the calling thread between any two instructions, also inside
the locks of `threading` and `concurrent.futures`, which then stay locked. So threads and caller
share queues and lists whose single operations cannot be interrupted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol


class Batch(Protocol):
    """Work that several threads share."""

    def run(self, wake: Callable[[], None], threads: int) -> None:
        """Work until nothing is left to take; call `wake` to let another one of `threads` help. It
        raises nothing."""
        ...


class ReadThreads:
    """A fixed number of threads, which take the parts of the oldest batch first, and of urgent ones
    before others. They end with :meth:`close` or with this object."""

    def __init__(self, count: int):
        # Batches that may have something left to take, urgent ones and others, the oldest first.
        self._batches: tuple[list[Batch], list[Batch]] = [], []
        # An entry wakes a thread; True ends it.
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._busy: list[None] = []  # an entry for each thread that works
        shared = self._batches, self._wake, self._busy, count
        self._threads = [
            threading.Thread(target=_work, args=shared, name=f"moeflux-read-{i}", daemon=True)
            for i in range(count)
        ]
        self.count = count
        self._end = weakref.finalize(self, _end, self._wake, count)
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch, *, urgent: bool = False) -> None:
        """Let one idle thread begin with `batch`; it wakes the next one."""
        self._batches[not urgent].append(batch)
        self._wake.put(False)

    @property
    def idle(self) -> int:
        """Number of threads that have no work."""
        return self.count - len(self._busy)

    def close(self) -> None:
        """Wait for the reads and end the threads."""
        self._end()
        for thread in self._threads:
            thread.join()


def _work(
    batches: tuple[list[Batch], list[Batch]],
    wake: SimpleQueue[bool],
    busy: list[None],
    count: int,
) -> None:
    def wake_another() -> None:
        wake.put(False)

    ended = False
    while not ended:
        ended = wake.get()
        busy.append(None)
        # A batch stays no longer than it has parts: it keeps its bank alive.
        urgent, others = batches
        while oldest := urgent[:1] or others[:1]:
            oldest[0].run(wake_another, count)
            for each in batches:
                with suppress(ValueError):  # another thread was first
                    each.remove(oldest[0])
        busy.pop()


def _end(wake: SimpleQueue[bool], count: int) -> None:
    for _ in range(count):
        wake.put(True)


class Carried:
    """Catches every exception of its block; another thread raises it."""

    error: BaseException | None = None

    def __enter__(self) -> Carried:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True
