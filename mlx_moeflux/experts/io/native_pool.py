"""Read blocks of files on threads that need no interpreter: ``native_reads.c`` through ctypes.

A thread of Python takes the interpreter's lock several times a block, so that eight of them delay
one another and the caller, who builds a graph meanwhile. Where a C compiler is at hand, it builds
the file once for each user; otherwise, and for readers that are not exactly ``pread`` or
``direct``, :mod:`~mlx_moeflux.experts.io.read_pool` reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p
from itertools import chain
from pathlib import Path
from types import MethodType
from typing import TypeGuard

import numpy as np

from mlx_moeflux import user_cache
from mlx_moeflux.checkpoint.files import Stamp
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.io import read_pool
from mlx_moeflux.experts.io.byte_ranges import Run
from mlx_moeflux.experts.io.file_readers import DirectReader, FileReader, PreadReader
from mlx_moeflux.experts.io.open_files import OpenFiles
from mlx_moeflux.experts.io.read_pool import Arrival, BlockFetch, BlockPool, ReadPool, SlotMemory
from mlx_moeflux.experts.io.readers import Reader, largest_block, private_bytes
from mlx_moeflux.experts.io.replicas import ReplicaPool, ReplicaReader
from mlx_moeflux.kernels.runtime import device

# The first holds the second.
SOURCES = tuple(Path(__file__).with_name(name) for name in ("handshake.c", "native_reads.c"))
# Scores have Python's bits: a product is rounded before it is added to.
FLAGS = ("-O2", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
# Checksums take an instruction that a compiler for any machine of the kind does not assume.
if platform.machine() == "aarch64":
    FLAGS = (*FLAGS, "-march=armv8-a+crc")
# Of native_reads.c.
MOST_COMPONENTS = 16
ENDS_EARLY, REFUSED, WRONG, CHANGED = -1, -2, -3, -4
# The caller looks for an interrupt after so many nanoseconds.
LOOK_AGAIN = 50_000_000


class _File(ctypes.Structure):
    _fields_ = (
        ("path", c_char_p),
        *((name, c_int64) for name in ("device", "inode", "size", "seconds", "nanoseconds")),
        ("fd", c_int32),
    )

    @classmethod
    def of(cls, path: str, stamp: Stamp, fd: int) -> _File:
        seconds, nanoseconds = divmod(stamp.modified_ns, 10**9)
        known = stamp.device, stamp.inode, stamp.size, seconds, nanoseconds
        return cls(os.fsencode(path), *known, fd)


class _Layer(ctypes.Structure):
    _fields_ = (
        ("files", POINTER(_File)),
        *((name, c_void_p) for name in ("where", "offsets", "sizes", "addresses", "order")),
        ("checksums", c_void_p),
        ("components", c_int64),
    )


class Outcome(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("nbytes", "nanoseconds", "elapsed", "offset", "wanted", "done")),
        ("file", c_int32),
        ("error", c_int32),
        ("rest", c_uint32),
    )


class Device(ctypes.Structure):
    """Functions of a GPU's driver and their arguments, see ``native_reads.c``."""

    _fields_ = (
        *((n, c_void_p) for n in ("enter", "launch", "finish", "context", "stream", "kernel")),
        ("blocks", c_uint32),
        ("threads", c_uint32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled ``handshake.c``, which holds ``native_reads.c``; None where it cannot be
    built or loaded."""
    try:
        found = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError):
        return None
    found.pool_open.restype = c_void_p
    found.pool_open.argtypes = c_int, c_int64, c_int64, c_int64, c_void_p, POINTER(Device)
    found.pool_close.argtypes = (c_void_p,)
    found.batch_bytes.restype = c_int64
    found.batch_bytes.argtypes = c_void_p, POINTER(_Layer), c_int64
    found.batch_begin.restype, found.batch_begin.argtypes = (
        None,
        (
            *(c_void_p, c_void_p, POINTER(_Layer), c_int64, c_char_p),
            *(POINTER(Outcome), c_int, c_int),
        ),
    )
    found.batch_abandon.argtypes = c_void_p, c_void_p
    found.batch_wait.argtypes = c_void_p, c_void_p, c_int64
    found.desk_open.restype, found.desk_open.argtypes = None, (c_void_p,) * 2
    found.desk_ended.argtypes, found.desk_failure.argtypes = (c_void_p, c_int64), (c_void_p,) * 2
    for name in ("begin", "abort", "close"):
        function = getattr(found, f"desk_{name}")
        function.restype, function.argtypes = None, (c_void_p,)
    return found


def _built() -> Path:
    """Return the shared library in the user's cache, built if need be.

    Raises:
        OSError: There is no compiler or no folder that is this user's alone.
        SubprocessError: The compiler fails.
    """
    text = [file.read_bytes() for file in SOURCES]
    whole = hashlib.sha256(repr((text, FLAGS, sys.platform, platform.machine())).encode())
    folder = user_cache.private("native")
    if folder is None:
        raise OSError("no private folder")
    file = folder / f"reads-{whole.hexdigest()[:16]}.so"
    if file.exists():
        return file
    if sys.platform == "darwin":
        # Without the command line tools, cc asks for them in a window.
        subprocess.run(["xcode-select", "-p"], check=True, capture_output=True, timeout=10)
    compiler = shutil.which("cc")
    if compiler is None:
        raise OSError("no compiler")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / file.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCES[0]), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(made, file)
    return file


def _close(library: ctypes.CDLL, handle: int, process: int) -> None:
    """End the threads. A process that was forked from theirs has none to wait for."""
    if os.getpid() == process:
        library.pool_close(handle)


class NativeThreads:
    """A fixed number of threads that read from `files`. They end with :meth:`close` or with this
    object, which waits for reads under way.

    Raises:
        OSError: There is no compiled library, or the system gives no more threads or memory.
    """

    def __init__(self, files: OpenFiles, count: int, uploads: device.Uploads | None = None):
        found = library()
        if found is None:
            raise OSError("no compiled library")
        self.library, self.open_files, self.count, self.uploads = found, files, count, uploads
        alignment, nbytes, driver = files.alignment, 0, None
        if uploads is not None:
            functions, self._memory = uploads.native()
            driver, nbytes = Device(*functions), uploads.nbytes
        elif alignment > 1:
            nbytes = files.staging_bytes
            self._memory = memoryview(mmap.mmap(-1, (count + 1) * nbytes))
        start = ctypes.addressof(c_int.from_buffer(self._memory)) if nbytes else None
        least = files.least_piece
        self.handle = found.pool_open(count, alignment, least, nbytes, start, driver)
        if not self.handle:
            raise OSError("no threads")
        self._buffered = bool(nbytes)
        known = zip(files.paths, files.stamps, files.descriptors, strict=True)
        structs = [_File.of(*each) for each in known]
        self.files = (_File * len(structs))(*structs)
        self._end = weakref.finalize(self, _close, found, self.handle, os.getpid())

    def close(self) -> None:
        """See :meth:`BlockPool.close`."""
        self._end()
        self.handle = None

    def reads_in_caller(self, nbytes: int) -> bool:
        """Return True if the caller reads blocks of `nbytes` sooner than it wakes a thread."""
        return nbytes <= read_pool.SMALL_BYTES and not self._buffered


class NativePool(NativeThreads):
    """Native threads that read the blocks of one reader. See
    :class:`~mlx_moeflux.experts.io.read_pool.BlockPool`."""

    def __init__(self, reader: FileReader, count: int, uploads: device.Uploads | None):
        super().__init__(reader, count, uploads)
        self.reader = reader
        self._places: dict[int, BlockPlaces] = {}

    @staticmethod
    def serves(reader: Reader) -> TypeGuard[FileReader]:
        """Return True if native threads can read what `reader` reads."""
        if type(reader) not in (PreadReader, DirectReader) or library() is None:
            return False
        if reader.read != MethodType(FileReader.read, reader):
            return False  # somebody put another method in its place
        counts = [len(reader.layout(layer).components) for layer in reader.layers]
        return max(counts) <= MOST_COMPONENTS

    def fetch(
        self, layer: int, slots: SlotMemory, blocks: Iterable[tuple[int, int]]
    ) -> NativeFetch:
        """See :meth:`BlockPool.fetch`."""
        return NativeFetch(self, self.place(layer, slots), list(blocks), slots, layer)

    def place(self, layer: int, slots: SlotMemory) -> BlockPlaces:
        """Return where the blocks and slots of a layer lie; kept until its bank changes."""
        known = self._places.get(layer)
        if known is None or known.addresses is not slots.addresses:
            where, offsets, order = self.reader.places(layer)
            checksums = self.reader.ranges.checksums(layer)
            known = BlockPlaces(self.files, slots.addresses, where, offsets, order, checksums)
            self._places[layer] = known
        return known


class BlockPlaces:
    """Holds the places of a layer's blocks in files, and of one bank's slots in memory.

    addresses: Of each component the address of all slots, and the bytes of one. where, offsets,
    order: See :meth:`FileReader.places`; empty: components do not follow one another. nbytes: Of
    a block.
    """

    def __init__(
        self,
        files: ctypes.Array[_File],
        addresses: Sequence[tuple[int, int]] | np.ndarray,
        where: np.ndarray,
        offsets: np.ndarray,
        order: Sequence[int] = (),
        checksums: np.ndarray | None = None,
    ):
        starts, sizes = np.array(addresses, np.int64).T.copy()
        self.addresses, self.nbytes = addresses, int(sizes.sum())
        orders = np.array(order or (-1,), np.int32)
        self._arrays = where, offsets, sizes, starts, orders, checksums
        pointers = (None if array is None else array.ctypes.data for array in self._arrays)
        self.layer = _Layer(files, *pointers, len(sizes))
        self._batches: dict[int, type[ctypes.Array[c_char]]] = {}

    def batch(self, pool: NativeThreads, count: int) -> ctypes.Array[c_char]:
        """Allocate memory for a batch of `count` blocks."""
        kind = self._batches.get(count)
        if kind is None:
            nbytes = pool.library.batch_bytes(pool.handle, self.layer, count)
            kind = self._batches[count] = c_char * nbytes
        return kind()


class NativeFetch(BlockFetch):
    """Blocks of `place` that native threads read.

    memory: What the threads write. layer: Of the blocks.
    """

    def __init__(
        self,
        pool: NativeThreads,
        place: BlockPlaces,
        blocks: Sequence[tuple[int, int]],
        memory: object,
        layer: int = -1,
    ):
        self.blocks, self._layer, self._pool, self._place = blocks, layer, pool, place
        self.in_caller = False
        self._memory = memory
        self._outcomes = (Outcome * len(blocks))()
        self._over = True

    def start(self, *, urgent: bool = False) -> None:
        """Begin all reads: on the threads, or in the caller if blocks are small and `urgent`."""
        count, pool, place = len(self.blocks), self._pool, self._place
        if not count:
            return
        self.in_caller = urgent and pool.reads_in_caller(place.nbytes)
        self._batch, self._over = place.batch(pool, count), False
        blocks = struct.pack(f"{2 * count}q", *chain.from_iterable(self.blocks))
        pool.library.batch_begin(
            *(pool.handle, self._batch, place.layer, count, blocks),
            *(self._outcomes, urgent, not self.in_caller),
        )
        if self.in_caller:
            self._wait()

    def wait(self) -> MoefluxError | None:
        """See :meth:`BlockFetch.wait`."""
        self._wait()
        for (expert, _), outcome in zip(self.blocks, self._outcomes, strict=True):
            if outcome.error:
                return error_of(self._pool, self._layer, expert, outcome)
        return None

    def abandon(self) -> None:
        """See :meth:`BlockFetch.abandon`."""
        if not self._over:
            self._pool.library.batch_abandon(self._pool.handle, self._batch)

    def _drain(self) -> None:
        self.abandon()
        self._wait()

    def arrivals(self) -> list[Arrival]:
        """See :meth:`BlockFetch.arrivals`."""
        nbytes = self._place.nbytes
        return [
            Arrival(*block, nbytes, 1e-9 * outcome.nanoseconds)
            for block, outcome in zip(self.blocks, self._outcomes, strict=True)
            if outcome.nbytes == nbytes and not outcome.error
        ]

    def elapsed(self) -> float:
        """See :meth:`BlockFetch.elapsed`."""
        return 1e-9 * max((outcome.elapsed for outcome in self._outcomes), default=0)

    def _wait(self) -> None:
        pool = self._pool
        # A closed pool has ended all reads.
        while not self._over and pool.handle:
            if pool.library.batch_wait(pool.handle, self._batch, LOOK_AGAIN):
                self._over = True
        if pool.uploads is not None:
            pool.uploads.finish()


def error_of(pool: NativeThreads, layer: int, expert: int, outcome: Outcome) -> MoefluxError:
    """Return the error of a block that was not read."""
    files = pool.open_files
    if outcome.error == REFUSED:
        assert pool.uploads is not None, "only a driver refuses"
        return pool.uploads.refusal(outcome.error)
    if outcome.error == CHANGED:
        return files.changed(outcome.file)
    if outcome.error == WRONG:
        assert isinstance(files, FileReader), "only experts have checksums"
        return files.wrong(layer, expert)
    run = Run(outcome.file, outcome.offset, outcome.wanted, ())
    if outcome.error == ENDS_EARLY:
        return files.ends_early(run, outcome.offset + outcome.done)
    cause = OSError(outcome.error, os.strerror(outcome.error))
    return files.failed(run, outcome.offset + outcome.done, cause)


def staging_bytes(reader: Reader, threads: int) -> int:
    """Return the bytes of all private buffers of a pool: of its threads and, if they are native, of
    the caller."""
    if isinstance(reader, ReplicaReader):
        return sum(staging_bytes(each, threads) for each in reader.readers.values())
    each = private_bytes(reader) + device.upload_bytes(largest_block(reader))
    return (threads + NativePool.serves(reader)) * each


def open_pool(reader: Reader, threads: int, uploads: device.Uploads | None) -> BlockPool:
    """Return threads that read with `reader`: native ones where they can, and so many for each
    replica."""
    if isinstance(reader, ReplicaReader):
        pools: dict[str, BlockPool] = {}
        for place, each in reader.readers.items():
            if pools and uploads is not None:
                uploads = device.uploads_for(largest_block(reader), threads)
            pools[place] = open_pool(each, threads, uploads)
        return ReplicaPool(reader, pools)
    files: Reader = reader
    if NativePool.serves(files):
        with contextlib.suppress(OSError):
            return NativePool(files, threads, uploads)
    return ReadPool(reader, threads, uploads)
