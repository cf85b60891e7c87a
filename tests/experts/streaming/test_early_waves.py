"""Waves that begin before their call. Oracles: the resident store, what a reader saw, and sums."""

import os
import random
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import experts as package
from mlx_moeflux.errors import ExpertFileError, InputError
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.policies.wave_schedule import layer_to_begin
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.events import (
    Chosen,
    Evict,
    Hit,
    Miss,
    PrefetchDrop,
    PrefetchEnd,
    PrefetchStart,
    ReadEnd,
    ReadStart,
)
from tests.experts.conftest import BOTH_READ, PYTHON_READS
from tests.experts.helpers import (
    C,
    E,
    K,
    Wrapped,
    all_is_well,
    bank_is_right,
    random_call,
    random_experts,
    same_bits,
    write_experts,
)

PACKAGE = os.path.dirname(package.__file__)
# Needs every expert.
PROMPT = random_call(30, seed=6)
assert set(np.array(PROMPT[1]).ravel().tolist()) == set(range(E))


def call_of(*rows, seed=0):
    """A call whose tokens need these experts."""
    rng = np.random.default_rng(seed)
    x = mx.array(rng.standard_normal((len(rows), C)).astype(np.float32))
    weights = mx.array(rng.random((len(rows), len(rows[0]))).astype(np.float32))
    return x, mx.array(rows, mx.uint32), weights


# Needs experts 1, 2, 4 and 6 alone: more than three slots.
SOME = call_of([1, 2, 4], [2, 4, 6], [1, 4, 6])


