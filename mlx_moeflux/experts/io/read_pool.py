"""Read in threads of Python, for readers of any kind: the oracle of :mod:`.native_pool`, with which
it shares its interface.

An interrupt (Ctrl-C) is raised in the calling thread between any two instructions, also inside
the locks of `threading` and `concurrent.futures`, which then stay locked. So threads and caller
share queues and lists whose single operations cannot be interrupted, and the caller takes no lock.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import NamedTuple, Protocol

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.byte_ranges import Piece
from mlx_moeflux.experts.io.file_readers import FileReader
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.readers import Reader, fetched_bytes
from mlx_moeflux.kernels.runtime import device

# An interrupt may swallow a wake-up; the caller looks again after this long.
_LOOK_AGAIN_SECONDS = 0.05
# Waking a thread takes longer than reading so few bytes.
SMALL_BYTES = 64 << 10


class SlotMemory(Protocol):
    """The memory of a layer's slots: for each component the bytes of all slots, or their address,
    and the bytes of one slot."""

    @property
    def views(self) -> list[tuple[memoryview, int]]: ...

    @property
    def addresses(self) -> list[tuple[int, int]]: ...


class HostSlots:
    """Slots for blocks of a layout in memory of their own."""

    def __init__(self, layout: BlockLayout, count: int):
        sizes = [component.nbytes for component in layout.components]
        self.views = [(memoryview(bytearray(count * nbytes)), nbytes) for nbytes in sizes]
        self.addresses = [(device.address_of(view), nbytes) for view, nbytes in self.views]


def complete(action: Callable[[], object]) -> None:
    """Call `action`, which may be repeated, until no interrupt comes meanwhile; the last one is
    raised after that."""
    interrupt = None
    while True:
        try:
            action()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class Arrival(NamedTuple):
    """One block that was read completely."""

    expert: int
    slot: int
    nbytes: int
    seconds: float


class BlockFetch(ABC):
    """A batch of reads: blocks of one layer into their slots. One thread at a time uses it.

    blocks: Experts and their slots. in_caller: True if the caller reads, in :meth:`start`.
    """

    blocks: Sequence[tuple[int, int]]
    in_caller: bool

    @abstractmethod
    def start(self, *, urgent: bool = False) -> None:
        """Begin all reads. urgent: The caller is about to wait for them; they come before those of
        other batches."""

    @abstractmethod
    def wait(self) -> BaseException | None:
        """Wait for all reads; return the error of the first that failed, if any did."""

    @abstractmethod
    def abandon(self) -> None:
        """Let no further read begin."""

    def drain(self) -> None:
        """Let no further read begin and wait until none is under way, in spite of interrupts, of
        which one is raised after that."""
        complete(self._drain)

    @abstractmethod
    def _drain(self) -> None: ...

    @abstractmethod
    def arrivals(self) -> list[Arrival]:
        """Return the blocks that were read completely, in the order of `blocks`. Seconds of pieces
        add up."""

    @abstractmethod
    def elapsed(self) -> float:
        """Return the seconds from :meth:`start` to the latest end of a read; 0 or less before the
        first."""


class BlockPool(Protocol):
    """Threads that read blocks of experts."""

    def fetch(self, layer: int, slots: SlotMemory, blocks: Iterable[tuple[int, int]]) -> BlockFetch:
        """Return a batch of reads, not begun: for each block its expert and its slot."""
        ...

    def close(self) -> None:
        """Wait for the reads and end the threads."""
        ...


class ReadThreads:
    """A fixed number of threads, which take the reads of the oldest batch first, and of urgent ones
    before others. They end with :meth:`close` or with this object."""

    begin_seconds = 0.001
    """An urgent batch waits so long for idle threads to begin."""

    def __init__(self, count: int):
        self.count = count
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
        """See :meth:`BlockPool.close`."""
        self._end()
        for thread in self._threads:
            thread.join()


def _work(
    batches: tuple[list[Batch], list[Batch]],
    wake: SimpleQueue[bool],
    busy: list[None],
    count: int,
) -> None:
    ended, wake_another = False, partial(wake.put, False)
    while not ended:
        ended = wake.get()
        busy.append(None)
        # A batch stays no longer than it has parts: it keeps its bank alive.
        urgent, others = batches
        while oldest := urgent[:1] or others[:1]:
            oldest[0].run(wake_another)
            for each in batches:
                with suppress(ValueError):  # another thread was first
                    each.remove(oldest[0])
        busy.pop()


def _end(wake: SimpleQueue[bool], count: int) -> None:
    for _ in range(count):
        wake.put(True)


class Batch(BlockFetch):
    """Reads that the threads of a pool share, or that the caller makes.

    owners: For each read the index of its block. nbytes: Of each block. in_caller: False once
    threads may be reading.
    """

    uploads: device.Uploads | None = None

    def __init__(
        self,
        threads: ReadThreads,
        blocks: Sequence[tuple[int, int]],
        owners: Sequence[int],
        nbytes: int,
    ):
        self.blocks, self.in_caller = blocks, True
        self._threads, self._owners, self._nbytes = threads, owners, nbytes
        self._abandoned = False
        # Threads and caller share this iterator: each read is taken once.
        self._left = iter(range(len(owners)))
        # Indices of reads. A thread appends to `begun`, then looks at `abandoned`; the caller
        # sets `abandoned`, then looks at `begun`: one of them sees the other.
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._results: dict[int, tuple[int, float] | BaseException] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._awaited = 0
        self._all_begun: SimpleQueue[None] = SimpleQueue()
        self._started = self._last_end = 0.0

    @abstractmethod
    def _read(self, i: int) -> int:
        """Make read `i` and return its bytes."""

    def start(self, *, urgent: bool = False) -> None:
        """Begin all reads: on the threads, or in the caller if blocks are small.

        urgent: Wait until the idle threads have begun. They cannot before the caller releases the
        interpreter lock, which a caller that goes on to build a graph does not do soon.
        """
        self._started = perf_counter()
        if urgent and self._nbytes <= SMALL_BYTES and self.uploads is None:
            for i in self._left:
                self._run_one(i)
            return
        self._awaited = min(self._threads.idle, len(self._owners)) if urgent else 0
        self.in_caller = False
        self._threads.submit(self, urgent=urgent)
        if self._awaited:
            with suppress(Empty):
                self._all_begun.get(timeout=self._threads.begin_seconds)

    def run(self, wake: Callable[[], None]) -> None:
        """Take reads until none is left; each of the pool's threads calls this. wake: Lets another
        one help."""
        for i in self._left:
            if i + 1 < min(self._threads.count, len(self._owners)):
                wake()
            self._begun.append(i)
            if 0 < self._awaited <= len(self._begun):
                self._all_begun.put(None)
            if not self._abandoned:
                self._run_one(i)
            self._ended.append(i)
            # Only the last one wakes the caller, and those that it may be draining.
            if self._abandoned or len(self._ended) >= len(self._owners):
                self._wake.put(None)

    def wait(self) -> BaseException | None:
        """See :meth:`BlockFetch.wait`."""
        self._wait_for(self._owners)
        results = (self._results.get(i) for i in range(len(self._owners)))
        return next((r for r in results if isinstance(r, BaseException)), None)

    def abandon(self) -> None:
        """See :meth:`BlockFetch.abandon`."""
        self._abandoned = True

    def _drain(self) -> None:
        self.abandon()
        self._wait_for(self._begun)

    def arrivals(self) -> list[Arrival]:
        """See :meth:`BlockFetch.arrivals`."""
        sums = [[0, 0.0] for _ in self.blocks]
        for i, block in enumerate(self._owners):
            result = self._results.get(i)
            if not isinstance(result, tuple):
                sums[block] = [-self._nbytes, 0.0]
                continue
            sums[block][0] += result[0]
            sums[block][1] += result[1]
        return [
            Arrival(*block, nbytes, seconds)
            for block, (nbytes, seconds) in zip(self.blocks, sums, strict=True)
            if nbytes == self._nbytes
        ]

    def elapsed(self) -> float:
        """See :meth:`BlockFetch.elapsed`."""
        return self._last_end - self._started

    def _wait_for(self, expected: Sequence[object]) -> None:
        """Wait until as many reads have ended as `expected` has entries; it may still grow."""
        while not self.in_caller and len(self._ended) < len(expected):
            try:
                self._wake.get(timeout=_LOOK_AGAIN_SECONDS)
            except Empty:
                continue
        if self.uploads is not None:
            self.uploads.finish()

    def _run_one(self, i: int) -> None:
        start = perf_counter()
        try:
            self._results[i] = self._read(i), perf_counter() - start
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            self._results[i] = error
        self._last_end = perf_counter()


class ReadPool(ReadThreads):
    """Threads that read blocks. See :class:`BlockPool`. uploads: Staging buffers, where the host
    does not write the slots."""

    def __init__(self, reader: Reader, count: int, uploads: device.Uploads | None = None):
        self._reader, self._uploads = reader, uploads
        super().__init__(count)

    def fetch(self, layer: int, slots: SlotMemory, blocks: Iterable[tuple[int, int]]) -> Fetch:
        """See :meth:`BlockPool.fetch`."""
        if self._uploads is None:
            targets = [
                Target(e, slot, [view[slot * n : (slot + 1) * n] for view, n in slots.views])
                for e, slot in blocks
            ]
        else:
            targets = [
                Target(e, slot, addresses=[start + slot * n for start, n in slots.addresses])
                for e, slot in blocks
            ]
        return Fetch(self, self._reader, layer, targets, uploads=self._uploads)


class Target(NamedTuple):
    """One block to read: the expert, its slot, and the bytes of the slot's components; `addresses`
    of the components instead, where the host does not write them."""

    expert: int
    slot: int
    views: Sequence[memoryview] = ()
    addresses: Sequence[int] = ()


class Job(NamedTuple):
    """One read: the index of its target, and the piece of the block, or None for all of it."""

    target: int
    piece: Piece | None


class Fetch(Batch):
    """Blocks of one layer that `reader` reads into their slots.

    Fewer blocks than threads are cut into pieces, if the reader can.
    """

    def __init__(
        self,
        threads: ReadPool,
        reader: Reader,
        layer: int,
        targets: Sequence[Target],
        *,
        uploads: device.Uploads | None = None,
    ):
        self._targets, self._reader, self._layer, self.uploads = targets, reader, layer, uploads
        pieces = self._pieces(-(-threads.count // max(1, len(targets))))
        self._jobs = [Job(i, piece) for i in range(len(targets)) for piece in pieces]
        super().__init__(
            threads,
            [(target.expert, target.slot) for target in targets],
            [job.target for job in self._jobs],
            fetched_bytes(reader, layer),
        )

    def _read(self, i: int) -> int:
        job = self._jobs[i]
        target = self._targets[job.target]
        try:
            return self._whole(target) if job.piece is None else self._part(target, job.piece)
        except OSError as cause:
            raise ExpertFileError(
                f"Reading expert {target.expert} of layer {self._layer} failed: {cause}."
            ) from cause

    def _pieces(self, count: int) -> Sequence[Piece | None]:
        """Return the pieces of every block; a single None stands for the whole block."""
        reader, staged = self._reader, self.uploads is not None
        if isinstance(reader, FileReader) and (count > 1 or staged):
            pieces = reader.pieces(self._layer, count)
            if len(pieces) > 1 or (pieces and staged):
                return pieces
        return (None,)

    def _part(self, target: Target, piece: Piece) -> int:
        """Read a piece of a block."""
        reader, uploads = self._reader, self.uploads
        assert isinstance(reader, FileReader), "only files have pieces"
        run = reader.piece(self._layer, target.expert, piece)
        if uploads is None:
            return reader.read_run(run, [target.views[c][a:b] for c, a, b in piece.parts])
        staging = uploads.staging()
        start = reader.read_staged(run, staging.take())
        staging.send([(target.addresses[c] + a, b - a) for c, a, b in piece.parts], start)
        return run.nbytes

    def _whole(self, target: Target) -> int:
        """Read a whole block."""
        views, uploads = target.views, self.uploads
        if uploads is not None:
            sizes = [c.nbytes for c in self._reader.layout(self._layer).components]
            views = uploads.staging().carve(sizes)
        nbytes = self._reader.read(self._layer, target.expert, views)
        if nbytes != self._nbytes:
            raise ExpertFileError(
                f"The reader '{self._reader.name}' gave {nbytes} bytes of expert {target.expert} "
                f"of layer {self._layer}, which has {self._nbytes}."
            )
        if uploads is not None:
            uploads.staging().send(list(zip(target.addresses, sizes, strict=True)))
        return nbytes
