"""Oracle: the resident store. Uploads run through a driver that launches the kernel on the host;
the real one is in test_gpu.py."""

import ctypes
import functools
import mmap
import threading
import time

import numpy as np
import pytest

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.file_readers import LEAST_PIECE, PreadReader
from mlx_moeflux.experts.io.native_pool import NativePool, open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots
from mlx_moeflux.experts.io.readers import READERS, make_reader
from mlx_moeflux.experts.io.replicas import open_readers
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.runtime.cuda import nvrtc, upload
from mlx_moeflux.kernels.runtime.cuda.upload import (
    MOST_PIECES,
    DriverError,
    Pieces,
    Uploads,
    address_of,
    launches,
)
from tests.experts.conftest import read_by
from tests.experts.helpers import (
    FLOATS,
    FORMS,
    LAYERS,
    E,
    K,
    arrive_at_random,
    bank_is_right,
    in_pieces,
    random_call,
    random_experts,
    write_experts,
)
from tests.kernels.runtime.scatter_on_host import launcher

FILES = "pread", "direct", "mmap"


class HostDriver:
    """What uploads need of a driver. Launches run as late as they may: when somebody waits for one
    of them, or for all. enters: Called when a native thread begins to launch. refuses: Launches of
    native threads fail."""

    KERNEL, BLOCKS, THREADS = 0x5CA7, 3, 32
    refuses = False

    def __init__(self):
        self._lock, self._begun, self.reached = threading.RLock(), [], []
        self._run, self.enters, self.launched = launcher(), lambda: None, []
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        enter, launch, finish = (
            ctypes.CFUNCTYPE(ctypes.c_int, *kinds)
            for kinds in ((pointer,), (pointer, *[number] * 7, *[pointer] * 3), (pointer,))
        )
        # What native threads call; a driver's functions return 0.
        self._native = (
            enter(lambda context: self.enters() or 0),
            launch(self._launch),
            finish(lambda stream: self.finish() or 0),
        )

    def functions(self):
        found = [ctypes.cast(each, ctypes.c_void_p).value for each in self._native]
        return [*found, None, None, self.KERNEL, self.BLOCKS, self.THREADS]

    def locked(self, nbytes):
        return memoryview(mmap.mmap(-1, nbytes))

    def event(self):
        return object()

    def advise_gpu(self, address, nbytes):
        self.reached.append((address, nbytes))

    @property
    def uploaded(self):
        pieces = (p for launch in self.launched for p in launch.piece[: launch.count])
        return sum(piece.nbytes for piece in pieces)

    def upload(self, pieces, event):
        for argument in launches(pieces):
            self._begin(argument, event)

    def wait(self, event):
        with self._lock:
            while any(begun is event for _, begun in self._begun):
                self._end_first()

    def finish(self):
        with self._lock:
            while self._begun:
                self._end_first()

    def _launch(self, kernel, *arguments):
        *grid, memory, stream, parameters, extra = arguments
        if self.refuses:
            return 1
        expected = [self.BLOCKS, 1, 1, self.THREADS, 1, 1]
        if (kernel, grid, memory, stream, extra) != (self.KERNEL, expected, 0, None, None):
            return 2
        first = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        self._begin(Pieces.from_buffer_copy(ctypes.string_at(first, ctypes.sizeof(Pieces))), None)
        return 0

    def _begin(self, argument, event):
        with self._lock:
            self._begun.append((argument, event))

    def _end_first(self):
        argument, _ = self._begun.pop(0)
        self._run(argument, self.BLOCKS, self.THREADS)
        self.launched.append(argument)


@pytest.fixture
def host(monkeypatch):
    found = HostDriver()
    uploads = functools.partial(Uploads, found, reached_for=8)
    monkeypatch.setattr(device, "uploads_for", uploads)
    return found


GIVEN = [*((name, least) for name in FILES for least in (LEAST_PIECE, 1000)), ("memory", 1000)]


@pytest.mark.parametrize(
    ("small_blocks", "name", "least"),
    [
        pytest.param(way, *given, marks=[pytest.mark.slow] * ((turn + i) % 2))
        for turn, way in enumerate(("threads", "python threads"))
        for i, given in enumerate(GIVEN)
    ],
    indirect=["small_blocks"],
)
def test_slots_filled_by_uploads_hold_the_experts(experts, host, name, least):
    resident = experts.resident()
    with StreamedStore(in_pieces(READERS[name](experts.refs), least), K, threads=3) as store:
        for seed in range(12):
            for layer in LAYERS:
                call = random_call(1, seed=seed)
                expected = np.array(resident.experts(layer, *call))
                assert np.array_equal(np.array(store.experts(layer, *call)), expected)
        assert bank_is_right(store, experts)
        total = store.stats().total
        assert total.reads == total.misses > 0
        assert host.uploaded == total.bytes_read


