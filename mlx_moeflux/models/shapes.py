"""Published shapes by name: what `synthesize` makes and benchmarks mean."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from mlx_moeflux.models import deepseek_v3, qwen3_5_moe_config, qwen3_moe, qwen3_next
from mlx_moeflux.models.rope import Rope

_QWEN = qwen3_5_moe_config.Config(
    vocab_size=248320,
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    max_position_embeddings=262144,
)

_QWEN3 = qwen3_moe.Config(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    partial_rotary_factor=1.0,
    max_position_embeddings=40960,
    norm_topk_prob=True,
)

_DEEPSEEK = deepseek_v3.Config(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
    rope=Rope(theta=1e4, factor=40.0, original=4096.0, mscale=1.0, mscale_all_dim=1.0),
)

_NEXT = qwen3_next.Config(
    **asdict(_QWEN)
    | {
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "intermediate_size": 5120,
    }
)

# Published shapes, from the models' config.json (transformers' defaults for the first). Those
# called tiny are a few megabytes of the same structure, for tests and examples.
SHAPES: dict[str, Any] = {
    "qwen3.5-35b-a3b": _QWEN,
    "qwen3.5-397b-a17b": replace(
        _QWEN,
        hidden_size=4096,
        num_hidden_layers=60,
        num_attention_heads=32,
        linear_num_value_heads=64,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        num_experts=512,
        num_experts_per_tok=10,
    ),
    "qwen3.5-tiny": replace(
        _QWEN,
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
    ),
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-235b-a22b": replace(
        _QWEN3,
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        intermediate_size=12288,
        moe_intermediate_size=1536,
    ),
    "qwen3-coder-30b-a3b": replace(_QWEN3, rope_theta=1e7, max_position_embeddings=262144),
    "qwen3-tiny": replace(
        _QWEN3,
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
    ),
    "qwen3-next-80b-a3b": _NEXT,
    "qwen3-next-tiny": replace(
        _NEXT,
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        intermediate_size=192,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
    ),
    "deepseek-v3": _DEEPSEEK,
    "kimi-k2": replace(
        _DEEPSEEK,
        vocab_size=163840,
        num_attention_heads=64,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        num_nextn_predict_layers=0,
        max_position_embeddings=131072,
        rope=replace(_DEEPSEEK.rope, theta=5e4, factor=32.0, beta_fast=1.0),
    ),
    "deepseek-tiny": replace(
        _DEEPSEEK,
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        n_routed_experts=32,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=8192,
    ),
}
