"""Oracle: the resident model's bits, and the simulator's hits. A played kernel asks real threads;
test_cuda_handshake.py and test_metal_handshake.py in tests/kernels/runtime run the kernels' own
texts."""

from __future__ import annotations

import os
import re
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cli.common import stats_table
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ExpertFileError, InputError, MemoryBudgetError, UnsupportedError
from mlx_moeflux.experts.io import desk
from mlx_moeflux.experts.policies.eviction import LFU
from mlx_moeflux.experts.streaming import handshake
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.experts.streaming.waiting import PlayedPull, PlayedPullWithoutCopies

TURNS = ("prompt", 5), ("steps", 12), ("prompt", 3), ("steps", 6)
COUNTS = "lookups", "hits", "misses", "evictions"


@pytest.fixture(
    params=[
        pytest.param(PlayedPull, id="kernels-write"),
        pytest.param(PlayedPullWithoutCopies, id="threads-write", marks=pytest.mark.slow),
    ]
)
def pulls(monkeypatch, request):
    """The played kernels of the stores that the test opens."""
    made = []

    def pull_for(k):
        made.append(request.param(k))
        return made[-1]

    monkeypatch.setattr(device, "pull_for", pull_for)
    return made


def run(model, turns=TURNS):
    """Logits after every call of a fixed text."""
    cache, ids = model.make_cache(), iter(np.random.default_rng(1).integers(5, 90, 99).tolist())
    for kind, count in turns:
        sizes = [count] if kind == "prompt" else [1] * count
        for size in sizes:
            tokens = mx.array([[next(ids) for _ in range(size)]])
            yield np.array(model(tokens, cache, last_only=True).astype(mx.float32))


@pytest.fixture(scope="module")
def path(two_layers):
    return two_layers / "qwen3.5-tiny"


@pytest.fixture
def opened(path):
    """A function that opens a model whose decode steps wait for experts."""

    def opened(slots=8, **options):
        options |= {"handshake": True, "expert_threads": 2}
        model = load_model(path, expert_memory="90%", **options)
        model.store.resize_all(dict.fromkeys(model.store.layers, slots))
        return model

    return opened


