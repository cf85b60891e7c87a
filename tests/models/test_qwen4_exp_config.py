"""Config of Qwen4-Exp. Oracles: the published keys, and transformers' `Qwen4ExpTextConfig` for what
it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_moeflux.errors import ConfigError, MoefluxError, UnsupportedError
from mlx_moeflux.models.qwen4_exp_config import Config
from mlx_moeflux.models.shapes import SHAPES

KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
# text_config of Qwen/Qwen3.8-Flash-Next.
PUBLISHED: dict[str, Any] = {
    "model_type": "qwen4_exp_text", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 248044, "eos_token_id": 248044, "dtype": "bfloat16",
    "full_attention_interval": 4, "hc_count": 4, "hc_lowrank": 320, "head_dim": 256,
    "heads_per_ngram": 8, "hidden_act": "silu", "hidden_size": 2560, "indexer_budget": 2048,
    "indexer_compress_ratio": 4, "indexer_head_dim": 128, "indexer_kv_heads": 1,
    "indexer_n_heads": 4, "initializer_range": 0.02, "layer_types": KINDS * 12,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "make_ngram_vocab_size_divisible_by": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "moe_intermediate_size": 640,
    "mtp": {"hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1},
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "ngram_size": 3,
    "ngram_vocab_size_base": 20000000, "num_attention_heads": 24, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_gate_type": "sigmoid", "output_router_logits": False, "pad_token_id": None,
    "partial_rotary_factor": 0.25, "ple_conv_kernel_size": 4, "ple_embed_dim": 2560,
    "ple_layer_ids": [2], "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 640,
    "split_ngram_parts": 128, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 248320,
}  # fmt: skip
WRAPPER = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
}


def tiny(**keys) -> dict[str, Any]:
    """The text model's keys; None leaves one out."""
    text = SHAPES["qwen4-exp-tiny"].published()["text_config"] | keys
    return {key: value for key, value in text.items() if value is not None}


def parsed(config: dict[str, Any]) -> Config:
    return Config.from_dict(config, file="config.json")


def test_the_published_config():
    found = parsed(WRAPPER | {"text_config": PUBLISHED, "eos_token_id": [248046, 248044]})
    assert found == parsed(SHAPES["qwen3.8-flash-next"].published())
    assert found == parsed(PUBLISHED)
    # transformers 5.23 writes it.
    assert found == parsed(PUBLISHED | {"number_of_conv_states": 3})
    linear = [found.is_linear(i) for i in range(48)]
    assert linear == [i % 4 != 3 for i in range(48)]
    assert [i for i in range(48) if found.ngram_index(i) is not None] == [1]
    assert (found.ngram_heads, found.ngram_width, found.block_topk) == (16, 160, 512)
    assert (found.output_gate, found.stop_token, found.rotary_dims) == ("sigmoid", 248044, 64)


@pytest.mark.parametrize("name", ["qwen3.8-flash-next", "qwen4-exp-tiny"])
def test_shapes_come_back(name):
    shape = SHAPES[name]
    keys = shape.published()
    assert keys["model_type"] == "qwen4_exp"
    assert keys["text_config"]["model_type"] == "qwen4_exp_text"
    assert keys["eos_token_id"] == shape.eos_token_id
    assert parsed(keys).published() == keys


def test_defaults_are_transformers():
    """Source: transformers 5.23 `Qwen4ExpTextConfig`."""
    left = {
        "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3,
        "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128, "seed": 1234, "split_ngram_parts": 512,
        "norm_topk_prob": True,
    }  # fmt: skip
    found = parsed(tiny(**dict.fromkeys([*left, "ple_embed_dim", "output_gate_type"])))
    assert {key: getattr(found, key) for key in left} == left
    assert found.ple_embed_dim == found.hidden_size
    assert found.output_gate == "silu"
    bare = parsed(tiny(ple_layer_ids=None, eos_token_id=None))
    assert bare.ple_layer_ids == ()
    assert bare.stop_token is None
    assert bare.ngram_index(1) is None
    rope = {"rope_type": "default", "rope_theta": 1e4}
    assert parsed(tiny(rope_parameters=rope, indexer_head_dim=64)).rotary_dims == 64


def test_both_names_of_attention():
    kinds = [kind.replace("full", "indexed") for kind in KINDS]
    assert parsed(tiny(layer_types=kinds)) == parsed(tiny(layer_types=KINDS))
    by_interval = parsed(tiny(layer_types=None, full_attention_interval=2, ple_layer_ids=[1]))
    assert [by_interval.is_linear(i) for i in range(4)] == [True, False, True, False]


def test_layers_with_ngrams_are_counted_in_order():
    found = parsed(tiny(ple_layer_ids=[3, 1, 3]))
    assert [found.ngram_index(i) for i in range(4)] == [0, None, 1, None]


