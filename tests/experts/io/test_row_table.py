"""Oracle: the rows that were written, dequantised by MLX, and a simulated cache."""

import os
import shutil
import signal
import threading
import time
import tracemalloc
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.formats.decoded import JoinedRef
from mlx_moeflux.checkpoint.formats.gguf_blocks import EXACT, BlocksRef
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError, ExpertFileError, InputError, UnsupportedError
from mlx_moeflux.experts.io import row_table
from mlx_moeflux.experts.io.row_cache import (
    INDEX_BYTES,
    ROW_MEMORY,
    RowCache,
    kept_rows,
    row_memory_bytes,
)
from mlx_moeflux.experts.io.row_table import RowTable
from tests.experts.conftest import read_by
from tests.experts.io.test_watched_files import CHANGES

CODES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32"}
COUNTS = (300, 1, 257)
FORMS = {
    "bf16": (mx.bfloat16, None, 37),
    "f16": (mx.float16, None, 160),
    "f32": (mx.float32, None, 5),
    "8 bits": (mx.bfloat16, QuantSpec(8, 32), 160),
    "8 bits, f16": (mx.float16, QuantSpec(8, 64), 192),
    "4 bits": (mx.bfloat16, QuantSpec(4, 32), 160),
    "4 bits, f32": (mx.float32, QuantSpec(4, 128), 128),
}
NAME = "layer 3's n-gram table"
BOTH_READ, IN_PYTHON = read_by("threads", "python threads"), read_by("python threads")


class Stored:
    """A table in two files: its shards, and what its rows are."""

    def __init__(self, directory: Path, dtype: mx.Dtype, spec: QuantSpec | None, width: int):
        random = np.random.default_rng(width)
        self.spec, self.shards, rows = spec, [], []
        self.files = [directory / "a", directory / "b"]
        for file in self.files:
            file.write_bytes(b"header")
        for i, count in enumerate(COUNTS):
            values = mx.array(random.normal(size=(count, width)).astype(np.float32)).astype(dtype)
            parts, found = {"weight": values}, values
            if spec:
                words, groups = spec.words(width), spec.groups(width)
                bits = random.integers(0, 1 << 32, (count, words), np.uint32)
                scales, biases = (random.normal(size=(count, groups)) for _ in range(2))
                parts = {
                    "weight": mx.array(bits),
                    "scales": mx.array(scales.astype(np.float32)).astype(dtype),
                    "biases": mx.array(biases.astype(np.float32)).astype(dtype),
                }
                found = mx.dequantize(*parts.values(), group_size=spec.group_size, bits=spec.bits)
            self.shards.append(
                {name: self._append(f"{i}.{name}", a, i % 2) for name, a in parts.items()}
            )
            rows.append(as_bytes(found))
        self.rows = np.concatenate(rows)

    def _append(self, name: str, array: mx.array, file: int) -> TensorRef:
        with open(self.files[file], "ab") as handle:
            offset = handle.tell()
            handle.write(as_bytes(array).tobytes())
        return TensorRef(name, self.files[file], offset, CODES[array.dtype], array.shape)

    def open(self, **options) -> RowTable:
        return RowTable(self.shards, self.spec, **{"name": NAME, "threads": 2, **options})


def as_bytes(array: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(array).view(mx.uint8))


def check(stored: Stored, table: RowTable, ids: np.ndarray) -> None:
    """Bits are compared, so that a NaN equals itself alone."""
    found = table.take(ids)
    assert found.dtype == table.dtype
    assert found.shape == (*ids.shape, table.width)
    assert np.array_equal(as_bytes(found), stored.rows[ids])


@pytest.fixture(params=FORMS)
def stored(request, tmp_path):
    return Stored(tmp_path, *FORMS[request.param])


@pytest.fixture
def small(tmp_path):
    return Stored(tmp_path, *FORMS["4 bits"])


class Simulated:
    """What a cache of so many rows does."""

    def __init__(self, capacity: int):
        self.capacity, self.rows = capacity, OrderedDict()
        self.hits = self.misses = 0

    def take(self, ids: np.ndarray) -> list[int]:
        """Count a call and return its misses."""
        distinct = sorted(set(ids.ravel().tolist()))
        hits = [i for i in distinct if i in self.rows]
        misses = [i for i in distinct if i not in self.rows]
        for i in hits:
            self.rows.move_to_end(i)
        for i in misses:
            self.rows[i] = None
            if len(self.rows) > self.capacity:
                self.rows.popitem(last=False)
        self.hits, self.misses = self.hits + len(hits), self.misses + len(misses)
        return misses


