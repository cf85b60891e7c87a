"""Oracle: the resident model, and words as docs/handshake.md describes them. The kernel's text runs
on the host; nobody has seen it on an Apple GPU."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.runtime.metal import handshake
from mlx_moeflux.loading import load_model
from tests.kernels.harness import require
from tests.kernels.metal import lint
from tests.kernels.metal.variant import Variant, generated_text
from tests.kernels.runtime.metal_handshake_on_host import HostPull

STEPS, TAG, ANSWER, BOX = 6, 16, 32, 64
IDS = [1, 2, 3, 500]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    monkeypatch.setattr(device, "pull_for", HostPull)
    yield
    mx.set_default_device(before)


def run(model):
    cache, ids = model.make_cache(), np.random.default_rng(2).integers(5, 90, 9).tolist()
    model(mx.array([ids[:3]]), cache)
    return [np.array(model(mx.array([[token]]), cache)) for token in ids[3 : 3 + STEPS]]


def test_slots_hold_their_blocks_when_the_kernel_ends(two_layers):
    path = two_layers / "qwen3.5-tiny"
    with load_model(path, expert_memory="100%") as model:
        right = run(model)
    with load_model(path, expert_memory="70%", handshake=True, expert_threads=2) as model:
        found, store = run(model), model.store
        assert all(map(np.array_equal, found, right))
        assert store.ways == f"handshake: {STEPS} steps"
        for layer in store.layers:
            for expert, slot in store.residents(layer).items():
                views = store._layers[layer].bank.slot_views(slot)
                read = [memoryview(bytearray(view.nbytes)) for view in views]
                store.reader.read(layer, expert, read)
                assert [bytes(v) for v in views] == [bytes(v) for v in read]


class Call:
    """A call of the kernel for IDS, of a turn, beside which the test is the host."""

    def __init__(self, turn, seconds):
        self.pull = HostPull(len(IDS))
        view = self.pull.locked(8 * 512)
        self.words = np.frombuffer(view, np.uint64)
        self.words[0], self.box = turn, self.words[BOX:]
        start = device.address_of(view)
        self.control = self.pull.control(start, start + 8 * BOX, int(1e9 * seconds))

    def slots(self):
        return self.pull.slots(mx.array([IDS], mx.uint32), self.control).tolist()[0]


def test_a_kernel_without_a_host_ends_and_none_waits_after_it():
    call = Call(turn=7, seconds=0.01)
    assert call.slots() == [0] * 4
    assert call.words[1] == 1, "the word that ends all waits"
    assert call.box[:4].tolist() == [7 << TAG | e for e in IDS]
    # A second one gives up at once, whatever its limit.
    later = Call(turn=7, seconds=4000)
    later.words[1] = 1
    assert later.slots() == [0] * 4


@pytest.mark.parametrize("turn", [1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, (1 << 32) + 5])
def test_only_words_of_this_turn_are_answers(turn):
    """Words of 2^16 turns ago have the same lower half; at first all words are of earlier turns."""
    call, found = Call(turn, seconds=4000), []
    box = call.box
    before = max(turn - (1 << 16), 0)
    box[ANSWER : ANSWER + 4] = [before << TAG | 9, (turn - 1) << TAG | 8, 7, before << TAG | 6]
    thread = threading.Thread(target=lambda: found.append(call.slots()))
    thread.start()
    try:
        until = time.monotonic() + 60
        while [int(word) >> TAG for word in box[:4]] != [turn] * 4:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert [int(word) & 0xFFFF for word in box[:4]] == IDS
        for i, slot in enumerate((4, 3, 65535, 0)):
            time.sleep(0.005)
            assert thread.is_alive()
            box[ANSWER + i] = turn << TAG | slot
        thread.join(60)
        assert found == [[4, 3, 65535, 0]]
        assert call.words[1] == 0
    finally:
        call.words[1] = 1


def test_metals_front_end_would_take_it():
    """But for the pragma, the qualifier `coherent(system)` and the number of a scope, which clang
    does not know."""
    require(lint.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    header, body = handshake.text()
    header = header.removeprefix(handshake.INTERNALS)
    names = {"input_names": list(handshake.INPUTS), "output_names": list(handshake.OUTPUTS)}
    call = mx.fast.metal_kernel(name="moeflux_handshake", source=body, header=header, **names)
    for k in (4, 8, handshake.MOST_CHOSEN):
        inputs = [mx.zeros((1, k), mx.uint32), mx.zeros((64,), mx.uint32), mx.zeros(3, mx.uint32)]
        launch = {"grid": (k, 1, 1), "threadgroup": (k, 1, 1), "template": []}
        launch |= {"output_shapes": [(1, k)], "output_dtypes": [mx.uint32]}
        generated = generated_text(call, header, inputs, **launch).removeprefix(header)
        kernel = SimpleNamespace(
            name="handshake", file=handshake.FILE, inputs=handshake.INPUTS, outputs=("slots",)
        )
        dtypes = (mx.uint32,) * 3, (mx.uint32,)
        found = lint.problems(Variant(kernel, header, generated, (), *dtypes, k))
        # Its body reads these itself, whatever their address space is.
        small = ("'ids' has fewer than 8", "'control' has fewer than 8")
        assert [problem for problem in found if not problem.startswith(small)] == []


def test_more_experts_than_the_words_of_a_layer_have_no_kernel():
    assert handshake.pull_for(handshake.MOST_CHOSEN) is not None
    assert handshake.pull_for(handshake.MOST_CHOSEN + 1) is None
