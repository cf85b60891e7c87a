"""Oracle: the resident store on the CPU in float32. Stock kernels take paths that depend on the
number of slots, so only tolerances are claimed here."""

import signal
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.experts.budget import measure_memory
from mlx_moeflux.experts.io.readers import READERS
from mlx_moeflux.experts.io.replicas import open_readers
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.conftest import read_by
from tests.experts.helpers import (
    FLOATS,
    FORMS,
    FOUR_BIT,
    LAYERS,
    E,
    K,
    Wrapped,
    arrive_at_random,
    bank_is_right,
    in_pieces,
    random_call,
    random_experts,
    write_experts,
)

pytestmark = pytest.mark.gpu

CALLS = [random_call(n, seed=seed) for seed, n in enumerate((1, 1, 2, 40, 1, 200, 1, 1, 7, 1))]
LIMITS = {mx.float32: 2e-3, mx.bfloat16: 3e-2}


def close(y, experts, layer, call, dtype):
    x, ids, weights = call
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        expected = np.array(experts.resident().experts(layer, x, ids, weights))
    finally:
        mx.set_default_device(device)
    error = np.abs(np.array(y) - expected).max() / np.abs(expected).max()
    return error <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("slots", [K, 4, E])
def test_streamed_is_resident(experts, open_store, slots, dtype):
    """Slots are refilled again and again between kernels that read them."""
    store, resident = open_store(slots), experts.resident()
    for x, ids, weights in CALLS * 2:
        for layer in LAYERS:
            call = (x.astype(dtype), ids, weights)
            assert close(store.experts(layer, *call), experts, layer, (x, ids, weights), dtype)
            assert close(resident.experts(layer, *call), experts, layer, (x, ids, weights), dtype)
    assert bank_is_right(store, experts)


def test_lazy_outputs_keep_their_experts(experts, open_store):
    store = open_store(K)
    calls = [random_call(1, seed=seed) for seed in range(30)]
    lazy = [store.experts(3, *call) for call in calls]
    mx.eval(lazy)
    assert all(close(y, experts, 3, c, mx.float32) for y, c in zip(lazy, calls, strict=True))


def test_a_submitted_output_keeps_its_experts(experts, open_store):
    """As above, with the work already handed to the device when the slots are wanted."""
    store = open_store(K)
    calls = [random_call(1, seed=seed) for seed in range(30)]
    outputs = []
    for call in calls:
        outputs.append(store.experts(3, *call))
        mx.async_eval(outputs[-1])
    assert all(close(y, experts, 3, c, mx.float32) for y, c in zip(outputs, calls, strict=True))


def test_resize(experts, open_store):
    store = open_store(K)
    for slots in (K, 5, E, 4):
        store.resize(3, slots)
        y = store.experts(3, *CALLS[3])
        assert close(y, experts, 3, CALLS[3], mx.float32)
        assert bank_is_right(store, experts)


NVIDIA = pytest.mark.skipif(not mx.cuda.is_available(), reason="an upload is NVIDIA's")
# Blocks of many chunks, of which several threads read parts, and of sizes that no word divides.
SHAPES = {
    "large": partial(random_experts, FOUR_BIT, hidden=512, inner=320),
    "tiny": partial(random_experts, FOUR_BIT),
    "odd": partial(random_experts, FLOATS, hidden=15, inner=7),
}


@NVIDIA
@read_by("threads", "python threads")
@pytest.mark.parametrize("name", ["pread", "direct"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_banks_hold_the_files_bytes(tmp_path, small_blocks, shape, form, name):
    experts = write_experts(tmp_path, SHAPES[shape](), form)
    with StreamedStore(in_pieces(READERS[name](experts.refs)), 4) as store:
        assert store._uploads is not None
        arrive_at_random(store, experts, rounds=40)


@NVIDIA
def test_banks_hold_what_readers_of_ones_own_give(tmp_path):
    """Threads of Python read or decode whole blocks."""
    experts = write_experts(tmp_path, SHAPES["large"](), "stacked")
    reader = Wrapped(READERS["pread"](experts.refs), lambda *block: None)
    with StreamedStore(reader, 4) as store:
        arrive_at_random(store, experts, rounds=40)


@NVIDIA
def test_banks_hold_the_bytes_of_two_copies(tmp_path):
    made = SHAPES["large"]()
    places = {p: write_experts(tmp_path / p, made, "packed").refs.copy() for p in "ab"}
    with StreamedStore(open_readers("pread", places), 4) as store:
        arrive_at_random(store, made, rounds=40)
        assert all(place.bytes_read for place in store.stats().places.values())


@NVIDIA
@read_by("threads", "python threads")
def test_interrupts_leave_banks_right(tmp_path, small_blocks):
    experts = write_experts(tmp_path, SHAPES["large"](), "stacked")
    interrupted, armed, random = 0, False, np.random.default_rng(3)

    def handler(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with StreamedStore(in_pieces(READERS["pread"](experts.refs)), 4) as store:
            for i in range(300):
                chosen = random.choice(E, 4, replace=False).tolist()
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + 4e-4 * random.random())
                    store.read_missing(3, chosen, protected=chosen)
                    armed = False
                except KeyboardInterrupt:
                    interrupted += 1
                if i % 10 == 9:
                    assert bank_is_right(store, experts)
            assert interrupted > 30
            arrive_at_random(store, experts)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@NVIDIA
@pytest.mark.parametrize("name", ["pread", "direct", "memory"])
def test_blocks_come_through_the_driver(experts, name):
    with StreamedStore(in_pieces(READERS[name](experts.refs)), K) as store:
        assert store._uploads is not None
        for seed in range(40):
            call = random_call(1, seed=seed)
            for layer in LAYERS:
                y = store.experts(layer, *call)
                assert close(y, experts, layer, call, mx.float32)
        assert store.stats().total.evictions > 40
        assert bank_is_right(store, experts)


def test_memory_is_measured():
    memory = measure_memory()
    assert memory.backend in ("metal", "cuda")
    assert 1 << 30 < memory.usable_bytes <= memory.free_bytes
