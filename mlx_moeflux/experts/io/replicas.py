"""Read from several copies of the same experts, each on a disk of its own: every block comes from
the copy that is expected to have read it first.

Each copy has a reader and threads of its own, so that a slow disk holds none of a fast one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.io.decoding import Experts
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.read_pool import Arrival, BlockFetch, BlockPool, SlotMemory
from mlx_moeflux.experts.io.readers import Reader, fetched_bytes, make_reader, private_bytes
from mlx_moeflux.experts.telemetry.stats import PlaceStats

# What a batch weighs in the estimate of a disk's speed falls by this factor with each later one.
KEPT = 0.9
# A disk that seems too slow for any block is measured anew with one of so many.
LEFT_OUT_BLOCKS = 256


def open_readers(name: str, places: Mapping[str, Experts]) -> Reader:
    """Make the reader called `name` of the experts in each of `places`; see
    :func:`~mlx_moeflux.experts.io.readers.make_reader`.

    Raises:
        InputError: ``memory`` with several places; and what make_reader raises.
    """
    if len(places) == 1:
        return make_reader(name, *places.values())
    if name == "memory":
        raise InputError("the reader 'memory' reads every expert once; give one expert_path.")
    readers: dict[str, Reader] = {}
    try:
        for place, experts in places.items():
            readers[place] = make_reader(name, experts)
    except BaseException:
        for reader in readers.values():
            reader.close()
        raise
    return ReplicaReader(readers)


class ReplicaReader:
    """The readers of several copies, place -> reader. A :class:`ReplicaPool` reads with all of
    them, :meth:`read` with the first. See :class:`~mlx_moeflux.experts.io.readers.Reader`."""

    def __init__(self, readers: Mapping[str, Reader]):
        self.readers, self._first = readers, next(iter(readers.values()))
        self.name = self._first.name
        self.layers, self.num_experts = self._first.layers, self._first.num_experts
        self.staging_bytes = sum(map(private_bytes, readers.values()))

    def layout(self, layer: int) -> BlockLayout:
        """See :meth:`Reader.layout`."""
        return self._first.layout(layer)

    def stored_bytes(self, layer: int) -> int:
        """Return the bytes that one read fetches."""
        return fetched_bytes(self._first, layer)

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> int:
        """See :meth:`Reader.read`."""
        return self._first.read(layer, expert, into)

    def close(self) -> None:
        """See :meth:`Reader.close`."""
        for reader in self.readers.values():
            reader.close()


def each_reader(reader: Reader) -> list[Reader]:
    """Return the readers of all copies, or `reader` alone."""
    return list(reader.readers.values()) if isinstance(reader, ReplicaReader) else [reader]


class Replica:
    """One copy: the threads that read it, what they read now, and how fast they were.

    in_flight: Bytes of batches that have begun. speed: Bytes a second while it reads, of recent
    batches; None before the first. left_out: Blocks that others got since its last one.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float]):
        self.pool, self.stats = pool, PlaceStats()
        self.left_out = 0
        self._clock = clock
        # Batch -> when it began, and its bytes.
        self._under_way: dict[BlockFetch, tuple[float, int]] = {}
        self._nbytes = self._seconds = self._busy_until = 0.0

    @property
    def in_flight(self) -> int:
        return sum(nbytes for _, nbytes in self._under_way.values())

    @property
    def speed(self) -> float | None:
        return self._nbytes / self._seconds if self._seconds else None

    def forget_speed(self) -> None:
        """Let the next batch alone say how fast this replica is."""
        self._nbytes = self._seconds = 0.0

    def start(self, fetch: BlockFetch, nbytes: int, *, urgent: bool) -> None:
        """Begin a batch of `nbytes`."""
        self._under_way[fetch] = self._clock(), nbytes
        fetch.start(urgent=urgent)

    def end(self, fetch: BlockFetch) -> None:
        """Count a batch that has ended; a second call does nothing."""
        if fetch not in self._under_way:
            return
        start, _ = self._under_way.pop(fetch)
        nbytes = sum(arrival.nbytes for arrival in fetch.arrivals())
        # Batches overlap: a second in which several are under way is one second.
        end = start + fetch.elapsed()
        seconds = max(end - max(start, self._busy_until), 0.0)
        self._busy_until = max(end, self._busy_until)
        self.stats.add(nbytes, seconds)
        if nbytes:
            self._nbytes = KEPT * self._nbytes + nbytes
            self._seconds = KEPT * self._seconds + seconds