@BOTH_READ
@pytest.mark.parametrize("kept", [0, 1, 40, sum(COUNTS)])
def test_rows_are_those_of_the_files(stored, kept):
    random = np.random.default_rng(kept)
    row_bytes = sum(r.nbytes // r.shape[0] for r in stored.shards[0].values())
    memory_bytes = kept * (row_bytes + INDEX_BYTES)
    table, simulated = stored.open(memory_bytes=memory_bytes), Simulated(kept)
    assert (table.rows, table.row_bytes) == (sum(COUNTS), row_bytes)
    assert table.nbytes == sum(r.nbytes for s in stored.shards for r in s.values())
    for shape in [(1,), (16,), (2, 3, 16), (0, 4), (), (700,)] * 3:
        ids = random.integers(0, table.rows, shape)
        check(stored, table, ids)
        simulated.take(ids)
        stats = table.stats()
        assert (stats.hits, stats.misses) == (simulated.hits, simulated.misses)
    check(stored, table, np.arange(table.rows, dtype=np.uint16)[::-1])
    table.close()


@BOTH_READ
def test_chunks_give_what_the_whole_gives(small):
    random = np.random.default_rng(0)
    ids = random.integers(0, sum(COUNTS), (90, 16)).astype(np.int32)
    for memory_bytes in (0, 5000, 10**6):
        whole, cut = small.open(memory_bytes=memory_bytes), small.open(memory_bytes=memory_bytes)
        parts = [cut.take(part) for part in np.split(ids, [1, 2, 40, 41])]
        assert np.array_equal(as_bytes(whole.take(ids)), as_bytes(mx.concatenate(parts)))
        whole.close()
        cut.close()


def test_a_long_simulation_counts_alike():
    """Among them are calls of more rows than there is memory, and victims used since the order
    was made."""
    random = np.random.default_rng(5)
    cache, simulated = RowCache(500, 8), Simulated(500)
    for step in range(600):
        count = 1200 if step % 97 == 0 else int(random.integers(1, 60))
        ids = np.unique(random.zipf(1.2, count) % 3000).astype(np.int64)
        rows = np.zeros((len(ids), 8), np.uint8)
        missing = ids[~cache.take(ids, rows)]
        assert missing.tolist() == simulated.take(ids)
        here = ~np.isin(ids, missing)
        assert np.array_equal(rows[here].view(np.int64).ravel(), ids[here])
        cache.put(missing, missing[:, None].view(np.uint8))
        assert len(cache) == len(simulated.rows)
    assert simulated.hits > 1000 < simulated.misses


def test_rows_that_another_call_kept_meanwhile_stay():
    cache = RowCache(4, 8)

    def put(*ids):
        cache.put(np.array(ids), np.array(ids)[:, None].view(np.uint8))

    def here(*ids):
        return cache.take(np.array(ids), np.empty((len(ids), 8), np.uint8)).tolist()

    put(1, 2, 3, 4)
    put(1, 2, 5, 6)
    assert here(1, 2, 3, 4, 5, 6) == [True, True, False, False, True, True]
    found = np.empty((4, 8), np.uint8)
    assert cache.take(np.array([1, 2, 5, 6]), found).all()
    assert found.view(np.int64).ravel().tolist() == [1, 2, 5, 6]


def test_memory_stays_within_its_bound():
    memory_bytes, row_bytes = 1_700_000, 100
    capacity = kept_rows(10**9, row_bytes, memory_bytes)
    tracemalloc.start()
    try:
        cache, rows = RowCache(capacity, row_bytes), np.zeros((100, row_bytes), np.uint8)
        for start in range(0, 3 * capacity, 100):
            ids = np.arange(start, start + 100) * 7919
            cache.put(ids, rows)
        assert len(cache) == capacity
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert memory_bytes / 2 < held <= memory_bytes


def test_memory_of_a_table():
    assert row_memory_bytes(320_000_000, 100) <= ROW_MEMORY
    assert ROW_MEMORY - row_memory_bytes(320_000_000, 100) < 100 + INDEX_BYTES
    assert row_memory_bytes(10, 100) == 10 * (100 + INDEX_BYTES)
    assert row_memory_bytes(10, 100, 0) == row_memory_bytes(0, 100) == 0


@IN_PYTHON
def test_counts_are_of_what_was_really_read(small, monkeypatch):
    seen, preadv = [], os.preadv

    def counted(fd, views, offset):
        count = preadv(fd, views, offset)
        seen.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    random = np.random.default_rng(1)
    table = small.open(memory_bytes=60 * (100 + INDEX_BYTES))
    for _ in range(30):
        check(small, table, random.zipf(1.3, 16) % table.rows)
    stats = table.stats()
    assert (stats.reads, stats.bytes_read) == (len(seen), sum(seen))
    assert stats.lookups == stats.hits + stats.misses
    assert stats.hits > 0 < stats.misses
    assert stats.stall_seconds > 0
    table.close()


@BOTH_READ
def test_near_rows_are_one_read_and_far_ones_are_not(tmp_path, monkeypatch):
    stored = Stored(tmp_path, mx.float16, None, 32)
    table = stored.open(memory_bytes=0)

    def reads(*ids):
        before = table.stats()
        check(stored, table, np.array(ids))
        after = table.stats()
        return after.reads - before.reads, after.bytes_read - before.bytes_read

    assert reads(10, 11, 12) == (1, 3 * 64)
    assert reads(10, 75) == (1, 66 * 64)
    assert reads(10, 76) == (2, 2 * 64)
    assert reads(298, 299, 300, 301) == (3, 4 * 64)
    assert reads(*range(300)) == (1, 300 * 64)
    monkeypatch.setattr(row_table, "MOST_RUN_BYTES", 100 * 64)
    assert reads(*range(300)) == (3, 300 * 64)
    table.close()


@BOTH_READ
def test_threads_get_exact_rows_and_counts_add_up(stored):
    table = stored.open(memory_bytes=50 * 1000, threads=3)
    asked, done = [], threading.Event()

    def watch():
        while not done.is_set():
            stats = table.stats()
            assert stats.lookups == stats.hits + stats.misses

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(6):
            ids = random.zipf(1.2, (3, 16)) % table.rows
            check(stored, table, ids)
            asked.append(len(np.unique(ids)))

    with ThreadPoolExecutor(9) as pool:
        watching = pool.submit(watch)
        for worker in [pool.submit(work, seed) for seed in range(8)]:
            worker.result()
        done.set()
        watching.result()
    assert table.stats().lookups == sum(asked)
    table.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_native_threads_read_calls_of_few_rows(small, monkeypatch):
    seen, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: seen.append(args) or preadv(*args))
    table, ids = small.open(memory_bytes=0), np.arange(0, 500, 50)
    check(small, table, ids)
    assert not seen
    monkeypatch.setattr(row_table, "MOST_NATIVE_ROWS", len(ids) - 1)
    check(small, table, ids)
    assert len(seen) == table.stats().reads / 2
    table.close()


