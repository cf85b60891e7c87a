"""Oracle: the resident model. The kernel's text runs on the host against the real threads; the GPU
is in tests/experts/streaming/test_handshake_gpu.py."""

import mmap
import shutil
import subprocess
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.runtime.cuda.handshake import BODY, header
from mlx_moeflux.loading import load_model
from tests.kernels.runtime.handshake_on_host import HostPull

STEPS = 6


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    monkeypatch.setattr(device, "pull_for", lambda k: HostPull(k, locked))
    yield
    mx.set_default_device(before)


def locked(nbytes):
    return memoryview(mmap.mmap(-1, nbytes))


def run(model):
    cache, ids = model.make_cache(), np.random.default_rng(2).integers(5, 90, 9).tolist()
    model(mx.array([ids[:3]]), cache)
    return [np.array(model(mx.array([[token]]), cache)) for token in ids[3 : 3 + STEPS]]


@pytest.mark.slow
def test_the_kernel_pulls_what_the_threads_read(two_layers):
    path = two_layers / "qwen3.5-tiny"
    with load_model(path, expert_memory="100%") as model:
        right = run(model)
    with load_model(path, expert_memory="70%", handshake=True) as model:
        found, store = run(model), model.store
        assert all(map(np.array_equal, found, right))
        assert store.ways == f"handshake: {STEPS} steps"
        for layer in store.layers:
            for expert, slot in store.residents(layer).items():
                views = store._layers[layer].bank.slot_views(slot)
                read = [memoryview(bytearray(view.nbytes)) for view in views]
                store.reader.read(layer, expert, read)
                assert [bytes(v) for v in views] == [bytes(v) for v in read]


def test_a_kernel_without_a_host_ends_and_none_waits_after_it():
    memory = np.zeros(4096, np.uint64)
    memory[0], pull = 7, HostPull(4, locked)
    ids = mx.array([[1, 2, 3, 5]], mx.uint32)
    limit = 300_000_000
    control = pull.control(memory.ctypes.data, memory[16:].ctypes.data, limit)
    start = time.perf_counter()
    assert pull.slots(ids, control).tolist() == [[0, 0, 0, 0]]
    took = time.perf_counter() - start
    assert 0.3 < took < 30
    assert memory[1] == 1, "the word that ends all waits"
    assert memory[16:20].tolist() == [7 << 16 | e for e in (1, 2, 3, 5)]
    # A second one gives up at once, whatever its limit.
    control = pull.control(memory.ctypes.data, memory[16:].ctypes.data, 1 << 62)
    assert pull.slots(ids, control).tolist() == [[0, 0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_nvcc_compiles_it(tmp_path, architecture):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    arrays = "const uint32_t* ids, const uint64_t* control, uint32_t* slots"
    kernel = f"__global__ void kernel({arrays}) {{ constexpr int K = 8; {BODY} }}"
    file = tmp_path / "kernel.cu"
    file.write_text(f"#include <cstdint>\n{header()}{kernel}\n")
    command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-cubin", "-o", tmp_path / "made"]
    subprocess.run([*command, file], check=True)


def test_a_late_word_is_waited_for():
    """Slots are there, a piece is not: the kernel copies nothing in its place."""
    memory, bank = np.zeros(4096, np.uint64), np.zeros(100, np.uint8)
    source = np.arange(1, 101, dtype=np.uint8)
    turn, pull = 9, HostPull(4, locked)
    memory[0], box = turn, memory[16:]
    box[32:37] = [turn << 16 | word for word in (4, 3, 2, 1, 2)]
    box[64:68] = bank.ctypes.data + 3, source.ctypes.data + 1, 33, turn << 16
    box[68:72] = bank.ctypes.data + 50, source.ctypes.data, 50, (turn - 1) << 16
    control = pull.control(memory.ctypes.data, box.ctypes.data, 200_000_000)
    ids = mx.array([[1, 2, 3, 5]], mx.uint32)
    assert pull.slots(ids, control).tolist() == [[4, 3, 2, 1]]
    expected = np.zeros(100, np.uint8)
    expected[3:36] = source[1:34]
    assert np.array_equal(bank, expected)
    assert memory[1] == 1
