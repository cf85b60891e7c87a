"""Routers that know their layer, and routers that choose fewer than K experts. Oracles: routers
that give the left-out experts weight 0, resident models, and the router's own calls."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import InputError, MoefluxError, ShapeError
from mlx_moeflux.experts.telemetry.events import Chosen, ReadStart
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.moe import GroupedRouter, SoftmaxRouter
from tests.models_at_hand import TWIN, same_bits

GOLDEN, K, E = TWIN.parent, 4, 32


def tokens_of(T: int, B: int = 1, vocabulary: int = 64) -> mx.array:
    return mx.array(np.random.default_rng([T, B]).integers(0, vocabulary, (B, T)))


def opened(directory=BUNDLED_MODEL, **options):
    return load_model(directory, **{"expert_memory": "25%", "dtype": mx.float32} | options)


class Layered(SoftmaxRouter):
    """Adds a number to each layer's logits, and notes who asked."""

    def __init__(self, k: int, rows: dict[int, mx.array]):
        super().__init__(k)
        self.rows, self.seen = rows, []

    def __call__(self, logits, *, layer):
        self.seen.append(layer)
        return super().__call__(logits + self.rows[layer])


def test_a_router_with_a_parameter_layer_gets_it():
    rows = {i: mx.random.normal((E,), key=mx.random.key(i)) for i in range(6)}
    router = Layered(K, rows)
    with opened(router=router) as model:
        assert router.seen == [0, 1, 2, 3, 4, 5]  # load tries each
        tokens, cache = tokens_of(5), model.make_cache()
        with model.record(names=["router_logits", "ids"]) as kept:
            mx.eval(model(tokens, cache))
            mx.eval(model(tokens[:, :1], cache))
        assert router.seen[6:] == 2 * [0, 1, 2, 3, 4, 5]
        for layer, arrays in kept.items():
            ids, _ = SoftmaxRouter(K)(arrays["router_logits"] + rows[layer])
            assert mx.array_equal(ids, arrays["ids"])


def test_a_layer_can_be_copied():
    router = Layered(K, dict.fromkeys(range(6), 0.0))
    with opened(expert_memory="100%", router=router) as model:
        copied = copy.deepcopy(model.layers[0].mlp)
        assert copied.layer == 0
        assert copied._kernels.expert_mix is model.kernels.expert_mix


class LayeredGroups(GroupedRouter):
    """Chooses the experts of its number only in layer 1."""

    def __call__(self, logits, bias=None, *, layer):
        return super().__call__(-logits if layer == 1 else logits, bias)


def test_a_router_with_a_bias_gets_its_layer_too():
    directory, tokens = GOLDEN / "glm4_moe_plain", tokens_of(7)
    with opened(directory, expert_memory="100%") as model:
        own, last = model.router, len(model.layers) - 1
        assert last == 1
        plain = model(tokens)
        with model.hook(last, "before_router", lambda logits: -logits):
            expected = model(tokens)
    options = {name: getattr(own, name) for name in ("n_group", "topk_group", "norm_topk_prob")}
    router = LayeredGroups(own.num_experts_per_tok, scale=own.scale, **options)
    with opened(directory, expert_memory="100%", router=router) as model:
        assert same_bits(model(tokens), expected)
    assert not same_bits(expected, plain)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({0: 0.0}, "Layered fails on random logits of layer 1: KeyError: 1"),
        (dict.fromkeys(range(5), 0.0) | {5: mx.full((E,), mx.nan)}, r"ids|not finite"),
    ],
)
def test_a_layer_that_the_router_cannot_do_is_one_line(rows, message):
    with pytest.raises(MoefluxError, match=message):
        opened(router=Layered(K, rows))


class Fewer(SoftmaxRouter):
    """Keeps the experts whose logit is above a bar: K, some or none. The others have id E, or, as
    the oracle has it, weight 0."""

    def __init__(self, bar: float, *, absent: bool):
        super().__init__(K)
        self.bar, self.absent = bar, absent

    def __call__(self, logits):
        ids, weights = super().__call__(logits)
        keep = mx.take_along_axis(logits, ids, axis=-1) > self.bar
        if not self.absent:
            return ids, mx.where(keep, weights, 0.0)
        ids = mx.where(keep, ids, mx.array(logits.shape[-1], mx.uint32))
        order = mx.argsort(ids, axis=-1)
        # What stands beside an id E is ignored.
        weights = mx.where(keep, weights, mx.nan)
        return mx.take_along_axis(ids, order, -1), mx.take_along_axis(weights, order, -1)


