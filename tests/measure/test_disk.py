"""Oracle: files, dates and counters of this test, and a reader whose speed and clock are given."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.experts.io.layout import Component, Layout
from mlx_moeflux.experts.streaming.store import DEFAULT_THREADS
from mlx_moeflux.measure import disk
from mlx_moeflux.measure.disk import Block, DiskSpeed, Reads

BLOCK = disk.BLOCK_BYTES
MEMORY = Path("/dev/shm")


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The file that the speed of this disk is kept in; nothing large is written."""
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(disk, "LEAST_FILE_BYTES", 8 << 20)
    monkeypatch.setattr(disk, "DISK_SECONDS", 0.2)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(disk, "available_memory", lambda: (9 * 10**9, {}))
    return tmp_path / "cache" / f"disk-{os.stat(tmp_path).st_dev:x}.json"


@pytest.fixture
def facts(monkeypatch) -> SimpleNamespace:
    """What reads give, here and below: of the model's own files, and of a temporary one. files: Of
    each measurement; free: bytes of the disk."""
    found = SimpleNamespace(files=[], own=Reads(2.0, False, True), free=10**12)
    found.temporary = Reads(1.0, False, True)

    def read(experts, *, threads, readers=("direct", "pread")):
        assert threads == DEFAULT_THREADS
        files = disk.expert_files(experts)
        found.files.append({file: file.stat().st_size for file in files})
        return found.own if readers == ("direct",) else found.temporary

    monkeypatch.setattr(disk, "read_experts", read)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=found.free))
    return found


class Paced:
    """A reader of 10 GB, of which a device gives `gbps`; a request takes 50 us more, in which the
    device serves others. Its time is :meth:`clock`, which no load of this machine changes."""

    name, layers, num_experts = "paced", (3,), 10**10 // BLOCK

    def __init__(self, gbps: float):
        self.rate, self.read_of, self.buffers = gbps * 1e9, Counter(), set()
        self._free, self._lock, self._own = 0.0, threading.Lock(), threading.local()

    def clock(self) -> float:
        return getattr(self._own, "now", 0.0)

    def layout(self, layer: int) -> Layout:
        return Layout((Component("a", "U8", (BLOCK - 4096,)), Component("b", "U8", (4096,))))

    def read(self, layer, expert, into) -> int:
        assert [view.nbytes for view in into] == [BLOCK - 4096, 4096]
        assert not any(view.readonly for view in into)
        with self._lock:
            self.read_of[layer, expert] += 1
            self.buffers.add(id(into[0].obj))
            self._free += BLOCK / self.rate
            self._own.now = self._free + 50e-6
        return BLOCK

    def close(self) -> None: ...


@pytest.mark.parametrize("gbps", [0.3, 1, 3, 6, 17])
def test_a_device_of_that_speed_is_measured_right(gbps):
    reader = Paced(gbps)
    done = disk.read_blocks(reader, 8, None, reader.clock)
    found = disk.summary(done, 8, in_cache=None, from_disk=None)
    assert found.bytes_per_second == pytest.approx(gbps * 1e9, rel=0.02)
    assert (found.uneven, found.whole, found.from_memory) == (False, True, False)
    # Each block once, into few buffers, for two seconds or 8 GB.
    assert set(reader.read_of.values()) == {1}
    assert len(reader.buffers) <= 8
    wanted = min(2.0 * gbps * 1e9, 8e9)
    assert sum(block.nbytes for block in done) == pytest.approx(wanted, abs=9 * BLOCK)


def test_the_order_differs_unless_a_seed_is_given():
    def order(seed):
        reader = Paced(17)
        disk.read_blocks(reader, 1, seed, reader.clock)
        return list(reader.read_of)

    assert order(None) != order(None)
    assert order(5) == order(5)


