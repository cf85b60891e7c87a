"""Oracles: the published configs, and mlx-lm on the same files. Logits of transformers:
test_twins.py."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import ConfigError, UnsupportedError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.laguna_config import FULL, SPARSE, WINDOWED, Config
from mlx_moeflux.models.rope import ORIGINAL
from mlx_moeflux.models.shapes import SHAPES
from tests.models.test_published import config_of
from tests.models.twins import GOLDEN, relative_error


def parsed(config: dict[str, Any]) -> Config:
    return Config.from_dict(config, file="config.json")


def tiny(**keys: Any) -> dict[str, Any]:
    """The keys of the tiny shape; None leaves one out."""
    config = SHAPES["laguna-tiny"].published() | keys
    return {key: value for key, value in config.items() if value is not None}


def ropes(kind: str, **keys: Any) -> dict[str, Any]:
    both = SHAPES["laguna-tiny"].published()["rope_parameters"]
    return {"rope_parameters": both | {kind: both[kind] | keys}}


# ---- Config


def test_the_published_configs():
    small, large = config_of("laguna-xs.2-4bit"), config_of("laguna-s-2.1-4bit")
    for config, heads in ((small, 64), (large, 72)):
        full = [i for i in range(config.num_hidden_layers) if config.window(i) is None]
        assert full == list(range(0, config.num_hidden_layers, 4))
        assert [i for i in range(config.num_hidden_layers) if not config.is_sparse(i)] == [0]
        assert config.of_layer(0) is config
        window = config.of_layer(1)
        assert (config.num_attention_heads, window.num_attention_heads) == (48, heads)
        assert (config.rotary_dims, window.rotary_dims) == (64, 128)
        assert (config.rope_theta, window.rope_theta, window.yarn) == (5e5, 1e4, None)
        assert config.window(1) == 512
        # Keys and values of 8 heads of 128, two bytes a number, in every layer.
        assert config.state_bytes(256) == config.num_hidden_layers * 256 * 2 * 2 * 8 * 128
    assert [c.yarn and (c.yarn.factor, c.yarn.original) for c in (small, large)] == [
        (64.0, 4096),
        (32.0, 8192),
    ]


@pytest.mark.parametrize("name", ["laguna-xs.2", "laguna-s-2.1", "laguna-tiny"])
def test_shapes_come_back(name):
    keys = SHAPES[name].published()
    assert parsed(keys).published() == keys


def test_keys_that_may_be_missing():
    assert parsed(tiny(mlp_layer_types=None)).published() == tiny()
    alone = parsed(tiny(num_attention_heads_per_layer=None))
    assert (alone.num_attention_heads, alone.window_attention_heads) == (4, 4)
    plain = parsed(tiny(rope_parameters=None))
    assert (plain.rope_theta, plain.window_rope_theta, plain.yarn) == (5e5, 1e4, None)
    assert (plain.rotary_dims, plain.of_layer(1).rotary_dims) == (32, 64)
    said = tiny(gating="per-head", gating_types=["per_head"] * 4, mlp_only_layers=[0])
    said |= {"partial_rotary_factor": 0.5, "norm_topk_prob": True, "decoder_sparse_step": 1}
    assert parsed(said).published() == tiny()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layer_types": None}, ConfigError, "the key 'layer_types' is missing"),
    ({"num_attention_heads": None}, ConfigError, "the key 'num_attention_heads' is missing"),
    ({"layer_types": [FULL] * 3}, ConfigError, "'layer_types' names 3 layers"),
    ({"layer_types": ["x"] * 4}, UnsupportedError, "'layer_types' has 'x'"),
    ({"layer_types": []}, ConfigError, "the key 'layer_types' is missing"),
    ({"layer_types": 7}, ConfigError, "'layer_types' is 7"),
    ({"mlp_layer_types": [SPARSE]}, ConfigError, "'mlp_layer_types' must have"),
    ({"mlp_layer_types": ["x"] * 4}, ConfigError, "'mlp_layer_types' must have"),
    ({"mlp_only_layers": [1]}, ConfigError, "'mlp_only_layers' is [1] and the dense layers"),
    ({"gating": "per-element"}, UnsupportedError, "'gating' is 'per-element'"),
    ({"gating": False}, UnsupportedError, "'gating' is False"),
    ({"gating_types": ["per_element"]}, UnsupportedError, "'gating' is 'per_element'"),
    ({"moe_router_logit_softcapping": 3.0}, UnsupportedError, "softcapping' is 3.0"),
    ({"moe_router_score_func": "sqrtsoftplus"}, UnsupportedError, "'sqrtsoftplus'"),
    ({"moe_apply_router_weight_on_input": True}, UnsupportedError, "on_input' is True"),
    ({"attention_bias": True}, UnsupportedError, "'attention_bias' is True"),
    ({"num_attention_heads_per_layer": [4] * 3}, ConfigError, "must list 4 layers"),
    ({"num_attention_heads_per_layer": 4}, ConfigError, "must list 4 layers"),
    ({"num_attention_heads_per_layer": [4, 5, 6, 6]}, ConfigError, "has 5, expected multiples"),
    ({"num_attention_heads_per_layer": [4, "6", 6, 6]}, ConfigError, "has '6', expected multiples"),
    ({"num_attention_heads_per_layer": [4, 4, 6, 6]}, UnsupportedError, "is 6; only 4"),
    ({"num_key_value_heads": 3}, ConfigError, "'num_key_value_heads' 3 does not divide"),
    ({"num_experts_per_tok": 33}, ConfigError, "33 is more than 'num_experts' 32"),
    ({"rope_theta": 1e4}, ConfigError, "'rope_theta' is at the top"),
    ({"partial_rotary_factor": 0.25}, UnsupportedError, "is 0.25; only 0.5"),
    ({"rope_parameters": {"rope_theta": 1e4}}, ConfigError, "must be an object with"),
    ({"rope_parameters": 3}, ConfigError, "must be an object with"),
    ({"rope_parameters": {FULL: {}}}, ConfigError, "'rope_theta' for 'full_attention'"),
    (ropes(WINDOWED, partial_rotary_factor=2), ConfigError, "'sliding_attention' is 2, must"),
    (ropes(WINDOWED, partial_rotary_factor=0.01), ConfigError, "turns 0 of a head's"),
    (ropes(WINDOWED, rope_type="yarn", factor=2, **{ORIGINAL: 64}), UnsupportedError, "'yarn'"),
    (ropes(FULL, rope_type="llama3"), UnsupportedError, "'llama3'"),
    (ropes(FULL, rope_theta="x"), ConfigError, "'rope_theta' of the rope is 'x'"),
    ({"swa_attention_sinks": True}, ConfigError, "nothing here reads 'swa_attention_sinks'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
def test_one_line_says_what_is_wrong(wrong, kind, message):
    with pytest.raises(kind, match=r"^config\.json: [^\n]*$") as error:
        parsed(tiny(**wrong))
    assert message in str(error.value)


# ---- Numbers


@pytest.mark.parametrize("quantised", [False, True], ids=["floats", "4 bits"])
def test_mlx_lm_gives_the_same_logits(quantised, tmp_path):
    utils = pytest.importorskip("mlx_lm.utils")
    tokens = mx.load(str(GOLDEN / "laguna_heads" / "golden.safetensors"))["tokens"]
    options = {"quantize": True, "q_bits": 4, "q_group_size": 64} if quantised else {}
    out = convert(GOLDEN / "laguna_heads", tmp_path / "mlx", layout="safetensors", **options)
    theirs, _ = utils.load_model(out)
    theirs.set_dtype(mx.float32)
    expected = theirs(tokens)
    for memory in ("100%", "60%"):
        with load_model(out, dtype=mx.float32, expert_memory=memory) as model:
            assert relative_error(model(tokens), expected) <= 1e-5


def test_mlx_lm_reads_what_is_synthesised(tmp_path):
    utils = pytest.importorskip("mlx_lm.utils")
    path = synthesize("laguna-tiny", tmp_path / "model", layers=3, experts=8)
    theirs, config = utils.load_model(path)
    theirs.set_dtype(mx.float32)
    tokens = mx.array(np.random.default_rng(0).integers(0, 1024, (2, 33)))
    with load_model(path, dtype=mx.float32, expert_memory="75%") as model:
        assert relative_error(model(tokens), theirs(tokens)) <= 1e-5
        assert [layer.self_attn.config.num_attention_heads for layer in model.layers] == [4, 6, 6]
    assert config["quantization"]["model.layers.1.mlp.gate.proj"]["bits"] == 8
