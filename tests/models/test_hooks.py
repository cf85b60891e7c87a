"""Hooks. Oracles: what ``record`` keeps, the store called by itself, and models whose modules or
router were replaced by ones that do what the hook does."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.hooks import POINTS
from mlx_moeflux.models.moe import SoftmaxRouter
from tests.models_at_hand import FAMILIES, TWIN, same_bits

GOLDEN = TWIN.parent
BY_DEFAULT = ("text_top3", "deepseek_v3_groups", "qwen4_exp_rows", "gemma4_shared")
ACCORDING_TO_RECORD = {
    "before_mixer": ["input"],
    "after_mixer": ["h_mid"],
    "before_router": ["router_logits"],
    "after_router": ["ids", "weights"],
    "before_experts": ["h_post"],
}


def tokens_of(T: int, B: int = 1, vocabulary: int = 64) -> mx.array:
    return mx.array(np.random.default_rng([T, B]).integers(0, vocabulary, (B, T)))


def opened(directory=TWIN, **options):
    return load_model(directory, **{"expert_memory": "75%", "dtype": mx.float32} | options)


def keep(into: list):
    """Return a function that keeps copies of what it gets, and replaces nothing."""
    return lambda *arrays: into.append([mx.array(np.array(array)) for array in arrays])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DEFAULT))
        for name in ("text_top3", *FAMILIES)
    ],
)
def test_each_point_sees_what_the_layer_computes(name):
    with opened(GOLDEN / name) as model:
        layer, tokens = model.store.layers[-1], tokens_of(7, 2, model.config.vocab_size)
        with model.record(layers=[layer]) as kept:
            expected = model(tokens)
        seen = {point: [] for point in POINTS}
        hooks = [model.hook(layer, point, keep(seen[point])) for point in POINTS]
        assert same_bits(model(tokens), expected)
        for hook in hooks:
            hook.remove()
        arrays = {point: calls for point, (calls,) in seen.items()}  # one call each
        for point, names in ACCORDING_TO_RECORD.items():
            for array, what in zip(arrays[point], names, strict=True):
                assert same_bits(array.reshape(kept[layer][what].shape), kept[layer][what])
        by_itself = model.store.experts(layer, *arrays["before_experts"], *arrays["after_router"])
        assert same_bits(by_itself, arrays["after_experts"][0])
        assert mx.abs(by_itself).max().item() > 0


class Scaled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __call__(self, x, *args, **kwargs):
        return self.layer(1.5 * x, *args, **kwargs)


class ScaledAfter(Scaled):
    def __call__(self, *args, **kwargs):
        return 1.5 * self.layer(*args, **kwargs)


class OtherRouter(SoftmaxRouter):
    """Takes the least likely experts of layer 1, with equal weights."""

    def __call__(self, logits, layer):
        ids, weights = super().__call__(-logits if layer == 1 else logits)
        return ids, (mx.full(weights.shape, 0.25) if layer == 1 else weights)


@pytest.mark.parametrize("memory", ["75%", pytest.param("100%", marks=pytest.mark.slow)])
def test_what_a_hook_returns_is_what_the_model_goes_on_with(memory):
    tokens = tokens_of(9, 2)

    def run(model) -> mx.array:
        cache = model.make_cache()
        parts = [model(tokens[:, :5], cache), *(model(tokens[:, [i]], cache) for i in range(5, 9))]
        return mx.concatenate(parts, axis=1)

    def hooked(point, function) -> mx.array:
        with opened(expert_memory=memory) as model, model.hook(1, point, function):
            return run(model)

    def edited(change=None, **options) -> mx.array:
        with opened(expert_memory=memory, **options) as model:
            if change is not None:
                change(model)
            return run(model)

    def wrap(model):
        model.layers[1] = Scaled(model.layers[1])

    def wrap_mixer(model):
        name = model.layers[1]._mixer_name
        model.layers[1][name] = ScaledAfter(model.layers[1][name])

    plain, K = edited(), 3
    assert same_bits(hooked("before_mixer", lambda x: 1.5 * x), edited(wrap))
    assert same_bits(hooked("after_mixer", lambda x: 1.5 * x), edited(wrap_mixer))
    with opened(expert_memory=memory) as model:
        with (
            model.hook(1, "before_router", lambda logits: -logits),
            model.hook(1, "after_router", lambda i, w: (i, mx.full(w.shape, 0.25))),
        ):
            found = run(model)
        assert same_bits(found, edited(router=OtherRouter(K)))
        assert same_bits(run(model), plain)
    without = hooked("after_experts", mx.zeros_like)
    assert same_bits(hooked("before_experts", mx.zeros_like), without)  # without biases f(0) = 0
    assert not np.allclose(without, plain)

    def nobody(ids, weights):
        return mx.full(ids.shape, 6, mx.uint32), weights  # of 6 experts

    assert same_bits(hooked("after_router", nobody), without)


@pytest.mark.parametrize("memory", ["75%", "100%"])
@pytest.mark.parametrize(
    ("function", "row"),
    [
        (lambda ids, weights: (ids[:, ::-1], weights), r"\[\d, \d, \d\]"),
        (lambda ids, weights: (ids + 6, weights), r"\[\d+, \d+, \d+\]"),
        (lambda ids, weights: (ids + 2**31, weights), r"\[\d{10}, \d{10}, \d{10}\]"),
        (lambda ids, weights: (ids * 0, weights), r"\[0, 0, 0\]"),
    ],
    ids=("descending", "too high", "far too high", "twice"),
)
def test_wrong_ids_are_one_line_whatever_the_store(memory, function, row):
    with opened(expert_memory=memory) as model, model.hook(1, "after_router", function):
        for T in (4, 1):
            with pytest.raises(
                ShapeError,
                match=rf"^layer 1: the ids of the hook after_router are {row} in row 0; each row "
                "must be ascending and distinct, below 6",
            ):
                model(tokens_of(T), model.make_cache())


def test_the_choice_of_padding_is_marked_and_cannot_be_changed():
    seen = []

    def function(ids, weights):
        seen.append(np.array(ids))
        return mx.where(ids == 6, mx.array([0, 1, 2], mx.uint32), ids), weights

    with opened() as model:
        tokens = tokens_of(5, 2)

        def run():
            cache = model.make_cache()
            for entry in cache:
                entry.prepare(left_padding=[0, 3])
            return model(tokens, cache)

        plain = run()
        with model.hook(1, "after_router", function):
            assert same_bits(run(), plain)
    (ids,) = seen
    assert (ids == 6).all(axis=1).tolist() == [False] * 5 + [True] * 3 + [False] * 2


def padded(model, left=None, right=None):
    """A cache for rows of unequal lengths. left: Padding before each. right: Tokens of each."""
    cache = model.make_cache()
    for entry in cache:
        entry.prepare(left_padding=left, lengths=right)
    return cache


@pytest.mark.parametrize("name", ["text_top3", "gemma4_shared", "qwen4_exp_rows"])
@pytest.mark.parametrize("left", [[0, 3], [2, 0]])
def test_every_point_is_told_what_is_padding(name, left):
    seen: dict = {}

    def taking(point):
        def function(*arrays, mask):
            seen.setdefault(point, []).append((arrays[0].shape, mask))

        return function

    with opened(GOLDEN / name) as model:
        layer, tokens = model.store.layers[-1], tokens_of(5, 2, model.config.vocab_size)
        hooks = [model.hook(layer, point, taking(point)) for point in POINTS]
        # Others at the same point are called as before.
        hooks.append(model.hook(layer, "before_experts", keep(plain := [])))
        cache = padded(model, left)
        with model.record(layers=[layer]) as both:
            for part in (tokens[:, :4], tokens[:, 4:], tokens[:, :1]):
                mx.eval(model(part, cache))
        for hook in hooks[:-1]:
            hook.remove()
        with model.record(layers=[layer], names=["ids", "router_logits"]) as rows:
            model(tokens, padded(model, left))
        with model.record(layers=[layer], names=["h_mid"]) as mixed:
            model(tokens, padded(model, left))
            model(tokens[:1])  # another batch begins anew
        hooks[-1].remove()
    expected = np.arange(4) >= np.array(left)[:, None]
    for point, part in POINTS.items():
        (shape, mask), *after = seen[point]
        wanted = expected if part == "mixer" else expected.reshape(-1)
        assert shape[: wanted.ndim] == wanted.shape
        assert np.array_equal(np.array(mask), wanted)
        assert [mask for _, mask in after] == [None, None]
    assert [len(rows) for (rows,) in plain] == [8, 2, 2, 10, 10, 5]
    kept = both[layer]
    ones = np.ones((2, 2), bool)
    assert np.array_equal(kept["mask"], np.concatenate([expected, ones], axis=1))
    assert kept["mask"].shape == kept["output"].shape[:2] == kept["h_post"].shape[:2]
    assert np.array_equal(kept["row_mask"], np.append(expected.reshape(-1), ones))
    assert kept["row_mask"].shape == kept["ids"].shape[:1]
    E = model.config.num_experts
    assert np.array_equal((np.array(kept["ids"]) == E).all(1), ~np.array(kept["row_mask"]))
    found = rows[layer]
    assert found.keys() == {"ids", "router_logits", "mask"}
    absent = (np.array(found["ids"]) == E).all(1)
    assert absent.sum() == sum(left)
    assert np.array_equal(absent, ~np.array(found["mask"]))
    assert mixed[layer].keys() == {"h_mid", "mask"}
    assert np.array_equal(mixed[layer]["mask"], np.ones((1, 5), bool))


def test_padding_after_the_tokens_is_told_too():
    masks, tokens = [], tokens_of(5, 2)
    with opened() as model, model.hook(0, "after_mixer", lambda x, mask: masks.append(mask)):
        model(tokens, padded(model, right=[5, 2]))
    assert np.array_equal(masks[0], np.arange(5) < np.array([[5], [2]]))


def test_hooks_at_one_point_are_called_in_their_order():
    order, tokens = [], tokens_of(4)
    with opened() as model:
        plain = model(tokens)
        first = model.hook(0, "after_mixer", lambda x: order.append("first") or 2 * x)
        second = model.hook(0, "after_mixer", lambda x: order.append("second") or x / 2)
        assert same_bits(model(tokens), plain)
        assert order == ["first", "second"]
        first.remove()
        first.remove()
        assert not same_bits(model(tokens), plain)
        assert order[2:] == ["second"]
        second.remove()
        assert same_bits(model(tokens), plain)
        assert len(order) == 3


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("memory", ["75%", pytest.param("100%", marks=pytest.mark.slow)])
def test_a_hooked_model_runs_no_step_from_a_trace_and_without_hooks_it_does_again(memory):
    tokens, seen = tokens_of(20), []
    with opened(expert_memory=memory, kernels="reference") as model:
        model.compile_steps = True

        def run() -> mx.array:
            cache = model.make_cache()
            logits = [model(tokens[:, :8], cache)]
            logits += [model(tokens[:, [i]], cache) for i in range(8, 20)]
            return mx.concatenate(logits, axis=1)

        def traces() -> int:
            return model.steps.whole.traces + model.steps.segments.traces

        plain, before = run(), traces()
        assert before > 0
        with model.hook(1, "after_experts", keep(seen)):
            assert same_bits(run(), plain)
        assert traces() == before
        assert [len(rows) for (rows,) in seen] == [8] + 12 * [1]
        assert same_bits(run(), plain)
        assert len(seen) == 13
        assert all(layer._hooks is None for layer in model.modules() if hasattr(layer, "_hooks"))
        assert model.runtime.observers.count == 0


def test_prompts_that_are_read_together_come_one_by_one_before_the_experts():
    mixer, experts = [], []
    with (
        opened() as model,
        model.hook(0, "before_mixer", keep(mixer)),
        model.hook(0, "before_experts", keep(experts)),
        BatchGenerator(model, max_tokens=1) as batch,
    ):
        batch.insert([[5, 6, 7], [8, 9]])
        while batch.next():
            pass
    C = model.config.hidden_size
    assert [x.shape for (x,) in mixer] == [(1, 3, C), (1, 2, C)]
    assert [x.shape for (x,) in experts] == [(5, C)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "router", print), "no point is called 'router'; there are before_mixer, after_mixer"),
        ((9, "before_router", print), "layer 9 does not exist; the model has [2-5]"),
        (("1", "before_router", print), "layer '1' does not exist"),
        ((-1, "before_router", print), "layer -1 does not exist"),
        ((0, "before_router", None), "the hook before_router is None; give a callable"),
        ((0, "before_router", "x"), "the hook before_router is 'x'; give a callable"),
    ],
)
def test_a_wrong_hook_is_one_line(arguments, message):
    with opened(GOLDEN / "qwen3_moe_top2") as model:
        with pytest.raises(InputError, match=message):
            model.hook(*arguments)
        assert model.runtime.observers.count == 0


def test_a_dense_layer_has_no_router():
    with opened(GOLDEN / "deepseek_v3_groups") as model:
        assert 0 not in model.store.layers
        for point in ("after_router", "before_experts"):
            with pytest.raises(InputError, match=f"layer 0 has no {POINTS[point]} to hook"):
                model.hook(0, point, print)
        seen, tokens = [], tokens_of(5)
        with model.hook(0, "after_mixer", keep(seen)):
            mx.eval(model(tokens))
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("point", "function", "message"),
    [
        (
            "after_mixer",
            lambda x: x[:, 1:],
            r"layer 1 returned \(float32\[1, 3, \d+\]\); return",
        ),
        ("after_mixer", lambda x: x.astype(mx.float16), r"returned \(float16\[1, 4, \d+\]\)"),
        ("after_mixer", lambda x: 7, r"returned int; return None or float32\[1, 4, \d+\]"),
        (
            "after_router",
            lambda ids, weights: ids,
            r"returned uint32\[4, 3\]; return None or uint32",
        ),
        (
            "after_router",
            lambda ids, weights: (weights, ids),
            r"returned \(float32\[4, 3\], uint32",
        ),
    ],
)
def test_another_shape_or_dtype_is_one_line_and_leaves_the_state(point, function, message):
    with opened() as model:
        cache = model.make_cache()
        with model.hook(1, point, function), pytest.raises(ShapeError, match=message):
            model(tokens_of(4), cache)
        assert all(entry.empty() for entry in cache)


@pytest.mark.slow
def test_gradients_flow_through_a_hook():
    tokens = tokens_of(6)
    with opened(BUNDLED_MODEL, expert_memory="100%", kernels="reference") as model:
        model.train()

        def total(shift: mx.array) -> mx.array:
            with model.hook(3, "before_experts", lambda x: x + shift):
                return (model(tokens) ** 2).mean()

        at, step = mx.zeros((model.config.hidden_size,)), 1e-2
        direction = mx.random.normal(at.shape, key=mx.random.key(1))
        slope = (mx.grad(total)(at) * direction).sum().item()
        ends = [total(at + sign * step * direction).item() for sign in (1, -1)]
    assert slope != 0
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=0.05)
