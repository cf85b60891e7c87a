"""The threads of ``handshake.c`` and all memory that they use, through ctypes."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p

import numpy as np

from mlx_moeflux.backend import usable_cores
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.io.file_readers import FileReader
from mlx_moeflux.experts.io.native_pool import (
    LOOK_AGAIN,
    BlockPlaces,
    NativePool,
    Outcome,
    error_of,
)
from mlx_moeflux.experts.io.read_pool import complete
from mlx_moeflux.kernels.runtime import device

# Of handshake.c: threads that read, words before the pieces of a layer and of a piece, and an error
# of its own.
MOST_READERS, PIECES, PIECE_WORDS, NO_EXPERT = 64, 64, 4, -5
COUNTS = ("lookups", "misses", "evictions", "bytes_read", "read", "waited", "decided")
# Bytes of a part of a block: a kernel copies it while the next ones are read.
STEP = 1 << 16
WORD_BYTES, COMMON_BYTES = 8, 128
# Parts begin at multiples of a line of the cache, or of a page if reads are direct.
_LINE = 128
_POINTERS = ("places", "box", "slot_of", "expert_of", "scores", "since", "counts")


class _Shelf(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in ("slots", "experts", "time")),
        ("base", c_double),
    )


class _Failure(ctypes.Structure):
    _fields_ = (("shelf", c_int64), ("expert", c_int64), ("outcome", Outcome))


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("shelves", "words", "staging")),
        *((n, c_int64) for n in ("pulled", "count", "chosen", "alignment", "step", "room")),
        *((n, c_int64) for n in ("parts", "readers")),
        ("rate", c_double),
    )


class Shelf:
    """The slots of a layer, lent to a :class:`Desk`.

    slot_of: ``[E]`` int32. expert_of: ``[slots]`` int32; -1: none. scores: ``[E]`` float64.
    since: ``[slots]`` int64, the turn in which a slot was filled; 0: before the desk opened.
    base: See :class:`~mlx_moeflux.experts.policies.eviction.Scores`. time: Tokens that the layer
    has seen.
    """

    def __init__(
        self,
        places: BlockPlaces,
        expert_of: Sequence[int],
        scores: Mapping[int, float],
        *,
        num_experts: int,
        base: float,
        time: int,
    ):
        self.places, self.base, self.time = places, base, time
        self.expert_of = np.array(expert_of, np.int32)
        self.slot_of = np.full(num_experts, -1, np.int32)
        used = np.flatnonzero(self.expert_of >= 0)
        self.slot_of[self.expert_of[used]] = used
        self.scores = np.zeros(num_experts)
        self.scores[list(scores)] = list(scores.values())
        self.since = np.zeros(len(self.expert_of), np.int64)


class Memory:
    """Memory that kernels and threads share, for calls of each layer of `reader`.

    pull: Allocates it. words: uint64 of all layers. boxes: Layer -> address of its words. staging:
    Address of the bytes that are read; None: they are read into slots.
    """

    def __init__(self, reader: FileReader, pull: device.Pull):
        self.k, self.pulled = pull.k, pull.copies
        self.parts, box = pull.k * most_parts(reader), _box_bytes(reader, pull)
        self.room = _room(reader)
        self.view = pull.locked(desk_bytes(reader, pull))
        start = COMMON_BYTES + box * len(reader.layers)
        self.view[:start] = bytes(start)
        self.common = device.address_of(self.view)
        self.words = np.frombuffer(self.view[:COMMON_BYTES], np.uint64)
        self.boxes = {
            layer: self.common + COMMON_BYTES + i * box for i, layer in enumerate(reader.layers)
        }
        staged = self.common + -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        self.staging = staged if _is_staged(reader, pull) else None


class Desk:
    """Threads that answer kernels for the layers of `shelves`, in their order, step by step. They
    end with :meth:`close` or with this object. One thread at a time calls it.

    rate: See :class:`~mlx_moeflux.experts.policies.eviction.Scores`.

    Raises:
        RuntimeError: The system gives no more threads or memory.
    """

    def __init__(
        self, pool: NativePool, memory: Memory, shelves: Mapping[int, Shelf], *, rate: float
    ):
        self._pool, self._memory, self.shelves = pool, memory, shelves
        self._counts = np.zeros((len(shelves), len(COUNTS)), np.int64)
        self._structs = (_Shelf * len(shelves))()
        for i, (layer, shelf) in enumerate(shelves.items()):
            arrays = shelf.slot_of, shelf.expert_of, shelf.scores, shelf.since, self._counts[i]
            self._structs[i] = _Shelf(
                *(ctypes.addressof(shelf.places.layer), memory.boxes[layer]),
                *(array.ctypes.data for array in arrays),
                *(len(shelf.expert_of), len(shelf.slot_of), shelf.time, shelf.base),
            )
        plan = _Plan(
            *(ctypes.addressof(self._structs), memory.common, memory.staging),
            *(memory.pulled, len(shelves), memory.k, pool.reader.alignment, STEP, memory.room),
            *(memory.parts, min(pool.count, max(usable_cores() - 2, 1), MOST_READERS), rate),
        )
        self._handle = c_void_p()
        used = memory, self._structs, self._counts, shelves
        # Before there are threads: an interrupt after they have begun must not leave them.
        self._end = weakref.finalize(self, _close, pool.library, self._handle, os.getpid(), used)
        pool.library.desk_open(ctypes.byref(self._handle), ctypes.byref(plan))
        if not self.open:
            raise RuntimeError("the system gives no more threads or memory")

    @property
    def open(self) -> bool:
        """False after :meth:`close`, which the other methods must not follow."""
        return self._handle.value is not None

    @property
    def turn(self) -> int:
        """Number of the present step, or of the last one."""
        return int(self._memory.words[0])

    def begin(self) -> None:
        """Begin a step: kernels may post ids."""
        self._pool.library.desk_begin(self._handle)

    def abort(self) -> None:
        """Let no kernel and no thread wait in the rest of this step."""
        self._pool.library.desk_abort(self._handle)

    def wait(self) -> None:
        """Wait until the threads have done what the kernels of this step asked for. An interrupt is
        raised after that."""
        ended = self._pool.library.desk_ended

        def look() -> None:
            while not ended(self._handle, LOOK_AGAIN):
                pass

        complete(look)

    def failure(self) -> str | None:
        """Return in one line what went wrong in this step; None: nothing. Call it after
        :meth:`wait`."""
        found = _Failure()
        if not self._pool.library.desk_failure(self._handle, ctypes.byref(found)):
            return None
        layer, outcome = list(self.shelves)[found.shelf], found.outcome
        if not outcome.error:
            return "a kernel waited too long for the host"
        if outcome.error == NO_EXPERT:
            return f"a kernel asked for expert {found.expert} of layer {layer}, which is none"
        error: MoefluxError = error_of(self._pool, layer, found.expert, outcome)
        return str(error)

    def counts(self) -> dict[int, dict[str, int]]:
        """Return what was counted for each layer since the last call; times are nanoseconds. Call
        it after :meth:`wait`."""
        rows = self._counts.tolist()
        self._counts[:] = 0
        return {
            layer: dict(zip(COUNTS, row, strict=True))
            for layer, row in zip(self.shelves, rows, strict=True)
        }

    def close(self) -> None:
        """End the threads, which waits for reads under way, and note the bases of the scores."""
        self._end()
        for shelf, struct in zip(self.shelves.values(), self._structs, strict=True):
            shelf.base = struct.base


def _close(library: ctypes.CDLL, handle: c_void_p, process: int, used: object) -> None:
    """End the threads, once. process: Whose they are; one that was forked has none to wait for.
    used: What they use; it lives until then, also if all of it is garbage."""
    if os.getpid() == process:
        library.desk_close(ctypes.byref(handle))


def _runs(reader: FileReader) -> list[list[int]]:
    """Return for each layer the bytes of a block's stretches that lie together in a file."""
    sizes = {i: [c.nbytes for c in reader.layout(i).components] for i in reader.layers}
    return [[sum(each)] if reader.ranges.order(i) else each for i, each in sizes.items()]


