"""The families whose GGUF files are read: one section each, which ends with its record.

A new family is a section and an entry of :data:`ARCHITECTURES`. What several share is in
:mod:`~mlx_moeflux.checkpoint.formats.gguf_names` and
:mod:`~mlx_moeflux.checkpoint.formats.gguf_metadata`.

Source: llama.cpp's `conversion/` (qwen.py, qwen4exp.py, deepseek.py, glm.py, gpt_oss.py, laguna.py,
gemma.py), `src/llama-arch.cpp`, `src/models/`; what a key means where it is absent is what
llama.cpp computes then.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.checkpoint.formats.gguf_metadata import (
    DELTA_KEYS,
    EXPERT_KEYS,
    FULL,
    HEAD_KEYS,
    SCORED_KEYS,
    SIGMOID,
    WINDOWED,
    Config,
    chosen_positions,
    delta_net,
    gating,
    latent_heads,
    latent_rope,
    layers_of,
    of_layers,
    refuse_more,
    rope,
    scaled_rope,
    turned_head_dim,
    turned_part,
)
from mlx_moeflux.checkpoint.formats.gguf_names import (
    ATTENTION,
    DELTA,
    DENSE,
    ENDS,
    GATED,
    HEAD_NORMS,
    INDEXED,
    LATENT,
    NORMS,
    POST_NORMS,
    REORDERED_DELTA,
    ROUTER,
    SCORED,
)
from mlx_moeflux.checkpoint.formats.gguf_record import Architecture, Held, Order, Ranges, Target
from mlx_moeflux.checks import shown
from mlx_moeflux.errors import CheckpointError, UnsupportedError

# --- Qwen3-MoE ---

_QWEN3MOE = Architecture(
    "qwen3moe",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    names=ENDS | NORMS | ATTENTION | HEAD_NORMS | ROUTER | DENSE,
    keys=HEAD_KEYS
    | EXPERT_KEYS
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
    stored={"mlp_only_layers": lambda held: sorted({*range(held.layers)} - {*held.sparse})},
)


# --- Qwen3-Next ---


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


# As transformers has them; older files have them in one tensor.
_GROUPED_DELTA = DELTA | {
    "ssm_in": (
        Target("linear_attn.in_proj_qkv", rows=_share(0, 1, 2)),
        Target("linear_attn.in_proj_z", rows=_share(3)),
    ),
    "ssm_ba": (
        Target("linear_attn.in_proj_b", rows=_half(0)),
        Target("linear_attn.in_proj_a", rows=_half(1)),
    ),
}

_QWEN3NEXT = Architecture(
    "qwen3next",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    names=ENDS | POST_NORMS | ATTENTION | HEAD_NORMS | _GROUPED_DELTA | GATED,
    keys=DELTA_KEYS | {"intermediate_size": lambda h: h.number("feed_forward_length", None)},
    groups=(rope, delta_net),
)


# --- Qwen3.5, Qwen3.6 ---

_QWEN35MOE = Architecture(
    "qwen35moe",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    names=ENDS | POST_NORMS | ATTENTION | HEAD_NORMS | REORDERED_DELTA | GATED,
    keys=DELTA_KEYS,
    groups=(rope, delta_net),
    inert=frozenset(["feed_forward_length"]),
)


# --- Qwen-4-Exp ---


def indexer(header: Header) -> Config:
    """Return the keys of attention to chosen blocks.

    Raises:
        UnsupportedError: A layer of attention has none, or they have several ratios.
    """
    layers, interval = layers_of(header), header.number("full_attention_interval", 4)
    ratios = header.integers("attention.compress_ratios")[:layers]
    marks = header.integers("attention.recurrent_layers", [])
    if not marks and type(interval) is int and interval > 0:
        marks = [(i + 1) % interval for i in range(len(ratios))]
    chosen = {ratio for ratio, linear in zip(ratios, marks, strict=False) if not linear}
    if len(ratios) < layers or len(chosen) != 1 or 0 in chosen:
        key = header.name("attention.compress_ratios")
        raise UnsupportedError(
            f"{header.file}: {key} of the layers of attention are {sorted(chosen)}; only one that "
            "is not 0 is computed."
        )
    return {
        "indexer_n_heads": header.number("attention.indexer.head_count"),
        "indexer_head_dim": header.number("attention.indexer.key_length"),
        "indexer_budget": header.number("attention.indexer.top_k"),
        "indexer_compress_ratio": chosen.pop(),
    }


def ngrams(header: Header) -> Config:
    """Return the keys of a layer's table of n-grams, with the constants of its hashes."""
    layers = header.integers("ple.layers", [])
    if not layers:
        return {"ple_layer_ids": []}
    if len(layers) > 1:
        raise UnsupportedError(
            f"{header.file}: {header.name('ple.layers')} has {len(layers)} layers; the file has "
            "the hashes of one."
        )
    tokens, heads = header.number("ple.ngram_size"), header.number("ple.heads_per_ngram")
    rows = header.integers("ple.head_vocab_sizes")
    if header.integers("ple.head_offsets") != list(accumulate(rows, initial=0))[:-1]:
        raise UnsupportedError(
            f"{header.file}: {header.name('ple.head_offsets')} are not the sums of "
            f"{header.name('ple.head_vocab_sizes')}; only those are computed."
        )
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ngram_size": tokens,
        "heads_per_ngram": heads,
        "ple_conv_kernel_size": header.number("ple.conv_kernel"),
        "ple_embed_dim": header.number("embedding_length_per_layer_input") * (tokens - 1) * heads,
        "ngram_head_rows": rows,
        "ngram_multipliers": header.integers("ple.layer_multipliers"),
        "eos_token_id": header.number("ple.eos_token_id"),
    }


