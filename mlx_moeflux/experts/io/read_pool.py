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
from time import perf_counter, sleep
from typing import NamedTuple

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.byte_ranges import Piece
from mlx_moeflux.experts.io.cuda_upload import Uploads
from mlx_moeflux.experts.io.readers import Reader

# An interrupt may swallow a wake-up; the caller looks again after this long.
_LOOK_AGAIN_SECONDS = 0.05
# How often the caller makes way for threads that may be busy with something else.
_YIELDS = 50


class ReadPool:
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

    @property
    def free(self) -> bool:
        """Nothing that was submitted waits for a thread."""
        return self._jobs.empty()

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
    """One block to read: which expert, into which slot, and the bytes of that slot's components,
    or where they begin, if they are not to be written by the host."""

    expert: int
    slot: int
    views: Sequence[memoryview] = ()
    addresses: Sequence[int] = ()


class Arrival(NamedTuple):
    """One block that was read completely."""

    expert: int
    slot: int
    nbytes: int
    seconds: float


class Job(NamedTuple):
    """One read: which target it belongs to, and which piece of it, None for all."""

    target: int
    piece: Piece | None


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
        self.targets = targets
        self._reader, self._layer, self._uploads = reader, layer, uploads
        stored = getattr(reader, "stored_bytes", lambda layer: reader.layout(layer).nbytes)
        self._expected = stored(layer)
        self._abandoned = False
        pieces = self._pieces(-(-at_once // max(1, len(targets))))
        self._jobs = [Job(i, piece) for i in range(len(targets)) for piece in pieces]
        # Indices of jobs. A thread appends to `begun`, then looks at `abandoned`; the caller
        # sets `abandoned`, then looks at `begun`: one of them sees the other.
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._results: dict[int, tuple[int, float] | BaseException] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()

    def start(self, threads: ReadPool, *, urgent: bool = False) -> None:
        """Hand every read to the threads.

        urgent: Wait until those that are free have begun: they cannot before the caller gives up
        the interpreter, which one that goes on to build a graph does not do soon.
        """
        free = urgent and threads.free
        for i in range(len(self._jobs)):
            threads.submit(lambda i=i: self._run(i))
        for _ in range(_YIELDS if free else 0):
            if len(self._begun) >= min(threads.count, len(self._jobs)):
                break
            sleep(0)

    def wait(self) -> BaseException | None:
        """Wait for all reads; the error of the first that failed, if any did."""
        self._wait_for(self._jobs)
        if self._uploads is not None:
            self._uploads.finish()
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
                if self._uploads is not None:
                    self._uploads.finish()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def arrivals(self) -> list[Arrival]:
        """What was read completely, in the order of the targets; seconds of parts are added."""
        sums = [[0, 0.0] for _ in self.targets]
        for i, job in enumerate(self._jobs):
            result = self._results.get(i)
            if not isinstance(result, tuple):
                sums[job.target] = [-self._expected, 0.0]
                continue
            sums[job.target][0] += result[0]
            sums[job.target][1] += result[1]
        return [
            Arrival(target.expert, target.slot, nbytes, seconds)
            for target, (nbytes, seconds) in zip(self.targets, sums, strict=True)
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
        # Only the last one wakes the caller, and those that it may be draining.
        if len(self._ended) >= len(self._jobs) or self._abandoned:
            self._wake.put(None)

    def _read(self, job: Job) -> tuple[int, float]:
        start, target = perf_counter(), self.targets[job.target]
        try:
            nbytes = self._whole(target) if job.piece is None else self._part(target, job.piece)
        except OSError as cause:
            raise ExpertFileError(
                f"Reading expert {target.expert} of layer {self._layer} failed: {cause}."
            ) from cause
        return nbytes, perf_counter() - start

    def _pieces(self, count: int) -> Sequence[Piece | None]:
        """Into what every block is cut; once None: it is read in one go."""
        cut, staged = getattr(self._reader, "pieces", None), self._uploads is not None
        pieces = cut(self._layer, count) if cut is not None and (count > 1 or staged) else ()
        return pieces if len(pieces) > 1 or (pieces and staged) else (None,)

    def _part(self, target: Target, piece: Piece) -> int:
        """Read a piece of a block."""
        reader, uploads = self._reader, self._uploads
        run = reader.piece(self._layer, target.expert, piece)
        if uploads is None:
            return reader.read_run(run, [target.views[c][a:b] for c, a, b in piece.parts])
        staging = uploads.staging()
        start = reader.read_staged(run, staging.take())
        staging.send([(target.addresses[c] + a, b - a) for c, a, b in piece.parts], start)
        return run.nbytes

    def _whole(self, target: Target) -> int:
        """Read a block in one go."""
        views, uploads = target.views, self._uploads
        if uploads is not None:
            sizes = [c.nbytes for c in self._reader.layout(self._layer).components]
            views = uploads.staging().carve(sizes)
        nbytes = self._reader.read(self._layer, target.expert, views)
        if nbytes != self._expected:
            raise ExpertFileError(
                f"The reader '{self._reader.name}' gave {nbytes} bytes of expert {target.expert} "
                f"of layer {self._layer}, which has {self._expected}."
            )
        if uploads is not None:
            uploads.staging().send(list(zip(target.addresses, sizes, strict=True)))
        return nbytes


class _Carried:
    """Catches whatever its block raises, for another thread to raise."""

    error: BaseException | None = None

    def __enter__(self) -> _Carried:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True
