"""A step from a trace against the same model without; caches against rows appended one by one."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_moeflux.cache import KVCache
from mlx_moeflux.cache.kv import TAIL_ROWS
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.loading import load_model
from tests.kernels.harness import on_the_cpu, require_gpu
from tests.models_at_hand import model_of


def close(a: mx.array, b: mx.array) -> bool:
    error, scale = mx.abs(a - b).max().item(), mx.abs(b).max().item()
    return error <= 2e-5 * scale


KINDS = ("resident", "streamed", "stacked", "latent")


def by_default(*names: str):
    """A test's fixture ``model`` is of these kinds, and with -m slow of the others."""
    kinds = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in names)) for kind in KINDS]
    return pytest.mark.parametrize("model", kinds, indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def model(two_bundled_layers, request, tmp_path_factory):
    memory = "50%" if request.param == "streamed" else "auto"
    stacked = request.param in ("stacked", "latent")
    options = {"expert_memory": memory, "dtype": mx.float32, "fuse": stacked}
    directory = two_bundled_layers
    if request.param == "latent":
        directory = synthesize("deepseek-tiny", tmp_path_factory.mktemp("model") / "latent")
    with load_model(directory, **options) as model:
        if request.param == "streamed":
            for layer in model.store.layers:
                model.store.resize(layer, model.store.num_experts)
            model.store.preload()
        yield model


def steps(model, tokens: mx.array, *, traced: bool, prompt: int) -> mx.array:
    """Logits ``[B, T - prompt, V]`` of one token at a time behind a prompt."""
    model.compile_steps = traced
    cache = model.make_cache()
    mx.eval(model(tokens[:, :prompt], cache))
    return mx.concatenate(
        [model(tokens[:, i : i + 1], cache) for i in range(prompt, tokens.shape[1])], axis=1
    )


@pytest.mark.parametrize("B", [1, pytest.param(3, marks=pytest.mark.slow)])
@by_default("streamed", "stacked")
def test_traced_steps_give_the_same_logits(model, B):
    tokens = mx.array(np.random.default_rng(B).integers(0, 1000, (B, 69)))
    before = model.steps.whole.traces
    traced = steps(model, tokens, traced=True, prompt=60)
    assert close(traced, steps(model, tokens, traced=False, prompt=60))
    # One shape of buffers, one trace, across the end of a tail.
    assert model.steps.whole.traces == before + 1


def test_ids_of_any_kind_take_the_same_trace(model):
    cache, before = model.make_cache(), model.steps.whole.traces
    mx.eval(model(mx.array([[5, 6, 7]]), cache))
    for dtype in (mx.uint32, mx.int32, mx.int64):
        mx.eval(model(mx.array([[8]], dtype), cache))
    assert model.steps.whole.traces <= before + 1


@by_default("streamed", "latent")
def test_a_trace_serves_until_a_buffer_grows(model):
    tokens = mx.array(np.random.default_rng(7).integers(0, 1000, (1, 259)))
    before = model.steps.whole.traces
    traced = steps(model, tokens, traced=True, prompt=253)
    assert close(traced, steps(model, tokens, traced=False, prompt=253))
    assert model.steps.whole.traces <= before + 2


@pytest.mark.usefixtures("uncompiled")
def test_a_window_of_keys_is_seen(tmp_path):
    with model_of("qwen3_moe_window", tmp_path, expert_memory="100%") as model:
        window = model.config.window
        tokens = mx.array(np.random.default_rng(3).integers(0, 64, (2, window + 6)))
        before = model.steps.whole.traces
        traced = steps(model, tokens, traced=True, prompt=window - 3)
        assert model.steps.whole.traces > before
        assert close(traced, steps(model, tokens, traced=False, prompt=window - 3))


@pytest.mark.usefixtures("uncompiled")
def test_rows_in_bits_are_seen(tmp_path):
    with model_of("4 bits", tmp_path, expert_memory="100%") as model:
        tokens = mx.array(np.random.default_rng(5).integers(0, 64, (2, 70)))
        before = model.steps.whole.traces
        traced = steps(model, tokens, traced=True, prompt=58)
        assert model.steps.whole.traces > before
        assert close(traced, steps(model, tokens, traced=False, prompt=58))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request, uncompiled):
    """The CPU without ``mx.compile``, which adds products otherwise there; a GPU with it."""
    if request.param == "gpu":
        require_gpu()
        yield
    else:
        with on_the_cpu():
            yield


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("B", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 16))])
@pytest.mark.parametrize(
    "kind",
    [
        *("deepseek_v3_groups", "qwen3_moe_window", "hybrid", "4 bits"),
        *("glm_moe_dsa_shared", "qwen4_exp_rows", "gemma4_shared"),
    ],
)
def test_a_step_that_calls_the_store_has_the_bits_of_a_traced_one(tmp_path, kind, B, dtype):
    """So have a batch whose experts do not fit into the slots, and a model with hooks."""
    with model_of(kind, tmp_path, expert_memory="100%", dtype=dtype) as model:
        tokens = mx.array(np.random.default_rng(4).integers(0, 64, (B, 36)))
        before = model.steps.whole.traces
        traced = steps(model, tokens, traced=True, prompt=30)
        assert (made := model.steps.whole.traces) > before
        with model.hook(0, "before_mixer", lambda x: None):
            called = steps(model, tokens, traced=True, prompt=30)
        assert model.steps.whole.traces == made
        assert mx.array_equal(called, traced).item()


