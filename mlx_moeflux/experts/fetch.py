"""A batch of reads on the thread pool, which can be waited for, and stopped, at any moment."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from time import perf_counter
from typing import NamedTuple

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.readers import Reader


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
    """Reads the blocks of one layer into their slots.

    A thread counts itself in before it touches a slot and out after it, so that :meth:`drain`
    can promise that no thread writes any more, whatever became of the caller meanwhile.
    """

    def __init__(self, reader: Reader, layer: int, targets: Sequence[Target]):
        self.targets = targets
        self._reader, self._layer = reader, layer
        self._expected = reader.layout(layer).nbytes
        self._condition = threading.Condition()
        self._active = 0
        self._cancelled = False
        self._arrived: dict[int, Arrival] = {}
        self._futures: list[Future[None]] = []

    def start(self, pool: Executor) -> None:
        """Hand every read to the pool."""
        for target in self.targets:
            self._futures.append(pool.submit(self._run, target))

    def wait(self) -> BaseException | None:
        """Wait for all reads; the error of the first target that failed, if any did."""
        errors = [future.exception() for future in self._futures]
        return next(filter(None, errors), None)

    def drain(self) -> None:
        """Let no further read begin and wait until none is under way.

        An interrupt meanwhile is raised only after that.
        """
        interrupt = None
        while True:
            try:
                with self._condition:
                    self._cancelled = True
                    self._condition.wait_for(lambda: not self._active)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def arrivals(self) -> list[Arrival]:
        """What was read completely, in the order of the targets."""
        return [self._arrived[t.slot] for t in self.targets if t.slot in self._arrived]

    def _run(self, target: Target) -> None:
        with self._condition:
            if self._cancelled:
                return
            self._active += 1
        try:
            self._arrived[target.slot] = self._read(target)
        finally:
            with self._condition:
                self._active -= 1
                self._condition.notify_all()

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