@pytest.fixture(scope="module")
def known(path, tmp_path_factory):
    """What a resident model gives, and the trace of a streamed one."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    file = tmp_path_factory.mktemp("trace") / "run.trace"
    with load_model(path, expert_memory="100%") as model:
        right = list(run(model))
    with load_model(path, expert_memory="70%") as model, model.trace(file):
        list(run(model))
    mx.set_default_device(before)
    assert all(np.isfinite(y).all() for y in right)
    return right, Trace.open(file)


def threads():
    """Threads of this process; none where the system does not list them."""
    return set(os.listdir("/proc/self/task")) if sys.platform == "linux" else set()


def all_right(found, right):
    assert len(found) == len(right)
    return all(np.array_equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("slots", "eviction"),
    [
        pytest.param(5, "lfu", id="5-lfu"),
        pytest.param(8, "lru", id="8-lru"),
        pytest.param(8, 0.01, id="8-weights that become too large"),
        pytest.param(15, "lfu", id="15-lfu"),
        pytest.param(5, "lru", id="5-lru", marks=pytest.mark.slow),
        pytest.param(8, 1.5, id="8-fast", marks=pytest.mark.slow),
        pytest.param(15, "lru", id="15-lru", marks=pytest.mark.slow),
    ],
)
def test_bits_and_hits(opened, pulls, known, slots, eviction):
    """eviction: A name, or the tokens after which uses count half."""
    right, trace = known
    with opened(slots, eviction=eviction if isinstance(eviction, str) else LFU(eviction)) as model:
        assert all_right(list(run(model)), right)
        store = model.store
        assert store.ways == "handshake: 18 steps"
        assert "handshake: 18 steps" in stats_table(store.stats(), model).splitlines()
        own = store.eviction
        again = LFU(1 / own.rate) if type(own) is LFU else "lru"
        replayed = simulate(trace, store.slots, eviction=again)
        for layer, stats in store.stats().layers.items():
            for name in COUNTS:
                assert getattr(stats, name) == getattr(replayed.layers[layer], name), (layer, name)
            assert stats.reads == stats.misses
            assert stats.bytes_read == stats.misses * store.block_bytes[layer]
    assert pulls[-1].calls == 18 * len(store.layers)


def test_direct_reads_begin_anywhere_in_a_page(pulls):
    few = ("prompt", 2), ("steps", 3)
    with load_model(BUNDLED_MODEL, expert_memory="100%") as model:
        right = list(run(model, few))
    options = {"expert_reader": "direct", "handshake": True, "expert_threads": 2}
    with load_model(BUNDLED_MODEL, expert_memory="60%", **options) as model:
        offsets = model.store.reader.places(0)[1]
        assert (offsets % 4096).any()
        assert all_right(list(run(model, few)), right)
        assert model.store.ways == "handshake: 3 steps"


USES = {
    "events": lambda store: setattr(store, "events", None),
    "residents": lambda store: store.residents(store.layers[0]),
    "preload": lambda store: store.preload(),
    "resize": lambda store: store.resize(store.layers[0], store.num_experts - 1),
    "release": lambda store: store.release(),
    "read": lambda store: store.read_missing(store.layers[1], range(4), protected=()),
    "exclusive": lambda store: store.exclusive().__enter__(),
}


RARE = "residents", "preload", "read"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in USES]
)
def test_whatever_uses_the_store_has_all_of_it(opened, pulls, known, name):
    right, _ = known
    with opened() as model:
        results, store = run(model), model.store
        found = [next(results) for _ in range(8)]
        assert any(store._handshake.lends(layer) for layer in store.layers)
        USES[name](store)
        assert not any(store._handshake.lends(layer) for layer in store.layers)
        for state in store._layers.values():
            assert len(state.table) + state.table.free == state.table.slots
        assert all_right(found + list(results), right)
        assert store._handshake.off is None


def test_slots_hold_what_the_table_says(opened, pulls):
    with opened(5) as model:
        list(run(model, (("prompt", 2), ("steps", 9))))
        store = model.store
        for layer in store.layers:
            residents, bank = store.residents(layer), store._layers[layer].bank
            assert len(residents) == store.slots[layer]
            views = [memoryview(bytearray(c.nbytes)) for c in bank.layout.components]
            for expert, slot in residents.items():
                store.reader.read(layer, expert, views)
                assert [bytes(v) for v in bank.slot_views(slot)] == [bytes(v) for v in views]


@pytest.mark.parametrize("kind", [PlayedPull, PlayedPullWithoutCopies])
def test_kernels_that_run_twice_in_a_step(experts, open_store, kind):
    """As where an operation is tried on a Mac: the second time for other experts."""
    store = open_store(5, handshake=kind(3))
    own = store.handshake
    with own.step():
        own.slots(3, mx.array([[0, 1, 2]], mx.uint32))
        own.begin_again()
        asked = {3: [2, 4, 6], 5: [0, 3, 5]}
        slots = {i: own.slots(i, mx.array([ids], mx.uint32)) for i, ids in asked.items()}
    assert store.ways == "handshake: 1 steps"
    for layer, ids in asked.items():
        bank = store._layers[layer].bank
        for expert, slot in zip(ids, slots[layer].tolist()[0], strict=True):
            assert b"".join(map(bytes, bank.slot_views(slot))) == experts.block(layer, expert)
        assert {expert: store.residents(layer)[expert] for expert in ids} == dict(
            zip(ids, slots[layer].tolist()[0], strict=True)
        )
        assert store.stats().layers[layer].misses == 3


@pytest.mark.parametrize("nth", [0, 1])
def test_interrupted_in_any_layer(opened, pulls, known, nth):
    right, _ = known

    def interrupt(call):
        if call == at:
            raise KeyboardInterrupt

    with opened(5) as model:
        at, pulls[-1].before = -1, interrupt
        cache, store = model.make_cache(), model.store
        ids = np.random.default_rng(1).integers(5, 90, 99).tolist()
        found = [np.array(model(mx.array([ids[:5]]), cache, last_only=True))]
        for i, token in enumerate(ids[5:17]):
            at = pulls[-1].calls + nth if i in (0, 1, 5) else -1
            if at >= 0:
                with pytest.raises(KeyboardInterrupt):
                    model(mx.array([[token]]), cache, last_only=True)
                assert cache[0].columns == 5 + i
                at = -1
            found.append(np.array(model(mx.array([[token]]), cache, last_only=True)))
        assert all_right(found, right[:13])
        assert store.ways == "handshake: 12 steps"


@pytest.mark.parametrize("every", [17, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupted_at_lines_of_the_hand_over(opened, pulls, known, every):
    """KeyboardInterrupt at the n-th line that the hand-over's code executes, for many n."""
    right, _ = known
    files, countdown = {handshake.__file__, desk.__file__}, 0

    def tracer(frame, event, argument):
        nonlocal countdown
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
        return tracer

    with opened(5) as model:
        cache, lines, finished = model.make_cache(), 0, False
        ids = np.random.default_rng(1).integers(5, 90, 99).tolist()
        model(mx.array([ids[:5]]), cache)
        before = threads()
        while not finished:
            lines += every
            model.store.residents(model.store.layers[0])
            countdown = lines
            sys.settrace(tracer)
            try:
                y = model(mx.array([[ids[5]]]), cache)
                finished = True
            except KeyboardInterrupt:
                assert cache[0].columns == 5
            finally:
                sys.settrace(None)
        assert lines > 120
        model.store.residents(model.store.layers[0])
        assert threads() == before
        assert np.array_equal(np.array(y), right[1])
        assert np.array_equal(np.array(model(mx.array([[ids[6]]]), cache)), right[2])


