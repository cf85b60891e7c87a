"""Oracles: mlx-lm's Qwen3.5-MoE on the same quantised checkpoint, and equalities that need no
outside oracle. Logits of transformers: test_twins.py."""

from __future__ import annotations

import contextlib
import io

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.delta.gated_delta import gated_delta_chunked, gated_delta_recurrent
from mlx_moeflux.kernels.runtime import launch_args
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models import decoder, layers, qwen3_5_moe
from tests.devices import seen_as
from tests.kernels.harness import emulated
from tests.models.twins import GOLDEN, LIMIT, relative_error
from tests.models_at_hand import same_bits


def test_mlx_lm_agrees_on_the_quantised_checkpoint(two_bundled_layers):
    from mlx_lm.utils import load_model as mlx_lm_load

    theirs, _ = mlx_lm_load(two_bundled_layers)
    theirs.set_dtype(mx.float32)
    tokens = mx.array(np.random.default_rng(0).integers(0, 4096, (2, 37)))
    with load_model(two_bundled_layers, expert_memory="30%") as model:
        assert relative_error(model(tokens), theirs(tokens)) <= 1e-4


def test_prefill_chunks_inside_a_layer_do_not_change_the_result(two_bundled_layers):
    tokens = mx.array(np.random.default_rng(1).integers(0, 4096, (1, 70)))
    with load_model(two_bundled_layers, expert_memory="30%") as model:
        whole = model(tokens)
        model.prefill_chunk = 16
        assert relative_error(model(tokens), whole) <= LIMIT


def test_of_a_long_prompt_the_host_is_two_layers_ahead(monkeypatch):
    """What it has laid out holds memory: it waits for the layer before the last."""
    begun, waited = [], []
    tokens = mx.array(np.random.default_rng(1).integers(0, 4096, (1, 70)))
    with load_model(BUNDLED_MODEL, expert_memory="100%") as model:
        expected = model(tokens, last_only=True)
        monkeypatch.setattr(decoder, "device", seen_as("cuda"))
        monkeypatch.setattr(decoder, "MANY_NUMBERS", 70 * model.config.hidden_size)
        begin, wait = mx.async_eval, mx.eval

        def noted(*arrays):
            waited.extend((array, len(begun)) for array in arrays)
            wait(*arrays)

        monkeypatch.setattr(mx, "async_eval", lambda *a: begun.extend(a) or begin(*a))
        monkeypatch.setattr(mx, "eval", noted)
        assert mx.array_equal(model(tokens, last_only=True), expected)
    assert len(begun) == len(model.layers) > 3
    waits = [each for each in waited if any(each[0] is h for h in begun)]
    assert len(waits) == len(begun) - 2
    for i, (array, ahead) in enumerate(waits):
        assert array is begun[i]
        assert ahead == i + 3


@pytest.mark.parametrize(
    ("memory", "chunk"),
    [
        ("100%", 100),
        ("30%", 16),
        pytest.param("100%", 16, marks=pytest.mark.slow),
        pytest.param("30%", 100, marks=pytest.mark.slow),
    ],
)
def test_what_a_gpu_begins_early_is_the_same(monkeypatch, chunk, memory):
    """Also inside a transformation, where nothing may be evaluated."""
    tokens, begun = mx.array(np.random.default_rng(1).integers(0, 4096, (1, 70))), []
    with load_model(BUNDLED_MODEL, expert_memory=memory) as model:
        model.prefill_chunk = chunk
        alike = model.make_cache(), model.make_cache()
        expected = model(tokens, alike[0], last_only=True)
        begin = mx.async_eval
        for module in (decoder, layers):
            monkeypatch.setattr(module, "device", seen_as("cuda"))
        monkeypatch.setattr(mx, "async_eval", lambda *a: begun.append(len(a)) or begin(*a))
        assert mx.array_equal(model(tokens, alike[1], last_only=True), expected)
        assert len(begun) >= len(model.layers) // decoder.LAYERS_AHEAD >= 1
        for one, other in zip(*alike, strict=True):
            assert all(
                map(same_bits, *([a for a in e.state if a is not None] for e in (one, other)))
            )
        if memory == "100%" and chunk > 70:
            # It is not evaluated here either: the CPU compiles 26 kernels for it.
            traced = mx.compile(lambda ids: model(ids, last_only=True))
            assert traced(tokens).shape == expected.shape


