"""Threads that work on batches of reads. A caller that hands them one takes no lock.

An interrupt (Ctrl-C) is raised in the calling thread between any two instructions, also inside
the locks of `threading` and `concurrent.futures`, which then stay locked. So threads and caller
share queues and lists whose single operations cannot be interrupted.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import Protocol


class Batch(Protocol):
    """Work that several threads share."""

    def run(self, waiting: SimpleQueue[Batch | None], threads: int) -> None:
        """Work until nothing is left; put the batch into `waiting` to wake another thread of
        `threads`. It raises nothing."""
        ...


class ReadThreads:
    """A fixed number of threads. They end with :meth:`close` or with this object."""

    def __init__(self, count: int):
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._busy: list[None] = []  # an entry for each thread that works on a batch
        shared = self._batches, self._busy, count
        self._threads = [
            threading.Thread(target=_work, args=shared, name=f"moeflux-read-{i}", daemon=True)
            for i in range(count)
        ]
        self.count = count
        self._end = weakref.finalize(self, _end, self._batches, count)
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch) -> None:
        """Let one idle thread begin with `batch`; it wakes the next one."""
        self._batches.put(batch)

    @property
    def idle(self) -> int:
        """Number of threads that have no work."""
        return self.count - len(self._busy) if self._batches.empty() else 0

    def close(self) -> None:
        """Wait for the reads and end the threads."""
        self._end()
        for thread in self._threads:
            thread.join()


def _work(batches: SimpleQueue[Batch | None], busy: list[None], count: int) -> None:
    while (batch := batches.get()) is not None:
        busy.append(None)
        batch.run(batches, count)
        busy.pop()
        del batch  # or the last batch's bank would live until the next one comes


def _end(batches: SimpleQueue[Batch | None], count: int) -> None:
    for _ in range(count):
        batches.put(None)


class Carried:
    """Catches every exception of its block; another thread raises it."""

    error: BaseException | None = None

    def __enter__(self) -> Carried:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True