@pytest.mark.parametrize("family", ["qwen4-exp-tiny", "deepseek-tiny"])
def test_other_kinds_of_state(two_layers, pulls, family, buffers_are_free):
    """N-grams that are fed before a step, and latents; a step fails, and is made again."""
    path = two_layers / family
    with load_model(path, expert_memory="100%") as model:
        right = list(run(model, TURNS[:2]))
    with load_model(path, expert_memory="97%", handshake=True) as model:
        layers = len(model.store.layers)

        def late(call):
            pulls[-1].late = call == 6 * layers

        pulls[-1].before = late
        model.store.resize_all(dict.fromkeys(model.store.layers, 6))
        assert all_right(list(run(model, TURNS[:2])), right)
        assert model.store.ways.startswith("handshake: 6 steps, then off")


class Broken:
    """Lets reads of all files fail from a call of the kernel on, until :meth:`mend`."""

    def __init__(self, model, pull, at):
        self._fds, self._kept, self._pull, self._at = model.store.reader._fds, [], pull, at
        pull.before = self._before

    def _before(self, call):
        if call == self._at:
            # Reading one's own memory at a low address fails with EIO.
            broken = os.open("/proc/self/mem", os.O_RDONLY)
            self._kept = [os.dup(fd) for fd in self._fds]
            for fd in self._fds:
                os.dup2(broken, fd)
            os.close(broken)

    def mend(self):
        for fd, kept in zip(self._fds, self._kept, strict=False):
            os.dup2(kept, fd)
            os.close(kept)
        self._kept = []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("passes", [True, False])
def test_reads_that_fail(opened, pulls, known, passes):
    """If they fail no more, the other path gives the bits; else its error is raised."""
    right, _ = known
    with opened(5) as model:
        broken = Broken(model, pulls[-1], at=4 * len(model.store.layers) + 1)
        if passes:
            pulls[-1].finish = broken.mend
            assert all_right(list(run(model)), right)
        else:
            results = run(model)
            with pytest.raises(ExpertFileError, match=r"at offset \d+ failed: Input/output error"):
                list(results)
            broken.mend()
            assert all_right(list(run(model)), right)
        ways = model.store.ways
        assert ways.startswith("handshake: 4 steps, then off: Reading ")
        assert "Input/output error" in ways
        assert "\n" not in ways


@pytest.mark.slow
def test_a_step_is_one_trace(opened, path, pulls, monkeypatch):
    """Slot e holds expert e, so that a lazy stand-in of the kernel needs no host."""

    def end(self):
        self._desk.abort()
        self._desk.wait()
        self.steps += 1

    monkeypatch.setattr(handshake.Handshake, "_end", end)
    with load_model(path, expert_memory="100%") as model:
        model.compile_steps = True
        right = list(run(model, TURNS[:2]))
    with opened(16) as model:
        model.compile_steps, store = True, model.store
        pulls[-1].slots = lambda ids, control: ids
        results = run(model, TURNS[:2])
        found = [next(results)]
        for layer in store.layers:
            for e in range(store.num_experts):
                store.reader.read(layer, e, store._layers[layer].bank.slot_views(e))
        assert all_right(found + list(results), right)
        assert store.ways == "handshake: 12 steps"
        assert model.steps.waiting.traces == 1


def test_blocks_with_checksums(tmp_path, path, pulls, known):
    """In a packed directory, where a block is one run of bytes; one checksum is another's."""
    right, _ = known
    with load_model(
        convert(path, tmp_path / "packed"), expert_memory="90%", handshake=True
    ) as model:
        store = model.store
        store.resize_all(dict.fromkeys(store.layers, 5))
        assert all_right(list(run(model)), right)
        assert store.ways == "handshake: 18 steps"
        checksums = store.reader.ranges.checksums(store.layers[1])
        results = run(model)
        found = [next(results) for _ in range(4)]
        checksums ^= 1
        with pytest.raises(ExpertFileError, match="differs from its checksum"):
            found += list(results)
        assert all_right(found, right[: len(found)])
        assert "then off: " in store.ways
        assert "differs from its checksum" in store.ways
        checksums ^= 1
        assert all_right(list(run(model)), right)


