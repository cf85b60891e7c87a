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
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.readers import Reader
from mlx_moeflux.experts.uploads import Uploads

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
        self.count = count
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


class Job(NamedTuple):
    """One read: which target it belongs to, and what a thread does; returns bytes."""

    target: int
    read: Callable[[], int]


class Fetch:
    """Reads the blocks of one layer into their slots.

    at_once: Reads that the threads can make at once: where there are fewer blocks, and the reader
    can, blocks are cut. uploads: Where slots are not to be written by the host.
    """

    def __init__(
        self,
        reader: Reader,
        layer: int,
        targets: Sequence[Target],
        *,
        at_once: int = 1,
        uploads: Uploads | None = None,
    ):
        self._targets = targets
        self._reader, self._layer, self._uploads = reader, layer, uploads
        stored = getattr(reader, "stored_bytes", lambda layer: reader.layout(layer).nbytes)
        self._expected = stored(layer)
        self._abandoned = False
        pieces = -(-at_once // max(1, len(targets)))
        self._jobs = [job for i in range(len(targets)) for job in self._jobs_of(i, pieces)]
        # Indices of jobs. A thread appends to `begun`, then looks at `abandoned`; the caller
        # sets `abandoned`, then looks at `begun`: one of them sees the other.
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._results: dict[int, tuple[int, float] | BaseException] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()

    def start(self, threads: ReadThreads) -> None:
        """Hand every read to the threads."""
        for i in range(len(self._jobs)):
            threads.submit(lambda i=i: self._run(i))

    def wait(self) -> BaseException | None:
        """Wait for all reads; the error of the first that failed, if any did."""
        self._wait_for(self._jobs)
        results = (self._results[i] for i in range(len(self._jobs)))
        return next((r for r in results if isinstance(r, BaseException)), None)

    def abandon(self) -> None:
        """Let no further read begin."""
        self._abandoned = True

    def drain(self) -> None:
        """Let no further read begin and wait until none is under way.

        An interrupt meanwhile is raised only after that.
        """
        interrupt = None
        while True:
            try:
                self.abandon()
                self._wait_for(self._begun)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def arrivals(self) -> list[Arrival]:
        """What was read completely, in the order of the targets; seconds of parts are added."""
        sums = [[0, 0.0] for _ in self._targets]
        for i, job in enumerate(self._jobs):
            result = self._results.get(i)
            if not isinstance(result, tuple):
                sums[job.target] = [-self._expected, 0.0]
                continue
            sums[job.target][0] += result[0]
            sums[job.target][1] += result[1]
        return [
            Arrival(target.expert, target.slot, nbytes, seconds)
            for target, (nbytes, seconds) in zip(self._targets, sums, strict=True)
            if nbytes == self._expected
        ]

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
                self._results[i] = self._read(self._jobs[i])
            if carried.error is not None:
                self._results[i] = carried.error
        self._ended.append(i)
        self._wake.put(None)

    def _read(self, job: Job) -> tuple[int, float]:
        start, expert = perf_counter(), self._targets[job.target].expert
        try:
            nbytes = job.read()
        except OSError as cause:
            raise ExpertFileError(
                f"Reading expert {expert} of layer {self._layer} failed: {cause}."
            ) from cause
        return nbytes, perf_counter() - start

    def _jobs_of(self, i: int, pieces: int) -> list[Job]:
        target, reader, uploads = self._targets[i], self._reader, self._uploads
        cut = getattr(reader, "pieces", None)
        if cut is not None and (pieces > 1 or uploads is not None):
            parts = cut(self._layer, target.expert, target.views, pieces)
            if parts and uploads is not None:
                return [Job(i, partial(_staged_part, reader, uploads, *part)) for part in parts]
            if len(parts) > 1:
                return [Job(i, partial(reader.read_run, *part)) for part in parts]
        return [Job(i, lambda: self._whole(target))]

    def _whole(self, target: Target) -> int:
        """Read a block in one go."""
        views, uploads = target.views, self._uploads
        if uploads is not None:
            views = uploads.staging().carve([view.nbytes for view in views])
        nbytes = self._reader.read(self._layer, target.expert, views)
        if nbytes != self._expected:
            raise ExpertFileError(
                f"The reader '{self._reader.name}' gave {nbytes} bytes of expert {target.expert} "
                f"of layer {self._layer}, which has {self._expected}."
            )
        if uploads is not None:
            uploads.staging().send(target.views)
        return nbytes


def _staged_part(reader: Any, uploads: Uploads, run: Any, views: Sequence[memoryview]) -> int:
    staging = uploads.staging()
    staging.send(views, reader.read_staged(run, staging.view))
    return run.nbytes


class _Carried:
    """Catches whatever its block raises, for another thread to raise."""

    error: BaseException | None = None

    def __enter__(self) -> _Carried:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True
