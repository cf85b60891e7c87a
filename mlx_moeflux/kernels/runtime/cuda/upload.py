"""Copy blocks into banks in the memory of an NVIDIA GPU.

A bank that the host can address is managed memory there. When the host writes a block, each of its
pages moves from the GPU and back, fault by fault. So the pages of a bank stay on the GPU: threads
read blocks into page-locked memory, and a kernel copies them. One launch copies all pieces that are
there, where a copy of the driver's own moves a single piece, and most pieces are too small to keep
the bus busy.

MLX offers none of this, so this module calls the driver's own library. Where the library cannot be
loaded, or it or the compiler refuses, the host writes banks as on other machines.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.kernels.runtime.cuda import nvrtc

_PREFERRED_LOCATION, _ACCESSED_BY, _PORTABLE, _NON_BLOCKING, _UNTIMED, _DEVICE = 3, 5, 1, 1, 2, 0
_GRANULE = mmap.PAGESIZE
BUFFERS = 2
# The driver gets its advice again after so many arrays.
REACHED_FOR = 1000

SOURCES = tuple(Path(__file__).with_name(name) for name in ("copy.cuh", "scatter.cu"))
KERNEL, _LOAD = "scatter", "#define LOAD(at) (*(at))\n"
# Of scatter.cu.
MOST_PIECES = 128
# So many threads keep the bus busy, and leave nearly all of the GPU to others.
BLOCKS, THREADS = 32, 256


class _Piece(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("to", "source", "nbytes"))


class Pieces(ctypes.Structure):
    """The argument of the kernel in ``scatter.cu``."""

    _fields_ = (("count", ctypes.c_uint64), ("piece", _Piece * MOST_PIECES))


def launches(pieces: Sequence[tuple[int, int, int]]) -> list[Pieces]:
    """Return the arguments of the launches that copy (to, from, bytes)."""
    starts = range(0, len(pieces), MOST_PIECES)
    groups = (tuple(pieces[start : start + MOST_PIECES]) for start in starts)
    return [Pieces(len(group), group) for group in groups]


class DriverError(MoefluxError):
    """A call of the driver failed."""

    def __init__(self, name: str, result: int):
        super().__init__(f"the GPU's driver refused a copy: {name} returned {result}.")


class Driver:
    """The few functions of ``libcuda`` that uploads need, on the context that MLX uses, and the
    kernel that copies once it is compiled.

    Raises:
        OSError: There is no driver.
        DriverError: It refused.
    """

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._local = threading.local()
        # These return immediately. They keep the interpreter lock: eight threads that pass it on
        # at every call would leave the disk idle.
        quick = ctypes.PyDLL("libcuda.so.1")
        self._launch, self._record, self._query = (
            getattr(quick, name) for name in ("cuLaunchKernel", "cuEventRecord", "cuEventQuery")
        )
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch.argtypes = (pointer, *[number] * 7, *[pointer] * 3)
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), _DEVICE)
        self._enter()
        # Kernels of a prompt fill the GPU: what copies the next experts has precedence.
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._stream = ctypes.c_void_p()
        stream = ctypes.byref(self._stream), _NON_BLOCKING, greatest
        self.call("cuStreamCreateWithPriority", *stream)
        self._kernel = ctypes.c_void_p()

    def call(self, name: str, *arguments: object) -> None:
        """Call one function by name."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise DriverError(name, result)

    def compile(self) -> None:
        """Compile the kernel, once: what follows launches it. A resident model needs none.

        Raises:
            DriverError: The driver refused it.
            nvrtc.CompilerError: There is no compiler, or it refused.
        """
        if self._kernel.value is not None:
            return
        architecture = str(mx.device_info(mx.gpu).get("architecture", ""))
        compiler = nvrtc.find(architecture)
        if compiler is None:
            raise nvrtc.CompilerError(f"NVRTC was not found for '{architecture}'.")
        text = _LOAD + "".join(file.read_text("ascii") for file in SOURCES)
        code, name = compiler.compile(text, KERNEL)
        self._enter()
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(self._kernel), module, name.encode())

    def upload(self, pieces: Sequence[tuple[int, int, int]], event: object) -> None:
        """Begin to copy (to, from, bytes) from page-locked addresses to the GPU's. The driver
        signals `event`, of :meth:`event`, afterwards. Copies of all threads run in order."""
        self._enter()
        for argument in launches(pieces):
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
            grid = BLOCKS, 1, 1, THREADS, 1, 1
            if result := self._launch(self._kernel, *grid, 0, self._stream, arguments, None):
                raise DriverError("cuLaunchKernel", result)
        if result := self._record(event, self._stream):
            raise DriverError("cuEventRecord", result)

    def functions(self) -> list[int | None]:
        """Return the addresses of the functions that enter the context, launch a kernel and wait
        for all copies; the context, the stream and the kernel that they take; the blocks of a
        launch, and the threads of a block."""
        names = "cuCtxSetCurrent", "cuLaunchKernel", "cuStreamSynchronize"
        found = [ctypes.cast(getattr(self._library, name), ctypes.c_void_p) for name in names]
        pointers = *found, self._context, self._stream, self._kernel
        return [*(pointer.value for pointer in pointers), BLOCKS, THREADS]

    def event(self) -> object:
        """Return an event for :meth:`upload`; one that was not given to it is already over."""
        self._enter()
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), _UNTIMED)
        weakref.finalize(event, self._forget, event.value or 0).atexit = False
        return event

    def wait(self, event: object) -> None:
        """Wait for an event."""
        if self._query(event):
            self.call("cuEventSynchronize", event)

    def finish(self) -> None:
        """Wait for all copies."""
        self._enter()
        self.call("cuStreamSynchronize", self._stream)

    def move_to_gpu(self, address: int, nbytes: int) -> None:
        """Move managed memory to the GPU and prefer to keep it there."""
        self._enter()
        where = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        self.call("cuMemAdvise", *where, _PREFERRED_LOCATION, _DEVICE)
        self.call("cuMemPrefetchAsync", *where, _DEVICE, self._stream)
        self.call("cuStreamSynchronize", self._stream)

    def advise_gpu(self, address: int, nbytes: int) -> None:
        """Let the GPU read managed memory in place; other memory is left as it is."""
        self._enter()
        where = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        self._library.cuMemAdvise(*where, _ACCESSED_BY, _DEVICE)

    def locked(self, nbytes: int) -> memoryview:
        """Allocate page-locked memory; it is freed with its last view."""
        self._enter()
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE)
        start = address.value or 0
        memory = (ctypes.c_uint8 * nbytes).from_address(start)
        weakref.finalize(memory, self._free, start).atexit = False
        return memoryview(memory).cast("B")

    def _enter(self) -> None:
        """Set the context of this thread."""
        if not hasattr(self._local, "inside"):
            self.call("cuCtxSetCurrent", self._context)
            self._local.inside = True

    def _free(self, address: int) -> None:
        self._enter()
        self._library.cuMemFreeHost(ctypes.c_void_p(address))

    def _forget(self, event: int) -> None:
        self._enter()
        self._library.cuEventDestroy_v2(ctypes.c_void_p(event))


