"""Oracle: after whatever went wrong the bank holds what it says and the next call is right."""

import errno
import gc
import os
import random
import signal
import sys
import threading
import time

import mlx.core as mx
import pytest

from mlx_moeflux import experts as package
from mlx_moeflux.errors import ExpertFileError, InputError
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.io.replicas import open_readers
from mlx_moeflux.experts.policies.eviction import EVICTIONS, LRU
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.events import Chosen, Evict, Hit, Miss, ReadEnd, ReadStart
from tests.experts.conftest import PYTHON_READS
from tests.experts.helpers import (
    CALLS,
    C,
    E,
    K,
    all_is_well,
    bank_is_right,
    random_call,
    random_experts,
    same_bits,
    write_experts,
)

ROUNDS = 150
PACKAGE = os.path.dirname(package.__file__)


@PYTHON_READS
@pytest.mark.parametrize(
    ("n", "broken"),
    [
        *((1, {1}), (20, {2}), (1, {3}), (20, {1, 2, 3, 4})),
        *(
            pytest.param(n, broken, marks=pytest.mark.slow)
            for n, broken in ((20, {1}), (1, {2}), (20, {3}), (1, {1, 2, 3, 4}))
        ),
    ],
)
def test_io_error_leaves_the_store_usable(experts, open_store, monkeypatch, n, broken):
    """The first, second, third or every read of a decode step or a sweep fails half-way."""
    store, count = open_store(4), [0]
    preadv = os.preadv

    def sometimes(fd, views, offset):
        count[0] += 1
        if count[0] not in broken:
            return preadv(fd, views, offset)
        views[0][:4] = b"half"
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", sometimes)
        with pytest.raises(ExpertFileError, match=r"packed_3\.bin at offset \d+ failed: Input/out"):
            store.experts(3, *random_call(n))
    assert bank_is_right(store, experts)
    all_is_well(store, experts)


@PYTHON_READS
def test_io_error_is_raised_and_other_blocks_are_kept(experts, wrapped):
    def before(layer, expert, into):
        if expert == 2 and broken:
            into[0][:8] = b"\xff" * 8
            raise OSError(errno.EIO, "Input/output error")

    broken, store = True, wrapped(before)
    call = (mx.ones((1, C)), mx.array([[1, 2, 6]], mx.uint32), mx.ones((1, K)))
    with pytest.raises(ExpertFileError, match=r"expert 2 of layer 3 failed.*Input/output"):
        store.experts(3, *call)
    assert set(store.residents(3)) == {1, 6}
    broken = False
    store.stats().reset()
    assert same_bits(store.experts(3, *call), experts.resident().experts(3, *call))
    assert store.stats().total.misses == store.stats().total.reads == 1
    all_is_well(store, experts)


def test_a_reader_that_gives_too_little(wrapped, experts):
    short = [True]
    store = wrapped(lambda layer, expert, into: 17 if short[0] else None)
    with pytest.raises(ExpertFileError, match=r"'wrapped' gave 17 bytes of expert . of layer 3"):
        store.experts(3, *CALLS[0])
    short[0] = False
    all_is_well(store, experts)


def test_a_bug_in_a_reader_is_not_hidden(wrapped, experts):
    def before(layer, expert, into):
        if bug:
            raise KeyError("a bug")

    bug, store = True, wrapped(before)
    with pytest.raises(KeyError, match="a bug"):
        store.experts(3, *CALLS[0])
    bug = False
    all_is_well(store, experts)


WAYS = ("threads", "caller", "python threads", "python caller")
# Reads differ by the way; of the other events each is met in one.
ONE = dict(zip((Chosen, Hit, Miss, Evict), WAYS, strict=True))


@pytest.mark.parametrize(
    ("kind", "small_blocks"),
    [
        pytest.param(kind, way, marks=[pytest.mark.slow] * (ONE.get(kind, way) != way))
        for kind in (Chosen, Hit, Miss, Evict, ReadStart, ReadEnd)
        for way in WAYS
    ],
    indirect=["small_blocks"],
)
def test_interrupted_at_any_event(experts, open_store, kind):
    armed = [0]

    def listener(event):
        if isinstance(event, kind) and armed[0]:
            armed[0] -= 1
            if not armed[0]:
                raise KeyboardInterrupt

    store = open_store(4, events=listener)
    interrupted = 0
    for nth in (1, 2, 3):
        for call in CALLS:
            armed[0] = nth
            try:
                store.experts(3, *call)
            except KeyboardInterrupt:
                interrupted += 1
            assert bank_is_right(store, experts)
            armed[0] = 0
    assert interrupted > 2
    all_is_well(store, experts)


