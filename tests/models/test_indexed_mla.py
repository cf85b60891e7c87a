"""Oracles: float64 loops over the formulas, plain latent attention, and equalities that need no
outside oracle. Logits of transformers: test_twins.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import IndexedLatentCache, LatentCache
from mlx_moeflux.cache.traced import ChosenPositions
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import SHAPES, synthesize
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.kernels.mla import choose_positions
from mlx_moeflux.kernels.mla.choose_positions import best_positions, position_scores
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import indexed_mla
from mlx_moeflux.models.indexed_mla import IndexedLatentAttention, Indexer
from mlx_moeflux.models.mla import LatentAttention
from mlx_moeflux.models.modules import RMSNorm
from tests.kernels.harness import on_the_cpu
from tests.kernels.metal.metal_device import on_metal
from tests.models.twins import GOLDEN, LIMIT, relative_error
from tests.models_at_hand import same_bits, tokens_of

V32, SHARED = GOLDEN / "deepseek_v32_yarn40", GOLDEN / "glm_moe_dsa_shared"
CONFIG = replace(
    SHAPES["deepseek-v3.2-tiny"],
    hidden_size=24,
    num_attention_heads=2,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=10,
    qk_rope_head_dim=8,
    v_head_dim=14,
    index_topk=6,
    index_n_heads=5,
    index_head_dim=20,
)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def randomised(module):
    """Give every parameter random numbers, norms and biases too."""
    parameters = dict(module.parameters())
    mx.random.seed(7)
    module.update(_random(parameters))
    return module


def _random(part):
    if isinstance(part, dict):
        return {name: _random(inner) for name, inner in part.items()}
    return mx.random.normal(part.shape) * (1.0 if part.ndim == 1 else part.shape[-1] ** -0.5) + 0.1


# ---- Scores and choice


@pytest.mark.parametrize("at_once", [1 << 22, 40])
def test_scores_are_those_of_loops(at_once, monkeypatch):
    """However many heads are held together."""
    monkeypatch.setattr(choose_positions, "SCORES_AT_ONCE", at_once)
    queries, weights, keys = normal(2, 5, 3, 8), normal(2, 3, 5, seed=1), normal(2, 1, 7, 8, seed=2)
    expected = np.zeros((2, 3, 7))
    q, w, k = (np.array(x).astype(np.float64) for x in (queries, weights, keys))
    for b, t, s, h in np.ndindex(2, 3, 7, 5):
        expected[b, t, s] += w[b, t, h] * max(q[b, h, t] @ k[b, 0, s], 0.0)
    assert relative_error(position_scores(queries, weights, keys), mx.array(expected)) <= 1e-6


@pytest.mark.parametrize("k", [1, 4, 9, 30])
def test_the_best_positions_and_of_equals_the_lower(k):
    rng = np.random.default_rng(k)
    scores = rng.integers(-2, 2, (3, 5, 17)).astype(np.float32)  # many are equal
    last, first = np.array([3, 9, 11, 14, 16]), np.array([0, 2, 10])
    found = best_positions(
        mx.array(scores), mx.array(last)[None, :, None], mx.array(first)[:, None, None], k
    )
    found = np.array(found)
    assert found.shape == (3, 5, k)
    for b, t in np.ndindex(3, 5):
        own = scores[b, t, first[b] : last[t] + 1]
        best = sorted(first[b] + np.argsort(-own, kind="stable")[:k])
        assert list(found[b, t]) == [*best, *[last[t]] * (k - len(best))]


@pytest.mark.parametrize("interleaved", [False, True])
def test_an_index_is_that_of_loops(interleaved):
    rope = replace(CONFIG.rope, attention_factor=1.25)
    config = replace(CONFIG, indexer_rope_interleave=interleaved, rope=rope)
    indexer, dims, first = randomised(Indexer(config)), 8, [0, 4]
    keys, queries = normal(2, 3, 20), normal(2, 3, 100, seed=1)
    index = indexer.index(keys, normal(2, 3, 5), queries, mx.array(first))
    k = np.array(keys).astype(np.float64)
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * np.array(indexer.k_norm.weight) + np.array(indexer.k_norm.bias)
    angles = 1.0 / rope.periods(dims).astype(np.float64)

    def turned(x, position):
        pairs = range(dims // 2)
        places = [(2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2) for i in pairs]
        x = x.copy()
        for angle, (i, j) in zip(position * angles, places, strict=True):
            a, b = x[..., i] * 1.25, x[..., j] * 1.25
            x[..., i] = a * np.cos(angle) - b * np.sin(angle)
            x[..., j] = b * np.cos(angle) + a * np.sin(angle)
        return x

    q = np.array(queries).astype(np.float64).reshape(2, 3, 5, 20)
    for b, t in np.ndindex(2, 3):
        position = first[b] + t
        assert np.abs(np.array(index.keys[b, 0, t]) - turned(k[b, t], position)).max() < 1e-5
        assert np.abs(np.array(index.queries[b, :, t]) - turned(q[b, t], position)).max() < 1e-5


# ---- Attention


def attention(**options) -> tuple[IndexedLatentAttention, RMSNorm]:
    layer = randomised(IndexedLatentAttention(CONFIG, Kernels(), **options))
    return layer.eval(), RMSNorm(24)


def test_below_the_budget_it_is_plain_attention_bit_for_bit():
    """Also the first tokens of a call that goes beyond it."""
    ours, norm = attention()
    plain, budget = LatentAttention(CONFIG, Kernels()).eval(), CONFIG.index_topk
    plain.update({k: v for k, v in ours.parameters().items() if k != "indexer"})
    x = normal(2, 30, 24, seed=3)
    expected = plain(x[:, :budget], LatentCache(), norm)
    assert same_bits(ours(x[:, :budget], IndexedLatentCache(), norm), expected)
    beyond = ours(x, IndexedLatentCache(), norm)
    assert relative_error(beyond[:, :budget], expected) <= 1e-6
    assert not mx.allclose(beyond[:, budget:], plain(x, LatentCache(), norm)[:, budget:])
    cache = IndexedLatentCache()
    steps = [ours(x[:, i : i + 1], cache, norm) for i in range(30)]
    assert relative_error(mx.concatenate(steps, axis=1), beyond) <= LIMIT


def test_stretches_of_queries_choose_what_all_do(monkeypatch):
    ours, norm = attention()
    x = normal(2, 30, 24, seed=4)
    expected = ours(x, IndexedLatentCache(), norm)
    monkeypatch.setattr(indexed_mla, "SCORES_AT_ONCE", 180)  # three queries
    assert relative_error(ours(x, IndexedLatentCache(), norm), expected) <= 1e-6


def test_layers_share_a_choice():
    """A layer without an indexer sees what the one before chose, in parts and in steps; the last of
    them frees it."""
    (first, norm), (middle, _), (last, _) = (
        attention(indexed=i == 0, shares=i < 2) for i in range(3)
    )
    assert "indexer" not in middle
    for layer in (middle, last):
        layer.update({k: v for k, v in first.parameters().items() if k != "indexer"})
    x = normal(2, 25, 24, seed=5)
    caches = [IndexedLatentCache(), LatentCache(), LatentCache()]
    for parts in ([(0, 17), (17, 24)], [(24, 25)]):
        chosen, outputs = ChosenPositions(), []
        for layer, cache in zip((first, middle, last), caches, strict=True):
            cache.chosen = chosen
            outputs.append([layer(x[:, a:b], cache, norm) for a, b in parts])
        for one, two, three in zip(*outputs, strict=True):
            # With the same parameters and input, only the choice could differ.
            assert same_bits(one, two)
            assert same_bits(one, three)
        with pytest.raises(KeyError):
            chosen.take(max(parts[0][0], CONFIG.index_topk), last=True)


# ---- Models


@pytest.mark.parametrize("twin", [V32, SHARED])
@pytest.mark.parametrize("memory", ["resident", pytest.param("67%", marks=pytest.mark.slow)])
def test_sequences_of_a_batch_are_as_they_are_alone(twin, memory):
    """One is below the budget, one passes it in the steps, one is beyond it."""
    lengths, options = (3, 5, 19), {"expert_memory": "auto" if memory == "resident" else memory}
    with load_model(twin, dtype=mx.float32, **options) as model:
        rows = [tokens_of(n + 6, seed=n) for n in lengths]
        alone, states = [], [model.make_cache() for _ in lengths]
        for row, n, state in zip(rows, lengths, states, strict=True):
            model(row[:, :n], state)
            alone.append([model(row[:, n + i : n + i + 1], state) for i in range(6)])
        states = [model.make_cache() for _ in lengths]
        for row, n, state in zip(rows, lengths, states, strict=True):
            model(row[:, :n], state)
        merged = [type(entries[0]).merge(list(entries)) for entries in zip(*states, strict=True)]
        for i in range(6):
            tokens = mx.concatenate([r[:, n + i][None] for r, n in zip(rows, lengths, strict=True)])
            logits = model(tokens.reshape(3, 1), merged)
            for b in range(3):
                assert same_bits(logits[b], alone[b][i][0])
        single = [entry.extract(2) for entry in merged]
        more = tokens_of(1, seed=9)
        assert relative_error(model(more, single), model(more, [e.extract(2) for e in merged])) == 0


@pytest.mark.parametrize("twin", [V32, SHARED])
def test_streamed_is_resident_bit_for_bit(twin):
    tokens = mx.concatenate([tokens_of(31, seed=1), tokens_of(31, seed=2)])

    def logits(memory):
        with load_model(twin, dtype=mx.float32, expert_memory=memory) as model:
            cache, cuts = model.make_cache(), (0, 4, 19, *range(20, 32))
            return [model(tokens[:, a:b], cache) for a, b in pairwise(cuts)]

    for ours, expected in zip(logits("67%"), logits("100%"), strict=True):
        assert same_bits(ours, expected)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("memory", ["100%", "67%"])
@pytest.mark.parametrize(
    ("twin", "budget", "first"),
    [
        (V32, 8, 2),
        (SHARED, 6, 2),
        # From a step of the capacity on they see less than everything.
        pytest.param(SHARED, 256, 253, marks=pytest.mark.slow),
    ],
)
def test_all_steps_are_traced(twin, budget, first, memory):
    """Whole, or in segments, between which layers share a choice."""
    with load_model(twin, dtype=mx.float32, kernels="reference", expert_memory=memory) as model:
        for layer in model.layers:
            layer.self_attn.config = replace(layer.self_attn.config, index_topk=budget)
        tokens, cache = tokens_of(first + 9), model.make_cache()
        expected, model.compile_steps = model(tokens), True
        model(tokens[:, :first], cache)
        for i in range(first, first + 9):
            assert model.steps.whole.fits(cache)
            logits = model(tokens[:, i : i + 1], cache)
            assert relative_error(logits[:, 0], expected[:, i]) <= LIMIT, i
        assert model.steps.whole.traces + model.steps.segments.traces == 9


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("twin", [V32, SHARED])
def test_traced_steps_of_a_batch_are_as_they_are_alone(twin):
    """One is below the budget, one passes it, one is beyond it."""
    lengths = (3, 5, 19)
    with load_model(twin, dtype=mx.float32, kernels="reference") as model:
        rows, states = [tokens_of(n + 4, seed=n) for n in lengths], []
        for row, n in zip(rows, lengths, strict=True):
            states.append(model.make_cache())
            model(row[:, :n], states[-1])
        expected = [model(row)[0, -4:] for row in rows]
        merged = [type(entries[0]).merge(list(entries)) for entries in zip(*states, strict=True)]
        model.compile_steps = True
        for i in range(4):
            tokens = mx.stack([row[0, n + i] for row, n in zip(rows, lengths, strict=True)])
            logits = model(tokens[:, None], merged)
            for b in range(3):
                assert relative_error(logits[b, 0], expected[b][i]) <= LIMIT
        assert model.steps.whole.traces == 4


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("types", [("full", "full"), ("full", "shared")])
def test_kernels_say_what_references_say_beyond_the_budget(types, tmp_path, monkeypatch):
    """Steps and prompts that begin below the budget and end beyond it."""
    shape = replace(SHAPES["glm-5-tiny"], index_topk=8, indexer_types=types)
    monkeypatch.setitem(SHAPES, "glm-5-tiny", shape)
    path = synthesize("glm-5-tiny", tmp_path / "model", layers=2, experts=16)
    tokens = mx.concatenate([tokens_of(20), tokens_of(20, seed=1)])

    def logits(model):
        cache, cuts = model.make_cache(), (0, 5, 6, 7, 17, 18, 19, 20)
        return mx.concatenate([model(tokens[:, a:b], cache) for a, b in pairwise(cuts)], axis=1)

    with on_the_cpu():
        with load_model(path, dtype=mx.float32, kernels="reference") as model:
            expected = logits(model)
        with load_model(path, dtype=mx.float32) as model, on_metal(tmp_path / "cache"):
            assert relative_error(logits(model), expected) <= LIMIT


def test_a_cut_state_goes_on_as_a_new_one():
    with load_model(SHARED, dtype=mx.float32) as model:
        tokens, cache = tokens_of(24), model.make_cache()
        model(tokens, cache)
        for entry in cache:
            entry.trim(11)
        fresh, other = model.make_cache(), tokens_of(5, seed=3)
        model(tokens[:, :13], fresh)
        assert relative_error(model(other, cache), model(other, fresh)) <= LIMIT


@pytest.mark.parametrize(
    "shape", ["glm-5-tiny", pytest.param("deepseek-v3.2-tiny", marks=pytest.mark.slow)]
)
def test_logits_are_those_of_mlx_lm(shape, tmp_path):
    """mlx-lm gives every layer of GLM an indexer. It takes equal scores in no order; with 16 heads
    hardly one is zero."""
    from mlx_lm.utils import load_model as mlx_lm_load

    quantised = synthesize(shape, tmp_path / "q", layers=2, experts=16)
    path = convert(
        quantised, tmp_path / "f", layout="safetensors", dequantize=True, dtype="float32"
    )
    theirs, _ = mlx_lm_load(path)
    tokens = mx.concatenate([tokens_of(100), tokens_of(100, seed=1)])
    assert tokens.shape[1] > SHAPES[shape].index_topk
    with load_model(path, dtype=mx.float32, expert_memory="40%") as model:
        assert relative_error(model(tokens), theirs(tokens)) <= LIMIT


def test_a_pool_holds_no_index_keys():
    with (
        load_model(SHARED, dtype=mx.float32) as model,
        pytest.raises(UnsupportedError, match="a KV pool holds no index keys"),
    ):
        BatchGenerator(model, kv_pool_bytes=1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["deepseek-v3.2-tiny", "glm-5-tiny"])
def test_formulas_hold_what_a_prompt_takes(shape, tmp_path):
    """On the CPU, where nothing runs ahead: bytes above those of the model."""
    path = synthesize(shape, tmp_path / "model", layers=4, experts=16)
    with load_model(path, dtype=mx.float32, expert_memory="100%") as model:
        tokens = mx.zeros((1, 1500), mx.int32)
        for n in (40, 1500):
            cache = model.make_cache()
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            mx.eval(model(tokens[:, :n], cache, last_only=True))
            taken = mx.get_peak_memory() - before
            assert taken <= model.state_bytes(n) + model.activation_bytes(n), n
