"""Oracle: the same model with every operation built in Python, and a listener told at once."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts import later
from mlx_moeflux.experts.events import Chosen, LookedUp, Resize, Steps, both
from mlx_moeflux.experts.later import Later
from mlx_moeflux.experts.listening import Listened, collected
from mlx_moeflux.experts.streamed import StreamedStore
from mlx_moeflux.experts.trace import Trace, TraceInfo, TraceWriter
from mlx_moeflux.generation import generate
from mlx_moeflux.kernels.choice import Kernels
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model

pytestmark = pytest.mark.usefixtures("uncompiled")

V, STEPS_AT_ONCE = 4096, 32


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(later, "STEPS_AT_ONCE", {mx.cpu: STEPS_AT_ONCE, mx.gpu: STEPS_AT_ONCE})


class Late:
    """A recorder that keeps what it is told, one by one."""

    late = True

    def __init__(self):
        self.seen, self.blocks = [], 0

    def __call__(self, event):
        if isinstance(event, Steps):
            self.blocks += len(event.ids)
        self.seen += event.events() if isinstance(event, Steps | LookedUp) else [event]


def plain(event) -> tuple:
    """Without times."""
    if isinstance(event, Chosen):
        ids, weights = (a.view(np.uint32).tolist() for a in (event.ids, event.weights))
        return event.layer, event.token, ids, weights
    return type(event).__name__, *(v for v in event if not isinstance(v, float))


def tokens_of(T: int, B: int = 1) -> mx.array:
    return mx.array(np.random.default_rng([T, B]).integers(0, V, (B, T)))


def opened(kind: str = "resident", **options):
    """resident; streamed; complete: every layer's experts are there, in any slot; mixed: the second
    and the last layer's are."""
    memory = "auto" if kind == "resident" else "40%"
    options = {"expert_memory": memory, "dtype": mx.float32, "kernels": "reference"} | options
    model = load_model(BUNDLED_MODEL, **options)
    if kind in ("complete", "mixed"):
        mx.eval(model(tokens_of(8)))
        layers = model.store.layers if kind == "complete" else model.store.layers[1::4]
        for layer in layers:
            model.store.resize(layer, model.store.num_experts)
        model.store.preload(layers)
    return model


def steps(model, tokens: mx.array, cache, start: int, stop: int) -> list[mx.array]:
    logits = [model(tokens[:, i : i + 1], cache) for i in range(start, stop)]
    mx.eval(logits)
    return logits


def told(kind: str, B: int, traced: bool, **options):
    """Events and logits of a prompt, many steps, a prompt in between and some steps more."""
    with opened(kind, **options) as model:
        listener = Late() if traced else []
        model.compile_steps, tokens, cache = traced, tokens_of(80, B), model.make_cache()
        model.store.events = listener if traced else listener.append
        logits = [model(tokens[:, :10], cache)]
        logits += steps(model, tokens, cache, 10, 12 + STEPS_AT_ONCE + 20)
        logits += [model(tokens[:, 64:70], cache)]
        logits += steps(model, tokens, cache, 70, 80)
        model.store.events = None
        events = listener.seen if traced else listener
        assert bool(traced) == bool(model._noted_step.traces or model._segments.traces)
        if kind in ("resident", "complete"):
            assert not traced or listener.blocks == 64
        account = model.store.stats().total.tokens
        return [plain(event) for event in events], mx.concatenate(logits, axis=1), account