def timings(*rates: float, blocks: int = 32) -> list[Block]:
    """Blocks of one byte: so many at each rate in turn."""
    seconds, done = 0.0, []
    for rate in rates:
        for _ in range(blocks):
            seconds += 1 / rate
            done.append(Block(seconds, 1))
    return done


@pytest.mark.parametrize(("rates", "speed", "uneven"), [
    ((100,) * 8, 100, False),
    ((110, 90, 105, 95, 100, 100, 120, 80), 100, False),
    ((100,) * 7 + (5,), 100, False),
    ((500,) + (100,) * 7, 100, False),
    ((100, 5, 5) + (100,) * 5, 100, True),
    ((30,) * 4 + (100,) * 4, 65, True),
    ((30,) * 6 + (100,) * 2, 30, True),
])  # fmt: skip
def test_a_moment_in_which_the_disk_was_busy_changes_little(rates, speed, uneven):
    found = disk.summary(timings(*rates), 8, in_cache=None, from_disk=None)
    assert found.bytes_per_second == pytest.approx(speed)
    assert found.uneven is uneven


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63])
def test_few_blocks_have_a_speed(count):
    """The last ones, for which not all threads were busy, do not count if there are others."""
    done = timings(100.0, blocks=count)
    found = disk.summary(done, 8, in_cache=None, from_disk=None)
    assert found.bytes_per_second == pytest.approx(100)
    assert (found.uneven, found.whole) == (False, False)


@pytest.mark.parametrize(("in_cache", "from_disk", "memory"), [
    (1.0, 0, True), (1.0, None, True), (1.0, 90, True), (0.3, 50, True),
    (1.0, 100, False),  # direct reads of a file that is in memory
    (0.0, 0, False),  # a file system of another machine, which counts nothing here
    (0.01, 0, False), (None, None, False), (None, 0, False),
])  # fmt: skip
def test_what_comes_from_memory_is_told_by_cache_and_counter(in_cache, from_disk, memory):
    done = timings(100.0, blocks=100)
    found = disk.summary(done, 8, in_cache=in_cache, from_disk=from_disk)
    assert found.from_memory is memory


@pytest.mark.skipif(not MEMORY.is_dir(), reason="this system has no file system in memory")
@pytest.mark.parametrize("name", ["direct", "pread"])
def test_a_file_system_in_memory_is_named(name, kept, monkeypatch, tmp_path):
    make = disk.make_reader

    def some(wanted, experts):
        if wanted != name:
            raise UnsupportedError("no")
        return make(wanted, experts)

    monkeypatch.setattr(disk, "make_reader", some)
    folder = MEMORY / f"test-{os.getpid()}"
    folder.mkdir()
    try:
        found = disk.measure_disk(folder)
    finally:
        folder.rmdir()
    if found is None:
        pytest.skip(f"memory is not read by '{name}' here")
    assert found.from_memory
    assert "read from memory and not from a disk" in str(found)
    assert disk.kept_speed(MEMORY) == found
    monkeypatch.setattr(disk, "read_experts", lambda *args, **options: Reads(1, False, True, True))
    assert disk.disk_bandwidth({}, threads=1) is None


def test_a_temporary_file_is_measured_kept_and_removed(tmp_path, kept, capsys):
    folder = tmp_path / "empty"
    folder.mkdir()
    found = disk.disk_speed(folder)
    assert list(folder.iterdir()) == []
    if found is None:
        pytest.skip("this file system allows no reads past the page cache")
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]
    assert capsys.readouterr().err == "measuring the disk: up to 10 seconds, once in 30 days\n"
    assert found.bytes_per_second > 1e6
    assert (found.day, found.available_bytes) == (date.today(), 9 * 10**9)
    entry = json.loads(kept.read_text())
    assert entry == found._asdict() | {"day": date.today().isoformat()}
    assert disk.disk_speed(folder) == disk.kept_speed(folder) == found
    assert capsys.readouterr().err == ""


