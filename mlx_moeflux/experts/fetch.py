"""Reads on threads, which can be waited for, and abandoned, at any moment.

An interrupt (Ctrl-C) is raised in the calling thread between any two instructions, also inside
the locks of `threading` and `concurrent.futures`, which then stay locked for ever. So nothing
here takes a lock in the calling thread: threads and caller share queues, lists and flags whose
single operations cannot be interrupted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import NamedTuple

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.readers import Reader

# An interrupt may swallow a wake-up; the caller looks again after this long.
_LOOK_AGAIN_SECONDS = 0.05


class ReadThreads:
    """A fixed number of threads that run jobs. They end with :meth:`close` or with this object."""

    def __init__(self, count: int):
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._jobs,), name=f"moeflux-read-{i}", daemon=True
            )
            for i in range(count)
        ]
        self._end = weakref.finalize(self, _end, self._jobs, count)
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which does not raise, on a thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """Wait for the jobs and end the threads."""
        self._end()
        for thread in self._threads:
            thread.join()


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or the last job's bank would live until the next one comes


def _end(jobs: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


class Target(NamedTuple):
    """One block to read: which expert, into which slot, and that slot's bytes."""

    expert: int
    slot: int
    views: Sequence[memoryview]


class Arrival(NamedTuple):
    """One block that was read completely."""

    expert: int
    slot: int
    nbytes: int
    seconds: float


class Fetch:
    """Reads the blocks of one layer into their slots."""

    def __init__(self, reader: Reader, layer: int, targets: Sequence[Target]):
        self._targets = targets
        self._reader, self._layer = reader, layer
        stored = getattr(reader, "stored_bytes", lambda layer: reader.layout(layer).nbytes)
        self._expected = stored(layer)
        self._abandoned = False
        # Indices of targets. A thread appends to `begun`, then looks at `abandoned`; the caller
        # sets `abandoned`, then looks at `begun`: one of them sees the other.
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._results: dict[int, Arrival | BaseException] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()

    def start(self, threads: ReadThreads) -> None:
        """Hand every read to the threads."""
        for i in range(len(self._targets)):
            threads.submit(lambda i=i: self._run(i))

    def wait(self) -> BaseException | None:
        """Wait for all reads; the error of the first target that failed, if any did."""
        self._wait_for(self._targets)
        results = (self._results[i] for i in range(len(self._targets)))
        return next((r for r in results if isinstance(r, BaseException)), None)

    def drain(self) -> None:
        """Let no further read begin and wait until none is under way.

        An interrupt meanwhile is raised only after that.
        """
        interrupt = None
        while True:
            try:
                self._abandoned = True
                self._wait_for(self._begun)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def arrivals(self) -> list[Arrival]:
        """What was read completely, in the order of the targets."""
        results = (self._results.get(i) for i in range(len(self._targets)))
        return [result for result in results if isinstance(result, Arrival)]

    def _wait_for(self, expected: Sequence[object]) -> None:
        """Wait until as many have ended as there are in `expected`, which may still grow."""
        while len(self._ended) < len(expected):
            try:
                self._wake.get(timeout=_LOOK_AGAIN_SECONDS)
            except Empty:
                continue

    def _run(self, i: int) -> None:
        """One read, in a thread."""
        self._begun.append(i)
        if not self._abandoned:
            with _Carried() as carried:
                self._results[i] = self._read(self._targets[i])
            if carried.error is not None:
                self._results[i] = carried.error
        self._ended.append(i)
        self._wake.put(None)

    def _read(self, target: Target) -> Arrival:
        start = perf_counter()
        try:
            nbytes = self._reader.read(self._layer, target.expert, target.views)
        except OSError as cause:
            raise ExpertFileError(
                f"Reading expert {target.expert} of layer {self._layer} failed: {cause}."
            ) from cause
        if nbytes != self._expected:
            raise ExpertFileError(
                f"The reader '{self._reader.name}' gave {nbytes} bytes of expert {target.expert} "
                f"of layer {self._layer}, which has {self._expected}."
            )
        return Arrival(target.expert, target.slot, nbytes, perf_counter() - start)


class _Carried:
    """Catches whatever its block raises, for another thread to raise."""

    error: BaseException | None = None

    def __enter__(self) -> _Carried:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True