@pytest.mark.parametrize(
    ("eviction", "places"),
    [
        pytest.param(name, places, marks=[pytest.mark.slow] * ((name, places) != ("lfu", 1)))
        for name in EVICTIONS
        for places in (1, 2)
    ],
)
def test_interrupted_at_every_line(tmp_path, experts, eviction, places):
    """KeyboardInterrupt at the n-th line that the store's code executes, for n = 1, 2, ..."""
    countdown = 0

    def tracer(frame, event, argument):
        nonlocal countdown
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
        return tracer

    call, other = random_call(4, seed=3), random_call(1, seed=8)
    right = [experts.resident().experts(3, *c) for c in (call, other)]
    lines, finished = 0, False
    copies = [write_experts(tmp_path / str(i), random_experts(), "packed").refs for i in (0, 1)]
    reader = open_readers("pread", dict(zip("ab", copies[:places], strict=False)))
    with StreamedStore(reader, K, threads=2, eviction=eviction) as store:
        store.wave_reads = 2
        while not finished:
            lines += 7 if eviction == "lru" else 41 if places == 1 else 29
            countdown = lines
            sys.settrace(tracer)
            try:
                store.experts(3, *call)
                finished = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            assert same_bits(store.experts(3, *other), right[1])
            assert bank_is_right(store, experts)
            assert same_bits(store.experts(3, *call), right[0])
        all_is_well(store, experts)
        if places > 1:
            store._layers[5].settle()
            assert not any(replica.in_flight for replica in store._pool._replicas.values())
    assert lines > 300


@pytest.mark.parametrize(
    "small_blocks",
    [
        *("threads", "python caller"),
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("caller", "python threads")),
    ],
    indirect=True,
)
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_interrupted_by_real_signals(experts, wrapped, monkeypatch):
    """Slow reads and two signals a call, the second often while the first is being handled."""
    # Python reports an interrupt that falls into a destructor, and forgets it.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    left, interrupted, chance = 0, 0, random.Random(5)

    def handler(number, frame):
        nonlocal left
        if left:
            left -= 1
            raise KeyboardInterrupt

    store = wrapped(lambda *_: time.sleep(chance.random() * 2e-3), threads=3)
    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 0.7e-3)
    try:
        for i in range(ROUNDS):
            call = CALLS[i % len(CALLS)]
            time.sleep(chance.random() * 1e-3)
            try:
                try:
                    left = 2
                    store.experts(3, *call)
                    left = 0
                except KeyboardInterrupt:
                    interrupted += 1
            except KeyboardInterrupt:
                interrupted += 1
            left = 0
            assert bank_is_right(store, experts)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > ROUNDS / 10
    all_is_well(store, experts)


def test_no_read_is_under_way_after_an_interrupt(wrapped):
    under_way, begun = set(), threading.Event()

    def before(layer, expert, into):
        under_way.add(expert)
        begun.set()
        time.sleep(0.01 * (expert + 1))
        under_way.discard(expert)

    store = wrapped(before, slots=E, threads=2)
    state = store._layers[3]
    state.begin_reads(range(6), ())
    assert begun.wait(60)
    state.recover()
    assert not under_way
    assert len(store.residents(3)) == 0
    assert state.table.free == E


def test_a_policy_that_breaks_its_contract_harms_nothing(experts, open_store):
    class Wild(LRU):
        wild = False

        def choose(self, layer, count, *, resident, protected):
            if self.wild:
                return list(resident)[:count]
            return super().choose(layer, count, resident=resident, protected=protected)

    policy = Wild()
    store = open_store(K, eviction=policy)
    first = (mx.ones((1, C)), mx.array([[0, 1, 2]], mx.uint32), mx.ones((1, K)))
    second = (mx.ones((1, C)), mx.array([[0, 1, 3]], mx.uint32), mx.ones((1, K)))
    store.experts(3, *first)
    policy.wild = True
    with pytest.raises(InputError, match="lru chose"):
        store.experts(3, *second)
    policy.wild = False
    all_is_well(store, experts)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_open_and_close_leak_nothing(experts):
    def cycle():
        with StreamedStore(make_reader("direct", experts.refs), 4) as store:
            for call in CALLS:
                store.experts(3, *call)
        del store
        gc.collect()

    cycle()
    mx.clear_cache()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    memory = mx.get_active_memory()
    for _ in range(6):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert mx.get_active_memory() <= memory


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_store_that_is_dropped_frees_files_and_threads(experts):
    def threads():
        return set(os.listdir("/proc/self/task"))

    files, before = len(os.listdir("/proc/self/fd")), threads()
    store = StreamedStore(make_reader("pread", experts.refs), 4)
    store.experts(3, *CALLS[0])
    started = threads() - before
    assert started
    del store
    gc.collect()
    until = time.monotonic() + 60
    while threads() & started and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads() & started
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_closed_store_says_so(open_store):
    store = open_store(K)
    y = store.experts(3, *CALLS[0])
    store.close()
    store.close()
    for use in (lambda: store.experts(3, *CALLS[0]), store.preload, lambda: store.resize(3, 4)):
        with pytest.raises(InputError, match="closed"):
            use()
    assert y.shape == (1, C)
    mx.eval(y)