def shares(replicas: Sequence[Replica], count: int, nbytes: int) -> list[int]:
    """Return how many of `count` blocks of `nbytes` each replica reads, so that the last of them is
    expected to arrive soonest. A replica that was never measured counts as the fastest one."""
    fastest = max((replica.speed or 0.0 for replica in replicas), default=0.0) or 1.0
    speeds = [replica.speed or fastest for replica in replicas]
    waiting = [replica.in_flight for replica in replicas]
    found = [0] * len(replicas)

    def preference(i: int) -> tuple[bool, float, bool]:
        due = not found[i] and replicas[i].left_out >= LEFT_OUT_BLOCKS
        return not due, (waiting[i] + nbytes) / speeds[i], replicas[i].speed is not None

    for _ in range(count):
        chosen = min(range(len(replicas)), key=preference)
        found[chosen] += 1
        waiting[chosen] += nbytes
    for replica, blocks in zip(replicas, found, strict=True):
        if blocks and replica.left_out >= LEFT_OUT_BLOCKS:
            replica.forget_speed()
        replica.left_out = 0 if blocks else replica.left_out + count
    return found


class ReplicaPool:
    """The threads of all replicas. See :class:`~mlx_moeflux.experts.io.read_pool.BlockPool`.

    pools: Place -> threads that read there. clock: Seconds, as those of
    :meth:`~mlx_moeflux.experts.io.read_pool.BlockFetch.elapsed`.
    """

    def __init__(
        self,
        reader: Reader,
        pools: Mapping[str, BlockPool],
        *,
        clock: Callable[[], float] = perf_counter,
    ):
        self._reader = reader
        self._replicas = {place: Replica(pool, clock) for place, pool in pools.items()}

    @property
    def stats(self) -> dict[str, PlaceStats]:
        """Place -> what was read there."""
        return {place: replica.stats for place, replica in self._replicas.items()}

    def fetch(
        self, layer: int, slots: SlotMemory, blocks: Iterable[tuple[int, int]]
    ) -> ReplicaFetch:
        """See :meth:`BlockPool.fetch`. Blocks keep their order over the replicas, which is that of
        the experts: so an expert comes mostly from the same one, and is in one page cache."""
        blocks, replicas = list(blocks), list(self._replicas.values())
        nbytes, first, parts = fetched_bytes(self._reader, layer), 0, []
        for replica, count in zip(replicas, shares(replicas, len(blocks), nbytes), strict=True):
            if count:
                fetch = replica.pool.fetch(layer, slots, blocks[first : first + count])
                parts.append((replica, fetch, count * nbytes))
            first += count
        return ReplicaFetch(blocks, parts)

    def close(self) -> None:
        """See :meth:`BlockPool.close`."""
        for replica in self._replicas.values():
            replica.pool.close()


class ReplicaFetch(BlockFetch):
    """Blocks that several replicas read.

    parts: Replicas, with the batch and the bytes that each reads, in the order of `blocks`.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        parts: Sequence[tuple[Replica, BlockFetch, int]],
    ):
        self.blocks, self._parts, self.in_caller = blocks, parts, False

    def start(self, *, urgent: bool = False) -> None:
        """See :meth:`BlockFetch.start`."""
        for replica, fetch, nbytes in self._parts:
            replica.start(fetch, nbytes, urgent=urgent)
            self.in_caller |= fetch.in_caller

    def wait(self) -> BaseException | None:
        """See :meth:`BlockFetch.wait`; an error of one replica leaves the others' blocks."""
        errors = [fetch.wait() for _, fetch, _ in self._parts]
        self._end()
        return next((error for error in errors if error is not None), None)

    def abandon(self) -> None:
        """See :meth:`BlockFetch.abandon`."""
        for _, fetch, _ in self._parts:
            fetch.abandon()

    def _drain(self) -> None:
        self.abandon()
        for _, fetch, _ in self._parts:
            fetch.drain()
        self._end()

    def arrivals(self) -> list[Arrival]:
        """See :meth:`BlockFetch.arrivals`."""
        return [arrival for _, fetch, _ in self._parts for arrival in fetch.arrivals()]

    def elapsed(self) -> float:
        """See :meth:`BlockFetch.elapsed`; of the replica that ended last."""
        return max((fetch.elapsed() for _, fetch, _ in self._parts), default=0.0)

    def _end(self) -> None:
        for replica, fetch, _ in self._parts:
            replica.end(fetch)