def test_other_calls_go_between(model):
    tokens = mx.array(np.random.default_rng(8).integers(0, 1000, (1, 40)))
    expected = model(tokens)
    model.compile_steps = True
    cache, parts, start = model.make_cache(), [], 0
    for T in (5, 1, 1, 4, 1, 1, 1, 20, 1, 5):
        parts.append(model(tokens[:, start : start + T], cache))
        start += T
    assert close(mx.concatenate(parts, axis=1), expected)


def test_the_account_counts_traced_tokens(model):
    model.compile_steps = True
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    before = model.store.stats().total.tokens
    mx.eval([model(mx.array([[i]]), cache) for i in range(4)])
    assert model.store.stats().total.tokens - before == 4


def test_new_parameters_are_seen(two_bundled_layers):
    with load_model(two_bundled_layers, expert_memory="auto", dtype=mx.float32) as model:
        model.compile_steps = True
        cache = model.make_cache()
        mx.eval(model(mx.array([[1, 2]]), cache))
        mx.eval(model(mx.array([[3]]), cache))
        model.update({"model": {"norm": {"weight": 2 * model.model.norm.weight}}})
        fresh = model.make_cache()
        mx.eval(model(mx.array([[1, 2, 3]]), fresh))
        assert close(model(mx.array([[4]]), cache), model(mx.array([[4]]), fresh))


def test_recording_sees_every_step(model):
    model.compile_steps = True
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2]]), cache))
    with model.record(layers=[1], names=["ids"]) as kept:
        mx.eval(model(mx.array([[3]]), cache))
    assert kept[1]["ids"].shape == (1, 4)


def test_rows_appended_through_the_tail_are_in_the_buffers():
    """Random steps, whole calls, trims and returns, beside a plain list of rows."""
    rng = random.Random(0)
    cache, rows = KVCache(), []

    def new(T: int) -> mx.array:
        return mx.random.normal((2, 3, T, 8))

    def check():
        keys, values = cache.views()
        expected = mx.concatenate(rows, axis=2)
        assert mx.array_equal(keys, expected).item()
        assert mx.array_equal(values, expected[..., :4]).item()

    first = new(5)
    cache.update_and_fetch(first, first[..., :4])
    rows.append(first)
    for _ in range(400):
        what = rng.random()
        if what < 0.9:
            row = new(1)
            _, _, keys, values = cache.begin_step()
            own = (mx.arange(TAIL_ROWS) == cache.columns % TAIL_ROWS)[:, None]
            cache.end_step(mx.where(own, row, keys), mx.where(own, row[..., :4], values))
            rows.append(row)
        elif what < 0.93:
            block = new(rng.randrange(1, 9))
            cache.update_and_fetch(block, block[..., :4])
            rows.append(block)
        elif what < 0.96:
            n = rng.randrange(1, 4)
            cache.trim(n)
            kept = mx.concatenate(rows, axis=2)[:, :, : cache.columns]
            rows[:] = [kept]
        elif what < 0.98:
            mark = cache.mark()
            _, _, keys, values = cache.begin_step()
            cache.end_step(keys, values)
            cache.rollback(mark)
        else:
            check()
    check()


def test_stacked_parameters_keep_their_names_and_values(two_bundled_layers):
    with (
        load_model(two_bundled_layers, fuse=False) as plain,
        load_model(two_bundled_layers, fuse=True) as stacked,
    ):
        ours, theirs = (dict(tree_flatten(m.parameters())) for m in (plain, stacked))
        assert ours.keys() == theirs.keys()
        assert all(mx.array_equal(ours[name], theirs[name]).item() for name in ours)
        layer = stacked.layers[0]
        linears = layer.linear_attn.stacks()[0]
        assert linears[0]._stack.holds(linears)
        assert len(linears[0]._stack.weights) == 1
        # A replaced parameter is what counts.
        tokens = mx.array([[3, 1, 4]])
        for model in (plain, stacked):
            mixer = model.layers[0].linear_attn
            mixer.in_proj_z.scales = 2 * mixer.in_proj_z.scales
        assert not linears[0]._stack.holds(linears)
        assert close(stacked(tokens), plain(tokens))