def _ngram_table(config: Config, rows: int) -> tuple[int, Config] | None:
    """The table is filled up to a number of rows that no key says."""
    layers = config.get("ple_layer_ids")
    return (layers[0] - 1, {"make_ngram_vocab_size_divisible_by": rows}) if layers else None


def _minus_one(values: np.ndarray) -> np.ndarray:
    return values - 1


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
    **HEAD_NORMS,
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
    **{f"ple_norm_{n}": f"ple.norm_{n}" for n in ("key", "query", "conv")},
}

_QWEN4EXP = Architecture(
    "qwen4exp",
    "qwen4_exp",
    "Qwen4ExpForConditionalGeneration",
    names=ENDS
    | ATTENTION
    | REORDERED_DELTA
    | GATED
    | _STREAMS
    | {name: Target(ours, values=_minus_one) for name, ours in _CENTRED.items()}
    | {
        "indexer.q_proj": Target("self_attn.indexer.index_qk_proj"),
        "indexer.k_proj": Target("self_attn.indexer.index_qk_proj", place=1),
        "ple_key": "ple.key_proj",
        "ple_value": "ple.value_proj",
        "ple_conv1d": "ple.conv1d",
        "per_layer_token_embd": Target(
            "model.layers.{layer}.ple.ple_embedding.ngram_embedding", table=_ngram_table
        ),
    },
    keys=DELTA_KEYS
    | {"hc_count": "hyper_connection.count", "hc_lowrank": "hyper_connection.low_rank"},
    groups=(rope, delta_net, indexer, ngrams),
    fixed={"output_gate_type": "sigmoid", "indexer_kv_heads": 1},
    inert=frozenset(["feed_forward_length", "ple.image_token_id"]),
    wrapped=True,
)


# --- gpt-oss ---


def exact_rope(header: Header) -> Config:
    """Return ``rope_scaling`` of gpt-oss, whose YaRN keeps fractions of pairs; llama.cpp rounds
    them, and files do not say it. Layers with a window have the same base."""
    header.only("rope.freq_base_swa", header.get("rope.freq_base", 10000.0))
    scaling = rope(header)["rope_scaling"]
    return {"rope_scaling": scaling and scaling | {"truncate": False}}


