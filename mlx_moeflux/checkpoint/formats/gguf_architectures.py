"""The architectures of GGUF files: names of tensors, what llama.cpp's converter does to their
values, and metadata, one :class:`Architecture` for each.

A new architecture is an entry of :data:`ARCHITECTURES`.

Source: llama.cpp's `conversion/` (qwen.py, qwen4exp.py, deepseek.py, glm.py, gpt_oss.py, laguna.py,
gemma.py),
`gguf-py/gguf/constants.py` and `tensor_mapping.py`, `src/llama-arch.cpp`, `src/models/`; what a key
means where it is absent is what llama.cpp computes then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.checkpoint.formats.gguf_metadata import (
    SIGMOID,
    SOFTMAX,
    Config,
    chosen_positions,
    delta_net,
    exact_rope,
    gating,
    gemma_layers,
    head_dim,
    indexer,
    indexer_types,
    laguna_layers,
    latent_heads,
    latent_rope,
    layers_of,
    ngrams,
    rope,
    turned_head_dim,
    turned_part,
)
from mlx_moeflux.checkpoint.names import PROJECTIONS
from mlx_moeflux.checks import shown
from mlx_moeflux.errors import UnsupportedError

Ranges = list[tuple[int, int]]
"""Start and stop of runs of a file's rows or columns, in the order of the model."""
Order = Callable[[Config, int], Ranges]
"""The text model's config and the number of rows or columns in the file -> ranges."""


@dataclass(frozen=True)
class Target:
    """Names the parameter that a tensor of the file becomes.

    name: As in Hugging Face's checkpoints, or as the model takes the file's form, without the
        layer's prefix and without what the file's name ends with, such as ``.weight``.
    rows, columns: Which of the file's, in which order; None: all as they are.
    values: Function of each number, in float64.
    place: Among the tensors that make one on axis 0.
    row: A vector is the one row of a matrix.
    table: Its rows are read when they are needed.
    """

    name: str
    rows: Order | None = None
    columns: Order | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None
    place: int = 0
    row: bool = False
    table: bool = False


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    model_type, published: config.json's ``model_type`` and first of ``architectures``.
    names: GGUF's name of a tensor, without ``blk.N.``, with or without its suffix -> targets; a
        string is one's name. Experts have the same names in all, see :data:`EXPERTS`.
    keys: config.json's key -> GGUF's behind the architecture, which must be a number, or a function
        of the header.
    groups: Functions that return several keys.
    fixed: Keys of config.json that llama.cpp computes in one way.
    only: GGUF's keys that have one value here, besides :data:`ONLY`.
    inert: GGUF's keys that change nothing, or repeat others.
    present: config.json's key -> name of a tensor in some layer that makes it true.
    lacking: config.json's key -> name of a tensor that makes it true if some layer lacks it.
    dense: Layers without experts are listed as ``mlp_only_layers``.
    wrapped: The keys are of ``text_config``.
    """

    model_type: str
    published: str
    names: Mapping[str, str | Target | tuple[Target, ...]]
    keys: Mapping[str, str | Callable[[Header], Any]]
    groups: tuple[Callable[[Header], Config], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    present: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    dense: bool = False
    wrapped: bool = False

    def targets(self, name: str) -> list[Target]:
        """Return where a tensor goes, with complete names; none if no name fits."""
        stem, _, suffix = name.rpartition(".")
        found, end = self.names.get(name), ""
        if found is None and suffix in ("weight", "bias"):
            found, end = self.names.get(stem), f".{suffix}"
        if found is None:
            return []
        every = found if isinstance(found, tuple) else (found,)
        targets = [Target(t) if isinstance(t, str) else t for t in every]
        return [replace(target, name=target.name + end) for target in targets]

    def config(self, header: Header, *, strict: bool = True) -> Config:
        """Return the keys of config.json that the metadata have, those of the text model alone.
        strict: A key that nothing here reads is an error.

        Raises:
            ConfigError: A key is missing or of another type.
            UnsupportedError: The file asks for something that is not computed, or a key is unknown.
        """
        config: Config = dict(self.fixed)
        for key, theirs in {**COMMON_KEYS, **self.keys}.items():
            config[key] = header.number(theirs) if isinstance(theirs, str) else theirs(header)
        for group in self.groups:
            config |= group(header)
        header.read |= INERT | self.inert
        for key, value in {**ONLY, **self.only}.items():
            if key not in header.read:
                header.only(key, value)
        if strict:
            header.check_known()
        return config


# --- Rows and columns ---


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


def _share(*which: int) -> Order:
    """Return the order of some parts (0 queries, 1 keys, 2 values, 3 gates) of rows that lie
    together for each key head."""

    def order(config: Config, count: int) -> Ranges:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        own = values // keys * config["linear_value_head_dim"] if keys > 0 else 0
        dims = config["linear_key_head_dim"]
        *starts, width = accumulate((dims, dims, own, own), initial=0)
        return _parts(starts, width, keys, count, which)

    return order


def _half(which: int) -> Order:
    """Return the order of b (0) or a (1) of rows ``[b, a]`` for each key head."""

    def order(config: Config, count: int) -> Ranges:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        own = values // keys if keys > 0 else 0
        return _parts([0, own], 2 * own, keys, count, (which,))

    return order


def _parts(starts: list[int], width: int, heads: int, count: int, which: tuple[int, ...]) -> Ranges:
    if min(starts[1], width, heads) < 1 or heads * width != count:
        return []
    ends = [*starts[1:], width]
    return [(h * width + starts[p], h * width + ends[p]) for p in which for h in range(heads)]


# --- Values ---


def _a_log(values: np.ndarray) -> np.ndarray:
    """Undo -exp; of what is not negative there is no logarithm."""
    return np.log(-values)


def _minus_one(values: np.ndarray) -> np.ndarray:
    return values - 1


# --- What all share ---

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of factors that divide the frequencies of global layers: 1, or so large that a pair does
not turn."""
COMMON_KEYS: Mapping[str, str | Callable[[Header], Any]] = {
    "num_hidden_layers": layers_of,
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_experts_per_tok": "expert_used_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": lambda h: h.number("rope.freq_base", 10000.0),
}
INERT = frozenset(["vocab_size", "rope.dimension_sections", "embedding_length_out"])
"""Keys of any architecture that change nothing: positions of text have equal sections."""
ONLY = {
    "attention.causal": True,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_gating_func": SOFTMAX,
}
"""Keys with one value, where an architecture's record does not read them."""
EXPERTS = {f"ffn_{p.removesuffix('_proj')}_exps": (p,) for p in PROJECTIONS}
EXPERTS |= {"ffn_gate_up_exps": ("gate_proj", "up_proj")}
"""GGUF's name of a stack of experts -> the projections that share its rows in equal parts."""