@BOTH_READ
def test_rows_come_while_the_caller_does_other_things(small):
    table = small.open()
    pending = [table.begin(np.arange(start, start + 40)) for start in (0, 30, 500)]
    for start, rows in zip((0, 30, 500), pending, strict=True):
        for _ in range(2):
            assert np.array_equal(as_bytes(rows.rows()), small.rows[start : start + 40])
    table.close()
    assert np.array_equal(as_bytes(pending[0].rows()), small.rows[:40])


@pytest.mark.parametrize("columns", [slice(0, 3), slice(4, 9), slice(7, 7), slice(0, 9)])
def test_some_columns_are_those_of_all(small, columns):
    table = small.open()
    pending = table.begin(np.random.default_rng(5).integers(0, table.rows, (2, 9, 4)))
    some, every = pending.rows(columns), pending.rows()
    assert some.shape == (2, columns.stop - columns.start, 4, table.width)
    assert np.array_equal(as_bytes(some), as_bytes(every[:, columns]))
    table.close()


@BOTH_READ
def test_rows_nobody_waits_for_are_kept(small):
    table = small.open()
    table.begin(np.arange(100))
    deadline = time.monotonic() + 10
    while table.stats().reads < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    while not table._cache and time.monotonic() < deadline:
        time.sleep(0.001)
    check(small, table, np.arange(100))
    assert (table.stats().hits, table.stats().misses) == (100, 100)
    table.close()


@IN_PYTHON
def test_closing_gives_up_what_is_under_way(small, monkeypatch):
    began, go, preadv = threading.Event(), threading.Event(), os.preadv

    def held(*args):
        began.set()
        assert go.wait(10)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", held)
    table = small.open(threads=2)
    pending = [table.begin(np.arange(0, 500, 100) + i) for i in range(3)]
    assert began.wait(10)
    closing = threading.Thread(target=table.close)
    closing.start()
    deadline = time.monotonic() + 10
    while not table._closed and time.monotonic() < deadline:
        time.sleep(0.001)
    go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert table.stats().reads <= 2  # of 21: one that each thread had begun
    with pytest.raises(InputError, match=f"^{NAME} is closed; load the model again.$"):
        pending[-1].rows()
    with pytest.raises(InputError, match="is closed"):
        table.take(np.array([0]))
    table.close()