_GPT_OSS = Architecture(
    "gpt-oss",
    "gpt_oss",
    "GptOssForCausalLM",
    names=ENDS
    | POST_NORMS
    | ATTENTION
    | {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"},
    keys=HEAD_KEYS
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
)


# --- DeepSeek-V3, Kimi-K2, GLM-4.7-Flash ---

_DEEPSEEK2 = Architecture(
    "deepseek2",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    names=ENDS | NORMS | DENSE | SCORED | LATENT,
    keys=SCORED_KEYS
    | {
        "q_lora_rank": lambda h: h.number("attention.q_lora_rank", None),
        "scoring_func": gating,
    },
    groups=(latent_rope, latent_heads),
    fixed={"num_nextn_predict_layers": 0},
    inert=frozenset(["attention.head_count_kv"]),
)


# --- GLM-4.5 to 4.7 ---

_GLM4MOE = Architecture(
    "glm4moe",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    names=ENDS | POST_NORMS | ATTENTION | HEAD_NORMS | DENSE | SCORED,
    keys=HEAD_KEYS | SCORED_KEYS | {"partial_rotary_factor": turned_part},
    groups=(rope,),
    fixed={"num_nextn_predict_layers": 0},
    only={"expert_gating_func": SIGMOID},
    stored={
        "use_qk_norm": lambda held: held.count("self_attn.q_norm.weight") > 0,
        "attention_bias": lambda held: held.count("self_attn.q_proj.bias") > 0,
    },
)


# --- DeepSeek-V3.2 ---

_DEEPSEEK32 = Architecture(
    "deepseek32",
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    names=ENDS | NORMS | DENSE | SCORED | INDEXED,
    keys=SCORED_KEYS | {"q_lora_rank": "attention.q_lora_rank", "scoring_func": gating},
    groups=(latent_rope, latent_heads, chosen_positions),
    fixed={"num_nextn_predict_layers": 0},
    inert=frozenset(["attention.head_count_kv"]),
)


# --- GLM-5 ---

# Of GLM-5.2 and 5.3, by which llama.cpp knows them in files that do not say which layers have an
# indexer.
_LONG_CONTEXT = 1 << 20


def indexer_types(header: Header) -> Config:
    """Return which layers have an indexer. Without the key all have one; in GLM-5.2 and 5.3 the
    first two and every fourth from there."""
    layers = layers_of(header)
    late = header.number("context_length") >= _LONG_CONTEXT
    default = [int(i < 2 or (i - 2) % 4 == 0 or not late) for i in range(layers)]
    own = header.integers("attention.indexer.types", []) or default
    return {"indexer_types": ["full" if one else "shared" for one in own[:layers]]}


_GLM_DSA = Architecture(
    "glm-dsa",
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    names=ENDS | NORMS | DENSE | SCORED | INDEXED,
    keys=SCORED_KEYS | {"q_lora_rank": "attention.q_lora_rank"},
    groups=(latent_rope, latent_heads, chosen_positions, indexer_types),
    fixed={"num_nextn_predict_layers": 0},
    only={"expert_gating_func": SIGMOID},
    inert=frozenset(["attention.head_count_kv"]),
)


# --- Laguna ---


def laguna_layers(header: Header) -> Config:
    """Return Laguna's keys of single layers: heads, windows, dense ones, ropes. The converter
    writes config.json's ``attention_factor`` of YaRN as it is."""
    layers, period = layers_of(header), header.number("attention.sliding_window_pattern", 4)
    window = header.number("attention.sliding_window", 0)
    if type(period) is not int or period < 1:
        raise header.wrong("attention.sliding_window_pattern", period, "a number of layers")
    kinds = [WINDOWED if window and i % period else FULL for i in range(layers)]
    width = header.number("attention.key_length")
    header.only("attention.value_length", width)
    heads, dense = of_layers(header, "attention.head_count"), _leading_dense(header)
    scaled = scaled_rope(header)
    full: Config = {"rope_type": "default"}
    if scaled is not None:
        full, found = scaled
        factor = found.pop("yarn_attn_factor", None)
        refuse_more(header, found)
        full |= {} if factor is None else {"attention_factor": factor}
    base = header.number("rope.freq_base", 10000.0)
    turned = header.number("rope.dimension_count", width)
    windowed = header.number("rope.dimension_count_swa", width)
    windowed_base = header.number("rope.freq_base_swa", base)
    return {
        "head_dim": width,
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "layer_types": kinds,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)],
        "sliding_window": window or None,
        "rope_parameters": {
            FULL: full | _rope_of(base, turned, width),
            WINDOWED: {"rope_type": "default"} | _rope_of(windowed_base, windowed, width),
        },
    }


def _leading_dense(header: Header) -> int:
    dense = header.number("leading_dense_block_count", 0)
    if type(dense) is not int or dense < 0:
        raise header.wrong("leading_dense_block_count", dense, "a number of layers")
    return dense


def _rope_of(base: float, turned: Any, width: Any) -> Config:
    share = turned / width if width else 0.0
    return {"rope_theta": base, "partial_rotary_factor": share}


