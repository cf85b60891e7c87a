"""Oracle: what the reader itself reads, one block at a time."""

import os
import shutil
import subprocess
import sys
from time import perf_counter, sleep

import numpy as np
import pytest

from mlx_moeflux.experts.io import native_pool
from mlx_moeflux.experts.io.file_readers import LEAST_PIECE, PreadReader
from mlx_moeflux.experts.io.native_pool import NativePool, open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots, ReadPool
from mlx_moeflux.experts.io.readers import READERS, make_reader
from tests.experts.helpers import LAYERS, E, in_pieces, random_experts, write_experts

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def least():
    """Bytes of the smallest piece; a test may have others."""
    return LEAST_PIECE


@pytest.fixture
def reader(tmp_path, request, least):
    form, name = request.param
    refs = write_experts(tmp_path, random_experts(), form).refs
    found = in_pieces(READERS[name](refs), least)
    yield found
    found.close()


FILES = [(form, name) for form in ("packed", "stacked", "separate") for name in ("pread", "direct")]
every_file = pytest.mark.parametrize("reader", FILES, indirect=True, ids="-".join)
a_file = pytest.mark.parametrize("reader", [("packed", "pread")], indirect=True, ids="-".join)


def block_of(slots, slot):
    return [bytes(view[slot * n : (slot + 1) * n]) for view, n in slots.views]


# By default a third of all: every file with every number of threads.
COUNTS, LEAST, WAYS = (1, 3, 8), (LEAST_PIECE, 100), ("threads", "caller")


def in_turns(file: int, count: int, least: int, way: int) -> bool:
    return (file + count + least + way) % 3 == 0


@pytest.mark.parametrize(
    ("reader", "count", "least", "small_blocks"),
    [
        pytest.param(
            FILES[i], COUNTS[j], LEAST[k], WAYS[n],
            id="-".join(map(str, (*FILES[i], COUNTS[j], LEAST[k], WAYS[n]))),
            marks=[pytest.mark.slow] * (not in_turns(i, j, k, n)),
        )
        for i in range(6) for j in range(3) for k in range(2) for n in range(2)
    ],
    indirect=["reader", "small_blocks"],
)  # fmt: skip
def test_blocks_are_what_the_reader_reads(reader, count):
    pool, random = open_pool(reader, count, None), np.random.default_rng(count)
    assert isinstance(pool, NativePool)
    for round in range(12):
        layer = LAYERS[round % len(LAYERS)]
        number = int(random.integers(1, E + 1))
        slots, right = HostSlots(reader.layout(layer), E), HostSlots(reader.layout(layer), 1)
        places = random.permutation(E)[:number].tolist()
        blocks = list(zip(random.permutation(E)[:number].tolist(), places, strict=True))
        fetch = pool.fetch(layer, slots, blocks)
        fetch.start(urgent=bool(round % 2))
        assert fetch.wait() is None
        nbytes = reader.layout(layer).nbytes
        assert [(a.expert, a.slot, a.nbytes) for a in fetch.arrivals()] == [
            (*block, nbytes) for block in blocks
        ]
        for expert, slot in blocks:
            reader.read(layer, expert, [view for view, _ in right.views])
            assert block_of(slots, slot) == block_of(right, 0)
        for slot in set(range(E)) - set(places):
            assert not any(map(any, block_of(slots, slot))), "written to another slot"
    pool.close()


@a_file
def test_batches_wait_for_one_another(reader):
    """Several are under way, some are abandoned; whatever arrived is right."""
    pool, layer = open_pool(reader, 2, None), LAYERS[0]
    slots, right = HostSlots(reader.layout(layer), E), HostSlots(reader.layout(layer), 1)
    for round in range(200):
        fetches = [pool.fetch(layer, slots, [(e, e)]) for e in range(E)]
        for fetch in fetches:
            fetch.start()
        for fetch in fetches[:: 1 + round % 3]:
            fetch.abandon()
        for fetch in reversed(fetches):
            assert fetch.wait() is None
        for arrival in (a for fetch in fetches for a in fetch.arrivals()):
            reader.read(layer, arrival.expert, [view for view, _ in right.views])
            assert block_of(slots, arrival.slot) == block_of(right, 0)
    pool.close()
    fetches[0].drain()