def test_record_returns_what_flows_between_the_parts():
    tokens = mx.array([[5, 6, 7, 8, 9]])
    with load_model(BUNDLED_MODEL) as model:
        plain = model(tokens)
        with model.record(layers=[1, 2]) as kept:
            assert mx.array_equal(model(tokens), plain)
        assert set(kept) == {1, 2}
        assert mx.array_equal(kept[1]["output"], kept[2]["input"])
        ids, weights = kept[2]["ids"], kept[2]["weights"]
        assert ids.shape == weights.shape == (5, 4)
        assert mx.allclose(weights.sum(axis=-1), mx.ones(5)).item()
        top = np.sort(np.argsort(-np.array(kept[2]["router_logits"]), axis=-1)[:, :4], axis=-1)
        assert (np.array(ids) == top).all()
        routed = model.store.experts(2, kept[2]["h_post"][0], ids, weights)
        shared = mx.sigmoid(kept[2]["gate_score"]) * kept[2]["shared_out"]
        total = kept[2]["h_mid"][0] + routed + shared
        assert relative_error(total, kept[2]["output"][0]) <= 1e-6
        entering, leaving = kept[2]["input"], kept[2]["output"]
        assert relative_error(model.run_layer(2, entering), leaving) <= 1e-6
        with pytest.raises(InputError, match="'hmid'"), model.record(names=["hmid"]):
            pass
        with pytest.raises(InputError, match="layer 9"), model.record(layers=[9]):
            pass
        assert all(getattr(layer, "_recorder", None) is None for layer in model.layers)
        layer = model.layers[1]
        model.layers[1] = lambda *arguments, **keywords: layer(*arguments, **keywords)
        with pytest.raises(InputError, match="layer 1 was replaced"), model.record(layers=[1]):
            pass
        with model.record(layers=[2]) as kept:
            assert mx.array_equal(model(tokens), plain)
        assert set(kept) == {2}


def test_record_accumulates_over_prompt_and_steps(two_bundled_layers):
    tokens = mx.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    with load_model(two_bundled_layers, dtype=mx.float32) as model:
        for rows in (tokens[:1], tokens):
            with model.record(layers=[1]) as whole:
                model(rows)
            with model.record(layers=[1]) as kept:
                model(mx.concatenate([tokens, tokens[:1]]))  # another batch size is discarded
                cache = model.make_cache()
                for start, stop in ((0, 3), (3, 4), (4, 5)):
                    mx.eval(model(rows[:, start:stop], cache))
            assert kept[1].keys() == whole[1].keys() > {"ids", "input", "output"}
            for name in ("input", "h_mid", "h_post", "output"):
                assert relative_error(kept[1][name], whole[1][name]) <= 1e-5
            # Rows of one call follow those of the call before.
            order = [
                b * 5 + t
                for part in ((0, 1, 2), (3,), (4,))
                for b in range(len(rows))
                for t in part
            ]
            assert mx.array_equal(kept[1]["ids"], whole[1]["ids"][mx.array(order)])


@pytest.mark.parametrize("ids", [[[1.0, 2.0]], [[True]], [[3, 4096]], [[-1, 2]], [[4096]]])
def test_ids_that_are_no_tokens_are_refused(two_bundled_layers, ids):
    with load_model(two_bundled_layers) as model, pytest.raises(InputError, match=r"token"):
        model(mx.array(ids))


