"""Blocks on their way into the memory of an NVIDIA GPU.

A bank that the host can address is managed memory there. Written by the host, every page of a block
first comes over from the GPU and later goes back, fault by fault: a block of 1.8 MB took 0.6 ms to
write and held the next kernel up for 0.5 ms on an H100. So the pages of a bank stay on the GPU,
blocks are read into page-locked memory, and the driver copies them: 0.05 ms.

MLX offers none of this, so the driver's own library is called. Where it cannot be loaded, or
refuses, banks are written as everywhere else.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

_PREFERRED_LOCATION, _PORTABLE, _NON_BLOCKING, _DEVICE = 3, 1, 1, 0
_GRANULE = mmap.PAGESIZE


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The few functions of ``libcuda`` that uploads need, on the context that MLX uses.

    Raises:
        OSError: There is no driver.
        DriverError: It refused.
    """

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._local = threading.local()
        self._copy = self._library.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), _DEVICE)

    def call(self, name: str, *arguments: object) -> None:
        """One function by name."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise DriverError(f"{name} returned {result}")

    def stream(self) -> ctypes.c_void_p:
        """This thread's stream; makes the context current first."""
        if not hasattr(self._local, "stream"):
            self.call("cuCtxSetCurrent", self._context)
            stream = ctypes.c_void_p()
            self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            self._local.stream = stream
        return self._local.stream

    def upload(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy (to, from, bytes) from page-locked addresses to the GPU's, and wait."""
        stream, copy = self.stream(), self._copy
        for to, source, nbytes in pieces:
            if result := copy(to, source, nbytes, stream):
                raise DriverError(f"cuMemcpyHtoDAsync_v2 returned {result}")
        self.call("cuStreamSynchronize", stream)

    def settle(self, address: int, nbytes: int) -> None:
        """Let managed memory live on the GPU."""
        stream, where = self.stream(), (ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        self.call("cuMemAdvise", *where, _PREFERRED_LOCATION, _DEVICE)
        self.call("cuMemPrefetchAsync", *where, _DEVICE, stream)
        self.call("cuStreamSynchronize", stream)

    def locked(self, nbytes: int) -> memoryview:
        """Page-locked memory, freed with the last view of it."""
        self.stream()
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE)
        memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
        weakref.finalize(memory, self._free, address.value).atexit = False
        return memoryview(memory).cast("B")

    def _free(self, address: int) -> None:
        self.stream()
        self._library.cuMemFreeHost(ctypes.c_void_p(address))


def driver() -> Driver | None:
    """The driver where banks are in its managed memory, else None."""
    return None if mx.default_device() == mx.cpu else _driver()


@functools.cache
def _driver() -> Driver | None:
    if not mx.cuda.is_available():
        return None
    try:
        return Driver()
    except (OSError, AttributeError, DriverError):
        return None


def address_of(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Uploads:
    """Page-locked memory of each reading thread, as large as a block."""

    def __init__(self, driver: Driver, nbytes: int):
        self._driver, self._nbytes = driver, nbytes
        self._local = threading.local()

    def staging(self) -> Staging:
        """This thread's."""
        if not hasattr(self._local, "staging"):
            self._local.staging = Staging(self._driver, self._nbytes)
        return self._local.staging


def uploads_for(nbytes: int) -> Uploads | None:
    """For blocks of at most `nbytes`; None where banks are written directly."""
    found = driver()
    return None if found is None else Uploads(found, nbytes)


class Staging:
    """Page-locked memory of one thread, and the way from there into slots."""

    def __init__(self, driver: Driver, nbytes: int):
        self._driver = driver
        # Direct reads begin at a multiple of a page and end at one.
        self.view = driver.locked(nbytes + 2 * _GRANULE)
        self._address = address_of(self.view)

    def carve(self, sizes: Sequence[int]) -> list[memoryview]:
        """Consecutive views from the beginning."""
        views, position = [], 0
        for size in sizes:
            views.append(self.view[position : position + size])
            position += size
        return views

    def send(self, into: Sequence[tuple[int, int]], start: int = 0) -> None:
        """Copy what lies here from `start` on to (address, bytes), one after another."""
        pieces, position = [], self._address + start
        for address, nbytes in into:
            pieces.append((address, position, nbytes))
            position += nbytes
        self._driver.upload(pieces)


def staging_bytes(reader: Any) -> int:
    """Bytes of private buffers for each thread that reads with `reader`."""
    own = getattr(reader, "staging_bytes", 0)
    if driver() is None:
        return own
    return own + max(reader.layout(layer).nbytes for layer in reader.layers) + 2 * _GRANULE
