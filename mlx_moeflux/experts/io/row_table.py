"""A table of rows on disk, such as an n-gram table, of which a token needs a few.

Threads of the table read rows into ordinary memory. MLX is used in the calling thread alone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
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
from mlx_moeflux.errors import CheckpointError, ExpertFileError, InputError, UnsupportedError
from mlx_moeflux.experts.io.byte_ranges import Run
from mlx_moeflux.experts.io.native_pool import BlockPlaces, NativeFetch, NativeThreads
from mlx_moeflux.experts.io.open_files import OpenFiles
from mlx_moeflux.experts.io.read_pool import Batch, ReadThreads
from mlx_moeflux.experts.io.row_cache import ROW_MEMORY, RowCache, kept_rows, row_memory_bytes

Shard = Mapping[str, TensorRef]

PARTS: tuple[str, ...] = ("weight", "scales", "biases")
FLOATS = ("BF16", "F16", "F32")
# A disk reads whole pages; one more of them takes less time than one more read.
GAP_BYTES = 4096
# A run of near rows goes through a buffer.
MOST_RUN_BYTES = OpenFiles.least_piece
# A thread of Python takes so many reads together.
MOST_READS = 256
# Native threads read calls of so few rows: their reads and near rows have memory until all end.
MOST_NATIVE_ROWS = 1024


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
            each thread, or a call of few rows, one of runs.
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
        self._threads, self._native = ReadThreads(threads), None
        with suppress(OSError):
            self._native = NativeThreads(self._files, threads)
        # Reads whose rows are not kept yet.
        self._under_way: list[_PythonReads | _NativeReads] = []
        pools = [pool for pool in (self._threads, self._native) if pool is not None]
        self._end = weakref.finalize(self, _give_up, pools, self._under_way, os.getpid())

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
        if self._under_way:
            self._keep_ended()
        with self._lock:
            self._check_open()
            here = self._cache.take(distinct, data)
            hits = int(np.count_nonzero(here))
            self._stats.hits += hits
            self._stats.misses += len(here) - hits
        reads = None
        if hits < len(here):
            runs = _Runs(self, distinct, np.flatnonzero(~here), data)
            native = self._native if len(runs.ids) <= MOST_NATIVE_ROWS else None
            if native is None:
                reads = _PythonReads(self._threads, self._files, runs)
            else:
                reads = _NativeReads(native, runs)
            with self._lock:
                # Threads that have ended would never read it.
                self._check_open()
                self._under_way.append(reads)
                reads.start()
        return PendingRows(self, data, inverse.reshape(ids.shape), reads)

    def stats(self) -> RowStats:
        """Return the account as it is now."""
        self._keep_ended()
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        """Give up the reads under way, whose rows then raise InputError, and close the files."""
        with self._lock:
            self._closed = True
        self._end()
        self._files.close()

    def _keep_ended(self) -> None:
        """Keep the rows of reads that have ended and that no caller waits for."""
        for reads in [reads for reads in self._under_way if reads.arrivals()]:
            with suppress(ExpertFileError, InputError):
                self._settle(reads)

    def _settle(self, reads: _PythonReads | _NativeReads) -> None:
        """Wait for reads, count them and keep their rows; raise the error of one that failed."""
        start = perf_counter()
        with reads.lock:
            error = reads.wait()
        runs, arrived = reads.runs, sum(each.nbytes for each in reads.arrivals())
        with self._lock:
            if reads in self._under_way:
                self._stats.stall_seconds += perf_counter() - start
                if arrived:
                    reads.scatter()
                    self._stats.reads += len(runs.sizes)
                    self._stats.bytes_read += arrived
                self._under_way.remove(reads)
                if arrived:
                    self._cache.put(runs.ids, runs.data[runs.missing])
        if error is not None:
            raise error
        if not arrived:
            raise self._is_closed()

    def _check_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> InputError:
        return InputError(f"{self.name} is closed; load the model again.")

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        """Return ascending ids as int64; raise InputError unless all are rows."""
        if ids.dtype.kind not in "iu":
            raise InputError(f"rows of {self.name} were asked for as {ids.dtype}; give integers.")
        for i in (int(ids[0]), int(ids[-1])) if len(ids) else ():
            if not 0 <= i < self.rows:
                raise InputError(f"{self.name} has no row {i}; it has rows 0 to {self.rows - 1}.")
        return ids.astype(np.int64)


def _give_up(
    pools: Sequence[ReadThreads | NativeThreads],
    under_way: Sequence[_PythonReads | _NativeReads],
    process: int,
) -> None:
    """End the threads of a table. A process that was forked from theirs has none to wait for."""
    if os.getpid() != process:
        return
    for reads in under_way:
        reads.abandon()
    with ExitStack() as stack:
        for reads in under_way:
            stack.enter_context(reads.lock)
        for pool in pools:
            pool.close()


class PendingRows:
    """Rows that threads are reading. They are read and kept even if the caller never takes them."""

    def __init__(
        self,
        table: RowTable,
        data: np.ndarray,
        places: np.ndarray,
        reads: _PythonReads | _NativeReads | None,
    ):
        self._table, self._data, self._places, self._reads = table, data, places, reads

    def rows(self, columns: slice | None = None) -> mx.array:
        """Wait for the rows and return them, ``[..., width]`` in the table's dtype. columns: Which
        of the second axis of the ids; None: all.

        Raises:
            ExpertFileError: A file cannot be read, or is not what it was.
            InputError: The table was closed before all were read.
        """
        table, reads = self._table, self._reads
        if reads is not None:
            table._settle(reads)
            self._reads = None
        places = self._places if columns is None else self._places[:, columns]
        shape, places = (*places.shape, table.width), places.reshape(-1)
        if not places.size:
            return mx.zeros(shape, table.dtype)
        if table.blocks is not None:
            blocks = self._data[places].reshape(-1, table.blocks.nbytes)
            return mx.array(block_values(table.blocks, blocks)).reshape(shape)
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


class _Runs:
    """The rows of a call that are missing, as runs of near rows; each is one read.

    ids: Those rows, ascending. data: Bytes of all rows of the call, ``[N, row_bytes]``. missing:
    Places of `ids` among them.
    Of each run: parts: Index of its part. starts, stops: Its rows among `ids`. files, offsets,
    sizes. places: Of its first byte in `data`.
    """

    def __init__(
        self, table: RowTable, distinct: np.ndarray, missing: np.ndarray, data: np.ndarray
    ):
        self.ids, self.data, self.missing = distinct[missing], data, missing
        self._parts = table._parts
        shards = np.searchsorted(table._starts, self.ids, side="right") - 1
        self._local = local = self.ids - table._starts[shards]
        steps, same = np.diff(local), np.diff(shards) == 0
        runs = []
        for i, part in enumerate(table._parts):
            nbytes = part.end - part.begin
            # Rows of one block of the file are read together, so that no run is longer than it.
            block = local // max(1, MOST_RUN_BYTES // nbytes)
            near = same & ((steps - 1) * nbytes <= GAP_BYTES) & (np.diff(block) == 0)
            cuts = np.flatnonzero(~near) + 1
            starts, stops = np.append(0, cuts), np.append(cuts, len(local))
            first, shard = local[starts], shards[starts]
            sizes = (local[stops - 1] - first + 1) * nbytes
            offsets = part.offsets[shard] + first * nbytes
            places = missing[starts] * table.row_bytes + part.begin
            parts, files = np.full_like(starts, i), part.files[shard]
            runs.append((parts, starts, stops, files, offsets, sizes, places))
        self.parts, self.starts, self.stops, self.files, self.offsets, self.sizes, self.places = (
            np.concatenate(runs, axis=1)
        )

    def copy(self, i: int, run: np.ndarray) -> None:
        """Copy the rows of run `i` to their places."""
        part, rows = self._parts[self.parts[i]], slice(self.starts[i], self.stops[i])
        found, local = run.reshape(-1, part.end - part.begin), self._local[rows]
        self.data[self.missing[rows], part.begin : part.end] = found[local - local[0]]


class _NativeReads(NativeFetch):
    """Runs that native threads read: one block, of which each run is a component.

    lock: Of the thread that waits.
    """

    def __init__(self, threads: NativeThreads, runs: _Runs):
        self.runs, self.lock = runs, threading.Lock()
        # Runs of several rows go to a buffer: their numbers, and where each ends there.
        self._near = near = np.flatnonzero(runs.stops - runs.starts > 1)
        sizes = runs.sizes[near]
        self._ends, self._buffer = sizes.cumsum(), np.empty(sizes.sum(), np.uint8)
        addresses = runs.places + runs.data.ctypes.data
        addresses[near] = self._buffer.ctypes.data + self._ends - sizes
        slots, files = np.array([addresses, runs.sizes]).T, runs.files.astype(np.int32)
        place = BlockPlaces(threads.files, slots, files, runs.offsets)
        super().__init__(threads, place, [(0, 0)], self._buffer)

    def scatter(self) -> None:
        """Copy rows from the buffer to their places."""
        begin = 0
        for i, end in zip(self._near.tolist(), self._ends.tolist(), strict=True):
            self.runs.copy(i, self._buffer[begin:end])
            begin = end


class _PythonReads(Batch):
    """Runs that threads of Python read, each of them many together. See :class:`_NativeReads`."""

    def __init__(self, threads: ReadThreads, files: OpenFiles, runs: _Runs):
        self.runs, self.lock, self._files = runs, threading.Lock(), files
        count = len(runs.sizes)
        self._step = min(-(-count // threads.count), MOST_READS)
        jobs = [0] * -(-count // self._step)
        super().__init__(threads, [(0, 0)], jobs, int(runs.sizes.sum()))

    def scatter(self) -> None:
        """Do nothing: threads copy each run."""

    def _read(self, i: int) -> int:
        runs, first, total = self.runs, i * self._step, 0
        of = slice(first, first + self._step)
        memory, files = runs.data.reshape(-1).data, runs.files[of].tolist()
        columns = runs.offsets, runs.sizes, runs.places, runs.stops - runs.starts
        places = zip(files, *(column[of].tolist() for column in columns), strict=True)
        for n, (file, offset, size, place, rows) in enumerate(places, first):
            if self._abandoned:
                break
            run = Run(file, offset, size, ())
            if rows == 1:
                self._files.fill(run, [memory[place : place + size]])
            else:
                buffer = np.empty(size, np.uint8)
                self._files.fill(run, [buffer.data])
                runs.copy(n, buffer)
            total += size
        for file in set(files):
            self._files.check(file)
        return total


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