def replies(model, B: int) -> mx.array:
    """Logits of a long prompt and of steps."""
    tokens, cache = tokens_of(24, B), model.make_cache()
    parts = [model(tokens[:, :19], cache), *(model(tokens[:, [i]], cache) for i in range(19, 24))]
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("B", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_absent_experts_are_not_read_and_change_no_bit_of_the_others(B):
    bar, events = 1.5, []
    with opened(router=Fewer(bar, absent=False)) as model:
        oracle = replies(model, B)
    with opened(router=Fewer(bar, absent=True), expert_memory="100%") as model:
        resident = replies(model, B)
    with opened(router=Fewer(bar, absent=True), events=events.append) as model:
        assert same_bits(replies(model, B), resident)
        stats = model.store.stats().total
    assert np.allclose(resident, oracle, rtol=1e-4, atol=1e-4)
    chosen = [event for event in events if isinstance(event, Chosen)]
    counts = np.concatenate([(event.ids < E).sum(axis=1) for event in chosen])
    assert {0, 1, 2, 3, 4} <= set(counts.tolist())
    needed = [set(event.ids[event.ids < E].tolist()) for event in chosen]
    assert stats.hits + stats.misses == sum(map(len, needed))
    read = [(event.layer, event.expert) for event in events if isinstance(event, ReadStart)]
    calls = zip(chosen, needed, strict=True)
    assert set(read) <= {(event.layer, expert) for event, experts in calls for expert in experts}
    assert read


def test_a_token_keeps_its_bits_whatever_its_neighbours_choose():
    """Row 0 has K experts in every call; the other row's bar is moved."""
    with opened(TWIN, expert_memory="75%") as model:
        seen, tokens = [], tokens_of(1, 2)

        def fewer(count):
            def function(ids, weights):
                none = mx.full((ids.shape[1],), 6, mx.uint32)
                row = mx.where(mx.arange(ids.shape[1]) < count, ids[1], none)
                return mx.stack([ids[0], row]), weights

            return function

        for count in (0, 1, 2, 3):
            with model.hook(1, "after_router", fewer(count)):
                seen.append(model(tokens, model.make_cache()))
        assert all(same_bits(logits[0], seen[-1][0]) for logits in seen)
        assert not any(same_bits(logits[1], seen[-1][1]) for logits in seen[:-1])


@pytest.mark.parametrize(
    "family",
    [
        "gemma4_shared",
        pytest.param("gpt_oss_sinks", marks=pytest.mark.slow),
        pytest.param("deepseek_v3_groups", marks=pytest.mark.slow),
    ],
)
def test_families_take_fewer_experts(family):
    with opened(GOLDEN / family, expert_memory="100%") as model:
        K, E = model.router.num_experts_per_tok, model.config.num_experts

    class Half(SoftmaxRouter):
        def __call__(self, logits):
            ids, weights = super().__call__(logits)
            absent = mx.arange(K) >= (K + 1) // 2
            return mx.where(absent, mx.array(E, mx.uint32), ids), weights

    logits = []
    for memory in ("80%", "100%"):
        with opened(GOLDEN / family, expert_memory=memory, router=Half(K)) as model:
            logits.append(model(tokens_of(9, 2)))
    assert same_bits(*logits)


@pytest.mark.parametrize(
    "row", [[E, 0, 1, 2], [0, 1, 2, E + 1], [0, 0, E, E], [1, 0, E, E], [0, E, E + 1, E + 1]]
)
def test_other_rows_than_ascending_ones_with_absent_experts_last_are_refused(row):
    class Wrong(SoftmaxRouter):
        def __call__(self, logits):
            ids = mx.broadcast_to(mx.array(row, mx.uint32), (logits.shape[0], K))
            return ids, mx.full(ids.shape, 0.25)

    with pytest.raises(ShapeError, match=r"each row must be ascending and distinct, below 32"):
        opened(router=Wrong(K))


@pytest.mark.parametrize("memory", ["75%", "100%"])
def test_a_router_that_goes_wrong_later_is_refused_by_every_store(memory):
    class Later(SoftmaxRouter):
        def __call__(self, logits):
            ids, weights = super().__call__(logits)
            return (ids if logits.shape[0] != 7 else ids[:, ::-1]), weights

    with opened(router=Later(K), expert_memory=memory) as model:
        model(tokens_of(6))
        with pytest.raises(ShapeError, match="layer 0: the ids of Later are"):
            model(tokens_of(7))


def steps(model, tokens: mx.array, cache) -> None:
    for i in range(10, 20):
        mx.eval(model(tokens[:, [i]], cache))


@pytest.mark.usefixtures("uncompiled")
def test_a_traceable_router_that_chooses_fewer_ends_a_traced_step_with_an_error():
    class Traceable(Fewer):
        traceable = True

    with opened(router=Traceable(1.0, absent=True), kernels="reference") as model:
        model.compile_steps, cache, tokens = True, model.make_cache(), tokens_of(20)
        mx.eval(model(tokens[:, :10], cache))
        with pytest.raises(ShapeError, match="traceable = True chose fewer experts than 4"):
            steps(model, tokens, cache)
        model.compile_steps = False  # the store goes on
        mx.eval(model(tokens[:, 10:], cache))


def test_a_class_with_a_layer_is_still_a_class():
    with pytest.raises(InputError, match="Layered is a class"):
        opened(router=Layered)