@BOTH_READ
@pytest.mark.parametrize("slots", [3, pytest.param(4, marks=pytest.mark.slow), 6])
def test_bits_and_counts_of_prompts_among_decode_steps(experts, open_store, slots):
    store, resident, random = open_store(slots, wave_reads=2), experts.resident(), [0]
    for n in (30, 1, 30, 17, 1, 2, 40, 5, 1, 30):
        for layer in (3, 5):
            random[0] += 1
            call = random_call(n, seed=random[0], padding=n // 9)
            assert same_bits(store.experts(layer, *call), resident.experts(layer, *call))
            assert bank_is_right(store, experts)
    first, second = (store.stats().layers[layer] for layer in (3, 5))
    assert first.prefetches == 0
    assert second.prefetches > slots
    assert second.prefetches >= second.prefetched_hits > 0
    for stats in (first, second):
        assert stats.reads == stats.misses + stats.prefetches
        assert stats.bytes_read == stats.reads * experts.layouts[3].nbytes
        assert stats.lookups == stats.hits + stats.misses
    all_is_well(store, experts)


def test_the_next_layer_is_read_behind_all_of_this_one_and_before_it_ends(tmp_path):
    """A reader that lets a block of layer 5 wait until layer 3 has returned; the call would wait
    for ever if it waited for it. Its blocks take long enough for several waves to queue."""
    order, ended = [], threading.Event()
    experts = write_experts(tmp_path, random_experts(num_experts=16), "packed")
    prompt = random_call(60, num_experts=16)

    def before(layer, expert, into):
        order.append((layer, expert))
        if layer == 5:
            assert ended.wait(60)
            time.sleep(0.01)

    reader = Wrapped(make_reader("pread", experts.refs), before)
    with StreamedStore(reader, 12, threads=1) as store:
        store.wave_reads = 2
        resident = experts.resident()
        assert same_bits(store.experts(3, *prompt), resident.experts(3, *prompt))
        assert store._layers[5].reading_ahead
        ended.set()
        assert same_bits(store.experts(5, *prompt), resident.experts(5, *prompt))
        # Each block once, ascending, and layer 5 behind layer 3.
        assert order == [(layer, expert) for layer in (3, 5) for expert in range(16)]
        assert store.stats().layers[5].misses == 16 - 3 * 2


@pytest.mark.parametrize("slots", [3, 4, 5, 6])
def test_no_block_is_read_that_a_call_alone_would_not_read(open_store, slots):
    reads = []
    for first in (5, 3):
        store = open_store(slots, wave_reads=1)
        for row in ([0, 2, 3], [2, 5, 6], [0, 3, 6]):
            store.experts(5, *call_of(row))
        before = store.stats().layers[5].reads
        store.experts(first, *PROMPT)
        assert store._layers[5].reading_ahead == (first == 3)
        if first == 3:
            store.experts(5, *PROMPT)
            assert store.stats().layers[5].prefetched_hits > 0
        reads.append(store.stats().layers[5].reads - before)
    assert reads[0] == reads[1]


def test_a_call_that_takes_waves_is_a_change_from_its_beginning(open_store, experts):
    """A second interrupt may prevent the recovery after the first; the next call makes it then."""
    store = open_store(4)
    store.experts(3, *PROMPT)
    x, ids, weights = PROMPT
    with store.exclusive():
        call = store.begin_load(5, ids, weights)
        assert store._layers[5].change.open
        store.wait(call)
        y = store.compute(call, x, weights)
        store.release_after(call, y)
        assert not store._layers[5].change.open
    assert same_bits(y, experts.resident().experts(5, *PROMPT))


@pytest.mark.parametrize("action", ["token", "some", "resize", "preload", "close", "release"])
def test_anything_may_come_before_the_call(experts, open_store, action):
    store = open_store(4)
    store.experts(3, *PROMPT)
    assert store._layers[5].reading_ahead
    if action == "close":
        store.close()
        with pytest.raises(InputError, match="closed"):
            store.experts(5, *PROMPT)
        return
    if action in ("token", "some"):
        call = random_call(1) if action == "token" else SOME
        assert same_bits(store.experts(5, *call), experts.resident().experts(5, *call))
        assert store.stats().layers[5].prefetches == 4
    elif action == "resize":
        store.resize(5, K)
    elif action == "preload":
        store.preload()
    else:
        store.release()
    assert bank_is_right(store, experts) or action == "release"
    all_is_well(store, experts)
    assert same_bits(store.experts(5, *PROMPT), experts.resident().experts(5, *PROMPT))


def test_blocks_that_are_not_needed_are_counted(open_store, experts):
    store = open_store(3)
    store.experts(3, *PROMPT)
    assert same_bits(store.experts(5, *SOME), experts.resident().experts(5, *SOME))
    stats = store.stats().layers[5]
    # 0, 1, 2 were read, of which 0 in vain.
    assert (stats.prefetches, stats.prefetched_hits) == (3, 2)
    assert (stats.lookups, stats.hits, stats.misses, stats.reads) == (4, 2, 2, 5)
    assert "read ahead 3, of which 2 used" in str(store.stats())


@pytest.mark.parametrize(
    ("call", "slots"),
    [
        (random_call(1), 4),  # one token
        (call_of([0, 1, 2], [3, 4, 5]), 4),  # six of seven experts
        (PROMPT, {3: 4, 5: E}),
        (PROMPT, {3: E, 5: 4}),  # no waves
    ],
)
def test_calls_that_begin_nothing(open_store, call, slots):
    store = open_store(slots)
    store.experts(3, *call)
    assert not store._layers[5].reading_ahead
    store.experts(5, *call)
    assert not store._layers[3].reading_ahead


def test_the_layer_that_begins():
    assert layer_to_begin((3, 5, 9), 3, 224, 256) == 5
    assert layer_to_begin((3, 5, 9), 5, 256, 256) == 9
    assert layer_to_begin((3, 5, 9), 5, 223, 256) is None
    assert layer_to_begin((3, 5, 9), 9, 256, 256) is None


def test_events_in_their_order(open_store):
    events = []
    store = open_store(4, events=events.append)
    store.experts(3, *PROMPT)
    early = [e for e in events if e.layer == 5]
    assert [(type(e), e.expert) for e in early] == [(PrefetchStart, e) for e in range(4)]
    last_read = max(i for i, e in enumerate(events) if isinstance(e, ReadStart))
    assert events.index(early[0]) > last_read
    del events[:]
    store.experts(5, *PROMPT)
    names = [(type(e), e.expert) for e in events[1:]]
    assert isinstance(events[0], Chosen)
    assert names[:4] == [(Hit, e) for e in range(4)]
    assert all(e.prefetched for e in events[1:5])
    ends = [(kind, e) for kind, e in names if kind in (PrefetchEnd, ReadEnd)]
    assert ends == [(PrefetchEnd, e) for e in range(4)] + [(ReadEnd, e) for e in range(4, E)]
    assert [e for kind, e in names if kind is Miss] == list(range(4, E))


@PYTHON_READS
@pytest.mark.parametrize("needed", [True, False])
def test_a_read_that_fails(experts, wrapped, needed):
    """Of an expert that is not needed it is dropped, else an error; both leave the store usable."""

    def before(layer, expert, into):
        if broken and (layer, expert) == (5, 1 if needed else 0):
            raise OSError(5, "Input/output error")

    broken, store, drops = True, wrapped(before, slots=3), []
    store.events = lambda e: drops.append(e.expert) if isinstance(e, PrefetchDrop) else None
    store.experts(3, *PROMPT)
    if needed:
        with pytest.raises(ExpertFileError, match="expert 1 of layer 5 failed"):
            store.experts(5, *SOME)
    else:
        assert same_bits(store.experts(5, *SOME), experts.resident().experts(5, *SOME))
        assert drops == [0]
        assert store.stats().layers[5].prefetches == 2
    broken = False
    assert same_bits(store.experts(5, *SOME), experts.resident().experts(5, *SOME))
    all_is_well(store, experts)


def test_a_bug_in_a_reader_is_not_hidden(wrapped, experts):
    def before(layer, expert, into):
        if bug and layer == 5:
            raise KeyError("a bug")

    bug, store = True, wrapped(before, slots=3)
    store.experts(3, *PROMPT)
    with pytest.raises(KeyError, match="a bug"):
        store.experts(5, *SOME)
    bug = False
    all_is_well(store, experts)


def test_no_read_is_under_way_after_an_error(wrapped, experts):
    """The last block of layer 3 fails while those of layer 5 are read."""
    under_way = []

    def before(layer, expert, into):
        if layer == 5:
            under_way.append(expert)
            time.sleep(0.02)
            under_way.remove(expert)
        elif expert == E - 1 and broken:
            raise OSError(5, "Input/output error")

    broken, store = True, wrapped(before, slots=4, threads=3)
    with pytest.raises(ExpertFileError, match="expert 6 of layer 3"):
        store.experts(3, *PROMPT)
    assert not under_way
    assert not store._layers[5].reading_ahead
    broken = False
    all_is_well(store, experts)


@pytest.mark.parametrize("kind", [Evict, Hit, PrefetchStart, PrefetchEnd])
def test_interrupted_at_events(experts, open_store, kind):
    armed = [0]

    def listener(event):
        if event.layer == 5 and isinstance(event, kind) and armed[0]:
            armed[0] -= 1
            if not armed[0]:
                raise KeyboardInterrupt

    store, interrupted = open_store(4, events=listener, wave_reads=2), 0
    for nth in (1, 2, 3, 1, 2, 3, 4):
        armed[0] = nth
        try:
            for layer in (3, 5):
                store.experts(layer, *PROMPT)
        except KeyboardInterrupt:
            interrupted += 1
        armed[0] = 0
        assert bank_is_right(store, experts)
    assert interrupted >= 3
    all_is_well(store, experts)


@pytest.mark.parametrize("rounds", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_interrupted_at_lines(experts, open_store, rounds):
    """KeyboardInterrupt at lines that two layers of a prompt execute, drawn at random."""
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

    def both():
        return [store.experts(layer, *PROMPT) for layer in (3, 5)]

    resident, rng, interrupted = experts.resident(), random.Random(rounds), 0
    right = [resident.experts(layer, *PROMPT) for layer in (3, 5)]
    store = open_store(4, threads=2, wave_reads=2)
    countdown = 10**9
    sys.settrace(tracer)
    try:
        both()
    finally:
        sys.settrace(None)
    lines = 10**9 - countdown
    for _ in range(rounds):
        countdown = rng.randrange(1, lines)
        sys.settrace(tracer)
        try:
            both()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert bank_is_right(store, experts)
        assert all(map(same_bits, both(), right))
    assert interrupted > rounds / 2
    all_is_well(store, experts)