_LAGUNA = Architecture(
    "laguna",
    "laguna",
    "LagunaForCausalLM",
    names=ENDS
    | NORMS
    | ATTENTION
    | HEAD_NORMS
    | DENSE
    | SCORED
    | {"attn_gate": "self_attn.g_proj"},
    keys=EXPERT_KEYS
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
)


# --- Gemma-4 ---

# Tensor of factors that divide the frequencies of global layers: 1, or so large that a pair does
# not turn.
_ROPE_FACTORS, _NO_TURN = "rope_freqs.weight", 1e20


def gemma_layers(header: Header) -> Config:
    """Return Gemma-4's keys of windows and global layers. How much of a head global layers turn,
    the factors of frequencies say."""
    marks = header.integers("attention.sliding_window_pattern")[: layers_of(header)]
    kinds = [WINDOWED if mark else FULL for mark in marks]
    widths = []
    for end in ("", "_swa"):
        width = header.number(f"attention.key_length{end}")
        header.only(f"attention.value_length{end}", width)
        header.only(f"rope.dimension_count{end}", width)
        widths.append(width)
    rows = of_layers(header, "attention.head_count_kv")
    each = {kind: {n for n, own in zip(rows, kinds, strict=False) if own == kind} for kind in kinds}
    for found in each.values():
        if len(found) > 1:
            raise header.wrong("attention.head_count_kv", rows, "one number for a kind of layers")
    (whole,), (windowed,) = (each.get(kind, {rows[0]}) for kind in (FULL, WINDOWED))
    bases = header.number("rope.freq_base", 10000.0), header.number("rope.freq_base_swa", 10000.0)
    return {
        "layer_types": kinds,
        "sliding_window": header.number("attention.sliding_window"),
        "global_head_dim": widths[0],
        "head_dim": widths[1],
        "num_global_key_value_heads": whole,
        "num_key_value_heads": windowed,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": bases[0]},
            WINDOWED: {"rope_type": "default", "rope_theta": bases[1]},
        },
    }


def _turned_ropes(held: Held) -> Config:
    """Return the ropes with the share of a global head's pairs that turn; the tensor that says it
    is no parameter.

    Raises:
        CheckpointError: It is missing.
        UnsupportedError: A factor is neither 1 nor so large that its pair does not turn, or they
            are in another order.
    """
    ref = held.tensors.pop(_ROPE_FACTORS, None)
    if ref is None or ref.dtype != "F32" or len(ref.shape) != 1:
        raise CheckpointError(
            f"{held.path} has no vector '{_ROPE_FACTORS}' in F32; download it again."
        )
    factors = np.empty(ref.shape, np.float32)
    ref.read_into(memoryview(factors.data))
    turns = int((factors == 1).sum())
    # Of a file on the hub `plan` has headers alone; the tensors are zeros.
    known = (factors[:turns] == 1).all() and (factors[turns:] >= _NO_TURN).all() and turns
    if factors.any() and not known:
        raise UnsupportedError(
            f"{held.path}: '{_ROPE_FACTORS}' has other factors than 1 and, behind them, 1e30; only "
            "those are computed."
        )
    share = turns / len(factors) if factors.any() else 1.0
    ropes = held.config["rope_parameters"]
    return {**ropes, FULL: ropes[FULL] | {"partial_rotary_factor": share}}


_GEMMA4 = Architecture(
    "gemma4",
    "gemma4_text",
    "Gemma4ForCausalLM",
    names=ENDS
    | ATTENTION
    | HEAD_NORMS
    | DENSE
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
        _ROPE_FACTORS: _ROPE_FACTORS,
    },
    keys=EXPERT_KEYS
    | {
        "rope_theta": lambda h: None,  # with the layers
        "top_k_experts": "expert_used_count",
        "intermediate_size": "feed_forward_length",
        "final_logit_softcapping": lambda h: h.number("final_logit_softcapping", None),
    },
    groups=(gemma_layers,),
    fixed={"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    only={"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0},
    stored={
        "attention_k_eq_v": lambda held: held.count("self_attn.v_proj.weight") < held.layers,
        "rope_parameters": _turned_ropes,
    },
)


ARCHITECTURES = {
    record.name: record
    for record in (
        _QWEN3MOE,
        _QWEN3NEXT,
        _QWEN35MOE,
        _QWEN4EXP,
        _GPT_OSS,
        _DEEPSEEK2,
        _GLM4MOE,
        _DEEPSEEK32,
        _GLM_DSA,
        _LAGUNA,
        _GEMMA4,
    )
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