def entry(*, days: int = 0, **changes) -> str:
    day = (date.today() - timedelta(days=days)).isoformat()
    memory = {"available_bytes": 10**9}
    whole = {"bytes_per_second": 5e9, "day": day, "busy": False, "from_memory": False} | memory
    return json.dumps({name: value for name, value in (whole | changes).items() if value != ""})


@pytest.mark.parametrize("content", [
    "", "[]", entry(day=""), entry(available_bytes=""), entry(busy=""),
    entry(bytes_per_second=float("nan")), entry(bytes_per_second=0), entry(bytes_per_second=[]),
    entry(day="1.1.26"), entry(day=5), entry(available_bytes="much"), entry(days=30),
    entry(days=-1), entry(days=1, busy=True),
])  # fmt: skip
def test_what_is_old_busy_or_unreadable_is_measured_anew(content, tmp_path, kept, facts):
    kept.parent.mkdir()
    kept.write_text(content)
    assert disk.disk_speed(tmp_path).bytes_per_second == 1.0
    assert json.loads(kept.read_text())["bytes_per_second"] == 1.0


@pytest.mark.parametrize(("content", "text"), [
    (entry(), "measured today, 1.0 GB of memory free"),
    (entry(days=1), "measured 1 day ago, 1.0 GB of memory free"),
    (entry(days=29), "measured 29 days ago, 1.0 GB of memory free"),
    (entry(busy=True), "measured today, 1.0 GB of memory free, machine busy: "
                       "'plan --measure-disk' measures again"),
])  # fmt: skip
def test_what_is_kept_counts_for_30_days_and_a_busy_one_for_that_day(
    content, text, tmp_path, kept, facts
):
    kept.parent.mkdir()
    kept.write_text(content)
    found = disk.disk_speed(tmp_path)
    assert found.bytes_per_second == 5e9
    assert str(found) == text
    assert facts.files == []
    assert disk.measure_disk(tmp_path).bytes_per_second == 1.0
    assert disk.disk_speed(tmp_path).bytes_per_second == 1.0


@pytest.mark.parametrize(("load", "uneven", "busy"), [
    (0.9, False, False), (1.1, False, True), (0.9, True, True),
])  # fmt: skip
def test_a_busy_machine_is_noticed(load, uneven, busy, tmp_path, kept, facts, monkeypatch):
    load *= os.cpu_count()
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    facts.temporary = Reads(1.0, uneven, True)
    assert disk.measure_disk(tmp_path).busy is busy


def test_a_system_without_a_load_is_not_busy(tmp_path, kept, facts, monkeypatch):
    def unknown():
        raise OSError("unobtainable")

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert not disk.measure_disk(tmp_path).busy


def model_of(folder: Path, **sizes: int) -> Path:
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    return folder


needs_direct = pytest.mark.skipif(
    not hasattr(os, "O_DIRECT"), reason="direct reads see the page cache"
)


@needs_direct
def test_the_models_own_files_are_read(tmp_path, kept, facts, monkeypatch):
    monkeypatch.setattr(disk, "DISK_BYTES", 20 << 20)
    model = model_of(tmp_path / "model", a=9 << 20, b=11 << 20, c=8 << 20, small=BLOCK - 1)
    (model / "link").symlink_to("a")
    (model / "gone").symlink_to("nothing")
    os.link(model / "b", model / "same")
    os.mkfifo(model / "pipe")
    with (model / "begun").open("wb") as file:  # a download has made room only
        file.truncate(1 << 30)
    if MEMORY.is_dir():  # another device
        elsewhere = MEMORY / f"test-{os.getpid()}.bin"
        elsewhere.write_bytes(bytes(30 << 20))
        (model / "elsewhere").symlink_to(elsewhere)
    try:
        assert disk.disk_speed(model).bytes_per_second == 2.0
    finally:
        if MEMORY.is_dir():
            elsewhere.unlink()
    assert sorted(facts.files[0].values()) == [9 << 20, 11 << 20]
    assert disk.measure_disk(model / "c").bytes_per_second == 2.0
    assert list(facts.files[1]) == [model / "c"]
    # Of a folder that is not there yet, the one above it is not searched.
    assert disk.measure_disk(model / "new" / "hub").bytes_per_second == 1.0


