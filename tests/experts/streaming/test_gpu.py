"""Oracle: the resident store on the CPU in float32. Stock kernels take paths that depend on the
number of slots, so only tolerances are claimed here."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.experts.budget import measure_memory
from mlx_moeflux.experts.io.readers import READERS
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.helpers import LAYERS, E, K, bank_is_right, random_call

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


@pytest.mark.skipif(not mx.cuda.is_available(), reason="an upload is NVIDIA's")
@pytest.mark.parametrize(
    ("name", "pieces"),
    [("pread", {"least_piece": 1000}), ("direct", {"least_piece": 1000}), ("memory", {})],
    ids=["pread", "direct", "memory"],
)
def test_blocks_come_through_the_driver(experts, name, pieces):
    with StreamedStore(READERS[name](experts.refs, **pieces), K) as store:
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
