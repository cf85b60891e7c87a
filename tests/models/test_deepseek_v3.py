"""Oracles: float64 NumPy loops of the definitions, mlx-lm's DeepSeek-V3 where it is right, and
equalities that need no outside oracle. Logits of transformers: test_twins.py."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_moeflux.cache import LatentCache
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, ConfigError, UnsupportedError
from mlx_moeflux.kernels.mla import latent_attention as kernel
from mlx_moeflux.kernels.mla.latent_prefill import latent_prefill
from mlx_moeflux.kernels.moe.router import sigmoid_top_k
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class
from mlx_moeflux.models.mla import LatentAttention
from mlx_moeflux.models.moe import GroupedRouter
from mlx_moeflux.models.rope import Rope
from mlx_moeflux.models.shapes import SHAPES
from tests.models.twins import GOLDEN, LIMIT, relative_error

TWIN = GOLDEN / "deepseek_v3_yarn40"
DEEPSEEK = sorted(p.parent.name for p in GOLDEN.glob("deepseek_v3_*/golden.safetensors"))
TOKENS = mx.array(np.random.default_rng(0).integers(0, 79, (2, 40)))


def config_of(directory: Path, **keys):
    config = json.loads((directory / "config.json").read_text()) | keys
    return model_class("deepseek_v3").Config.from_dict(config, file="config.json")


# Attention.


def attention_in_float64(q, k, v, scale, visible):
    scores = np.einsum("bhtd,bhsd->bhts", q, k) * scale
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhts,bhsd->bhtd", p / p.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("padded", [None, "start", "mask"])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 43), (5, 43), (43, 43), (17, 31)])
def test_both_forms_are_attention_over_keys_and_values(T, S, padded, monkeypatch):
    """Over blocks of every kind: of keys, of heads, and of single keys."""
    B, H, R, Dn, Dr, Dv, capacity = 2, 5, 24, 14, 6, 10, 49
    random = np.random.default_rng(S)
    latent, key_rope = random.standard_normal((B, 1, S, R)), random.standard_normal((B, 1, S, Dr))
    q_nope, q_rope = random.standard_normal((B, H, T, Dn)), random.standard_normal((B, H, T, Dr))
    w_k, w_v = random.standard_normal((2, H, 14, R)) * 0.3
    w_v = w_v[:, :Dv]
    keys = np.concatenate([latent @ w_k.swapaxes(1, 2), np.repeat(key_rope, H, 1)], axis=-1)
    queries = np.concatenate([q_nope, q_rope], axis=-1)
    visible = np.arange(S) <= np.arange(S - T, S)[:, None]
    mask = "causal" if T > 1 else None
    if padded:
        first = np.array([min(3, S - T), 0])[:, None, None, None]
        visible = visible & (np.arange(S) >= first) | (np.arange(S) == np.arange(S - T, S)[:, None])
        if padded == "mask":
            mask = mx.array(visible)
    expected = attention_in_float64(queries, keys, latent @ w_v.swapaxes(1, 2), 0.3, visible)

    def f32(array):
        return mx.array(np.asarray(array, np.float32))

    # Rows behind `length` are poison.
    rest = [(0, 0), (0, 0), (0, capacity - S), (0, 0)]
    cache = [mx.pad(f32(a), rest, constant_values=math.nan) for a in (latent, key_rope)]
    k_heads, v_heads = f32(w_k), f32(w_v)

    def expand(c, first, last):
        assert c.shape[2] <= S
        return (
            c @ k_heads[first:last].swapaxes(1, 2),
            c @ v_heads[first:last].swapaxes(1, 2),
        )

    # Of the queries as a projection gives them the rotary columns are not read.
    q = f32(np.concatenate([q_nope, np.full_like(q_rope, np.nan)], axis=-1).swapaxes(1, 2))
    options = {"length": S, "scale": 0.3, "mask": mask}
    if padded == "start":
        options["start"] = mx.array(first.reshape(-1).astype(np.int32))
    for bound, keys_at_once in ((16 << 20, 512), (200, 8), (30, 512), (2, 4), (B * H * T * 7, 5)):
        monkeypatch.setattr(kernel, "SCORES_AT_ONCE", bound)
        monkeypatch.setattr(kernel, "KEYS_AT_ONCE", keys_at_once)
        absorbed = kernel.latent_attention(f32(q_nope) @ k_heads, f32(q_rope), *cache, **options)
        absorbed = absorbed @ v_heads.swapaxes(1, 2)
        assert relative_error(absorbed, f32(expected)) <= 2e-6
        direct = latent_prefill(q, f32(q_rope), *cache, expand=expand, **options)
        assert relative_error(direct, f32(expected)) <= 2e-6


@pytest.mark.parametrize("case", DEEPSEEK)
def test_absorbed_is_materialised(case, monkeypatch):
    with load_model(GOLDEN / case, dtype=mx.float32) as model:
        answers = {}
        for absorbed in (True, False):
            monkeypatch.setattr(LatentAttention, "absorbs", lambda self, T, a=absorbed: a)
            cache = model.make_cache()
            parts = [model(TOKENS[:, a:b], cache) for a, b in ((0, 21), (21, 22), (22, 40))]
            answers[absorbed] = mx.concatenate(parts, axis=1)
        assert relative_error(answers[True], answers[False]) <= LIMIT


@pytest.mark.slow
def test_64k_positions_keep_to_their_arithmetic(monkeypatch):
    """512 + 64 numbers a position, and scores of some keys at a time: those of 16 heads, 2 queries
    and 65536 keys would take 8 MB in float32, twice over."""
    S, H, R, Dr = 65536, 16, 512, 64
    cache = LatentCache()
    step = S // 4
    for start in range(0, S, step):
        rows = mx.full((1, 1, step, 1), start / S, mx.bfloat16)
        latent = mx.broadcast_to(rows, (1, 1, step, R)) + mx.arange(R).astype(mx.bfloat16) / R
        cache.update_and_fetch(latent, mx.broadcast_to(rows, (1, 1, step, Dr)))
        mx.eval(cache.keys, cache.values)
    assert cache.nbytes == S * (512 + 64) * 2
    assert (cache.capacity, cache.size()) == (S, S)
    (latent, key_rope), length = cache.buffers(), cache.columns
    T = 2
    q = mx.random.normal((1, H, T, R), key=mx.random.key(T)).astype(mx.bfloat16) * 0.01
    q_rope = mx.random.normal((1, H, T, Dr), key=mx.random.key(9)).astype(mx.bfloat16)
    mx.eval(q, q_rope)
    monkeypatch.setattr(kernel, "SCORES_AT_ONCE", 1 << 17)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = kernel.latent_attention(
        q, q_rope, latent, key_rope, length=length, scale=0.1, mask="causal"
    )
    mx.eval(y)
    held = mx.get_peak_memory() - before
    assert mx.isfinite(y).all().item()
    assert y.shape == (1, H, T, R)
    assert held < H * T * S * 4 / 4


@pytest.mark.slow
def test_a_prefill_holds_scores_of_some_heads_only():
    """All of 128 heads, 256 queries and 1024 keys would take 134 MB in float32."""
    H, T, S, D = 128, 256, 1024, 8
    q, r, latent = (mx.random.normal(s) for s in ((1, T, H, 2 * D), (1, H, T, D), (1, 1, S, D)))
    mx.eval(q, r, latent)

    def expand(c, first, last):
        heads = mx.broadcast_to(c, (1, last - first, *c.shape[2:]))
        return heads, heads

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    options = {"length": S, "scale": 0.1, "mask": "causal", "expand": expand}
    y = latent_prefill(q, r, latent, latent, **options)
    mx.eval(y)
    assert mx.isfinite(y).all().item()
    assert mx.get_peak_memory() - before < H * T * S * 4 / 1.5


def test_which_form_costs_less():
    """131072 multiply-adds to expand a latent against 768 more for each query and head."""
    attention = LatentAttention(config_of(TWIN), None)
    attention.config = SHAPES["deepseek-v3"]
    assert [attention.absorbs(T) for T in (1, 170, 171, 2048)] == [True, True, False, False]


# Router.


def choose(logits, bias, k, groups, kept, normalise, scale):
    """One token at a time, by the definition, in float64."""
    ids, weights = [], []
    for row in logits.astype(np.float64):
        p = 1 / (1 + np.exp(-row))
        choice = p + bias
        by_group = choice.reshape(groups, -1)
        best = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
        winners = np.argsort(-best, kind="stable")[:kept]
        allowed = np.repeat(np.isin(np.arange(groups), winners), by_group.shape[1])
        order = [e for e in np.argsort(-choice, kind="stable") if allowed[e]][:k]
        chosen = sorted(order)
        w = p[chosen]
        ids.append(chosen)
        weights.append(w / w.sum() * scale if normalise else w * scale)
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("mean", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3), (8, 8)])
def test_router_is_its_definition(groups, kept, mean, normalise):
    random = np.random.default_rng(groups)
    E, k, N = 24, 5, 40
    logits = random.standard_normal((N, E)).astype(np.float32) * 2
    bias = mean + random.standard_normal(E)
    expected = choose(logits, bias, k, groups, kept, normalise, 2.5)
    ids, weights = sigmoid_top_k(
        mx.array(logits),
        mx.array(bias.astype(np.float32)),
        k=k,
        groups=groups,
        kept_groups=kept,
        normalise=normalise,
        scale=2.5,
    )
    assert np.array_equal(np.array(ids), expected[0])
    assert np.abs(np.array(weights) - expected[1]).max() <= 1e-6
    assert (ids.dtype, weights.dtype) == (mx.uint32, mx.float32)


def test_fixture_of_moeflux():
    """The unit fixture of moeflux's router: 8 experts in 2 groups, one of which takes part."""
    logits = mx.array([[3.0, -2, 1, -1, -3, 2, 0, 4]])
    bias = mx.array([0.1, 0.2, -0.3, 0, 0, 0.4, -0.1, 0.05])
    router = GroupedRouter(2, n_group=2, topk_group=1, scale=2.5)
    ids, weights = router(logits, bias)
    assert ids.tolist() == [[5, 7]]
    assert abs(weights.sum().item() - 2.5) <= 1e-6