@needs_direct
@pytest.mark.parametrize("own", [Reads(2.0, False, False), Reads(2.0, False, True, True), None])
def test_a_temporary_file_is_read_where_the_models_are_not_enough(own, tmp_path, kept, facts):
    model = model_of(tmp_path / "model", a=4 << 20)
    facts.own = own
    assert disk.measure_disk(model).bytes_per_second == 1.0
    # Without room for one, what little was read counts.
    facts.free = 0
    found = disk.measure_disk(model)
    assert (found and found.bytes_per_second) == (own and own.bytes_per_second)


@pytest.mark.parametrize(("free", "size"), [
    (32 << 20, 8 << 20), (63 << 20, 8 << 20), (1 << 40, 16 << 20), ((32 << 20) - 4, None),
])  # fmt: skip
def test_a_temporary_file_takes_a_quarter_of_what_is_free(free, size, tmp_path, kept, facts):
    facts.free = free
    found = disk.measure_disk(tmp_path / "new")
    assert [list(sizes.values()) for sizes in facts.files] == ([] if size is None else [[size]])
    assert (found is None) == (size is None)


def test_writing_ends_in_time(tmp_path, monkeypatch):
    times = iter([10.0, 10.0, 12.5, 14.9, 15.1])
    with (tmp_path / "file").open("wb") as file:
        disk._fill(file.fileno(), Path(file.name), 10**12, clock=lambda: next(times))
    assert (tmp_path / "file").stat().st_size == 3 * 4 * BLOCK


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing tells what is in memory")
def test_little_is_written_to_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "cached_share", lambda files: 1.0)
    monkeypatch.setattr(disk, "LEAST_FILE_BYTES", 16 << 20)
    with (tmp_path / "file").open("wb") as file:
        disk._fill(file.fileno(), Path(file.name), 10**12)
    assert (tmp_path / "file").stat().st_size == 16 << 20


def test_what_a_killed_measurement_left_is_removed(tmp_path, kept, facts):
    kept.parent.mkdir(mode=0o700)
    old, young = (kept.parent / f"{disk.TEMPORARY}{age}" for age in ("old", "young"))
    for file in (old, young):
        file.touch()
    os.utime(old, (0, time.time() - 3700))
    disk.measure_disk(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_blocks_of_files_lie_in_them_and_are_distinct(tmp_path, monkeypatch):
    model = model_of(tmp_path / "model", a=3 * BLOCK + 5, b=BLOCK, c=2 * BLOCK)
    files = [model / name for name in "abc"]
    ((_, blocks),) = disk._blocks_of(*files)[0].items()
    places = [(ref.file.name, ref.offset // BLOCK) for ref in blocks]
    assert sorted(places) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
    monkeypatch.setattr(disk, "DISK_BYTES", 3 * BLOCK - 1)
    ((_, blocks),) = disk._blocks_of(*files)[0].items()
    assert len(blocks) == 3


def test_a_disk_that_cannot_be_measured_is_unknown(tmp_path, kept, monkeypatch):
    def refuse(name, experts):
        raise UnsupportedError("no")

    monkeypatch.setattr(disk, "make_reader", refuse)
    assert disk.disk_speed(tmp_path) is None
    assert not kept.exists()

    def full(*arguments):
        raise OSError("full")

    monkeypatch.setattr(disk, "_fill", full)
    assert disk.disk_speed(tmp_path) is None


def test_a_clock_that_was_set_back_gives_no_negative_age():
    assert DiskSpeed(1.0, date.today() + timedelta(days=3)).age == "today"