def test_a_host_that_is_late(opened, pulls, known):
    right, _ = known
    with opened() as model:

        def late(call):
            pulls[-1].late = call == 9

        pulls[-1].before = late
        assert all_right(list(run(model)), right)
        steps = 9 // len(model.store.layers)
        assert model.store.ways == (
            f"handshake: {steps} steps, then off: a kernel waited too long for the host"
        )


def test_an_expert_that_is_none(opened, pulls, known, monkeypatch):
    right, _ = known
    with opened() as model:
        slots, number = pulls[-1].slots, model.store.num_experts
        wrong = lambda ids, control: slots(mx.full(ids.shape, number, mx.uint32), control)  # noqa: E731
        monkeypatch.setattr(pulls[-1], "slots", wrong)
        assert all_right(list(run(model)), right)
        assert f"asked for expert {number} of layer {model.store.layers[0]}, which is none" in (
            model.store.ways
        )


def test_closed_by_another_thread_during_a_step(opened, pulls):
    model, closing = opened(5), []

    def close(call):
        if call == 3 * len(model.store.layers) + 1:
            closing.append(threading.Thread(target=model.close))
            closing[0].start()
            time.sleep(0.05)

    pulls[-1].before = close
    with pytest.raises(InputError, match="closed"):
        list(run(model))
    closing[0].join(60)
    assert not closing[0].is_alive()


def test_a_listener_that_comes_before_a_step(opened, pulls, known):
    """It gets all events, although the step was about to take the handshake."""
    right, _ = known
    with opened() as model:
        results, store, events = run(model), model.store, []
        found = [next(results) for _ in range(3)]
        own, calls = store.handshake, pulls[-1].calls
        store.events = events.append
        with pytest.raises(handshake.StepFailed), own.step():
            pytest.fail("the store has a listener")
        assert own.off is None
        found.append(next(results))
        assert pulls[-1].calls == calls
        assert events
        store.events = None
        assert all_right(found + list(results), right)


def test_threads_end_with_the_run_of_steps(opened, pulls):
    with opened() as model:
        results, before = run(model), threads()
        for _ in range(4):
            next(results)
        assert threads() - before or sys.platform != "linux"
        model.store.residents(model.store.layers[0])
        assert threads() == before


def test_models_that_cannot(path, pulls, open_store, monkeypatch):
    """They are loaded without it."""

    class Own(LFU):
        name = "own"

    def waits(**options):
        with load_model(path, **{"expert_memory": "90%", "expert_threads": 2} | options) as model:
            return model.store.handshake is not None

    assert waits()
    for option in (
        *({"handshake": False}, {"prefetch": "last"}, {"expert_reader": "mmap"}, {"safe": True}),
        *({"events": lambda event: None}, {"eviction": Own()}, {"expert_memory": "100%"}),
        {"eviction": LFU(float("inf"))},
    ):
        assert not waits(**option), option
    # Memory that kernels and threads share would leave no slots.
    with pytest.raises(MemoryBudgetError, match="smallest budget") as refused:
        load_model(path, expert_memory=1)
    (least,) = re.findall(r"works is (\d+) bytes", str(refused.value))
    assert not waits(expert_memory=int(least))
    with load_model(path, expert_memory=int(least), handshake=True) as model:
        assert model.store.ways == "handshake: none, its memory does not fit the budget"
    with monkeypatch.context() as patch:
        patch.setattr(device, "pull_for", lambda k: None)
        assert not waits()
    with pytest.raises(UnsupportedError, match="needs native threads"):
        open_store(reader="memory", handshake=PlayedPull(3))


def test_steps_that_are_none_of_one_sequence(opened, pulls, known):
    """Batches, listeners and prefetchers take the other path; the same bits."""
    right, _ = known
    with opened() as model:
        store = model.store
        with model.attribute():
            assert store.handshake is None
            assert all_right(list(run(model, TURNS[:2])), right[:13])
        assert pulls[-1].calls == 0
        cache = model.make_cache()
        two = mx.array([[5, 6, 7], [8, 9, 10]])
        model(two, cache)
        model(two[:, :1], cache)
        assert pulls[-1].calls == 0
        assert store.handshake is not None
        assert isinstance(store, StreamedStore)
