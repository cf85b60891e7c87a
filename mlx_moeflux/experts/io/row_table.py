"""A table of rows on disk, such as an n-gram table, of which a token needs a few.

Threads of the table read rows into ordinary memory. MLX is used in the calling thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.blocks import BlockMode
from mlx_moeflux.checkpoint.formats.decoded import DecodedRef, sources_of
from mlx_moeflux.checkpoint.formats.gguf_blocks import OfBlocks, block_values
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import ITEMSIZE, Ref, TensorRef, mlx_dtype
from mlx_moeflux.checks import check_integer
from mlx_moeflux.errors import CheckpointError, InputError, UnsupportedError
from mlx_moeflux.experts.io.byte_ranges import Run
from mlx_moeflux.experts.io.open_files import OpenFiles
from mlx_moeflux.experts.io.read_threads import Carried, ReadThreads
from mlx_moeflux.experts.io.row_cache import ROW_MEMORY, RowCache, kept_rows, row_memory_bytes

Shard = Mapping[str, TensorRef]

PARTS: tuple[str, ...] = ("weight", "scales", "biases")
FLOATS = ("BF16", "F16", "F32")
# A disk reads whole pages; one more of them takes less time than one more read.
GAP_BYTES = 4096
# A run of near rows goes through a buffer of its thread.
MOST_RUN_BYTES = 1 << 20
# A thread takes so many reads together; closing waits for no more of them.
MOST_READS = 256


@dataclass
class RowStats:
    """A table's account.

    hits, misses: The distinct rows of each call that were in memory, and those that were not.
    reads, bytes_read: Reads of files, and their bytes, those between near rows included.
    stall_seconds: Time that callers waited for reads.
    """

    hits: int = 0
    misses: int = 0
    reads: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0

    @property
    def lookups(self) -> int:
        """Distinct rows asked for, summed over the calls."""
        return self.hits + self.misses

    def __str__(self) -> str:
        rate = self.hits / max(1, self.lookups)
        return (
            f"hit rate {100 * rate:.1f} % of {self.lookups}, {self.bytes_read / 1e6:,.1f} MB in "
            f"{self.reads} reads, stalls {self.stall_seconds:.2f} s"
        )


def sum_of(accounts: Iterable[RowStats]) -> RowStats | None:
    """Return the sum of accounts, or None if there are none."""
    every = list(accounts)
    if not every:
        return None
    return RowStats(**{f.name: sum(getattr(a, f.name) for a in every) for f in fields(RowStats)})


class _Part(NamedTuple):
    """The bytes [begin, end) of every row. bits: The unsigned type of the same size as `dtype`.
    files, offsets: Where each shard begins."""

    dtype: mx.Dtype
    bits: np.dtype
    begin: int
    end: int
    files: np.ndarray
    offsets: np.ndarray


class RowTable:
    """A table ``[rows, width]`` whose rows are read when asked for. Any thread may use it.

    rows, width: Its rows, and the numbers of one. dtype: Of the weight, or of the scales. blocks:
    GGUF's type of them, or None.
    row_bytes, nbytes: Bytes of one row and of all in the files. memory_bytes: That it comes to
    hold.

    Args:
        shards: Part -> tensor, of consecutive rows: ``weight`` ``[R, width]`` in a float dtype; or
            ``weight``, ``scales`` and ``biases`` of an affine quantisation. Those of GGUF's blocks
            are read as blocks, and their rows come in float32.
        spec: The quantisation, or None.
        memory_bytes: Of recent rows and their index. A call has buffers of its rows besides, and
            each thread one of a run.
        name: What messages call the table, such as ``layer 3's n-gram table``.
        threads: Number of threads that read.

    Raises:
        CheckpointError: The shards do not fit together, or do not fit `spec`.
        UnsupportedError: The quantisation is not affine.
        InputError: `memory_bytes` or `threads` is out of range.
        ExpertFileError: A file cannot be opened.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        spec: QuantSpec | None,
        *,
        memory_bytes: int = ROW_MEMORY,
        name: str,
        threads: int,
    ):
        check_integer(f"the memory of {name}", memory_bytes, 0, hint=" bytes")
        check_integer(f"the number of threads of {name}", threads, 1)
        self.width: int = _checked_width(shards, spec, name)
        self.name, self.spec = name, spec
        self._starts = np.cumsum([0, *(shard["weight"].shape[0] for shard in shards)])
        self.rows = int(self._starts[-1])
        self._parts: list[_Part] = []
        self.row_bytes = 0
        files: dict[Path, int] = {}
        self.blocks = _blocks_of(shards, name)
        for part in PARTS if spec and self.blocks is None else PARTS[:1]:
            refs = [sources_of(shard[part])[0] for shard in shards]
            dtype, size, begin = mlx_dtype(refs[0].dtype), ITEMSIZE[refs[0].dtype], self.row_bytes
            self.row_bytes += refs[0].shape[1] * size
            where = np.array([files.setdefault(Path(ref.file), len(files)) for ref in refs])
            offsets = np.array([ref.offset for ref in refs], np.int64)
            bits = np.dtype(f"u{size}")
            self._parts.append(_Part(dtype, bits, begin, self.row_bytes, where, offsets))
        self.dtype: mx.Dtype = mx.float32 if self.blocks else self._parts[-1].dtype
        self.nbytes = self.rows * self.row_bytes
        # No interrupt falls between taking a plain lock and the block of its `with`.
        self._lock, self._closed, self._stats = threading.Lock(), False, RowStats()
        self.memory_bytes = row_memory_bytes(self.rows, self.row_bytes, memory_bytes)
        self._cache = RowCache(kept_rows(self.rows, self.row_bytes, memory_bytes), self.row_bytes)
        self._files = OpenFiles(list(files))
        self._files.advise_random()
        self._threads = ReadThreads(threads)

    def take(self, ids: np.ndarray) -> mx.array:
        """Return the rows of `ids`; see :meth:`begin` and :meth:`PendingRows.rows`."""
        return self.begin(ids).rows()

    def begin(self, ids: np.ndarray) -> PendingRows:
        """Begin to read rows, and return. ids: Integers ``[...]``.

        Raises:
            InputError: An id is no row's, or the table is closed.
        """
        ids = np.asarray(ids)
        distinct, inverse = np.unique(ids, return_inverse=True)
        distinct = self._checked(distinct)
        data = np.empty((len(distinct), self.row_bytes), np.uint8)
        with self._lock:
            self._check_open()
            here = self._cache.take(distinct, data)
            hits = int(np.count_nonzero(here))
            self._stats.hits += hits
            self._stats.misses += len(here) - hits
        pending = PendingRows(self, distinct, data, inverse.reshape(ids.shape))
        if hits < len(here):
            pending._plan(np.flatnonzero(~here))
            with self._lock:
                # Threads that have ended would never read it.
                self._check_open()
                self._threads.submit(pending)
        return pending

    def stats(self) -> RowStats:
        """Return the account as it is now."""
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        """Give up the reads under way, whose rows then raise InputError, and close the files."""
        with self._lock:
            self._closed = True
        self._threads.close()
        self._files.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self.name} is closed; load the model again.")

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        """Return ascending ids as int64; raise InputError unless all are rows."""
        if ids.dtype.kind not in "iu":
            raise InputError(f"rows of {self.name} were asked for as {ids.dtype}; give integers.")
        for i in (int(ids[0]), int(ids[-1])) if len(ids) else ():
            if not 0 <= i < self.rows:
                raise InputError(f"{self.name} has no row {i}; it has rows 0 to {self.rows - 1}.")
        return ids.astype(np.int64)


