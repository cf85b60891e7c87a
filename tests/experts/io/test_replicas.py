"""Oracle: one copy, which gives the same bits and hits; the best of all possible splits; and files
of which one copy differs."""

import itertools
import os
import shutil
import threading
import time

import numpy as np
import pytest

from mlx_moeflux.errors import CheckpointError, ExpertFileError
from mlx_moeflux.experts.io import native_pool
from mlx_moeflux.experts.io.file_readers import PreadReader
from mlx_moeflux.experts.io.native_pool import NativePool, open_pool
from mlx_moeflux.experts.io.read_pool import Arrival, HostSlots
from mlx_moeflux.experts.io.readers import READERS, make_reader
from mlx_moeflux.experts.io.replicas import (
    LEFT_OUT_BLOCKS,
    ReplicaPool,
    ReplicaReader,
    open_readers,
    shares,
)
from mlx_moeflux.experts.io.samples import check_replica
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.conftest import BOTH_READ
from tests.experts.helpers import (
    CALLS,
    FORMS,
    LAYERS,
    E,
    Wrapped,
    all_is_well,
    bank_is_right,
    random_experts,
    same_bits,
    write_experts,
)

NBYTES = 1000
SOURCES = [name for name in READERS if name != "memory"]


class Disk:
    """A pool whose batches end after the time that `rate`, in bytes a second, gives."""

    def __init__(self, rate):
        self.rate, self.seen = rate, []

    def fetch(self, layer, slots, blocks):
        self.seen.append(len(blocks))
        return Batch(blocks, len(blocks) * NBYTES / self.rate)

    def close(self):
        pass


class Batch:
    in_caller = False

    def __init__(self, blocks, seconds):
        self.blocks, self.seconds = blocks, seconds

    def start(self, *, urgent=False):
        pass

    def wait(self):
        pass

    def abandon(self):
        pass

    drain = abandon

    def elapsed(self):
        return self.seconds

    def arrivals(self):
        return [Arrival(*block, NBYTES, self.seconds) for block in self.blocks]


class Reads:
    """Batches from disks of these rates, in a time of their own."""

    name, layers, num_experts = "fake", (0,), 1000

    def __init__(self, *rates):
        self.now, self.disks = 0.0, [Disk(rate) for rate in rates]
        pools = {str(i): disk for i, disk in enumerate(self.disks)}
        self.pool = ReplicaPool(self, pools, clock=lambda: self.now)
        self.replicas = list(self.pool._replicas.values())

    def stored_bytes(self, layer):
        return NBYTES

    def begin(self, count):
        """Begin a batch; return it, and its blocks by disk."""
        before = [sum(disk.seen) for disk in self.disks]
        fetch = self.pool.fetch(0, None, [(e, e) for e in range(count)])
        fetch.start(urgent=True)
        after = [sum(disk.seen) for disk in self.disks]
        return fetch, [b - a for a, b in zip(before, after, strict=True)]

    def end(self, fetch):
        self.now += fetch.elapsed()
        assert fetch.wait() is None
        assert [(a.expert, a.slot) for a in fetch.arrivals()] == fetch.blocks

    def read(self, count):
        fetch, by_disk = self.begin(count)
        self.end(fetch)
        return by_disk


def test_shares_follow_the_speeds():
    reads = Reads(100, 300)
    assert reads.read(8) == [4, 4]  # neither was measured
    assert reads.read(8) == [2, 6]
    first, second = reads.disks
    first.rate, second.rate = 300, 100
    counts = [reads.read(8) for _ in range(40)]
    assert counts[0] == [2, 6]
    assert counts[-1] == [6, 2]


@pytest.mark.parametrize("rates", [(100, 300), (70, 70), (1000, 10), (90, 200, 330)])
def test_shares_are_the_best_of_all(rates):
    """Among all splits none is expected to end earlier, whatever is under way."""
    random = np.random.default_rng(0)
    for round in range(30):
        if round % 6 == 0:  # so that none is left out for long
            reads = Reads(*rates)
            for _ in range(3):
                reads.read(3 * len(rates))
        waiting = [reads.begin(int(random.integers(0, 6)))[0] for _ in range(3)]
        count = int(random.integers(1, 9))
        in_flight = [replica.in_flight for replica in reads.replicas]

        speeds = [replica.speed for replica in reads.replicas]

        def ends(split, in_flight=in_flight, speeds=speeds):
            loads = zip(split, in_flight, speeds, strict=True)
            return max((n * NBYTES + more) / speed for n, more, speed in loads if n)

        splits = itertools.product(range(count + 1), repeat=len(rates))
        best = min(ends(split) for split in splits if sum(split) == count)
        found = shares(reads.replicas, count, NBYTES)
        assert sum(found) == count
        assert ends(found) <= best * (1 + 1e-9)
        for fetch in waiting:
            reads.end(fetch)
        assert not any(replica.in_flight for replica in reads.replicas)


