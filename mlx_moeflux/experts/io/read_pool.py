"""Read blocks of experts on threads that can be waited for, or stopped, at any moment.

The calling thread takes no lock here, for the reason that :mod:`.read_threads` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import NamedTuple, Protocol

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.byte_ranges import Piece
from mlx_moeflux.experts.io.file_readers import FileReader
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.read_threads import Carried, ReadThreads
from mlx_moeflux.experts.io.readers import Reader, fetched_bytes
from mlx_moeflux.kernels.runtime import device

# An interrupt may swallow a wake-up; the caller looks again after this long.
_LOOK_AGAIN_SECONDS = 0.05
# The caller waits so long for idle threads to begin.
_BEGIN_SECONDS = 0.001
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


class BlockFetch(Protocol):
    """A batch of reads: blocks of one layer into their slots. The caller's thread alone uses it."""

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        """Experts and their slots."""
        ...

    @property
    def in_caller(self) -> bool:
        """True if the caller reads, in :meth:`start`."""
        ...

    def start(self, *, urgent: bool = False) -> None:
        """Begin all reads. urgent: The caller is about to wait for them; they come before those of
        other batches."""
        ...

    def wait(self) -> BaseException | None:
        """Wait for all reads; return the error of the first that failed, if any did."""
        ...

    def abandon(self) -> None:
        """Let no further read begin."""
        ...

    def drain(self) -> None:
        """Let no further read begin and wait until none is under way, in spite of interrupts, of
        which one is raised after that."""
        ...

    def arrivals(self) -> list[Arrival]:
        """Return the blocks that were read completely, in the order of `blocks`."""
        ...

    def elapsed(self) -> float:
        """Return the seconds from :meth:`start` to the latest end of a read; 0 or less before the
        first."""
        ...


class BlockPool(Protocol):
    """Threads that read blocks of experts."""

    def fetch(self, layer: int, slots: SlotMemory, blocks: Iterable[tuple[int, int]]) -> BlockFetch:
        """Return a batch of reads, not begun: for each block its expert and its slot."""
        ...

    def close(self) -> None:
        """Wait for the reads and end the threads."""
        ...


class ReadPool(ReadThreads):
    """Threads that read blocks. See :class:`BlockPool`. uploads: Staging buffers, where the host
    does not write the slots. begin_seconds: How long an urgent batch waits for idle threads to
    begin."""

    def __init__(
        self,
        reader: Reader,
        count: int,
        uploads: device.Uploads | None = None,
        *,
        begin_seconds: float = _BEGIN_SECONDS,
    ):
        self._reader, self._uploads, self.begin_seconds = reader, uploads, begin_seconds
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


class Arrival(NamedTuple):
    """One block that was read completely."""

    expert: int
    slot: int
    nbytes: int
    seconds: float


class Job(NamedTuple):
    """One read: the index of its target, and the piece of the block, or None for all of it."""

    target: int
    piece: Piece | None


class Fetch:
    """A batch of reads: blocks of one layer into their slots.

    Fewer blocks than threads are cut into pieces, if the reader can. See :class:`BlockFetch`.
    in_caller: False once threads may be reading.
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
        self.blocks = [(target.expert, target.slot) for target in targets]
        self._targets, self._threads = targets, threads
        self._reader, self._layer, self._uploads = reader, layer, uploads
        self._expected = fetched_bytes(reader, layer)
        self._abandoned = False
        self.in_caller = True
        pieces = self._pieces(-(-threads.count // max(1, len(targets))))
        self._jobs = [Job(i, piece) for i in range(len(targets)) for piece in pieces]
        # Threads and caller share this iterator: each job is taken once.
        self._left = iter(range(len(self._jobs)))
        # Indices of jobs. A thread appends to `begun`, then looks at `abandoned`; the caller
        # sets `abandoned`, then looks at `begun`: one of them sees the other.
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._results: dict[int, tuple[int, float] | BaseException] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._awaited = 0
        self._all_begun: SimpleQueue[None] = SimpleQueue()
        self._started = self._last_end = 0.0

    def start(self, *, urgent: bool = False) -> None:
        """Begin all reads: on the threads, or in the caller if blocks are small.

        urgent: Wait until the idle threads have begun. They cannot before the caller releases the
        interpreter lock, which a caller that goes on to build a graph does not do soon.
        """
        self._started = perf_counter()
        if urgent and self._expected <= SMALL_BYTES and self._uploads is None:
            for i in self._left:
                self._run_one(i)
            return
        self._awaited = min(self._threads.idle, len(self._jobs)) if urgent else 0
        self.in_caller = False
        self._threads.submit(self, urgent=urgent)
        if self._awaited:
            with suppress(Empty):
                self._all_begun.get(timeout=self._threads.begin_seconds)

    def run(self, wake: Callable[[], None], threads: int) -> None:
        """Take reads until none is left; each of the pool's threads calls this."""
        for i in self._left:
            if i + 1 < min(threads, len(self._jobs)):
                wake()
            self._begun.append(i)
            if 0 < self._awaited <= len(self._begun):
                self._all_begun.put(None)
            if not self._abandoned:
                self._run_one(i)
            self._ended.append(i)
            # Only the last one wakes the caller, and those that it may be draining.
            if len(self._ended) >= len(self._jobs) or self._abandoned:
                self._wake.put(None)

    def wait(self) -> BaseException | None:
        """Wait for all reads; return the error of the first that failed, if any did."""
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
        complete(self._drain)

    def _drain(self) -> None:
        self.abandon()
        self._wait_for(self._begun)
        if self._uploads is not None:
            self._uploads.finish()

    def arrivals(self) -> list[Arrival]:
        """Return the blocks that were read completely, in the order of `blocks`. Seconds of pieces
        add up."""
        sums = [[0, 0.0] for _ in self.blocks]
        for i, job in enumerate(self._jobs):
            result = self._results.get(i)
            if not isinstance(result, tuple):
                sums[job.target] = [-self._expected, 0.0]
                continue
            sums[job.target][0] += result[0]
            sums[job.target][1] += result[1]
        return [
            Arrival(*block, nbytes, seconds)
            for block, (nbytes, seconds) in zip(self.blocks, sums, strict=True)
            if nbytes == self._expected
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

    def _run_one(self, i: int) -> None:
        with Carried() as carried:
            self._results[i] = self._read(self._jobs[i])
        if carried.error is not None:
            self._results[i] = carried.error
        self._last_end = perf_counter()

    def _read(self, job: Job) -> tuple[int, float]:
        start, target = perf_counter(), self._targets[job.target]
        try:
            nbytes = self._whole(target) if job.piece is None else self._part(target, job.piece)
        except OSError as cause:
            raise ExpertFileError(
                f"Reading expert {target.expert} of layer {self._layer} failed: {cause}."
            ) from cause
        return nbytes, perf_counter() - start

    def _pieces(self, count: int) -> Sequence[Piece | None]:
        """Return the pieces of every block; a single None stands for the whole block."""
        reader, staged = self._reader, self._uploads is not None
        if isinstance(reader, FileReader) and (count > 1 or staged):
            pieces = reader.pieces(self._layer, count)
            if len(pieces) > 1 or (pieces and staged):
                return pieces
        return (None,)

    def _part(self, target: Target, piece: Piece) -> int:
        """Read a piece of a block."""
        reader, uploads = self._reader, self._uploads
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