@pytest.mark.parametrize("ids", [7, [7], [7, 9]])
def test_the_stop_token_is_the_text_models_first(ids):
    assert parsed(tiny(eos_token_id=ids)).stop_token == 7
    wrapped = {"model_type": "qwen4_exp", "text_config": tiny(eos_token_id=ids)}
    assert parsed(wrapped | {"eos_token_id": [9, 7]}).stop_token == 7


def test_the_wrappers_stop_token_is_another_thing():
    wrapped = {"text_config": tiny(eos_token_id=None), "eos_token_id": 7}
    with pytest.raises(ConfigError, match="'eos_token_id' of the text model is missing"):
        parsed(wrapped)


INDEXER = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
WRONG: list[tuple[dict[str, Any], type[MoefluxError], str]] = [
    *(({key: None}, ConfigError, f"the key '{key}' is missing") for key in INDEXER),
    *(({key: 0}, ConfigError, f"'{key}' is 0, must be positive") for key in INDEXER),
    ({"indexer_kv_heads": 2}, ConfigError, "'indexer_kv_heads' is 2, must be 1"),
    ({"indexer_budget": 18}, ConfigError, "'indexer_compress_ratio' 4 does not divide"),
    ({"indexer_head_dim": 8}, ConfigError, "turns 16 of a head's dimensions, more than 'ind"),
    ({"layer_types": KINDS[:3]}, ConfigError, "'layer_types' names 3 layers"),
    ({"layer_types": [*KINDS[:3], "sliding"]}, UnsupportedError, "has 'sliding'; no such layer"),
    ({"output_gate_type": "gelu"}, UnsupportedError, "'output_gate_type' is 'gelu'; only 'silu'"),
    ({"hc_count": 1}, ConfigError, "'hc_count' is 1, must be at least 2"),
    ({"hc_count": 0}, ConfigError, "'hc_count' is 0, must be positive"),
    ({"hc_lowrank": -1}, ConfigError, "'hc_lowrank' is -1, must be positive"),
    ({"num_experts": 0}, ConfigError, "'num_experts' is 0, must be positive"),
    ({"num_experts_per_tok": 33}, ConfigError, "'num_experts_per_tok' 33 is more than"),
    ({"moe_intermediate_size": 0}, ConfigError, "'moe_intermediate_size' is 0"),
    ({"shared_expert_intermediate_size": 0}, ConfigError, "'shared_expert_intermediate_size' is"),
    ({"ple_layer_ids": [4]}, ConfigError, "'ple_layer_ids' has 4, a layer of attention"),
    ({"ple_layer_ids": [0]}, ConfigError, "'ple_layer_ids' has 0; expected 1 to 4"),
    ({"ple_layer_ids": [1, 5]}, ConfigError, "'ple_layer_ids' has 5; expected 1 to 4"),
    ({"ple_layer_ids": 2}, ConfigError, "'ple_layer_ids' is 2, expected tuple"),
    ({"ple_embed_dim": 190}, ConfigError, "6 heads of n-grams do not divide 'ple_embed_dim' 190"),
    ({"ngram_size": 1}, ConfigError, "'heads_per_ngram' 3 make 0 heads; expected 1 to"),
    ({"ngram_size": 2_000_000_000}, ConfigError, "make 5999999997 heads; expected 1 to"),
    ({"ngram_vocab_size_base": 1 << 50}, ConfigError, "'ngram_vocab_size_base' is 11258999068426"),
    ({"seed": -1}, ConfigError, "'seed' is -1, must not be negative"),
    ({"eos_token_id": None}, ConfigError, "'eos_token_id' of the text model is missing"),
    ({"eos_token_id": []}, ConfigError, "'eos_token_id' of the text model is missing"),
    ({"eos_token_id": "x"}, ConfigError, "'eos_token_id' is 'x', expected int"),
    ({"eos_token_id": 1024}, ConfigError, "'eos_token_id' is 1024, expected 0 to 1023"),
    ({"eos_token_id": [-1]}, ConfigError, "'eos_token_id' is -1, expected 0 to 1023"),
    ({"ple_new": 3}, ConfigError, "nothing here reads 'ple_new'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
def test_one_line_says_what_is_wrong(wrong, kind, message):
    with pytest.raises(kind, match=r"^config\.json: [^\n]*$") as error:
        parsed(tiny(**wrong))
    assert message in str(error.value)
    wrapped = SHAPES["qwen4-exp-tiny"].published()
    wrapped["text_config"] |= wrong
    with pytest.raises(kind) as of_wrapper:
        parsed(wrapped)
    assert str(of_wrapper.value) == str(error.value)