_HEADS = {
    "num_key_value_heads": lambda h: h.number(
        "attention.head_count_kv", h.number("attention.head_count")
    ),
    "head_dim": head_dim,
}
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# Experts that a sigmoid scores.
_SCORED_KEYS = {
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "intermediate_size": "feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": lambda h: h.number("leading_dense_block_count", 0),
    "routed_scaling_factor": lambda h: h.number("expert_weights_scale", 0) or 1.0,
    "norm_topk_prob": lambda h: h.flag("expert_weights_norm", False),
    "n_group": lambda h: h.number("expert_group_count", 0) or 1,
    "topk_group": lambda h: h.number("expert_group_used_count", 0) or 1,
}

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

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FIRST_NORM = {"attn_norm": "input_layernorm"}
_NORMS = _FIRST_NORM | {"ffn_norm": "post_attention_layernorm"}
_POST_NORMS = _FIRST_NORM | {"post_attention_norm": "post_attention_layernorm"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_DENSE = {f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
_SCORED = _ROUTER | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
}
_LATENT = {
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
_INDEXED = _LATENT | {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_GATED = _ROUTER | {
    "ffn_gate_inp_shexp": Target("mlp.shared_expert_gate", row=True),
    **{f"ffn_{n}_shexp": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
}
_DELTA = {
    "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": Target("linear_attn.A_log", values=_a_log),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_out": "linear_attn.out_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
# Value heads in the order of ggml's broadcast.
_REORDERED_DELTA = _DELTA | {
    "ssm_conv1d": Target("linear_attn.conv1d", rows=_behind_keys),
    "ssm_a": Target("linear_attn.A_log", rows=_value_numbers, values=_a_log),
    "ssm_dt.bias": Target("linear_attn.dt_bias", rows=_value_numbers),
    "ssm_out": Target("linear_attn.out_proj", columns=_value_heads),
    "attn_qkv": Target("linear_attn.in_proj_qkv", rows=_behind_keys),
    "attn_gate": Target("linear_attn.in_proj_z", rows=_value_heads),
    "ssm_beta": Target("linear_attn.in_proj_b", rows=_value_numbers),
    "ssm_alpha": Target("linear_attn.in_proj_a", rows=_value_numbers),
}
# As transformers has them; older files have them in one tensor.
_GROUPED_DELTA = _DELTA | {
    "ssm_in": (
        Target("linear_attn.in_proj_qkv", rows=_share(0, 1, 2)),
        Target("linear_attn.in_proj_z", rows=_share(3)),
    ),
    "ssm_ba": (
        Target("linear_attn.in_proj_b", rows=_half(0)),
        Target("linear_attn.in_proj_a", rows=_half(1)),
    ),
}
_DELTA_KEYS = (
    _HEADS
    | _EXPERT_KEYS
    | {
        "partial_rotary_factor": turned_part,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
)

_STREAMS = {
    f"{theirs}_{part}": f"{ours}.{name}"
    for theirs, ours in (
        ("hc_attn", "attn_hyper_connection"),
        ("hc_ffn", "mlp_hyper_connection"),
        ("output_hc", "model.hyper_connection_mixer"),
    )
    for part, name in (
        ("down", "input_mix_weight_down"),
        ("up", "input_mix_weight_up"),
        ("inject", "block_inject_weight"),
        ("norm", "hc_norm"),
    )
    if (theirs, part) != ("output_hc", "inject")
}
# The converter adds one to norms; checkpoints of this architecture keep them zero-centred.
_CENTRED = {
    **{name: ours for name, ours in _STREAMS.items() if name.endswith("_norm")},
    **_HEAD_NORMS,
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
    **{f"ple_norm_{n}": f"ple.norm_{n}" for n in ("key", "query", "conv")},
}

ARCHITECTURES = {
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        names=_ENDS | _NORMS | _ATTENTION | _HEAD_NORMS | _ROUTER | _DENSE,
        keys=_HEADS
        | _EXPERT_KEYS
        | {
            "head_dim": turned_head_dim,
            "intermediate_size": lambda h: h.number(
                "feed_forward_length", h.number("expert_feed_forward_length")
            ),
        },
        groups=(rope,),
        # llama.cpp divides by the sum in this architecture and ignores the file.
        fixed={"norm_topk_prob": True},
        inert=frozenset(["expert_weights_norm"]),
        dense=True,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        names=_ENDS | _POST_NORMS | _ATTENTION | _HEAD_NORMS | _GROUPED_DELTA | _GATED,
        keys=_DELTA_KEYS | {"intermediate_size": lambda h: h.number("feed_forward_length", None)},
        groups=(rope, delta_net),
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        names=_ENDS | _POST_NORMS | _ATTENTION | _HEAD_NORMS | _REORDERED_DELTA | _GATED,
        keys=_DELTA_KEYS,
        groups=(rope, delta_net),
        inert=frozenset(["feed_forward_length"]),
    ),
    "qwen4exp": Architecture(
        "qwen4_exp",
        "Qwen4ExpForConditionalGeneration",
        names=_ENDS
        | _ATTENTION
        | _REORDERED_DELTA
        | _GATED
        | _STREAMS
        | {name: Target(ours, values=_minus_one) for name, ours in _CENTRED.items()}
        | {
            "indexer.q_proj": Target("self_attn.indexer.index_qk_proj"),
            "indexer.k_proj": Target("self_attn.indexer.index_qk_proj", place=1),
            "ple_key": "ple.key_proj",
            "ple_value": "ple.value_proj",
            "ple_conv1d": "ple.conv1d",
            "per_layer_token_embd": Target(
                "model.layers.{ple}.ple.ple_embedding.ngram_embedding", table=True
            ),
        },
        keys=_DELTA_KEYS
        | {"hc_count": "hyper_connection.count", "hc_lowrank": "hyper_connection.low_rank"},
        groups=(rope, delta_net, indexer, ngrams),
        fixed={"output_gate_type": "sigmoid", "indexer_kv_heads": 1},
        inert=frozenset(["feed_forward_length", "ple.image_token_id"]),
        wrapped=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        names=_ENDS
        | _POST_NORMS
        | _ATTENTION
        | {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"},
        keys=_HEADS
        | {
            "head_dim": turned_head_dim,
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        groups=(exact_rope,),
        fixed={"swiglu_limit": 7.0},
        # Every other layer has the window; the softmax is over the chosen experts.
        only={"attention.sliding_window_pattern": 2, "expert_gating_func": 3},
        inert=frozenset(["feed_forward_length"]),
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        names=_ENDS | _NORMS | _DENSE | _SCORED | _LATENT,
        keys=_SCORED_KEYS
        | {
            "q_lora_rank": lambda h: h.number("attention.q_lora_rank", None),
            "scoring_func": gating,
        },
        groups=(latent_rope, latent_heads),
        fixed={"num_nextn_predict_layers": 0},
        inert=frozenset(["attention.head_count_kv"]),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        names=_ENDS | _POST_NORMS | _ATTENTION | _HEAD_NORMS | _DENSE | _SCORED,
        keys=_HEADS | _SCORED_KEYS | {"partial_rotary_factor": turned_part},
        groups=(rope,),
        fixed={"num_nextn_predict_layers": 0},
        only={"expert_gating_func": SIGMOID},
        present={
            "use_qk_norm": "self_attn.q_norm.weight",
            "attention_bias": "self_attn.q_proj.bias",
        },
    ),
    "deepseek32": Architecture(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        names=_ENDS | _NORMS | _DENSE | _SCORED | _INDEXED,
        keys=_SCORED_KEYS | {"q_lora_rank": "attention.q_lora_rank", "scoring_func": gating},
        groups=(latent_rope, latent_heads, chosen_positions),
        fixed={"num_nextn_predict_layers": 0},
        inert=frozenset(["attention.head_count_kv"]),
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        names=_ENDS | _NORMS | _DENSE | _SCORED | _INDEXED,
        keys=_SCORED_KEYS | {"q_lora_rank": "attention.q_lora_rank"},
        groups=(latent_rope, latent_heads, chosen_positions, indexer_types),
        fixed={"num_nextn_predict_layers": 0},
        only={"expert_gating_func": SIGMOID},
        inert=frozenset(["attention.head_count_kv"]),
    ),
    "laguna": Architecture(
        "laguna",
        "LagunaForCausalLM",
        names=_ENDS
        | _NORMS
        | _ATTENTION
        | _HEAD_NORMS
        | _DENSE
        | _SCORED
        | {"attn_gate": "self_attn.g_proj"},
        keys=_EXPERT_KEYS
        | {
            "num_attention_heads": lambda h: None,  # with the layers
            "rope_theta": lambda h: None,
            "num_key_value_heads": "attention.head_count_kv",
            "intermediate_size": "feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_routed_scaling_factor": "expert_weights_scale",
        },
        groups=(laguna_layers,),
        only={"expert_gating_func": SIGMOID, "expert_shared_count": 1},
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        names=_ENDS
        | _ATTENTION
        | _HEAD_NORMS
        | _DENSE
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            ROPE_FACTORS: ROPE_FACTORS,
        },
        keys=_EXPERT_KEYS
        | {
            "rope_theta": lambda h: None,  # with the layers
            "top_k_experts": "expert_used_count",
            "intermediate_size": "feed_forward_length",
            "final_logit_softcapping": lambda h: h.number("final_logit_softcapping", None),
        },
        groups=(gemma_layers,),
        fixed={"enable_moe_block": True, "hidden_size_per_layer_input": 0},
        only={"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0},
        lacking={"attention_k_eq_v": "self_attn.v_proj.weight"},
    ),
}
"""By ``general.architecture``."""


def architecture_of(file: Path | str, name: Any) -> Architecture:
    """Return the architecture that the metadata of `file` name.

    Raises:
        UnsupportedError: It is not read here.
    """
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedError(
            f"{file}: the architecture is {shown(name)}; of GGUF are read "
            f"{', '.join(ARCHITECTURES)}; llama.cpp runs others."
        )
    return found
