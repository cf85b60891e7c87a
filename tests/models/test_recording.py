"""A model with a listener. Oracle: the same model with every operation built in Python."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.experts.telemetry.events import Chosen, Resize, joined
from mlx_moeflux.experts.telemetry.trace import Trace, TraceInfo, TraceWriter
from mlx_moeflux.generation.text import generate
from mlx_moeflux.loading import load, load_model

pytestmark = pytest.mark.usefixtures("uncompiled")

V = 4096


def plain(event) -> tuple:
    """Without times."""
    if isinstance(event, Chosen):
        ids, weights = (a.view(np.uint32).tolist() for a in (event.ids, event.weights))
        return event.layer, event.token, ids, weights
    return type(event).__name__, *(v for v in event if not isinstance(v, float))


def chosen(events) -> list[tuple[int, int]]:
    """Layer and token of each call."""
    return [(event.layer, event.token) for event in events if isinstance(event, Chosen)]


def tokens_of(T: int, B: int = 1) -> mx.array:
    return mx.array(np.random.default_rng([T, B]).integers(0, V, (B, T)))


@pytest.fixture(scope="module")
def opened(two_bundled_layers):
    def opened(kind: str = "resident", **options):
        """resident; streamed; complete: every layer's experts are there, in any slot; mixed: those
        of the last layer are."""
        memory = "auto" if kind == "resident" else "40%"
        options = {"expert_memory": memory, "dtype": mx.float32, "kernels": "reference"} | options
        model = load_model(two_bundled_layers, **options)
        if kind in ("complete", "mixed"):
            mx.eval(model(tokens_of(8)))
            layers = model.store.layers if kind == "complete" else model.store.layers[1:]
            for layer in layers:
                model.store.resize(layer, model.store.num_experts)
            model.store.preload(layers)
        return model

    return opened


def steps(model, tokens: mx.array, cache, start: int, stop: int) -> list[mx.array]:
    logits = [model(tokens[:, i : i + 1], cache) for i in range(start, stop)]
    mx.eval(logits)
    return logits


def traces(model) -> int:
    return model.steps.whole.traces + model.steps.waiting.traces + model.steps.segments.traces


def told(opened, kind: str, B: int, compiles: bool, **options):
    """Events and logits of a prompt, steps, a prompt in between and some steps more."""
    with opened(kind, **options) as model:
        events, before = [], model.store.stats().total.tokens
        model.compile_steps, tokens, cache = compiles, tokens_of(24, B), model.make_cache()
        model.store.events = events.append
        logits = [model(tokens[:, :10], cache)]
        logits += steps(model, tokens, cache, 10, 16)
        logits += [model(tokens[:, 16:20], cache)]
        logits += steps(model, tokens, cache, 20, 24)
        model.store.events = None
        assert traces(model) == 0
        account = model.store.stats().total.tokens - before
        return [plain(event) for event in events], mx.concatenate(logits, axis=1), account


@pytest.mark.parametrize(
    ("kind", "B", "options"),
    [
        pytest.param("resident", 1, {}, marks=pytest.mark.slow),
        pytest.param("resident", 3, {}, marks=pytest.mark.slow),
        ("streamed", 1, {}),
        pytest.param("streamed", 2, {}, marks=pytest.mark.slow),
        pytest.param("complete", 1, {}, marks=pytest.mark.slow),
        pytest.param("mixed", 2, {"eviction": "lru"}, marks=pytest.mark.slow),
        pytest.param(
            "streamed", 1, {"prefetch": "ahead", "keep_all_ahead": True}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_listener_is_told_of_every_layer_of_every_step(opened, kind, B, options):
    (ours, logits, count), (theirs, expected, tokens) = (
        told(opened, kind, B, compiles, **options) for compiles in (True, False)
    )
    assert sum(len(event) == 4 and isinstance(event[0], int) for event in ours) == 2 * 12
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other
    assert count == tokens == 24 * B
    assert mx.array_equal(logits, expected).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["streamed", *(pytest.param(k, marks=pytest.mark.slow) for k in ("resident", "mixed"))]
)
def test_it_comes_and_goes_between_steps(opened, kind):
    with opened(kind) as model:
        model.compile_steps, tokens = True, tokens_of(40)
        cache = model.make_cache()
        mx.eval(model(tokens[:, :10], cache))
        expected = steps(model, tokens, cache, 10, 40)
        cache, logits, first, second = model.make_cache(), [], [], []
        mx.eval(model(tokens[:, :10], cache))
        begun, seen = traces(model), model.store.stats().layers[0].tokens
        for stop, listener in ((15, None), (25, first.append), (28, None), (34, second.append)):
            model.store.events = listener
            logits += steps(model, tokens, cache, 10 + len(logits), stop)
        model.store.events = joined(second.append, first.append)
        logits += steps(model, tokens, cache, 34, 40)
        model.store.events = None
        # Without MLX's compilation each step through a trace counts: those that nobody listened to.
        assert traces(model) - begun == 5 + 3
    calls = [(layer, seen + i) for i in (*range(5, 15), *range(24, 30)) for layer in range(2)]
    assert chosen(first) == calls
    assert chosen(second) == [(layer, seen + i) for i in range(18, 30) for layer in range(2)]
    a, b = (mx.concatenate(parts, axis=1) for parts in (logits, expected))
    assert mx.abs(a - b).max().item() <= 2e-5 * mx.abs(b).max().item()


def test_layers_that_are_called_alone_in_between(opened):
    with opened() as model:
        events, hidden = [], mx.ones((1, 3, model.config.hidden_size))
        model.compile_steps, tokens, cache = True, tokens_of(30), model.make_cache()
        mx.eval(model(tokens[:, :10], cache))
        for i in range(10, 20):
            model.store.events = events.append if i >= 16 else None
            steps(model, tokens, cache, i, i + 1)
            mx.eval(model.run_layer(1, hidden))
        model.store.events = None
    assert traces(model) > 0
    assert [token for layer, token in chosen(events) if layer == 0] == [16, 17, 18, 19]
    assert [token for layer, token in chosen(events) if layer == 1] == [
        *(34, 35, 38, 39, 42, 43, 46, 47)
    ]


def test_what_happens_between_steps_keeps_its_place(opened):
    with opened("streamed") as model:
        model.compile_steps, tokens, cache = True, tokens_of(30), model.make_cache()
        events = []
        model.store.events = events.append
        mx.eval(model(tokens[:, :10], cache))
        steps(model, tokens, cache, 10, 13)
        model.set_expert_memory("60%")
        steps(model, tokens, cache, 13, 15)
        model.store.events = None
    places = [i for i, event in enumerate(events) if isinstance(event, Resize)]
    assert places[-1] - places[0] == len(places) - 1 == 1
    after = [token for _, token in chosen(events[places[-1] :])]
    before = [token for _, token in chosen(events[: places[0]])]
    assert (max(before), min(after), max(after)) == (12, 13, 14)


@pytest.mark.parametrize("kind", ["resident", pytest.param("streamed", marks=pytest.mark.slow)])
def test_a_listener_that_raises_stops_the_step_and_leaves_the_cache(opened, kind):
    heard = []

    def full(event):
        heard.append(event)
        if len(heard) in (1, 6, 13):
            raise OSError(28, "No space left on device")

    with opened(kind) as model:
        model.compile_steps, tokens, cache = True, tokens_of(20), model.make_cache()
        mx.eval(model(tokens[:, :10], cache))
        expected = steps(model, tokens, cache, 10, 20)
        cache, logits, errors = model.make_cache(), [], 0
        mx.eval(model(tokens[:, :10], cache))
        model.store.events = full
        while len(logits) < 10:
            try:
                logits += steps(model, tokens, cache, 10 + len(logits), 11 + len(logits))
            except OSError:
                errors += 1
                assert {entry.columns for entry in cache} == {10 + len(logits)}
        model.store.events = None
    assert errors == 3
    a, b = (mx.concatenate(parts, axis=1) for parts in (logits, expected))
    assert mx.abs(a - b).max().item() <= 2e-5 * mx.abs(b).max().item()


def test_a_file_that_is_closed_first_has_everything(opened, tmp_path):
    with opened() as model:
        model.compile_steps, tokens, cache = True, tokens_of(20), model.make_cache()
        with TraceWriter(tmp_path / "a", TraceInfo.of(model.store, experts_per_token=4)) as writer:
            model.store.events = writer
            mx.eval(model(tokens[:, :10], cache))
            steps(model, tokens, cache, 10, 20)
        model.store.events = None
    trace = Trace.open(tmp_path / "a")
    assert trace.complete
    assert [(c.layer, c.token) for c in trace][2:] == [
        (i, t) for t in range(10, 20) for i in range(2)
    ]
    times = [call.nanoseconds for call in trace]
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    "kind",
    ["streamed", *(pytest.param(k, marks=pytest.mark.slow) for k in ("resident", "complete"))],
)
def test_files_are_the_same(opened, kind, tmp_path):
    for name in ("compiles", "not"):
        with opened(kind) as model, model.trace(tmp_path / name):
            model.compile_steps, cache = name == "compiles", model.make_cache()
            mx.eval(model(tokens_of(10, 2), cache))
            steps(model, tokens_of(14, 2), cache, 10, 14)
    ours, theirs = (Trace.open(tmp_path / name) for name in ("compiles", "not"))
    assert len(ours) == len(theirs) == 2 * 5
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.layer, mine.token) == (other.layer, other.token)
        assert np.array_equal(mine.ids, other.ids)
        assert np.array_equal(mine.weights, other.weights)
        for part, of_other in zip(mine.rows, other.rows, strict=True):
            assert np.array_equal(part, of_other)
        a, b = mine.result, other.result
        assert (a and (a.hits, a.misses, a.nbytes)) == (b and (b.hits, b.misses, b.nbytes))


def test_attribution_of_a_resident_model(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, dtype=mx.float32, kernels="reference")
    model.compile_steps = True
    with model:
        with model.attribute():
            for text in ("def f(", "import "):
                last = generate(model, tokenizer, text, max_tokens=3, return_response=True)
                calls = last.experts.calls
                assert [call.layer for call in calls] == 3 * [*range(2)]
                assert all(call.ids.shape[1] == 4 for call in calls)
            assert traces(model) == 0
        generate(model, tokenizer, "def f(", max_tokens=3)
        assert traces(model) > 0


@pytest.mark.parametrize("kind", ["streamed", pytest.param("resident", marks=pytest.mark.slow)])
def test_threads_take_turns(opened, kind):
    with opened(kind) as model:
        events = []
        model.compile_steps, model.store.events = True, events.append

        def work(seed: int) -> None:
            tokens, cache = tokens_of(20 + seed), model.make_cache()
            mx.eval(model(tokens[:, :10], cache))
            steps(model, tokens, cache, 10, 14)

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
    for event in events:
        if isinstance(event, Chosen):
            assert event.token == seen.get(event.layer, 0)
            seen[event.layer] = event.token + len(event.ids)
    assert seen == dict.fromkeys(range(2), 42)


@pytest.mark.gpu
@pytest.mark.usefixtures("buffers_are_free")
@pytest.mark.parametrize("kind", ["resident", "streamed", "complete", "mixed"])
@pytest.mark.parametrize("B", [1, 2])
def test_on_a_gpu(opened, kind, B):
    """Steps with a listener give the bits of those that are traced without one."""
    options = {"kernels": "auto", "dtype": None}
    ours, theirs = (told(opened, kind, B, compiles, **options) for compiles in (True, False))
    assert ours[0] == theirs[0]
    with opened(kind, **options) as model:
        model.compile_steps, tokens, cache = True, tokens_of(24, B), model.make_cache()
        logits = [model(tokens[:, :10], cache), *steps(model, tokens, cache, 10, 16)]
        logits += [model(tokens[:, 16:20], cache), *steps(model, tokens, cache, 20, 24)]
        assert traces(model) > 0
        for other in (ours[1], theirs[1]):
            assert mx.array_equal(mx.concatenate(logits, axis=1), other).item()