class _Job(NamedTuple):
    """Reads of one part. starts, stops: Of each, among the rows that are missing."""

    part: _Part
    starts: np.ndarray
    stops: np.ndarray


class PendingRows:
    """Rows that threads are reading. They are read and kept even if the caller never takes them."""

    def __init__(self, table: RowTable, distinct: np.ndarray, data: np.ndarray, places: np.ndarray):
        self._table, self._distinct, self._data, self._places = table, distinct, data, places
        self._jobs: list[_Job] = []
        self._error: BaseException | None = None
        # Locked until all reads have ended: an interrupt of who waits leaves it to the others.
        self._under_way = threading.Lock()

    def rows(self) -> mx.array:
        """Wait for the rows and return them, ``[..., width]`` in the table's dtype.

        Raises:
            ExpertFileError: A file cannot be read, or is not what it was.
            InputError: The table was closed before all were read.
        """
        table = self._table
        if self._under_way.locked():
            start = perf_counter()
            with self._under_way:
                pass
            with table._lock:
                table._stats.stall_seconds += perf_counter() - start
        if self._error is not None:
            raise self._error
        places, shape = self._places.reshape(-1), (*self._places.shape, table.width)
        if not places.size:
            return mx.zeros(shape, table.dtype)
        if table.blocks is not None:
            values = block_values(table.blocks, self._data.reshape(-1, table.blocks.nbytes))
            return mx.array(values.reshape(-1, table.width)[places]).reshape(shape)
        arrays = []
        for part in table._parts:
            raw = self._data[places, part.begin : part.end].view(part.bits)
            arrays.append(mx.array(raw).view(part.dtype))
        if table.spec is None:
            (found,) = arrays
        else:
            spec = table.spec
            found = mx.dequantize(*arrays, group_size=spec.group_size, bits=spec.bits)
        return found.reshape(shape)

    def _plan(self, missing: np.ndarray) -> None:
        """Plan the reads of the rows at these places of the call's distinct ids, ascending."""
        table, self._missing = self._table, missing
        ids = self._distinct[missing]
        self._shards = np.searchsorted(table._starts, ids, side="right") - 1
        self._local = ids - table._starts[self._shards]
        steps, same = np.diff(self._local), np.diff(self._shards) == 0
        for part in table._parts:
            nbytes = part.end - part.begin
            # Rows of one block of the file are read together, so that no run is longer than it.
            block = self._local // max(1, MOST_RUN_BYTES // nbytes)
            near = same & ((steps - 1) * nbytes <= GAP_BYTES) & (np.diff(block) == 0)
            cuts = np.flatnonzero(~near) + 1
            starts, stops = np.append(0, cuts), np.append(cuts, len(ids))
            size = min(-(-len(starts) // table._threads.count), MOST_READS)
            self._jobs += [
                _Job(part, starts[i : i + size], stops[i : i + size])
                for i in range(0, len(starts), size)
            ]
        # Threads share this iterator: each job is taken once.
        self._left, self._unfinished = iter(range(len(self._jobs))), len(self._jobs)
        self._under_way.acquire()

    def run(self, wake: Callable[[], None], threads: int) -> None:
        """See :meth:`Batch.run`."""
        for i in self._left:
            if i + 1 < min(threads, len(self._jobs)):
                wake()
            with Carried() as carried:
                self._read(self._jobs[i])
            self._finish(carried.error)

    def _finish(self, error: BaseException | None) -> None:
        """Count a job; after the last one keep the rows and let the caller have them."""
        table = self._table
        with table._lock:
            self._error = self._error or error
            self._unfinished -= 1
            if self._unfinished:
                return
        if self._error is None:
            with Carried() as carried:
                ids, rows = self._distinct[self._missing], self._data[self._missing]
                with table._lock:
                    table._cache.put(ids, rows)
            self._error = carried.error
        self._under_way.release()

    def _read(self, job: _Job) -> None:
        """Read the rows of a job into their places."""
        table, part, starts = self._table, job.part, job.starts
        firsts, lasts = self._local[starts], self._local[job.stops - 1]
        shards, nbytes = self._shards[starts], part.end - part.begin
        files = part.files[shards]
        offsets = part.offsets[shards] + firsts * nbytes
        sizes = (lasts - firsts + 1) * nbytes
        places = self._missing[starts] * table.row_bytes + part.begin
        columns = starts, job.stops, places, files, offsets, sizes
        memory, count, total = self._data.reshape(-1).data, 0, 0
        try:
            for start, stop, place, file, offset, size in zip(
                *(column.tolist() for column in columns), strict=True
            ):
                table._check_open()
                run = Run(file, offset, size, ())
                if stop - start == 1:
                    table._files.fill(run, [memory[place : place + size]])
                else:
                    self._read_run(run, part, start, stop)
                count, total = count + 1, total + size
            for file in set(files.tolist()):
                table._files.check(file)
        finally:
            with table._lock:
                table._stats.reads += count
                table._stats.bytes_read += total

    def _read_run(self, run: Run, part: _Part, start: int, stop: int) -> None:
        """Read a run of near rows and copy those that are missing."""
        buffer = np.empty(run.nbytes, np.uint8)
        self._table._files.fill(run, [buffer.data])
        found = buffer.reshape(-1, part.end - part.begin)
        local = self._local[start:stop]
        self._data[self._missing[start:stop], part.begin : part.end] = found[local - local[0]]


def _blocks_of(shards: Sequence[Shard], name: str) -> BlockMode | None:
    """Return the type of GGUF's blocks that all shards are stored in, or None.

    Raises:
        UnsupportedError: They are decoded in another way.
    """
    weights: list[Ref] = [shard["weight"] for shard in shards]
    if not any(isinstance(weight, DecodedRef) for weight in weights):
        return None
    kinds = {weight.kind if isinstance(weight, OfBlocks) else None for weight in weights}
    kind = kinds.pop()
    if kinds or kind is None:
        raise UnsupportedError(f"{name} is stored in a form whose rows cannot be read alone.")
    return kind


def _checked_width(shards: Sequence[Shard], spec: QuantSpec | None, name: str) -> int:
    """Return the numbers of a row; raise unless all shards have them in one form."""
    if spec is not None and not spec.is_affine:
        raise UnsupportedError(f"{name} has mode {spec.mode!r}; only affine tables can be read.")
    wanted = set(PARTS if spec else PARTS[:1])
    for i, shard in enumerate(shards):
        if set(shard) != wanted:
            raise CheckpointError(
                f"shard {i} of {name} has {sorted(shard)}, expected {sorted(wanted)}; download or "
                "convert the checkpoint again."
            )
    if all(shard["weight"].shape[:1] == (0,) for shard in shards):
        raise CheckpointError(f"{name} has no rows; download or convert the checkpoint again.")
    first = shards[0]["scales" if spec else "weight"]
    code = first.dtype if first.dtype in FLOATS else " or ".join(FLOATS)
    columns = max(first.shape[-1] if first.shape else 1, 1)
    width = columns * spec.group_size if spec else columns
    expected: dict[str, tuple[str, int]] = dict.fromkeys(wanted, (code, columns))
    if spec:
        expected["weight"] = ("U32", spec.words(width))
    for shard in shards:
        rows = shard["weight"].shape[0] if shard["weight"].shape else 1
        for part, ref in shard.items():
            dtype, columns = expected[part]
            if (ref.dtype, tuple(ref.shape)) != (dtype, (rows, columns)):
                raise CheckpointError(
                    f"{ref.file}: '{ref.name}' is {ref.dtype} {list(ref.shape)}, but {name} needs "
                    f"{dtype} {[rows, columns]}; download or convert the checkpoint again."
                )
    return width