@BOTH_READ
def test_no_memory_to_keep_rows_is_an_error_and_no_endless_wait(small, monkeypatch):
    def fail(*_):
        raise MemoryError

    table = small.open()
    with monkeypatch.context() as patch:
        patch.setattr(RowCache, "_find", fail)
        patch.setattr(RowCache, "take", lambda _, ids, into: np.zeros(len(ids), bool))
        with pytest.raises(MemoryError):
            table.take(np.arange(5))
    check(small, table, np.arange(5))
    table.close()


@IN_PYTHON
def test_an_interrupt_while_waiting_leaves_the_table_usable(small, monkeypatch):
    go, preadv = threading.Event(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: preadv(*args) if go.wait(10) else 0)
    table = small.open()
    pending = table.begin(np.arange(40))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

    def wait():
        timer.start()
        pending.rows()

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()
    go.set()
    assert np.array_equal(as_bytes(pending.rows()), small.rows[:40])
    check(small, table, np.arange(20, 60))
    assert (table.stats().hits, table.stats().misses) == (20, 60)
    table.close()


@BOTH_READ
def test_interrupts_at_any_moment_leave_the_table_usable(small):
    table, random = small.open(memory_bytes=60 * 300), np.random.default_rng(3)
    armed = False

    def handler(signum, frame):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    previous, interrupted = signal.signal(signal.SIGALRM, handler), 0
    try:
        for _ in range(300):
            ids = random.integers(0, table.rows, 40)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 8e-4 * random.random())
                table.take(ids)
                armed = False
            except KeyboardInterrupt:
                interrupted += 1
            check(small, table, ids)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 20
    table.close()


@BOTH_READ
def test_a_table_that_is_dropped_ends_its_threads_and_closes_its_files(small):
    before, fds = set(threading.enumerate()), len(os.listdir("/dev/fd"))
    table = small.open(threads=3)
    check(small, table, np.arange(40))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    del table
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(os.listdir("/dev/fd")) == fds


@BOTH_READ
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_file_is_one_line(small, monkeypatch, change):
    table = small.open(memory_bytes=0)
    check(small, table, np.array([0, 300]))
    monkeypatch.chdir("/")
    time.sleep(0.02)  # the system's clock for files is coarse
    change(small.files[1])
    message = f"^{small.files[1]} was changed, replaced or removed while in use; load the model"
    for _ in range(2):
        with pytest.raises(ExpertFileError, match=message):
            table.take(np.array([0, 300]))
    check(small, table, np.array([0]))
    table.close()


@BOTH_READ
def test_a_file_that_ends_early_is_one_line(small):
    os.truncate(small.files[0], small.files[0].stat().st_size - 1)
    table = small.open()
    for _ in range(2):
        with pytest.raises(ExpertFileError, match=f"^{small.files[0]} ends early: .* at offset "):
            table.take(np.array([table.rows - 1]))
    assert table.stats().misses == 2
    check(small, table, np.array([0]))
    table.close()


@BOTH_READ
def test_a_file_cut_while_open_is_one_line_and_nothing_of_it_is_kept(small):
    table = small.open()
    os.truncate(small.files[0], small.files[0].stat().st_size - 1)
    for _ in range(2):
        with pytest.raises(
            ExpertFileError, match=f"^{small.files[0]} (ends early: |was changed, )"
        ):
            table.take(np.array([3, table.rows - 1]))
    assert table.stats().misses == 4
    table.close()


@IN_PYTHON
def test_a_failing_disk_is_one_line(small, monkeypatch):
    table, preadv = small.open(), os.preadv

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ExpertFileError, match=r"^Reading .* at offset \d+ failed: Input/output"):
        table.take(np.arange(5))
    monkeypatch.setattr(os, "preadv", preadv)
    check(small, table, np.arange(5))
    table.close()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, -1], "has no row -1; it has rows 0 to 557."),
        ([558, 3], "has no row 558; it has rows 0 to 557."),
        (np.array([1 << 63], np.uint64), "has no row 9223372036854775808;"),
        ([0.0], "were asked for as float64; give integers."),
        ([True], "were asked for as bool; give integers."),
    ],
)
def test_wrong_ids_are_one_line(small, ids, message):
    table = small.open()
    with pytest.raises(InputError, match=f"{NAME} {message}$" if message[-1] == "." else message):
        table.begin(np.array(ids))
    assert table.stats().lookups == 0
    table.close()


def changed_part(shards, index, part, **fields):
    return [
        {**s, part: replace(s[part], **fields)} if i == index else s for i, s in enumerate(shards)
    ]


