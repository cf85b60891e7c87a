"""Oracle: the same model with every operation built in Python, bit for bit."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ExpertFileError, InputError
from mlx_moeflux.experts.io import native_pool
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.moe import SoftmaxRouter
from tests.experts.helpers import prefetch_of

V = 4096


def tokens_of(T: int, B: int = 1) -> mx.array:
    return mx.array(np.random.default_rng([T, B]).integers(0, V, (B, T)))


def steps(model, tokens: mx.array, *, traced: bool, prompt: int) -> mx.array:
    """Logits ``[B, T - prompt, V]`` of one token at a time behind a prompt."""
    model.compile_steps, cache = traced, model.make_cache()
    mx.eval(model(tokens[:, :prompt], cache))
    parts = [model(tokens[:, i : i + 1], cache) for i in range(prompt, tokens.shape[1])]
    return mx.concatenate(parts, axis=1)


@pytest.fixture(scope="module")
def opened(two_bundled_layers):
    def opened(directory=two_bundled_layers, **options):
        # What is traced is computed by references on the CPU.
        options = {"expert_memory": "40%", "dtype": mx.float32, "kernels": "reference"} | options
        options["prefetch"] = prefetch_of(options.get("prefetch"))
        return load_model(directory, **options)

    return opened


@pytest.mark.parametrize("memory", ["40%", "100%", "all slots"])
def test_a_closed_model_takes_no_step_from_its_traces(opened, memory):
    with opened(expert_memory="40%" if memory == "all slots" else memory) as model:
        if memory == "all slots":
            model.store.resize_all(dict.fromkeys(model.store.layers, model.store.num_experts))
            model.store.preload()
        model.compile_steps, cache = True, model.make_cache()
        for token in range(3):
            mx.eval(model(mx.array([[token]]), cache))
        assert model.steps.whole.traces + model.steps.segments.traces > 0
        model.close()
        with pytest.raises(InputError, match="closed"):
            model(mx.array([[3]]), cache)


@pytest.mark.parametrize(
    ("options", "B"),
    [
        ({}, 1),
        pytest.param({"fuse": True}, 1, marks=pytest.mark.slow),
        pytest.param({}, 3, marks=pytest.mark.slow),
        pytest.param(
            {"eviction": "lru", "prefetch": "ahead", "keep_all_ahead": True},
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param({"prefetch": "auto", "keep_all_ahead": True}, 1, marks=pytest.mark.slow),
        pytest.param({"prefetch": "last", "keep_all_ahead": True}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_segments_give_the_same_bits_and_the_same_account(opened, options, B):
    tokens, totals, logits = tokens_of(70, B), [], []
    for traced in (True, False):
        with opened(**options) as model:
            logits.append(steps(model, tokens, traced=traced, prompt=50))
            mx.eval(logits)
            # With and without a look-ahead.
            plans = 2 if options.get("prefetch") == "auto" else 1
            assert model.steps.segments.traces == (plans if traced else 0)
            total = model.store.stats().total
            names = ("tokens", "lookups", "hits", "misses", "evictions", "bytes_read", "foreseen")
            totals.append([getattr(total, name) for name in names])
    assert mx.array_equal(*logits).item()
    assert totals[0] == totals[1]
    assert totals[0][3] > 100


@pytest.mark.slow
def test_banks_change_between_steps(opened):
    """Other sizes, complete layers, copies that somebody else's results forced."""
    with opened() as model:
        model.compile_steps, tokens = True, tokens_of(50)
        expected = steps(model, tokens, traced=False, prompt=20)
        model.compile_steps, cache = True, model.make_cache()
        mx.eval(model(tokens[:, :20], cache))
        parts = []
        for i in range(20, 50):
            if i % 7 == 0:
                model.set_expert_memory(("20%", "80%", "35%", "50%")[i // 7 % 4])
            if i == 33:
                model.store.resize(model.store.layers[1], model.store.num_experts)
                model.store.preload([model.store.layers[1]])
            if i % 5 == 0:
                layer = model.store._layers[model.store.layers[0]]
                layer.bank.resize(layer.bank.slots)
            parts.append(model(tokens[:, i : i + 1], cache))
        assert mx.array_equal(mx.concatenate(parts, axis=1), expected).item()


def test_an_error_leaves_the_cache_and_the_next_try_succeeds(opened, monkeypatch):
    monkeypatch.setattr(native_pool, "library", lambda: None)
    with opened() as model:
        tokens = tokens_of(20)
        expected = steps(model, tokens, traced=False, prompt=10)
        model.compile_steps, cache = True, model.make_cache()
        mx.eval(model(tokens[:, :10], cache))
        read, parts, calls = model.store.reader.read_run, [], []
        whole = model.store.reader.read

        def fails(original):
            def read(*arguments):
                calls.append(1)
                if len(calls) % 5 == 0:
                    raise OSError(5, "Input/output error")
                return original(*arguments)

            return read

        monkeypatch.setattr(model.store.reader, "read_run", fails(read))
        monkeypatch.setattr(model.store.reader, "read", fails(whole))
        errors = 0
        for i in range(10, 20):
            while True:
                try:
                    parts.append(model(tokens[:, i : i + 1], cache))
                    break
                except ExpertFileError:
                    errors += 1
                    assert {entry.columns for entry in cache} == {i}
        assert errors > 3
        assert mx.array_equal(mx.concatenate(parts, axis=1), expected).item()


@pytest.mark.parametrize("whole", [pytest.param((), marks=pytest.mark.slow), (1, 5)], ids=str)
def test_an_interrupt_while_ids_are_awaited_leaves_the_cache(opened, whole, monkeypatch):
    with opened(BUNDLED_MODEL) as model:
        for layer in whole:
            model.store.resize(layer, model.store.num_experts)
        model.store.preload(whole)
        tokens = tokens_of(30)
        expected = steps(model, tokens, traced=True, prompt=10)
        cache, parts, calls, asked = model.make_cache(), [], [], StreamedStore._wait_for_ids
        mx.eval(model(tokens[:, :10], cache))

        def interrupted(self, call, *rest):
            calls.append(layer := call.state.layer)
            if (layer, calls.count(layer)) in ((0, 1), (3, 4), (3, 5), (4, 16)):
                raise KeyboardInterrupt
            return asked(self, call, *rest)

        monkeypatch.setattr(StreamedStore, "_wait_for_ids", interrupted)
        while len(parts) < 20:
            i = 10 + len(parts)
            try:
                parts.append(model(tokens[:, i : i + 1], cache))
                mx.eval(parts[-1])
            except KeyboardInterrupt:
                assert {entry.columns for entry in cache} == {i}
        assert calls.count(0) == 24
        assert mx.array_equal(mx.concatenate(parts, axis=1), expected).item()


@pytest.mark.slow
def test_what_segments_cannot_do_goes_another_way(opened):
    with opened(expert_memory="15%") as model:  # 4 slots of 32
        tokens = tokens_of(20, 2)
        a, b = (steps(model, tokens, traced=traced, prompt=5) for traced in (True, False))
        assert model.steps.segments.traces == 0
        assert mx.array_equal(a, b).item()
        model.store.events = [].append
        steps(model, tokens_of(8), traced=True, prompt=5)
        assert model.steps.segments.traces == 0
        model.store.events = None
        steps(model, tokens_of(8), traced=True, prompt=5)
        assert model.steps.segments.traces == 1


class Sticky(SoftmaxRouter):
    """Prefers the experts of the token before: a trace would go on preferring the same."""

    last = None

    def __call__(self, logits):
        if self.last is not None and logits.shape[0] == 1:
            logits = logits.at[:, self.last].add(1.0)
        ids, weights = super().__call__(logits)
        self.last = ids[-1]
        return ids, weights


@pytest.mark.parametrize("memory", ["40%", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_router_of_ones_own_is_asked_for_every_token(opened, memory):
    logits = []
    for traced in (True, False):
        with opened(expert_memory=memory, router=Sticky(4)) as model:
            logits.append(steps(model, tokens_of(17), traced=traced, prompt=10))
    assert mx.array_equal(*logits).item()


@pytest.mark.slow
def test_two_threads_take_turns(opened):
    with opened() as model:
        tokens = [tokens_of(40 + i) for i in range(2)]
        expected = [np.array(steps(model, t, traced=False, prompt=20)) for t in tokens]
        found = [None, None]

        def work(i):
            found[i] = np.array(steps(model, tokens[i], traced=True, prompt=20))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"expert_reader": "direct"}, {"prefetch": "ahead"}], ids=str
)
def test_segments_on_a_gpu(options):
    tokens = tokens_of(60)
    options |= {"expert_memory": "40%", "handshake": False}
    with load_model(BUNDLED_MODEL, **options) as model:
        a, b = (steps(model, tokens, traced=traced, prompt=20) for traced in (True, False))
        assert mx.isfinite(a).all().item()
        assert mx.array_equal(a, b).item()
        assert model.steps.segments.traces >= 1
    with load_model(BUNDLED_MODEL, expert_memory="100%") as model:
        assert mx.array_equal(a, steps(model, tokens, traced=False, prompt=20)).item()
