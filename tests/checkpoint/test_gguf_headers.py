"""Oracle: the shapes of published models; the metadata are those of their published GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_moeflux.checkpoint.formats.gguf_architectures import ARCHITECTURES
from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.models import config_class
from mlx_moeflux.models.shapes import SHAPES

# As float32 stores them.
E_6, E_5, TENTH = 9.999999974752427e-07, 9.999999747378752e-06, 0.10000000149011612
QWEN = {
    "context_length": 262144,
    "attention.head_count_kv": 2,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "attention.layer_norm_rms_epsilon": E_6,
    "rope.freq_base": 10000000.0,
    "rope.dimension_count": 64,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-35b-a3b": (
        "qwen35moe",
        QWEN
        | {
            "block_count": 41,
            "nextn_predict_layers": 1,
            "embedding_length": 2048,
            "attention.head_count": 16,
            "rope.dimension_sections": [11, 11, 10, 0],
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
            "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
            "full_attention_interval": 4,
        },
    ),
    # Files of the first converter have no interval.
    "qwen3-next-80b-a3b": (
        "qwen3next",
        QWEN
        | {
            "block_count": 48,
            "embedding_length": 2048,
            "feed_forward_length": 5120,
            "attention.head_count": 16,
            "expert_count": 512,
            "expert_used_count": 10,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
            "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
        },
    ),
    "qwen3.8-flash-next": (
        "qwen4exp",
        QWEN
        | {
            "block_count": 49,
            "nextn_predict_layers": 1,
            "embedding_length": 2560,
            "embedding_length_out": 10240,
            "embedding_length_per_layer_input": 160,
            "attention.head_count": 24,
            "rope.dimension_sections": [11, 11, 10, 0],
            "expert_count": 512,
            "expert_used_count": 10,
            "expert_feed_forward_length": 640,
            "expert_shared_feed_forward_length": 640,
            "ssm.time_step_rank": 48,
            "ssm.inner_size": 6144,
            "full_attention_interval": 4,
            "attention.compress_ratios": [0, 0, 0, 4] * 12 + [0],
            "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 128,
            "attention.indexer.top_k": 2048,
            "hyper_connection.count": 4,
            "hyper_connection.low_rank": 320,
            "ple.layers": [1],
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 8,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": 248044,
            "ple.image_token_id": 248056,
            "ple.layer_multipliers": [23703573157769, 20109073645365, 8052911324071],
            "ple.head_vocab_sizes": [20000003] * 16,
            "ple.head_offsets": [i * 20000003 for i in range(16)],
        },
    ),
    "gpt-oss-20b": (
        "gpt-oss",
        {
            "block_count": 24,
            "context_length": 131072,
            "embedding_length": 2880,
            "feed_forward_length": 2880,
            "expert_feed_forward_length": 2880,
            "attention.head_count": 64,
            "attention.head_count_kv": 8,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.layer_norm_rms_epsilon": E_5,
            "attention.sliding_window": 128,
            "expert_count": 32,
            "expert_used_count": 4,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "deepseek-v3": (
        "deepseek2",
        {
            "block_count": 61,
            "context_length": 163840,
            "embedding_length": 7168,
            "feed_forward_length": 18432,
            "attention.head_count": 128,
            "attention.head_count_kv": 1,
            "attention.layer_norm_rms_epsilon": E_6,
            "attention.q_lora_rank": 1536,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_group_count": 8,
            "expert_group_used_count": 4,
            "expert_feed_forward_length": 2048,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "leading_dense_block_count": 3,
            "vocab_size": 129280,
            "rope.freq_base": 10000.0,
            "rope.dimension_count": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": TENTH,
        },
    ),
    # The key of the router's scores is missing in some files.
    "glm-4.7-flash": (
        "deepseek2",
        {
            "block_count": 47,
            "context_length": 202752,
            "embedding_length": 2048,
            "feed_forward_length": 10240,
            "attention.head_count": 20,
            "attention.head_count_kv": 1,
            "attention.layer_norm_rms_epsilon": E_5,
            "attention.q_lora_rank": 768,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 256,
            "attention.value_length_mla": 256,
            "expert_count": 64,
            "expert_used_count": 4,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_feed_forward_length": 1536,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.7999999523162842,
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "vocab_size": 154880,
            "rope.freq_base": 1000000.0,
            "rope.dimension_count": 64,
        },
    ),
    "glm-4.5-air": (
        "glm4moe",
        {
            "block_count": 47,
            "nextn_predict_layers": 1,
            "context_length": 131072,
            "embedding_length": 4096,
            "feed_forward_length": 10944,
            "attention.head_count": 96,
            "attention.head_count_kv": 8,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "attention.layer_norm_rms_epsilon": E_5,
            "expert_count": 128,
            "expert_used_count": 8,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_feed_forward_length": 1408,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
            "rope.freq_base": 1000000.0,
            "rope.dimension_count": 64,
        },
    ),
}
# Of the tensors, or of no effect on the model.
ELSEWHERE = {
    "num_nextn_predict_layers": 0,
    "ngram_head_rows": (),
    "ngram_multipliers": (),
    "split_ngram_parts": 128,
    "use_qk_norm": False,
    "attention_bias": False,
    "layer_types": (),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_metadata_of_published_files(name):
    """All keys are read, and mean the published config."""
    architecture, keys = PUBLISHED[name]
    shape, record = SHAPES[name], ARCHITECTURES[architecture]
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    metadata |= {"general.name": name, "tokenizer.ggml.pre": "x", "quantize.imatrix.file": "y"}
    found = record.config(Header(Path("m.gguf"), architecture, metadata))
    # The head and the rows of the embedding are tensors.
    found |= {"vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tie_word_embeddings}
    config = config_class(record.model_type).from_dict(found, file="m.gguf")
    same = {key: value for key, value in ELSEWHERE.items() if hasattr(config, key)}
    wanted = type(config)(**(vars(shape) | same))
    assert replace(config, **same) == wanted