def test_experts_are_chosen_before_the_shared_ones_begin(monkeypatch):
    """What is launched first is what MLX needs first: the shared products hang on the ids."""
    with load_model(TWIN, kernels="reference") as model:
        block, norm = model.layers[1].mlp, model.layers[1].post_attention_layernorm
        route = block.route

        def marked(logits):
            ids, weights = route(logits)
            return mx.bitwise_invert(mx.bitwise_invert(ids)), weights

        monkeypatch.setattr(block, "route", marked)
        begun = block.prepare(mx.ones((1, 3, model.config.hidden_size)), norm)
        for product in begun.shared:
            graph = io.StringIO()
            mx.export_to_dot(graph, product)
            assert "BitwiseInvert" in graph.getvalue()
        assert len(begun.shared) == 2


# mlx-lm.


def lifted(directory: Path, out: Path, by: float) -> Path:
    """The twin with router biases moved by `by`."""
    shutil.copytree(directory, out)
    tensors = mx.load(str(out / "model.safetensors"))
    mx.eval(tensors)
    for name in [n for n in tensors if n.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name] + by
    mx.save_safetensors(str(out / "model.safetensors"), tensors)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_mlx_lm_agrees_with_positive_scores(tmp_path, bits):
    """On its own layout, ``embed_q`` and ``unembed_out``, as mlx-community publishes it."""
    from mlx_lm.utils import load_model as mlx_lm_load
    from mlx_lm.utils import quantize_model

    source = convert(lifted(TWIN, tmp_path / "up", 4.0), tmp_path / "hf", layout="safetensors")
    theirs, config = mlx_lm_load(source)
    if bits is not None:
        theirs, config = quantize_model(theirs, config, 64, bits)
    out = tmp_path / "theirs"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(theirs.parameters()))
    assert any(name.endswith("embed_q.weight") for name in weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights)
    theirs.set_dtype(mx.float32)
    expected = theirs(TOKENS)
    for memory in ("auto", "50%"):
        with load_model(out, expert_memory=memory) as model:
            assert relative_error(model(TOKENS), expected) <= LIMIT
            cache = model.make_cache()
            steps = [model(TOKENS[:, t : t + 1], cache) for t in range(40)]
            assert relative_error(mx.concatenate(steps, axis=1), expected) <= LIMIT