def keep_on_gpu(views: Iterable[memoryview]) -> None:
    """Keep the storage of banks on the GPU, if the host does not write it."""
    if (home := driver()) is not None:
        for view in views:
            home.move_to_gpu(address_of(view), view.nbytes)


def driver() -> Driver | None:
    """Return the driver where banks are in managed memory, else None."""
    return None if mx.default_device() == mx.cpu else _driver()


@functools.cache
def _driver() -> Driver | None:
    if not mx.cuda.is_available():
        return None
    try:
        return Driver()
    except (OSError, AttributeError, DriverError):
        return None


def bytes_of(array: mx.array) -> memoryview:
    """Return the storage of an evaluated array as writable bytes."""
    # MLX's stubs do not declare the buffer protocol.
    return memoryview(array).cast("B")  # pyright: ignore[reportArgumentType]


def address_of(view: memoryview) -> int:
    """Return the address of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Uploads:
    """Page-locked memory of all reading threads and the caller. Each has two blocks: it reads into
    one while the GPU copies the other. One allocation serves all: locking pages takes long.

    reached_for: The driver gets its advice again after so many arrays.
    """

    def __init__(
        self, driver: Driver, nbytes: int, threads: int, *, reached_for: int = REACHED_FOR
    ):
        self._driver, self._local, self._reached_for = driver, threading.local(), reached_for
        self._reached: set[int] = set()
        self._turn = 0
        size = _buffer_bytes(nbytes)
        count = (threads + 1) * BUFFERS
        self._memory = memory = driver.locked(count * size)
        buffers = [memory[i * size : (i + 1) * size] for i in range(count)]
        self._free = [buffers[i : i + BUFFERS] for i in range(0, len(buffers), BUFFERS)]
        self.nbytes = BUFFERS * size

    def staging(self) -> Staging:
        """Return the staging of the calling thread, one of `threads` or the caller."""
        if not hasattr(self._local, "staging"):
            self._local.staging = Staging(self._driver, self._free.pop())
        return self._local.staging

    def native(self) -> tuple[list[int | None], memoryview]:
        """Return what threads without an interpreter need: :meth:`Driver.functions`, and the
        memory, `nbytes` a thread."""
        return self._driver.functions(), self._memory

    def advise_gpu(self, array: mx.array) -> None:
        """Let the GPU read in place a small array that the host has written.

        Otherwise its page moves to the GPU when the first kernel reads it, and back when the host
        writes again. MLX reuses few addresses; it may also free memory, and with it the advice.
        """
        view = bytes_of(array)
        address, self._turn = address_of(view), self._turn + 1
        if self._turn % self._reached_for == 0:
            self._reached.clear()
        if address not in self._reached:
            self._reached.add(address)
            self._driver.advise_gpu(address, view.nbytes)

    def finish(self) -> None:
        """Wait until all blocks have arrived."""
        self._driver.finish()

    @staticmethod
    def refusal(result: int) -> MoefluxError:
        """Return the error for a copy of :meth:`native` threads that the driver refused."""
        return DriverError("cuLaunchKernel", result)


def uploads_for(nbytes: int, threads: int) -> Uploads | None:
    """Return staging for blocks of at most `nbytes`; None where the host writes banks itself."""
    found = driver()
    if found is None:
        return None
    try:
        found.compile()
    except (DriverError, nvrtc.CompilerError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"Experts reach the GPU slowly, page by page: {reason}", stacklevel=2)
        return None
    return Uploads(found, nbytes, threads)


class Staging:
    """Page-locked memory of one thread, and copies from there into slots."""

    def __init__(self, driver: Driver, views: Sequence[memoryview]):
        self._driver = driver
        self._buffers = [(view, address_of(view), driver.event()) for view in views]
        self._address, self._event = self._buffers[0][1:]

    def take(self) -> memoryview:
        """Return memory to read into, once the copy of its last contents has ended."""
        view, self._address, self._event = buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        self._driver.wait(self._event)
        return view

    def carve(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory to read into as consecutive views from its beginning."""
        memory, views, position = self.take(), [], 0
        for size in sizes:
            views.append(memory[position : position + size])
            position += size
        return views

    def send(self, into: Sequence[tuple[int, int]], start: int = 0) -> None:
        """Begin to copy the taken memory, from `start` on, to consecutive (address, bytes);
        :meth:`Uploads.finish` waits for it."""
        pieces, position = [], self._address + start
        for address, nbytes in into:
            pieces.append((address, position, nbytes))
            position += nbytes
        self._driver.upload(pieces, self._event)


def _buffer_bytes(nbytes: int) -> int:
    """Return `nbytes` in whole pages, and two more: direct reads begin and end on a page."""
    return (-(-nbytes // _GRANULE) + 2) * _GRANULE


def upload_bytes(nbytes: int) -> int:
    """Return the bytes of :class:`Uploads` for each thread that reads blocks of at most `nbytes`; 0
    where the host writes banks itself."""
    return 0 if driver() is None else BUFFERS * _buffer_bytes(nbytes)