@pytest.mark.parametrize(
    ("index", "part", "fields"),
    [
        (1, "weight", {"dtype": "I32"}),
        (2, "weight", {"shape": (257, 40)}),
        (2, "weight", {"shape": (256, 20)}),
        (0, "scales", {"shape": (300, 4)}),
        (1, "scales", {"dtype": "F16"}),
        (2, "biases", {"dtype": "F16"}),
        (0, "biases", {"shape": (300,)}),
        (0, "biases", {"shape": (299, 5)}),
    ],
)
def test_shards_that_do_not_fit_are_one_line(small, index, part, fields):
    small.shards = changed_part(small.shards, index, part, **fields)
    with pytest.raises(CheckpointError, match=rf"^/.*: '\d.\w+' is \w+ \[.*\], but {NAME} needs"):
        small.open()


@BOTH_READ
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_1"])
def test_rows_in_blocks_of_gguf(tmp_path, kind):
    """Oracle: the `gguf` package. Rows are kept as blocks."""
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(7).standard_normal((211, 160)).astype(np.float32)
    qtype = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(values, qtype)
    (tmp_path / "t").write_bytes(bytes(13) + raw.tobytes())
    source = TensorRef("t", tmp_path / "t", 13, "U8", raw.shape)
    form = EXACT[kind]
    shards = [BlocksRef.parts("t", source, BLOCK_MODES[kind.lower()], form)]
    spec, ids = form.spec, np.array([[3, 210, 3], [0, 77, 9]])
    with closing(RowTable(shards, spec, name=NAME, threads=2)) as table:
        expected = gguf.dequantize(raw, qtype)[ids]
        for _ in range(2):
            assert np.array_equal(np.array(table.take(ids)), expected)
        stats = table.stats()
        assert (table.row_bytes, stats.hits, stats.misses) == (raw.shape[1], 5, 5)
    whole = [{part: JoinedRef("t", [ref]) for part, ref in shards[0].items()}]
    with pytest.raises(UnsupportedError, match="rows cannot be read alone"):
        RowTable(whole, spec, name=NAME, threads=2)


def test_wrong_arguments_are_one_line(small, tmp_path):
    shards = small.shards
    with pytest.raises(CheckpointError, match=rf"shard 1 of {NAME} has \['weight'\], expected"):
        RowTable([shards[0], {"weight": shards[1]["weight"]}], small.spec, name=NAME, threads=1)
    with pytest.raises(CheckpointError, match=rf"shard 0 of {NAME} has .*, expected \['weight'\]"):
        RowTable(shards, None, name=NAME, threads=1)
    with pytest.raises(CheckpointError, match="needs BF16 or F16 or F32"):
        RowTable([{"weight": shards[0]["weight"]}], None, name=NAME, threads=1)
    with pytest.raises(CheckpointError, match=f"{NAME} has no rows"):
        RowTable([], None, name=NAME, threads=1)
    with pytest.raises(UnsupportedError, match=f"{NAME} has mode 'mxfp4'"):
        RowTable(shards, QuantSpec(4, 32, "mxfp4"), name=NAME, threads=1)
    with pytest.raises(InputError, match=f"the memory of {NAME} is -1"):
        small.open(memory_bytes=-1)
    with pytest.raises(InputError, match=f"the number of threads of {NAME} is 0"):
        small.open(threads=0)
    small.files[1].unlink()
    with pytest.raises(ExpertFileError, match=f"{small.files[1]} cannot be read"):
        small.open()


def test_a_table_of_real_height_takes_milliseconds_and_little_memory(tmp_path):
    rows, width, file = 20_000_000, 160, tmp_path / "table"
    random = np.random.default_rng(0)
    ids = np.unique(np.append(random.integers(0, rows, 48), [0, rows - 1]))
    written = random.integers(0, 256, (len(ids), 2 * width), np.uint8)
    with open(file, "wb") as handle:
        handle.truncate(rows * 2 * width)
        for i, row in zip(ids.tolist(), written, strict=True):
            handle.seek(i * 2 * width)
            handle.write(row.tobytes())
    ref = TensorRef("table", file, 0, "BF16", (rows, width))
    tracemalloc.start()
    try:
        start = time.perf_counter()
        table = RowTable([{"weight": ref}], None, memory_bytes=100_000, name=NAME, threads=2)
        found = table.take(ids)
        seconds = time.perf_counter() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(as_bytes(found), written)
    assert not as_bytes(table.take(ids[1:-1] + 1)).any()
    assert seconds < 1
    assert peak < 1_000_000
    table.close()