def test_quantised_experts_are_not_trainable(two_bundled_layers):
    with load_model(two_bundled_layers, expert_memory="100%") as model:
        names = dict(tree_flatten(model.parameters()))
        assert names["model.layers.0.mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
        model.unfreeze()
        left = dict(tree_flatten(model.trainable_parameters()))
        assert "model.norm.weight" in left
        assert not any("switch_mlp" in name or name.endswith("scales") for name in left)


@pytest.mark.parametrize("kernels", ["off", "on"])
def test_gradients_reach_every_parameter(kernels):
    """Kernels have no gradients: training must not take them where they would run."""
    model = load_model(GOLDEN / "text_top3", dtype=mx.float32)
    model.train()
    tokens = mx.array(np.random.default_rng(2).integers(0, 97, (2, 40)))

    def loss(batch):
        logits = model(batch[:, :-1])
        return nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")

    with emulated() if kernels == "on" else contextlib.nullcontext():
        _, gradients = nn.value_and_grad(model, loss)(tokens)
        gradients = dict(tree_flatten(gradients))
        mx.eval(gradients)
    parameters = dict(tree_flatten(model.trainable_parameters()))
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        assert mx.isfinite(gradient).all().item(), name
        assert mx.abs(gradient).max().item() > 0, name


def test_kernels_give_the_logits_of_references():
    """What "auto" takes on Metal, emulated."""
    tokens = mx.array(np.random.default_rng(3).integers(0, 97, (2, 9)))
    with load_model(GOLDEN / "text_top3", dtype=mx.float32, kernels="reference") as model:
        expected = model(tokens)
    with emulated(), load_model(GOLDEN / "text_top3", dtype=mx.float32) as model:
        assert set(model.kernels.names().values()) != {"reference"}
        assert relative_error(model(tokens), expected) <= LIMIT


SMOOTH = [
    "model.layers.0.linear_attn.A_log",
    "model.layers.0.linear_attn.conv1d.weight",
    "model.layers.0.linear_attn.norm.weight",
    "model.layers.0.mlp.switch_mlp.down_proj.weight",
    "model.layers.3.self_attn.q_norm.weight",
    "model.layers.3.self_attn.v_proj.weight",
]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_finite_differences(name):
    # A fixed router: the loss has no jumps where a token changes its experts.
    model = load_model(GOLDEN / "text_top3", dtype=mx.float32, router=Fixed())
    model.train()
    tokens = mx.array(np.random.default_rng(2).integers(0, 97, (2, 40)))

    def loss(parameters):
        model.update(tree_unflatten(list(parameters.items())))
        logits = model(tokens[:, :-1])
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    # Experts are bfloat16 in the file, too short for differences.
    value = dict(tree_flatten(model.parameters()))[name].astype(mx.float32)
    gradient = mx.grad(loss)({name: value})[name]
    # Along the gradient the difference stands out of float32's rounding.
    direction = gradient / mx.linalg.norm(gradient)
    expected = (gradient * direction).sum().item()
    step = 0.001 / expected
    sides = [loss({name: value + sign * step * direction}).item() for sign in (1, -1)]
    assert abs((sides[0] - sides[1]) / (2 * step) - expected) <= 0.02 * expected


@pytest.mark.parametrize("chunk", [4, 16, 32, 64])
@pytest.mark.parametrize("T", [1, 31, 77])
def test_delta_rule_forms_agree_with_float64_loops(T, chunk):
    B, Hk, Hv, Dk, Dv = 2, 2, 6, 40, 24
    rng = np.random.default_rng(T)
    q, k = rng.standard_normal((2, B, T, Hk, Dk))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.standard_normal((B, T, Hv, Dv)), rng.standard_normal((B, Hv, Dv, Dk))
    log_decay = -np.exp(rng.standard_normal((B, T, Hv)) * 3 - 2)
    log_decay[:, T // 2] = -np.inf
    log_decay[:, T // 3, 0] = -300.0
    beta = 1 / (1 + np.exp(-rng.standard_normal((B, T, Hv))))
    mask = rng.random((B, T)) > 0.2
    y, S = np.zeros((B, T, Hv, Dv)), state.copy()
    for b in range(B):
        for t in range(T):
            for h in range(Hv):
                kk, qq = k[b, t, h // 3], q[b, t, h // 3]
                if mask[b, t]:
                    S[b, h] *= np.exp(log_decay[b, t, h])
                    S[b, h] += np.outer(beta[b, t, h] * (v[b, t, h] - S[b, h] @ kk), kk)
                y[b, t, h] = S[b, h] @ qq
    arrays = {"log_decay": log_decay, "beta": beta, "state": state}
    arrays = {n: mx.array(a.astype(np.float32)) for n, a in arrays.items()}
    q, k, v = (mx.array(a.astype(np.float32)) for a in (q, k, v))
    implementations = [gated_delta_recurrent(q, k, v, mask=mx.array(mask), **arrays)]
    implementations.append(gated_delta_chunked(q, k, v, mask=mx.array(mask), chunk=chunk, **arrays))
    for actual, new_state in implementations:
        real = np.broadcast_to(mask[..., None, None], y.shape)
        assert relative_error(mx.array(np.where(real, np.array(actual), 0)), mx.array(
            np.where(real, y, 0).astype(np.float32))) <= 2e-6  # fmt: skip
        assert relative_error(new_state, mx.array(S.astype(np.float32))) <= 2e-6


class Fixed:
    """A router that always takes experts 1 and 3."""

    num_experts_per_tok = 2

    def __call__(self, logits):
        N = logits.shape[0]
        ids = mx.broadcast_to(mx.array([1, 3], mx.uint32), (N, 2))
        return ids, mx.full((N, 2), 0.5, mx.float32)


def test_what_several_threads_see_is_evaluated(monkeypatch):
    """Two threads that evaluate one array end the process: it loses its inputs in one of them."""
    taps, seen, evaluate = qwen3_5_moe.Convolution(8, 4).eval(), [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: seen.append(taps._taps) or evaluate(*arrays))
    kept = taps.taps()
    assert seen == [None]
    assert kept is taps.taps()
    launch_args._zeros.cache_clear()
    for array in (kept, launch_args._zeros(8)):
        mx.export_to_dot(graph := io.StringIO(), array)
        assert "rectangle" not in graph.getvalue(), "it has inputs"


def test_components_can_be_swapped():
    tokens = mx.array([[5, 6, 7]])
    with load_model(BUNDLED_MODEL, router=Fixed(), expert_memory="30%") as model:
        mx.eval(model(tokens))
        residents = {tuple(sorted(model.store.residents(layer))) for layer in range(6)}
        assert residents == {(1, 3)}
    calls = []

    def spy(q, k, v, **options):
        calls.append(q.shape)
        return causal_sdpa(q, k, v, **options)

    with load_model(BUNDLED_MODEL, kernels={"sdpa": spy, "delta_mixer": "reference"}) as model:
        calls.clear()
        mx.eval(model(tokens))
        assert len(calls) == 2
        assert model.kernels.names()["delta_mixer"] == "reference"
        store = model.store
        with load_model(BUNDLED_MODEL, store=store) as other:
            assert other.store is store
    with pytest.raises(InputError, match="subclass of ExpertStore"):
        load_model(BUNDLED_MODEL, store=object())
    with load_model(BUNDLED_MODEL, experts_per_token=2) as model:
        assert model.store.stats().lossy == ["experts_per_token 2 of 4"]


@pytest.mark.parametrize(
    ("ids", "weights", "match"),
    [
        (mx.uint32, mx.bfloat16, "weights"),
        (mx.int64, mx.float32, "ids"),
    ],
)
def test_a_router_of_wrong_types_is_refused_at_load(two_bundled_layers, ids, weights, match):
    class Wrong(Fixed):
        def __call__(self, logits):
            chosen, given = super().__call__(logits)
            return chosen.astype(ids), given.astype(weights)

    with pytest.raises(ShapeError, match=match):
        load_model(two_bundled_layers, router=Wrong())


def test_a_kernel_of_wrong_shape_or_name_is_refused_at_load(two_bundled_layers):
    with pytest.raises(ShapeError, match="sdpa"):
        load_model(two_bundled_layers, kernels={"sdpa": lambda q, k, v, **_: q[..., :1]})
    with pytest.raises(InputError, match="sdpaa"):
        load_model(two_bundled_layers, kernels={"sdpaa": "reference"})
    with pytest.raises(InputError, match="has no implementation 'fast'"):
        load_model(two_bundled_layers, kernels={"sdpa": "fast"})