def most_parts(reader: FileReader) -> int:
    """Return the most parts that a block of any layer is read in."""
    return max(sum(-(-nbytes // STEP) for nbytes in runs) for runs in _runs(reader))


def _is_staged(reader: FileReader, pull: device.Pull) -> bool:
    """Return True if blocks pass through staging: kernels take them there, and so do threads after
    direct reads, which begin and end on a page."""
    return pull.copies or reader.alignment > 1


def _box_bytes(reader: FileReader, pull: device.Pull) -> int:
    """Return the bytes of a layer's words: each component in a part is a piece that is pulled."""
    if not pull.copies:
        return WORD_BYTES * PIECES
    components = max(len(reader.layout(layer).components) for layer in reader.layers)
    return WORD_BYTES * (PIECES + PIECE_WORDS * pull.k * (most_parts(reader) + components))


def _room(reader: FileReader) -> int:
    """Return the bytes of staging of a part: direct reads begin and end on a page."""
    part = min(STEP, max(map(max, _runs(reader))))
    pages = 2 * mmap.PAGESIZE if reader.alignment > 1 else 0
    return -(-part // _LINE) * _LINE + pages


def desk_bytes(reader: FileReader, pull: device.Pull) -> int:
    """Return the bytes of :class:`Memory`."""
    words = COMMON_BYTES + _box_bytes(reader, pull) * len(reader.layers)
    if not _is_staged(reader, pull):
        return words
    return words + mmap.PAGESIZE + pull.k * most_parts(reader) * _room(reader)
