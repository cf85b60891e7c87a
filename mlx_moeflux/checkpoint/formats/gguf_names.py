"""Names of tensors that several families share in GGUF files, and the order of rows that
llama.cpp's converter changed.

Source: llama.cpp's `conversion/`, `gguf-py/gguf/constants.py` and `tensor_mapping.py`.
"""

from __future__ import annotations

import numpy as np

from mlx_moeflux.checkpoint.formats.gguf_metadata import Config
from mlx_moeflux.checkpoint.formats.gguf_record import Ranges, Target
from mlx_moeflux.checkpoint.names import PROJECTIONS

IN_BLOCKS = frozenset(
    [
        "lm_head",
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"linear_attn.in_proj_{p}" for p in ("qkv", "z")),
        "linear_attn.out_proj",
        *(
            f"{mlp}.{p}"
            for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts")
            for p in PROJECTIONS
        ),
    ]
)
"""Matrices of the trunk, without their layer, that rows are multiplied with and nothing else: they
may stay in blocks."""

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FIRST_NORM = {"attn_norm": "input_layernorm"}
NORMS = FIRST_NORM | {"ffn_norm": "post_attention_layernorm"}
POST_NORMS = FIRST_NORM | {"post_attention_norm": "post_attention_layernorm"}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
DENSE = {f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
SCORED = ROUTER | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
}
LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # The converter splits the matrix and turns the keys' half, as mlx-lm does.
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
INDEXED = LATENT | {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
GATED = ROUTER | {
    "ffn_gate_inp_shexp": Target("mlp.shared_expert_gate", row=True),
    **{f"ffn_{n}_shexp": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
}


# --- Gated delta nets ---


def _heads(config: Config, count: int, *, first: int, width: int) -> Ranges:
    """Return the value heads of `width` each from `first` on, those of a key head together.

    The converter puts the first heads of all key heads first, then the second ones.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if not 0 < keys <= values or values % keys or first + values * width != count:
        return []
    order = (k + keys * r for k in range(keys) for r in range(values // keys))
    return [(first + h * width, first + (h + 1) * width) for h in order]


def _value_heads(config: Config, count: int) -> Ranges:
    return _heads(config, count, first=0, width=config["linear_value_head_dim"])


def _value_numbers(config: Config, count: int) -> Ranges:
    return _heads(config, count, first=0, width=1)


def _behind_keys(config: Config, count: int) -> Ranges:
    """Return queries and keys as they are, then value heads."""
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = _heads(config, count, first=first, width=config["linear_value_head_dim"])
    return [(0, first), *values] if values else []


def _a_log(values: np.ndarray) -> np.ndarray:
    """Undo -exp; of what is not negative there is no logarithm."""
    return np.log(-values)


DELTA = {
    "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": Target("linear_attn.A_log", values=_a_log),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_out": "linear_attn.out_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
# Value heads in the order of ggml's broadcast.
REORDERED_DELTA = DELTA | {
    "ssm_conv1d": Target("linear_attn.conv1d", rows=_behind_keys),
    "ssm_a": Target("linear_attn.A_log", rows=_value_numbers, values=_a_log),
    "ssm_dt.bias": Target("linear_attn.dt_bias", rows=_value_numbers),
    "ssm_out": Target("linear_attn.out_proj", columns=_value_heads),
    "attn_qkv": Target("linear_attn.in_proj_qkv", rows=_behind_keys),
    "attn_gate": Target("linear_attn.in_proj_z", rows=_value_heads),
    "ssm_beta": Target("linear_attn.in_proj_b", rows=_value_numbers),
    "ssm_alpha": Target("linear_attn.in_proj_a", rows=_value_numbers),
}