def test_single_blocks_measure_every_disk():
    reads = Reads(100, 300, 200)
    assert sorted(reads.read(1) for _ in range(3)) == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert reads.read(1) == [0, 1, 0]
    begun, _ = reads.begin(1)
    assert reads.begin(1)[1] == [0, 0, 1]  # the fastest is at work
    reads.end(begun)


def test_a_disk_that_was_slow_is_tried_again():
    reads = Reads(1000, 1)
    assert reads.read(2) == [1, 1]
    for _ in range(LEFT_OUT_BLOCKS // 4):
        assert reads.read(4) == [4, 0]
    assert reads.read(4) == [3, 1]
    assert reads.read(4) == [4, 0]
    reads.disks[1].rate = 1000
    counts = [reads.read(4) for _ in range(LEFT_OUT_BLOCKS // 4 + 1)]
    assert counts[-3:] == [[4, 0], [3, 1], [2, 2]]


def test_overlapping_batches_share_their_seconds():
    reads = Reads(100)
    one, _ = reads.begin(1)
    reads.now += 5
    two, _ = reads.begin(2)
    reads.now += 30
    for fetch in (one, two):
        fetch.wait()
    fetch.drain()  # counts nothing twice
    stats = reads.pool.stats["0"]
    # From 0 to 10, and from 5 to 25.
    assert (stats.bytes_read, stats.busy_seconds) == (3 * NBYTES, 25.0)


@pytest.fixture
def copies(tmp_path, experts):
    """The experts of the fixture `experts`, which is the first place, and a copy."""
    copy = write_experts(tmp_path / "copy", random_experts(), "packed").refs
    return {"first": experts.refs, "second": copy}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("name", SOURCES)
def test_blocks_are_those_of_one_copy(tmp_path, monkeypatch, form, native, name):
    if not native:
        monkeypatch.setattr(native_pool, "library", lambda: None)
    experts = random_experts()
    refs = [write_experts(tmp_path / at, experts, form).refs for at in "ab"]
    reader = open_readers(name, dict(zip("ab", refs, strict=True)))
    assert isinstance(reader, ReplicaReader)
    pool = open_pool(reader, 2, None)
    kinds = {isinstance(replica.pool, NativePool) for replica in pool._replicas.values()}
    assert kinds == {native and name != "mmap"}
    for layer in LAYERS:
        slots = HostSlots(reader.layout(layer), E)
        fetch = pool.fetch(layer, slots, [(e, (e + 2) % E) for e in range(E)])
        fetch.start(urgent=True)
        assert fetch.wait() is None
        assert [a.expert for a in fetch.arrivals()] == list(range(E))
        assert fetch.elapsed() > 0
        for e in range(E):
            slot = (e + 2) % E
            block = b"".join(bytes(view[slot * n : (slot + 1) * n]) for view, n in slots.views)
            assert block == experts.block(layer, e)
    read = [stats.bytes_read for stats in pool.stats.values()]
    assert all(read)
    assert sum(read) == E * sum(reader.layout(layer).nbytes for layer in LAYERS)
    assert all(stats.busy_seconds > 0 for stats in pool.stats.values())
    pool.close()
    reader.close()


@BOTH_READ
@pytest.mark.parametrize("prefetch", [None, "last"])
def test_bits_and_hits_are_those_of_one_place(experts, open_store, copies, small_blocks, prefetch):
    options = {"prefetch": prefetch, "keep_all_ahead": True, "threads": 2}
    one, two = (
        open_store(4, reader=open_readers("pread", places), **options)
        for places in ({"first": experts.refs}, copies)
    )
    for store in (one, two):
        store.preload([5])
    for call in CALLS:
        for layer in LAYERS:
            assert same_bits(one.experts(layer, *call), two.experts(layer, *call))
            assert one.residents(layer) == two.residents(layer)
    for store in (one, two):
        assert store.read_missing(3, range(E), protected=range(E))
    assert bank_is_right(two, experts)
    counts = [
        {k: v for k, v in store.stats().total.as_dict().items() if "seconds" not in k}
        for store in (one, two)
    ]
    assert counts[0] == counts[1]
    stats = two.stats()
    assert not one.stats().places
    assert list(stats.places) == list(copies)
    assert sum(place.bytes_read for place in stats.places.values()) == stats.total.bytes_read
    assert all(place.bytes_read for place in stats.places.values())


def test_statistics_name_the_places(open_store, copies):
    store = open_store(4, reader=open_readers("pread", copies))
    store.preload()
    stats, before = store.stats(), store.stats().snapshot()
    for name, place in stats.places.items():
        assert f"{name}: {place.bytes_read / 1e9:.3f} GB at {place.gb_per_s:.2f} GB/s" in str(stats)
    store.experts(3, *CALLS[0])
    assert sum(p.bytes_read for p in stats.since(before).places.values()) == (
        stats.since(before).total.bytes_read
    )
    assert stats.as_dict()["places"] == {n: p.as_dict() for n, p in stats.places.items()}
    stats.reset()
    assert [p.as_dict() for p in stats.places.values()] == [
        {"bytes_read": 0, "busy_seconds": 0.0, "gb_per_s": 0.0}
    ] * 2


@BOTH_READ
def test_a_second_place_that_fails_is_one_line(tmp_path, experts, open_store, copies, small_blocks):
    """The first place's blocks are kept, and the next call is right once the file is."""
    store = open_store(E - 1, reader=open_readers("pread", copies))
    file = tmp_path / "copy" / "packed_3.bin"
    kept = os.stat(file)
    content = file.read_bytes()
    os.truncate(file, 0)
    with pytest.raises(ExpertFileError, match=r"ends early|was changed") as caught:
        store.preload([3])
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
    with pytest.raises(ExpertFileError, match=str(file)):
        store.preload([3])
    file.write_bytes(content)
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    all_is_well(store, experts)


def test_no_read_of_any_place_is_under_way_after_a_drain(copies):
    under_way, begun = set(), {place: threading.Event() for place in copies}

    def before(place):
        def wait(layer, expert, into):
            under_way.add(expert)
            begun[place].set()
            time.sleep(0.01 * (expert + 1))
            under_way.discard(expert)

        return wait

    reader = ReplicaReader(
        {at: Wrapped(make_reader("pread", refs), before(at)) for at, refs in copies.items()}
    )
    pool = open_pool(reader, 2, None)
    fetch = pool.fetch(3, HostSlots(reader.layout(3), E), [(e, e) for e in range(E)])
    fetch.start()
    assert all(event.wait(60) for event in begun.values())
    fetch.drain()
    assert not under_way
    assert len(fetch.arrivals()) < E
    assert not any(replica.in_flight for replica in pool._replicas.values())
    pool.close()
    reader.close()


def test_a_change_of_the_second_place_is_one_line(tmp_path, open_store, copies):
    store = open_store(4, reader=open_readers("pread", copies))
    file = tmp_path / "copy" / "packed_5.bin"
    shutil.copy2(file, file.with_name("other"))
    os.replace(file.with_name("other"), file)
    # While no place has been measured each reads half.
    with pytest.raises(ExpertFileError, match=rf"^{file} was changed, replaced or removed"):
        store.preload([5])


def test_a_copy_may_lie_in_other_files_of_the_same_ranges(tmp_path):
    for form in FORMS:
        refs = [write_experts(tmp_path / f"{form}{i}", random_experts(), form).refs for i in (0, 1)]
        check_replica(*refs, place="there")


def altered(file):
    data = bytearray(file.read_bytes())
    data[: len(data) // 2] = bytes(255 - byte for byte in data[: len(data) // 2])
    file.write_bytes(data)


def test_what_is_no_copy_is_refused(tmp_path):
    first = write_experts(tmp_path / "first", random_experts(), "stacked").refs

    def refused(other, difference):
        with pytest.raises(CheckpointError) as caught:
            check_replica(first, other, place="/disk/b")
        assert str(caught.value) == (
            f"/disk/b is no copy of the first expert_path: {difference}; copy the files again, or "
            "leave it out."
        )

    def written(name, form="stacked", **options):
        return write_experts(tmp_path / name, random_experts(**options), form).refs

    refused({3: first[3]}, "it has experts of other layers")
    refused(written("more", num_experts=E + 1), f"layer 3 has {E + 1} experts, not {E}")
    refused(written("wide", hidden=128), "the experts of layer 3 have other shapes or dtypes")
    refused(written("form", "packed"), "the experts of layer 3 lie at other offsets")
    refused(written("other", seed=1), "the experts of layer 3 have other bytes")
    partly = written("partly")
    altered(tmp_path / "partly" / "stacked_5.bin")
    refused(partly, "the experts of layer 5 have other bytes")


class Limited(PreadReader):
    """Reads at `rate` bytes a second, over all threads."""

    def __init__(self, experts, rate):
        super().__init__(experts)
        self._rate, self._free, self._turn = rate, 0.0, threading.Lock()

    def _read_run(self, run, views):
        super()._read_run(run, views)
        with self._turn:
            self._free = max(self._free, time.perf_counter()) + run.nbytes / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


@pytest.mark.slow
def test_two_limited_disks_give_nearly_the_sum(tmp_path):
    experts = random_experts(hidden=1024, inner=768)
    refs = [write_experts(tmp_path / at, experts, "packed").refs for at in "ab"]
    speeds = dict(zip("ab", (100e6, 300e6), strict=True))
    readers = {at: Limited(of, speeds[at]) for at, of in zip("ab", refs, strict=True)}
    with StreamedStore(ReplicaReader(readers), E, threads=4) as store:
        pool, layer = store._pool, LAYERS[0]
        slots = HostSlots(store.reader.layout(layer), E)
        block = store.reader.layout(layer).nbytes
        for round in range(45):
            if round == 5:
                begun = time.perf_counter()
            fetch = pool.fetch(layer, slots, [(e, e) for e in range(E)])
            fetch.start(urgent=True)
            assert fetch.wait() is None
        seconds = (time.perf_counter() - begun) / 40
    # Of whole blocks.
    best = min(max(n * block / speeds["a"], (E - n) * block / speeds["b"]) for n in range(E + 1))
    assert seconds <= best / 0.9