class Asleep:
    """The library, but no thread is woken: who waits for a batch takes its parts."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)

    def batch_begin(self, *arguments):
        self._library.batch_begin(*arguments[:-1], 0)


@a_file
@pytest.mark.parametrize("given_up", [True, False])
def test_a_block_that_was_given_up_before_it_began_is_never_read(reader, given_up):
    """A thread of the pool that begins late finds work although nobody woke it, but not each
    time."""
    pool, layer = open_pool(reader, 2, None), LAYERS[0]
    pool.library = Asleep(pool.library)
    for _ in range(20):
        slots = HostSlots(reader.layout(layer), 3)
        first, wrong, needed = (pool.fetch(layer, slots, [(e, e)]) for e in range(3))
        for fetch in (first, wrong, needed):
            fetch.start()
        if given_up:
            wrong.abandon()
        assert needed.wait() is None
        assert [a.expert for a in needed.arrivals()] == [2]
        # The caller reads what it waits for, unless it was given up.
        before = any(map(any, block_of(slots, 1)))
        assert wrong.wait() is None
        assert first.wait() is None
        after = any(map(any, block_of(slots, 1)))
        assert bool(wrong.arrivals()) == after
        if (before, after) == (False, not given_up):
            break
        sleep(0.01)
    else:
        pytest.fail("read before anybody waited for it, or although it was given up")
    pool.close()


@a_file
@pytest.mark.parametrize("first", ["urgent", "waited for"])
def test_what_comes_before_older_reads(reader, first):
    """Of one thread that has thousands of blocks to read: an urgent batch, and, by the caller, the
    batch that it waits for. Either may be too slow to show it, but not each time."""
    pool, layer, before = open_pool(reader, 1, None), LAYERS[0], False
    slots = HostSlots(reader.layout(layer), E)
    for _ in range(20):
        long = pool.fetch(layer, slots, [(e, e) for e in range(E)] * 500)
        short = pool.fetch(layer, slots, [(1, 1), (2, 2)])
        begun = perf_counter()
        long.start()
        short.start(urgent=first == "urgent")
        started = perf_counter()
        if first == "urgent":
            # The caller would read the long one's blocks while it waits, and the thread sleep.
            while len(short.arrivals()) < 2 and perf_counter() < begun + 60:
                sleep(1e-4)
            assert short.wait() is None
            assert long.wait() is None
            before = started + short.elapsed() < begun + long.elapsed()
        else:
            assert short.wait() is None
            before = len(long.arrivals()) < E * 250
            assert long.wait() is None
        assert len(short.arrivals()) == 2
        assert len(long.arrivals()) == E * 500
        if before:
            break
    assert before
    pool.close()


@a_file
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_errors_name_file_and_offset(reader):
    layer, pool = LAYERS[0], open_pool(reader, 2, None)
    slots = HostSlots(reader.layout(layer), E)
    file, fd = reader.ranges.files[0], reader._fds[0]

    def read(*experts):
        fetch = pool.fetch(layer, slots, [(e, e) for e in experts])
        fetch.start()
        return fetch.wait(), [arrival.expert for arrival in fetch.arrivals()]

    size, offset = os.path.getsize(file), int(reader.ranges.table(layer)[1][3, 0])
    # Reading one's own memory at address 0 fails with EIO.
    kept, broken = os.dup(fd), os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(broken, fd)
    error, arrived = read(3)
    assert f"Reading {file} at offset {offset} failed: Input/output error" in str(error)
    assert arrived == []
    os.dup2(kept, fd)
    os.truncate(file, offset + 5)
    error, arrived = read(3, 1, 2)
    nbytes = reader.layout(layer).nbytes
    assert f"{file} ends early: expected {nbytes} bytes at offset" in str(error)
    assert f"offset {offset}, got 5" in str(error)
    error, also = read(1, 2)
    assert str(error).startswith(f"{file} was changed")
    assert arrived == also == []
    assert os.path.getsize(file) < size
    for other in (kept, broken):
        os.close(other)
    pool.close()


@a_file
def test_other_readers_and_machines_without_a_compiler_read_in_python(
    reader, monkeypatch, tmp_path
):
    class Own(PreadReader):
        pass

    refs = write_experts(tmp_path / "more", random_experts(), "packed").refs
    own, patched = Own(refs), make_reader("pread", refs)
    patched.read = lambda *_: 0
    assert NativePool.serves(reader)
    for found in (own, patched):
        assert not NativePool.serves(found)
        pool = open_pool(found, 1, None)
        assert isinstance(pool, ReadPool)
        pool.close()
        found.close()
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native_pool.library.cache_clear()
    try:
        assert native_pool.library() is None
        assert not NativePool.serves(reader)
    finally:
        native_pool.library.cache_clear()


@pytest.mark.parametrize(
    "refusal", [FileNotFoundError("xcode-select"), subprocess.CalledProcessError(2, "xcode-select")]
)
def test_a_mac_without_command_line_tools_reads_in_python(refusal, monkeypatch, tmp_path):
    asked = []

    def run(command, **_):
        asked.append(command[0])
        raise refusal

    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(native_pool.sys, "platform", "darwin")
    monkeypatch.setattr(native_pool.subprocess, "run", run)
    native_pool.library.cache_clear()
    try:
        assert native_pool.library() is None
        assert asked == ["xcode-select"]
    finally:
        native_pool.library.cache_clear()


@pytest.mark.slow
def test_the_library_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    first = native_pool._built()
    monkeypatch.setattr(native_pool.subprocess, "run", None)
    assert native_pool._built() == first
    assert [file.name for file in first.parent.iterdir()] == [first.name]