def test_mlx_lm_lets_lost_groups_win(tmp_path):
    """Source: mlx-lm 0.32.2 group_expert_select puts 0.0 at groups that lost; transformers 5.23
    DeepseekV3TopkRouter fills them with -inf. With negative scores 0 wins."""
    from mlx_lm.utils import load_model as mlx_lm_load

    theirs, _ = mlx_lm_load(convert(TWIN, tmp_path / "hf", layout="safetensors"))
    theirs.set_dtype(mx.float32)
    golden = mx.load(str(TWIN / "golden.safetensors"))
    with load_model(TWIN, dtype=mx.float32) as model:
        assert relative_error(model(golden["tokens"]), golden["logits"]) <= LIMIT
    assert relative_error(theirs(golden["tokens"]), golden["logits"]) > 1e-2


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_kv_b_proj_means_its_dequantised_self(tmp_path, bits):
    quantised = convert(TWIN, tmp_path / "q", quantize=True, q_bits=bits, dtype="float32")
    floats = convert(quantised, tmp_path / "f", dequantize=True, dtype="float32")
    with load_model(quantised) as model, load_model(floats) as other:
        assert model.layers[2].self_attn.kv_b_proj.bits == bits
        assert not hasattr(model.layers[2].mlp.gate, "bits")
        assert model.layers[0].mlp.up_proj.bits == bits
        assert relative_error(model(TOKENS), other(TOKENS)) <= LIMIT


