"""Oracle: the resident store. Uploads run through a driver that copies in ordinary memory; the real
one is in test_gpu.py."""

import ctypes
import functools
import mmap
import threading

import numpy as np
import pytest

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.file_readers import LEAST_PIECE, PreadReader
from mlx_moeflux.experts.io.readers import READERS, make_reader
from mlx_moeflux.experts.io.replicas import open_readers
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.runtime.cuda.upload import Uploads, address_of
from tests.experts.conftest import read_by
from tests.experts.helpers import (
    LAYERS,
    E,
    K,
    bank_is_right,
    random_call,
    random_experts,
    write_experts,
)

FILES = "pread", "direct", "mmap"


class HostDriver:
    """What uploads need of a driver. Copies are made as late as they may be: when somebody waits
    for one of them, or for all."""

    uploaded = 0

    def __init__(self):
        self._lock, self._begun, self.reached = threading.RLock(), [], []
        number, address = ctypes.c_size_t, ctypes.c_void_p
        enters, copies, ends = (
            ctypes.CFUNCTYPE(ctypes.c_int, *kinds)
            for kinds in ((address,), (number, number, number, address), (address,))
        )
        # What native threads call; a driver's functions return 0.
        self._native = (
            enters(lambda context: 0),
            copies(lambda to, source, nbytes, _: self.upload([(to, source, nbytes)], None) or 0),
            ends(lambda stream: self.finish() or 0),
        )

    def functions(self):
        found = [ctypes.cast(each, ctypes.c_void_p).value for each in self._native]
        return [*found, None, None]

    def locked(self, nbytes):
        return memoryview(mmap.mmap(-1, nbytes))

    def event(self):
        return object()

    def advise_gpu(self, address, nbytes):
        self.reached.append((address, nbytes))

    def upload(self, pieces, event):
        with self._lock:
            self._begun.append((pieces, event))

    def wait(self, event):
        with self._lock:
            while any(begun is event for _, begun in self._begun):
                self._copy(*self._begun.pop(0))

    def finish(self):
        with self._lock:
            while self._begun:
                self._copy(*self._begun.pop(0))

    def _copy(self, pieces, event):
        for to, source, nbytes in pieces:
            ctypes.memmove(to, source, nbytes)
            self.uploaded += nbytes


@pytest.fixture
def host(monkeypatch):
    found = HostDriver()
    uploads = functools.partial(Uploads, found, reached_for=8)
    monkeypatch.setattr(device, "uploads_for", uploads)
    return found


GIVEN = [(name, {"least_piece": least}) for name in FILES for least in (LEAST_PIECE, 1000)]
GIVEN.append(("memory", {}))


@pytest.mark.parametrize(
    ("small_blocks", "name", "pieces"),
    [
        pytest.param(way, *given, marks=[pytest.mark.slow] * ((turn + i) % 2))
        for turn, way in enumerate(("threads", "python threads"))
        for i, given in enumerate(GIVEN)
    ],
    indirect=["small_blocks"],
)
def test_slots_filled_by_uploads_hold_the_experts(experts, host, name, pieces):
    resident = experts.resident()
    with StreamedStore(READERS[name](experts.refs, **pieces), K, threads=3) as store:
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
    reader = PreadReader(experts.refs, least_piece=1000)
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