@pytest.mark.parametrize(
    ("kind", "B", "options"),
    [
        ("resident", 1, {}),
        pytest.param("resident", 3, {}, marks=pytest.mark.slow),
        pytest.param("streamed", 1, {}, marks=pytest.mark.slow),
        ("streamed", 2, {}),
        pytest.param("complete", 1, {}, marks=pytest.mark.slow),
        pytest.param("complete", 2, {}, marks=pytest.mark.slow),
        pytest.param("mixed", 1, {}, marks=pytest.mark.slow),
        ("mixed", 2, {"eviction": "lru"}),
        pytest.param(
            *("streamed", 1, {"prefetch": "ahead", "keep_all_ahead": True}),
            marks=pytest.mark.slow,
        ),
        pytest.param("streamed", 1, {"balance": "shift"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_recorder_is_told_the_same_in_the_same_order(kind, B, options):
    (ours, logits, count), (theirs, expected, tokens) = (
        told(kind, B, traced, **options) for traced in (True, False)
    )
    assert len(ours) == len(theirs) >= 396
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other
    assert count == tokens
    error, scale = mx.abs(logits - expected).max().item(), mx.abs(expected).max().item()
    assert error <= 2e-5 * scale


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_it_comes_and_goes_between_steps(kind):
    with opened(kind) as model:
        model.compile_steps, tokens = True, tokens_of(40)
        cache = model.make_cache()
        mx.eval(model(tokens[:, :10], cache))
        expected = steps(model, tokens, cache, 10, 40)
        cache, logits, first, second = model.make_cache(), [], Late(), []
        mx.eval(model(tokens[:, :10], cache))
        for stop, listener in ((15, None), (25, first), (28, None), (34, second.append)):
            model.store.events = listener
            logits += steps(model, tokens, cache, 10 + len(logits), stop)
        # One that wants to know at once, and one that does not, are told at once.
        model.store.events = both(second.append, first)
        count = len(first.seen)
        logits += steps(model, tokens, cache, 34, 35)
        assert len(first.seen) > count
        model.store.events = both(first, third := Late())
        logits += steps(model, tokens, cache, 35, 40)
        assert not third.seen
        model.store.events = None
    assert [e.token for e in first.seen if isinstance(e, Chosen) and e.layer == 0] == [
        *range(first.seen[0].token, first.seen[0].token + 10),
        *range(first.seen[0].token + 19, first.seen[0].token + 25),
    ]
    assert [e.layer for e in third.seen if isinstance(e, Chosen)] == 5 * [*range(6)]
    a, b = (mx.concatenate(parts, axis=1) for parts in (logits, expected))
    assert mx.abs(a - b).max().item() <= 2e-5 * mx.abs(b).max().item()


def test_layers_that_are_called_alone_in_between():
    found = []
    for traced in (True, False):
        with opened() as model:
            late, hidden = Late(), mx.ones((1, 3, model.config.hidden_size))
            model.compile_steps, tokens, cache = traced, tokens_of(30), model.make_cache()
            mx.eval(model(tokens[:, :10], cache))
            model.store.events = late if traced else late.seen.append
            for i in range(10, 30):
                steps(model, tokens, cache, i, i + 1)
                if i % 6 == 5:
                    mx.eval(model.run_layer(i % 5, hidden))
            model.store.events = None
            found.append([(e.layer, e.token, e.ids.tolist()) for e in late.seen])
    assert found[0] == found[1]
    assert [e[1] for e in found[0] if e[0] == 2][-12:] == [*range(21, 33)]


def test_what_happens_between_steps_keeps_its_place():
    with opened("streamed") as model:
        model.compile_steps, tokens, cache = True, tokens_of(30), model.make_cache()
        model.store.events = late = Late()
        mx.eval(model(tokens[:, :10], cache))
        steps(model, tokens, cache, 10, 13)
        model.set_expert_memory("60%")
        steps(model, tokens, cache, 13, 15)
        model.store.events = None
    places = [i for i, event in enumerate(late.seen) if isinstance(event, Resize)]
    assert places[-1] - places[0] == len(places) - 1 == 5
    after = [e.token for e in late.seen[places[-1] :] if isinstance(e, Chosen)]
    before = [e.token for e in late.seen[: places[0]] if isinstance(e, Chosen)]
    assert (max(before), min(after), max(after)) == (12, 13, 14)


def test_a_step_that_fails_is_told_as_far_as_it_went(monkeypatch):
    found, errors = [], 0
    for traced in (True, False):
        with opened("streamed") as model:
            late, broken, reader = Late(), set(), model.store.reader
            model.compile_steps, tokens, cache = traced, tokens_of(30), model.make_cache()
            mx.eval(model(tokens[:, :10], cache))
            model.store.events = late if traced else late.seen.append

            def fails(layer, *arguments, read=reader.read, broken=broken):
                if layer in broken:
                    raise OSError(5, "Input/output error")
                return read(layer, *arguments)

            monkeypatch.setattr(reader, "read", fails)
            for i in range(10, 30):
                broken |= {2: {3}, 5: {0}, 7: {5}}.get(i % 8, set())
                try:
                    mx.eval(model(tokens[:, i : i + 1], cache))
                except ExpertFileError:
                    errors += 1
                    broken.clear()
                    mx.eval(model(tokens[:, i : i + 1], cache))
            model.store.events = None
            found.append([plain(event) for event in late.seen])
    assert found[0] == found[1]
    assert errors > 6


@pytest.mark.parametrize("kind", ["streamed", "mixed"])
def test_a_step_that_is_interrupted_while_ids_are_awaited(kind, monkeypatch):
    found, asked = [], StreamedStore._asked
    for traced in (True, False):
        with opened(kind) as model:
            calls, late = [], Late()
            model.compile_steps, tokens, cache = traced, tokens_of(30), model.make_cache()
            mx.eval(model(tokens[:, :10], cache))
            model.store.events = late if traced else late.seen.append

            def interrupted(self, call, *rest, calls=calls):
                calls.append(layer := call.state.layer)
                if (layer, calls.count(layer)) in ((0, 1), (3, 4), (3, 5), (4, 16)):
                    raise KeyboardInterrupt
                return asked(self, call, *rest)

            i = 10
            monkeypatch.setattr(StreamedStore, "_asked", interrupted)
            while i < 30:
                try:
                    mx.eval(model(tokens[:, i : i + 1], cache))
                    i += 1
                except KeyboardInterrupt:
                    assert {entry.columns for entry in cache} == {i}
            model.store.events = None
            monkeypatch.setattr(StreamedStore, "_asked", asked)
            assert calls.count(0) == 24
            found.append([plain(event) for event in late.seen])
    assert found[0] == found[1]


def test_a_recorder_that_raises_stops_the_step_and_leaves_the_cache():
    class Full(Late):
        def __call__(self, event):
            raise OSError(28, "No space left on device")

    with opened() as model:
        model.compile_steps, tokens, cache = True, tokens_of(60), model.make_cache()
        mx.eval(model(tokens[:, :10], cache))
        expected = steps(model, tokens, cache, 10, 60)
        cache, logits, errors = model.make_cache(), [], 0
        mx.eval(model(tokens[:, :10], cache))
        model.store.events = Full()
        while len(logits) < 50:
            try:
                logits += steps(model, tokens, cache, 10 + len(logits), 11 + len(logits))
            except OSError:
                errors += 1
                assert {entry.columns for entry in cache} == {10 + len(logits)}
        assert errors == 1
        with pytest.raises(OSError, match="No space"):
            model.store.events = None
        model.store.events = None
    a, b = (mx.concatenate(parts, axis=1) for parts in (logits, expected))
    assert mx.abs(a - b).max().item() <= 2e-5 * mx.abs(b).max().item()


def test_a_file_that_is_closed_first_has_everything(tmp_path):
    with opened() as model:
        model.compile_steps, tokens, cache = True, tokens_of(20), model.make_cache()
        with TraceWriter(tmp_path / "a", TraceInfo.of(model.store, experts_per_token=4)) as writer:
            model.store.events = writer
            mx.eval(model(tokens[:, :10], cache))
            steps(model, tokens, cache, 10, 20)
        model.store.events = None
    trace = Trace.open(tmp_path / "a")
    assert trace.complete
    assert [(c.layer, c.token) for c in trace][6:] == [
        (i, t) for t in range(10, 20) for i in range(6)
    ]
    times = [call.nanoseconds for call in trace]
    assert times == sorted(times)
    assert len(set(times[6:])) == 10


@pytest.mark.parametrize(
    "kind", ["resident", "streamed", pytest.param("complete", marks=pytest.mark.slow)]
)
def test_files_are_the_same(kind, tmp_path):
    for name in ("traced", "not"):
        with opened(kind) as model, model.trace(tmp_path / name):
            model.compile_steps, cache = name == "traced", model.make_cache()
            mx.eval(model(tokens_of(10, 2), cache))
            steps(model, tokens_of(60, 2), cache, 10, 60)
    ours, theirs = (Trace.open(tmp_path / name) for name in ("traced", "not"))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.layer, mine.token) == (other.layer, other.token)
        assert np.array_equal(mine.ids, other.ids)
        assert np.array_equal(mine.weights, other.weights)
        a, b = mine.result, other.result
        assert (a and (a.hits, a.misses, a.nbytes)) == (b and (b.hits, b.misses, b.nbytes))


def test_attribution_of_a_resident_model_leaves_its_steps_traced():
    calls = []
    for traced in (True, False):
        model, tokenizer = load(BUNDLED_MODEL, dtype=mx.float32, kernels="reference")
        model.compile_steps = traced
        with model, model.attribute():
            for text in ("def f(", "import "):
                last = generate(model, tokenizer, text, max_tokens=9, return_response=True)
                calls.append([(c.layer, c.token, c.ids.tolist()) for c in last.experts.calls])
            assert bool(model._noted_step.traces) == traced
    assert calls[:2] == calls[2:]
    assert [len(some) for some in calls[:2]] == [54, 54]


@pytest.mark.parametrize("kind", ["streamed", "resident"])
def test_threads_take_turns(kind):
    with opened(kind) as model:
        model.compile_steps, model.store.events = True, (late := Late())

        def work(seed: int) -> None:
            tokens, cache = tokens_of(20 + seed), model.make_cache()
            mx.eval(model(tokens[:, :10], cache))
            steps(model, tokens, cache, 10, 20)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
            if kind == "resident":
                # Its steps have no lock of their own: generation holds the model's.
                thread.join()
        for thread in threads:
            thread.join()
        model.store.events = None
    seen = {}
    for event in late.seen:
        if isinstance(event, Chosen):
            assert event.token == seen.get(event.layer, 0)
            seen[event.layer] = event.token + len(event.ids)
    assert seen == dict.fromkeys(range(6), 60)


class Told(Late):
    """Plain steps that are handed to a Later by hand, of layers 1 and 4 with one expert each, and
    what may happen while one is built."""

    def __init__(self):
        super().__init__()
        self.later, self.layers, self.count, self.asked = Later(self, streamed=False), (1, 4), 0, 0

    def counts(self) -> tuple[int, ...]:
        self.asked += 1
        return self.count, self.count + 100

    def step(self, meanwhile=lambda: None) -> None:
        self.later.land()
        run, log = self.later.run(1, self.layers, self.counts), self.later.log("notes", 4)
        meanwhile()
        ids = mx.array([self.count, self.count + 1], mx.uint32).view(mx.float32)
        new = mx.stack([mx.array([0.5, 0.25]), ids], axis=1).reshape(-1)
        self.later.add(run, 0, notes=mx.concatenate([log[4:], new]))
        self.count += 1

    def found(self) -> list:
        """Steps by their tokens, and events, as they were told."""
        self.later.catch_up()
        found = []
        for event in self.seen:
            if type(event) is not Chosen:
                found.append(event)
                continue
            if event.layer == 1:
                found.append(event.token)
            step, second = found[-1], event.layer == 4
            assert (event.layer, event.token) == ((4, step + 100) if second else (1, step))
            assert (event.ids.item(), event.weights.item()) == (step + second, 0.5 - 0.25 * second)
        return found


def test_steps_that_follow_one_another_are_told_in_blocks():
    told = Told()
    for _ in range(3 * STEPS_AT_ONCE + 5):
        told.step()
    assert (told.asked, told.blocks) == (1, 3 * (STEPS_AT_ONCE - 1))
    assert told.found() == [*range(3 * STEPS_AT_ONCE + 5)]
    told.layers = (*told.layers[:1], 4)
    told.step()
    assert told.asked == 2


@pytest.mark.parametrize("at", [0, 1, 5, STEPS_AT_ONCE - 1, STEPS_AT_ONCE, STEPS_AT_ONCE + 1])
def test_what_happens_while_a_step_is_built(at):
    for catches_up in (False, True):
        told, event = Told(), Resize(0, 3)

        def happens(told=told, event=event, catches_up=catches_up) -> None:
            told.later(event)
            if catches_up:
                told.later.catch_up()

        for i in range(2 * STEPS_AT_ONCE + 3):
            told.step(happens if i == at else lambda: None)
        assert told.found() == [*range(at), event, *range(at, 2 * STEPS_AT_ONCE + 3)]


def test_layers_noted_in_either_form_are_collected():
    def bits(*numbers):
        return mx.array(numbers, mx.uint32).view(mx.float32)

    store = Listened(streamed=True)
    with store.notes() as parts:
        store.noting.append(bits(9, 9, 4, 3, 0, 2, 7, 8, 9, 10))
        store.called(mx.array([[5, 6, 7, 8]], mx.uint32), bits(1, 1, 1, 1)[None])
    ours = collected(Kernels(), bits(*range(32)), parts, 4)
    ours = ours.view(mx.uint32).reshape(2, 4, 4)
    assert ours[0].reshape(-1).tolist() == [*range(16, 32)]
    assert ours[1].tolist() == [[4, 3, 0, 2], [7, 8, 9, 10], [1] * 4, [5, 6, 7, 8]]
    assert store.noting is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["resident", "streamed", "complete", "mixed"])
@pytest.mark.parametrize("B", [1, 2])
def test_on_a_gpu(kind, B):
    options = {"kernels": "auto", "dtype": None}
    ours, theirs = (told(kind, B, traced, **options) for traced in (True, False))
    assert ours[0] == theirs[0]
    assert mx.array_equal(ours[1], theirs[1]).item()
