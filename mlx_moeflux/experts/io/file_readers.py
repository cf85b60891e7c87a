"""Readers of files: buffered, direct and mapped. :mod:`.readers` has the protocol."""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mlx_moeflux.checkpoint.files import pass_page_cache, window
from mlx_moeflux.checkpoint.tensors import ExpertRefs
from mlx_moeflux.errors import ExpertFileError, ShapeError, UnsupportedError
from mlx_moeflux.experts.io.byte_ranges import ByteRanges, Piece, Run, copy_into
from mlx_moeflux.experts.io.layout import Layout
from mlx_moeflux.experts.io.open_files import OpenFiles

# Logical blocks of disks are 512 or 4096 bytes; 4096 serves both.
DIRECT_ALIGNMENT = 4096
# A short direct read ends at a logical block, the smallest of which has so many bytes.
SECTOR = 512
# Larger transfers gain nothing, and every thread owns one bounce buffer. A multiple of a page.
MAX_BOUNCE_BYTES = 8 << 20
# A smaller part of a block takes less time to read than to submit.
LEAST_PIECE = 1 << 18


class FileReader(OpenFiles):
    """Base class of readers of files: the ranges of experts in them. See :class:`Reader`."""

    name = "file"
    least_piece = LEAST_PIECE

    def __init__(self, experts: Mapping[int, Mapping[str, ExpertRefs]]):
        self.ranges = ByteRanges(experts)
        self.layers, self.num_experts = self.ranges.layers, self.ranges.num_experts
        self._pieces: dict[tuple[int, int], Sequence[Piece]] = {}
        super().__init__(self.ranges.files)

    def layout(self, layer: int) -> Layout:
        """See :meth:`Reader.layout`."""
        return self.ranges.layout(layer)

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> int:
        """See :meth:`Reader.read`; one system call for each run of adjacent components."""
        components = self.ranges.layout(layer).components
        if [view.nbytes for view in into] != [c.nbytes for c in components]:
            raise ShapeError(
                f"the buffers for an expert of layer {layer} have {[v.nbytes for v in into]} "
                f"bytes, its components {[c.nbytes for c in components]}."
            )
        total = 0
        runs = self.ranges.runs(layer, expert)
        self._announce(runs)
        for run in runs:
            self._read_run(run, [into[i] for i in run.components])
            total += run.nbytes
        for file in {run.file for run in runs}:
            self.check(file)
        checksums = self.ranges.checksums(layer)
        if checksums is not None:
            found = 0
            for i in self.ranges.order(layer):
                found = zlib.crc32(into[i], found)
            if found != checksums[expert]:
                raise self.wrong(layer, expert)
        return total

    def pieces(self, layer: int, count: int) -> Sequence[Piece]:
        """Cut a block of a layer into about `count` reads for several threads, by :meth:`read_run`
        or :meth:`read_staged`. Empty if blocks are not contiguous or have checksums, which
        :meth:`read` verifies, or if a subclass overrides :meth:`read`."""
        if type(self).read is not FileReader.read or self.ranges.checksums(layer) is not None:
            return ()
        if (layer, count) not in self._pieces:
            sizes = [c.nbytes for c in self.layout(layer).components]
            order = self.ranges.order(layer)
            self._pieces[layer, count] = cut(order, sizes, count, self.least_piece)
        return self._pieces[layer, count]

    def piece(self, layer: int, expert: int, piece: Piece) -> Run:
        """Return the run of one of :meth:`pieces` for an expert."""
        return self.ranges.piece(layer, expert, piece)

    def read_run(self, run: Run, views: Sequence[memoryview]) -> int:
        """Read `run` into consecutive views; return its bytes."""
        self._read_run(run, views)
        self.check(run.file)
        return run.nbytes

    def read_staged(self, run: Run, buffer: memoryview) -> int:
        """Read `run` into a page-aligned buffer that is two pages larger; return the offset in the
        buffer at which it begins."""
        self.read_run(run, [buffer[: run.nbytes]])
        return 0

    def places(self, layer: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return files, int32, and offsets, int64, of all blocks of a layer, ``[E, components]``,
        and the :meth:`ByteRanges.order` of the components."""
        return *self.ranges.table(layer), self.ranges.order(layer)

    def _announce(self, runs: Sequence[Run]) -> None:
        """Prepare for the reads of `runs`; a subclass may tell the system."""

    def _read_run(self, run: Run, views: Sequence[memoryview]) -> None:
        self.fill(run, views)

    def wrong(self, layer: int, expert: int) -> ExpertFileError:
        """Return the error of a block that differs from its checksum."""
        file = self.ranges.files[self.ranges.runs(layer, expert)[0].file]
        return ExpertFileError(
            f"{file}: expert {expert} of layer {layer} differs from its checksum; check disk and "
            "memory, then convert the checkpoint again."
        )


class PreadReader(FileReader):
    """``os.preadv`` straight into the caller's buffers; pages stay in the page cache.

    A block of a stock checkpoint has nine ranges. One read after another leaves most of the disk's
    queue empty, so the reader first announces all of them to a system that takes such advice.
    """

    name = "pread"

    def __init__(self, experts: Mapping[int, Mapping[str, ExpertRefs]]):
        super().__init__(experts)
        # The next expert is rarely a neighbour.
        self._advises = self.advise_random()

    def _announce(self, runs: Sequence[Run]) -> None:
        if not self._advises or len(runs) == 1:
            return
        for run in runs:
            fd = self._fds[run.file]
            os.posix_fadvise(fd, run.offset, run.nbytes, os.POSIX_FADV_WILLNEED)


class DirectReader(FileReader):
    """Reads that bypass the page cache: ``O_DIRECT`` through an aligned buffer for each thread
    on Linux, ``F_NOCACHE`` on macOS.

    Raises:
        UnsupportedError: The file system does not allow it.
    """

    name = "direct"
    _flags = FileReader._flags | getattr(os, "O_DIRECT", 0)

    def __init__(self, experts: Mapping[int, Mapping[str, ExpertRefs]]):
        super().__init__(experts)
        self._local = threading.local()
        self._bounces = hasattr(os, "O_DIRECT")
        if self._bounces:
            largest = max(self.layout(layer).nbytes for layer in self.layers)
            self.alignment = DIRECT_ALIGNMENT
            self.staging_bytes = min(_round_up(largest) + DIRECT_ALIGNMENT, MAX_BOUNCE_BYTES)
        try:
            self._prepare()
        except OSError as cause:
            self.close()
            raise self._cannot_open(self.ranges.files[0], cause) from cause

    def close(self) -> None:
        """See :meth:`Reader.close`; drops every thread's buffer."""
        super().close()
        self._local = threading.local()

    def _prepare(self) -> None:
        """Switch caching off where a flag at opening does not; try one read."""
        if self._bounces:
            os.preadv(self._fds[0], [self._buffer()[1][:DIRECT_ALIGNMENT]], 0)
            return
        for fd in self._fds:
            if not pass_page_cache(fd):
                raise OSError(0, "this system has no direct reads")

    def read_staged(self, run: Run, buffer: memoryview) -> int:
        """See :meth:`FileReader.read_staged`: without another copy."""
        if not self._bounces:
            return super().read_staged(run, buffer)
        before = run.offset % DIRECT_ALIGNMENT
        self._fill_aligned(run, buffer, run.offset - before, before + run.nbytes)
        self.check(run.file)
        return before

    def _fill_aligned(self, run: Run, buffer: memoryview, at: int, nbytes: int) -> None:
        """Read `nbytes` at `at`, which is aligned, and what the last page has behind them."""
        done = 0
        while done < nbytes:
            start = done - done % SECTOR
            end = start + self._preadv(run, [buffer[start : _round_up(nbytes)]], at + start)
            if end <= done:
                raise self.ends_early(run, at + end)
            done = end

    def _buffer(self) -> tuple[np.ndarray, memoryview]:
        """Return this thread's page-aligned buffer, as an array and as a view."""
        if not hasattr(self._local, "buffer"):
            memory = mmap.mmap(-1, self.staging_bytes)
            self._local.buffer = np.frombuffer(memory, np.uint8), memoryview(memory)
        return self._local.buffer

    def _read_run(self, run: Run, views: Sequence[memoryview]) -> None:
        if not self._bounces:
            super()._read_run(run, views)
            return
        array, view = self._buffer()
        at, stop = run.offset - run.offset % DIRECT_ALIGNMENT, run.offset + run.nbytes
        while at < stop:
            first, last = max(at, run.offset), min(at + self.staging_bytes, stop)
            self._fill_aligned(run, view, at, last - at)
            into = window(views, first - run.offset, last - run.offset)
            copy_into(into, array[first - at : last - at])
            at = last

    def _cannot_open(self, file: Path, cause: OSError) -> Exception:
        if isinstance(cause, FileNotFoundError):
            return super()._cannot_open(file, cause)
        return UnsupportedError(
            f"{file} cannot be read past the page cache ({cause.strerror or cause}); "
            "choose the reader 'pread'."
        )


class MmapReader(FileReader):
    """Copies out of a mapping of the file.

    If another process truncates the file during a copy, the system ends this process: prefer
    ``pread`` for files that may change.
    """

    name = "mmap"

    def __init__(self, experts: Mapping[int, Mapping[str, ExpertRefs]]):
        self._maps: list[mmap.mmap] = []
        super().__init__(experts)
        for file, fd in zip(self.ranges.files, self._fds, strict=True):
            try:
                self._maps.append(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError) as cause:
                self.close()
                raise ExpertFileError(f"{file} cannot be mapped: {cause}.") from cause

    def close(self) -> None:
        """See :meth:`Reader.close`."""
        maps, self._maps = self._maps, []
        for mapping in maps:
            mapping.close()
        super().close()

    def _read_run(self, run: Run, views: Sequence[memoryview]) -> None:
        mapping = self._maps[run.file]
        stop = run.offset + run.nbytes
        size = os.fstat(self._fds[run.file]).st_size
        if stop > min(size, len(mapping)):
            raise self.ends_early(run, size)
        start = run.offset - run.offset % mmap.PAGESIZE
        # Ask for the whole run instead of one fault per page. Afterwards the pages count as cache
        # again, not as memory of this process.
        mapping.madvise(mmap.MADV_WILLNEED, start, stop - start)
        copy_into(views, np.frombuffer(mapping, np.uint8, run.nbytes, run.offset))
        mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def cut(
    order: Sequence[int], sizes: Sequence[int], count: int, least: int = LEAST_PIECE
) -> Sequence[Piece]:
    """Cut components of these sizes, consecutive in `order`, into at most `count` pieces of about
    the same size, none much smaller than `least` bytes."""
    total = sum(sizes[c] for c in order)
    step = -(-total // max(1, min(count, total // least)))
    if step >= 8 * DIRECT_ALIGNMENT:
        step = _round_up(step)
    pieces = []
    for start in range(0, total, max(step, 1)):
        stop, position, parts = min(start + step, total), 0, []
        for c in order:
            begin, end = max(start - position, 0), min(stop - position, sizes[c])
            if begin < end:
                parts.append((c, begin, end))
            position += sizes[c]
        pieces.append(Piece(start, stop, tuple(parts)))
    return pieces


def _round_up(n: int) -> int:
    return -(-n // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