@read_by("threads", "python threads")
@pytest.mark.parametrize("name", ["pread", "direct"])
@pytest.mark.parametrize("form", FORMS)
def test_components_of_odd_sizes(tmp_path, host, small_blocks, form, name):
    """Of 210 bytes each, behind one another in memory and in files."""
    made = random_experts(FLOATS, hidden=15, inner=7)
    experts = write_experts(tmp_path, made, form)
    reader = in_pieces(READERS[name](experts.refs), 100)
    with StreamedStore(reader, 4, threads=3) as store:
        arrive_at_random(store, experts)
        assert host.uploaded == store.stats().total.bytes_read


@read_by("threads", "python threads")
def test_each_copy_has_staging_of_its_own(tmp_path, experts, host, small_blocks):
    copy = write_experts(tmp_path / "copy", random_experts(), "packed").refs
    resident, reader = experts.resident(), open_readers("pread", {"a": experts.refs, "b": copy})
    with StreamedStore(reader, K, threads=3) as store:
        for seed in range(12):
            call = random_call(1, seed=seed)
            expected = np.array(resident.experts(3, *call))
            assert np.array_equal(np.array(store.experts(3, *call)), expected)
        assert bank_is_right(store, experts)
        assert host.uploaded == store.stats().total.bytes_read
        assert all(place.bytes_read for place in store.stats().places.values())


def test_the_gpu_reads_slot_numbers_where_they_lie(experts, host):
    # A layer that holds every expert is not looked at, and has no slots to give.
    with StreamedStore(make_reader("pread", experts.refs), E - 1, threads=2) as store:
        slots = []
        for seed in range(7):
            with store.exclusive():
                call = store.begin_load(3, *random_call(1, seed=seed)[1:])
                slots.append(store.slots_of(call))
                store.wait(call)
                store.release_after(call, slots[-1])
        places = [(address_of(memoryview(array).cast("B")), 4 * K) for array in slots]
        assert len(set(places)) == 7, "all are kept, so none is where another was"
        assert host.reached == places
        for array in slots + slots:
            store._uploads.advise_gpu(array)
    assert host.reached[7:] == [*places, *places[1:]], "told again from the 8th and the 16th on"


@read_by("python threads")
def test_a_part_that_fails_is_an_expert_that_did_not_arrive(experts, host, monkeypatch):
    reader = in_pieces(PreadReader(experts.refs))
    if len(reader.ranges.runs(3, 0)) > 1:
        pytest.skip("this form is read in one piece")
    staged, calls = reader.read_staged, []

    def fails(run, buffer):
        calls.append(run)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return staged(run, buffer)

    monkeypatch.setattr(reader, "read_staged", fails)
    call = random_call(1, seed=1)
    with StreamedStore(reader, E, threads=2) as store:
        with pytest.raises(ExpertFileError, match="Input/output error"):
            store.experts(3, *call)
        assert len(store.residents(3)) == len(set(np.array(call[1]).ravel().tolist())) - 1
        y = store.experts(3, *call)
        assert np.array_equal(np.array(y), np.array(experts.resident().experts(3, *call)))
        assert bank_is_right(store, experts)


@pytest.mark.parametrize("form", ["packed", "stacked"])
def test_what_was_read_meanwhile_takes_one_launch(tmp_path, host, form):
    """While one thread launches, the others read on; a launch has room for so many pieces."""
    count = 24
    experts = write_experts(tmp_path, random_experts(num_experts=count), form)
    layout, reader = experts.layouts[3], PreadReader(experts.refs)
    slots = HostSlots(layout, count)
    pool = open_pool(reader, count, device.uploads_for(layout.nbytes, count))
    assert isinstance(pool, NativePool)
    host.enters = lambda: time.sleep(0.3 * (not host._begun))
    places = np.random.default_rng(0).permutation(count).tolist()
    fetch = pool.fetch(3, slots, list(enumerate(places)))
    fetch.start()
    assert fetch.wait() is None
    for expert, slot in enumerate(places):
        block = b"".join(view[slot * n : (slot + 1) * n] for view, n in slots.views)
        assert block == experts.block(3, expert)
    counts = [launch.count for launch in host.launched]
    assert sum(counts) == count * len(layout.components)
    assert max(counts) == MOST_PIECES
    assert len(counts) < count // 2
    pool.close()
    reader.close()


def test_a_kernel_that_does_not_compile_is_one_line(monkeypatch):
    class Driver:
        def compile(self):
            raise nvrtc.CompilerError("nvrtcCompileProgram failed:\nerror: no such thing")

    monkeypatch.setattr(upload, "driver", Driver)
    with pytest.warns(UserWarning, match=r"page by page: nvrtc\w+ failed: error: no such thing$"):
        assert upload.uploads_for(1000, 2) is None


def test_a_launch_that_is_refused_is_one_line(experts, host):
    call = random_call(1, seed=1)
    with StreamedStore(make_reader("pread", experts.refs), E, threads=2) as store:
        host.refuses = True
        with pytest.raises(DriverError, match="refused a copy: cuLaunchKernel"):
            store.experts(3, *call)
        assert not store.residents(3)
        host.refuses = False
        y = store.experts(3, *call)
        assert np.array_equal(np.array(y), np.array(experts.resident().experts(3, *call)))
        assert bank_is_right(store, experts)
