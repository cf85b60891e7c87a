"""Exactness holds bit for bit on the CPU, where every test but those marked ``gpu`` runs."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_moeflux.experts.io import native_pool, read_pool
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.helpers import K, Wrapped, random_experts, write_experts


@pytest.fixture(autouse=True)
def device(request):
    """The GPU for tests that ask for it, else the CPU."""
    before = mx.default_device()
    if request.node.get_closest_marker("gpu") is None:
        mx.set_default_device(mx.cpu)
    elif before == mx.cpu:
        pytest.skip("MLX drives no GPU here")
    yield
    mx.set_default_device(before)


@pytest.fixture(params=["threads"], autouse=True)
def small_blocks(request, monkeypatch):
    """Tiny blocks go to the threads, as large ones do; tests that ask for "caller" as well read
    them in the calling thread. "python": Without native threads."""
    if "threads" in request.param:
        monkeypatch.setattr(read_pool, "SMALL_BYTES", 0)
    if "python" in request.param:
        monkeypatch.setattr(native_pool, "library", lambda: None)


def read_by(*ways):
    """Run a test with these ways to read small blocks."""
    return pytest.mark.parametrize("small_blocks", ways, indirect=True)


BOTH_READ = read_by("threads", "caller", "python threads", "python caller")
PYTHON_READS = read_by("python threads", "python caller")


@pytest.fixture
def experts(tmp_path):
    """Tiny 4-bit experts in a packed directory."""
    return write_experts(tmp_path, random_experts(), "packed")


@pytest.fixture
def open_store(experts):
    """A function that opens a store over `experts`; all are closed at the end."""
    stores = []

    def open_store(slots=K, reader="pread", *, wave_reads=None, scratch_bytes=None, **options):
        if isinstance(reader, str):
            reader = make_reader(reader, experts.refs)
        store = StreamedStore(reader, slots, **options)
        stores.append(store)
        store.wave_reads = wave_reads or store.wave_reads
        store.expert_compute = replace(store.expert_compute, scratch_bytes=scratch_bytes)
        return store

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture
def wrapped(experts, open_store):
    """A function that opens a store whose reader calls `before` first."""

    def wrapped(before, slots=4, **options):
        return open_store(slots, Wrapped(make_reader("pread", experts.refs), before), **options)

    return wrapped
