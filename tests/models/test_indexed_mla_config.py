"""Configs of DeepSeek-V3.2 and GLM-5. Oracles: the published keys; transformers 5.24
`DeepseekV32Config` and `GlmMoeDsaConfig` for defaults and for which layers have an indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_moeflux.checkpoint.names import map_tensors
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import ConfigError, MoefluxError, UnsupportedError
from mlx_moeflux.models import config_class
from mlx_moeflux.models.shapes import SHAPES

# config.json of zai-org/GLM-5.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1,
    "first_k_dense_replace": 3, "head_dim": 64, "hidden_act": "silu", "hidden_size": 6144,
    "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "indexer_rope_interleave": True, "initializer_range": 0.02, "intermediate_size": 12288,
    "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1,
    "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
KINDS = ["full"] * 2 + ["full", "shared", "shared", "shared"] * 19


def parsed(config: dict[str, Any]):
    return config_class(config["model_type"]).from_dict(config, file="config.json")


def tiny(name: str = "glm-5-tiny", **keys) -> dict[str, Any]:
    """Keys of a shape; None leaves one out."""
    config = SHAPES[name].published() | keys
    return {key: value for key, value in config.items() if value is not None}


def test_the_published_config():
    assert parsed(PUBLISHED) == SHAPES["glm-5"]
    longer = {"max_position_embeddings": 1048576, "head_dim": 192, "indexer_types": KINDS}
    longer |= {"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}}
    longer |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert parsed(PUBLISHED | longer) == SHAPES["glm-5.2"]


@pytest.mark.parametrize(
    "name", ["deepseek-v3.2", "deepseek-v3.2-tiny", "glm-5", "glm-5.2", "glm-5-tiny"]
)
def test_shapes_come_back(name):
    found = parsed(tiny(name))
    assert parsed(found.published()) == found
    # YaRN reaches further than this shape says.
    expected = SHAPES[name]
    assert replace(found, max_position_embeddings=expected.max_position_embeddings) == expected


def test_defaults_are_transformers():
    """Source: transformers 5.24 `DeepseekV32Config`, `GlmMoeDsaConfig`."""
    left = {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "q_lora_rank": 2048}
    left |= {"v_head_dim": 256, "n_group": 1, "topk_group": 1, "indexer_rope_interleave": True}
    found = parsed(tiny(**dict.fromkeys(left)))
    assert {key: getattr(found, key) for key in left} == left
    left = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128, "q_lora_rank": 1536}
    left |= {"v_head_dim": 128, "n_group": 8, "topk_group": 4, "indexer_rope_interleave": False}
    found = parsed(tiny("deepseek-v3.2-tiny", **dict.fromkeys(left)))
    assert {key: getattr(found, key) for key in left} == left


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({}, "FFFF"),
        ({"index_topk_freq": 1}, "FFFF"),
        ({"index_topk_freq": 0}, "FFFF"),
        ({"index_topk_freq": 2}, "FFSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
        ({"index_topk_pattern": "FSSF"}, "FSSF"),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, "FFSF"),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, "FSFS"),
        ({"indexer_types": [], "index_topk_freq": 2}, "FFSF"),
        # Of a key without its offset, transformers reads the list.
        ({"indexer_types": ["full"] * 4, "index_topk_freq": 2}, "FFFF"),
    ],
)
def test_which_layers_have_an_indexer(keys, own):
    config = tiny(indexer_types=None) | keys
    found = parsed(config)
    assert "".join("FS"[not found.has_indexer(i)] for i in range(4)) == own
    names = [set(found.state(i, "F32").arrays) for i in range(4)]
    assert [("index_keys" in arrays) for arrays in names] == [kind == "F" for kind in own]
    assert parsed(found.published()) == found


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"indexer_types": ["full"] * 3}, ConfigError, "'indexer_types' must name a kind"),
        ({"indexer_types": ["full"] * 5}, ConfigError, "'indexer_types' is .* 4 layers"),
        ({"indexer_types": ["full", "none", "full", 7]}, ConfigError, "expected 'full' or"),
        ({"indexer_types": 3}, ConfigError, "'indexer_types' must name a kind"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, ConfigError, "gives the first layer no"),
        ({"index_topk_pattern": "FFSX"}, ConfigError, "'index_topk_pattern' is 'FFSX'"),
        ({"indexer_types": ["full"] * 4, "index_topk_pattern": "FFSF"}, ConfigError, "differ"),
        (
            {"indexer_types": ["full"] * 4, "index_topk_freq": 2, "index_skip_topk_offset": 1},
            ConfigError,
            "'indexer_types' and 'index_topk_freq' differ; keep one",
        ),
        ({"index_topk_freq": "4"}, ConfigError, "'index_topk_freq' is '4'"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": -1}, ConfigError, "offset' is -1"),
        ({"index_topk": 0}, ConfigError, "'index_topk' is 0, must be positive"),
        ({"index_n_heads": -1}, ConfigError, "'index_n_heads' is -1"),
        ({"index_head_dim": 32}, ConfigError, "'index_head_dim' 32 is less than"),
        ({"q_lora_rank": 0}, ConfigError, "'q_lora_rank' is 0"),
        ({"rope_interleave": False}, UnsupportedError, "'rope_interleave' is False"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedError, "'layer_types' is"),
        ({"mlp_layer_types": ["sparse"] * 4}, ConfigError, "has 0 dense layers; keep one"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "'partial_rotary_factor' is 0.5"),
        ({"moe_router_dtype": "bfloat16"}, UnsupportedError, "'moe_router_dtype' is"),
        ({"num_hidden_layers": "4"}, ConfigError, "'num_hidden_layers' is '4'"),
        ({"num_hidden_layers": 10**12}, ConfigError, "'num_hidden_layers' is"),
        ({"index_kpool": 4}, ConfigError, "nothing here reads 'index_kpool'"),
    ],
)
def test_wrong_keys_are_one_line(keys, error, words):
    own = {"indexer_types": None} | keys
    with pytest.raises(error, match=words) as caught:
        parsed(tiny(**own))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_no_rank_of_queries_is_one_line():
    config = tiny("deepseek-v3.2-tiny") | {"q_lora_rank": None}
    with pytest.raises(MoefluxError, match="'q_lora_rank' is null; the indexer needs its rank"):
        parsed(config)


def test_an_indexer_that_nothing_reads_is_dropped(tmp_path):
    """Some converters write one for every layer."""
    rules = parsed(tiny(indexer_types=["full", "shared", "full", "shared"])).name_rules()
    names = [f"model.layers.{i}.self_attn.indexer.wk.weight" for i in range(4)]
    refs = {name: TensorRef(name, tmp_path, 0, "BF16", (2, 2)) for name in names}
    assert set(map_tensors(refs, rules).trunk) == {names[0], names[2]}