# Rope.


def test_both_spellings_of_rope_are_one():
    yarn = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
    yarn |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    new = {"rope_parameters": yarn | {"rope_type": "yarn", "rope_theta": 1e4}}
    old = {"rope_scaling": yarn | {"type": "yarn"}, "rope_theta": 10000}
    for factor in (1.0, 40.0):
        ropes = []
        for config in (old, new):
            config = json.loads(json.dumps(config))
            config.get("rope_scaling", config.get("rope_parameters"))["factor"] = factor
            ropes.append(Rope.from_config(config, "config.json", theta=1.0, positions=163840))
        assert ropes[0] == ropes[1]
        plain = 1e4 ** (np.arange(0, 64, 2) / 64)
        periods = np.array(ropes[0].periods(64))
        if factor == 1.0:
            assert np.abs(periods / plain - 1).max() <= 1e-6
            assert ropes[0].softmax_factor() == 1.0
        else:
            # moeflux's table: pairs up to 10 keep their frequency, from 23 on it is 40 times less.
            assert np.abs(periods[:11] / plain[:11] - 1).max() <= 1e-6
            assert np.abs(periods[23:] / plain[23:] / 40 - 1).max() <= 1e-6
            assert (np.diff(periods[10:24] / plain[10:24]) > 0).all()
            assert abs(ropes[0].softmax_factor() - 1.87385) <= 1e-5
        assert ropes[0].attention_factor == 1.0


# Configs and names.


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ({"topk_group": 5}, ConfigError, "topk_group"),
        ({"n_group": 3}, ConfigError, "n_group"),
        ({"num_experts_per_tok": 5}, ConfigError, "take part"),
        ({"n_group": 8, "topk_group": 2, "num_experts_per_tok": 1}, ConfigError, "one expert"),
        ({"qk_rope_head_dim": 15}, ConfigError, "odd"),
        ({"scoring_func": "softmax"}, UnsupportedError, "softmax"),
        ({"topk_method": "greedy"}, UnsupportedError, "greedy"),
        ({"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, UnsupportedError, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, ConfigError, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": "2"}}, ConfigError, "factor"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8, "x": 1}},
            ConfigError,
            "'x'",
        ),
        ({"rope_parameters": {"rope_theta": 3.0}}, ConfigError, "rope_theta"),
        ({"kv_lora_rank": 0}, ConfigError, "kv_lora_rank"),
        ({"new_trick": 3}, ConfigError, "new_trick"),
    ],
)
def test_configs_that_are_refused(keys, kind, words):
    with pytest.raises(kind, match=words):
        config_of(TWIN, **keys)


def test_layers_of_prediction_are_dropped_whatever_the_config_counts(tmp_path):
    with load_model(TWIN) as model:
        assert len(model.layers) == 3
        assert set(model.moe_blocks()) == {1, 2}
    other = Path(shutil.copytree(TWIN, tmp_path / "x"))
    config = json.loads((other / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    config["num_nextn_predict_layers"] = 0
    (other / "config.json").write_text(json.dumps(config))
    tokens = mx.array([[1, 2, 3]])
    with load_model(other) as model, load_model(TWIN) as expected:
        assert mx.array_equal(model(tokens), expected(tokens))
    config["num_hidden_layers"] = 2
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"3 layers, config\.json says 2"):
        load_model(other)
