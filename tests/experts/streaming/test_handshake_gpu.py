"""Oracle: the resident model's bits on the same GPU. tests/faults/test_handshake.py has the faults,
test_handshake.py the simulator's hits."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.experts.streaming.handshake import Handshake
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.experts.streaming.test_handshake import TURNS, all_right, run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_nvidia(device):
    if not mx.cuda.is_available():
        pytest.skip("MLX drives no GPU of NVIDIA here")


@pytest.fixture(scope="module")
def right():
    with load_model(BUNDLED_MODEL, expert_memory="100%") as model:
        found = list(run(model))
    assert all(np.isfinite(y).all() for y in found)
    return found


def opened(slots, **options):
    options |= {"handshake": True, "expert_threads": 2}
    model = load_model(BUNDLED_MODEL, expert_memory="90%", **options)
    model.store.resize_all(dict.fromkeys(model.store.layers, slots))
    return model


@pytest.mark.parametrize("reader", ["pread", "direct"])
@pytest.mark.parametrize("eviction", ["lfu", "lru"])
@pytest.mark.parametrize("slots", [8, 16, 31])
def test_bits_and_hits(tmp_path, right, slots, eviction, reader):
    file = tmp_path / "run.trace"
    with load_model(BUNDLED_MODEL, expert_memory="50%") as model, model.trace(file):
        list(run(model))
    with opened(slots, eviction=eviction, expert_reader=reader) as model:
        assert all_right(list(run(model)), right)
        steps = sum(count for kind, count in TURNS if kind == "steps")
        assert model.store.ways == f"handshake: {steps} steps"
        assert model.steps.waiting.traces, "its steps are traced"
        replayed = simulate(Trace.open(file), model.store.slots, eviction=eviction)
        total = model.store.stats().total
        assert (total.hits, total.misses) == (replayed.total.hits, replayed.total.misses)


def test_a_trace_stands_for_all_steps_of_a_reply(right):
    with opened(16) as model:
        results = run(model)
        for _ in range(3):
            next(results)
        traces = model.steps.waiting.traces
        list(results)
        assert model.steps.waiting.traces == traces


def test_a_model_that_has_all_experts_needs_no_host(right):
    """Traces of steps that wait are not those of a model whose slots hold every expert."""
    with load_model(BUNDLED_MODEL, expert_memory="90%", handshake=True, expert_threads=2) as model:
        model.store.resize_all(dict.fromkeys(model.store.layers, model.store.num_experts))
        results = run(model)
        found = [next(results) for _ in range(3)]
        steps = model.store._handshake.steps
        assert steps > 0
        model.store.preload()
        assert model.runtime.experts_stay_on_device
        assert all_right(found + list(results), right)
        assert model.store._handshake.steps == steps


def test_slots_hold_what_the_table_says(right):
    with opened(8) as model:
        list(run(model))
        store = model.store
        for layer in store.layers:
            bank = store._layers[layer].bank
            views = [memoryview(bytearray(c.nbytes)) for c in bank.layout.components]
            for expert, slot in store.residents(layer).items():
                store.reader.read(layer, expert, views)
                for name, view in zip(bank.arrays, views, strict=True):
                    held = np.array(bank.arrays[name][slot].reshape(-1).view(mx.uint8))
                    assert held.tobytes() == bytes(view)


def test_text_of_generate():
    texts = []
    for options in ({"expert_memory": "100%"}, {"expert_memory": "50%", "handshake": True}):
        model, tokenizer = load(BUNDLED_MODEL, **options)
        with model:
            texts.append(generate(model, tokenizer, prompt="Tides", max_tokens=40))
            if model.store.streaming:
                assert model.store._handshake.steps > 0
                assert model.store._handshake.off is None
    assert texts[0] == texts[1]


def test_kernels_end_without_a_host(right, monkeypatch):
    """The answering thread is never woken; all kernels of the step wait no longer than one."""
    monkeypatch.setattr("mlx_moeflux.experts.streaming.handshake.WAIT_SECONDS", 0.2)
    with opened(16) as model:
        own = model.store._handshake
        assert isinstance(own, Handshake)
        memory, boxes = own._memory, dict(own._memory.boxes)
        memory.boxes = {layer: box + 8 * 40 for layer, box in boxes.items()}
        assert all_right(list(run(model)), right)
        ways = model.store.ways
        assert ways == "handshake: 0 steps, then off: a kernel waited too long for the host"
