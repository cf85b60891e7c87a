"""What the metadata of GGUF files say in config.json's words: keys and functions of a header that
several families share.

Source: llama.cpp's `src/llama-model.cpp`, `src/llama-context.cpp` (YaRN's factors) and
`src/models/`; what an absent key means is what llama.cpp computes then. Every function may raise
ConfigError for a key that is missing or of another type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.errors import ConfigError, UnsupportedError

Config = dict[str, Any]
Keys = Mapping[str, str | Callable[[Header], Any]]
"""config.json's key -> GGUF's behind the architecture, which must be a number, or a function of the
header."""
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Values of ``layer_types``."""
SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""


def head_dim(header: Header) -> int:
    """Return the width of a head of queries, keys and values.

    Raises:
        UnsupportedError: Values have another.
    """
    heads = header.number("attention.head_count")
    default = header.number("embedding_length") // heads if heads else 0
    width = header.number("attention.key_length", default)
    header.only("attention.value_length", width)
    return width


def turned_part(header: Header) -> float:
    """Return the part of a head's dimensions that are rotated."""
    width = head_dim(header)
    turned = header.number("rope.dimension_count", width)
    if type(turned) is not int or type(width) is not int or not 0 < turned <= width:
        raise ConfigError(
            f"{header.file}: {header.name('rope.dimension_count')} is {turned!r}, expected 1 to "
            f"the {width!r} dimensions of a head."
        )
    part = turned / width
    # The model rounds the product down.
    return part if int(part * width) == turned else math.nextafter(part, 1.0)


def turned_head_dim(header: Header) -> int:
    """Return the width of a head, all of which is rotated.

    Raises:
        UnsupportedError: A part of it is.
    """
    width = head_dim(header)
    header.only("rope.dimension_count", width)
    return width


# GGUF's keys of the group rope.scaling -> config.json's.
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def scaled_rope(header: Header) -> tuple[Config, Config] | None:
    """Return ``rope_scaling`` of config.json and the remaining keys of the group; None for a plain
    rope.

    Raises:
        ConfigError: A value is no number.
        UnsupportedError: The scaling is another than YaRN's.
    """
    prefix = "rope.scaling."
    found = header.group(prefix)
    factor = found.setdefault("factor", header.get("rope.scale_linear", 1.0))
    kind = found.pop("type", "linear")
    found.pop("finetuned", None)
    for key, value in found.items():
        if type(value) not in (int, float):
            raise header.wrong(f"{prefix}{key}", value, "a number")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind != "yarn":
        raise UnsupportedError(
            f"{header.file}: {header.name(f'{prefix}type')} is {kind!r}; only 'yarn' is computed."
        )
    if (extrapolation := found.pop("yarn_ext_factor", 1.0)) not in (1, -1):
        raise UnsupportedError(
            f"{header.file}: {header.name(f'{prefix}yarn_ext_factor')} is {extrapolation}; only 1 "
            "is computed."
        )
    scaling = {ours: found.pop(theirs) for theirs, ours in _SCALING.items() if theirs in found}
    return scaling | {"rope_type": "yarn"}, found


def refuse_more(header: Header, found: Config) -> None:
    if unknown := [key for key, value in found.items() if value]:
        key = header.name(f"rope.scaling.{unknown[0]}")
        raise UnsupportedError(f"{header.file}: nothing here computes {key}.")


def rope(header: Header) -> Config:
    """Return ``rope_scaling`` of config.json, None for a plain rope.

    Defaults and the attention factor are llama.cpp's: YaRN's own factor times two of the file.
    """
    scaled = scaled_rope(header)
    if scaled is None:
        return {"rope_scaling": None}
    scaling, found = scaled
    attention = found.pop("attn_factor", 1.0) * found.pop("yarn_attn_factor", 1.0)
    refuse_more(header, found)
    if attention != 1:
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(max(scaling["factor"], 1)))
    return {"rope_scaling": scaling}


def latent_rope(header: Header) -> Config:
    """Return ``rope_scaling`` of a model with latent attention: the softmax alone is scaled, by
    ``yarn_log_multiplier``, a tenth of ``mscale_all_dim``."""
    scaled = scaled_rope(header)
    if scaled is None:
        return {"rope_scaling": None}
    scaling, found = scaled
    log = found.pop("yarn_log_multiplier", 0)
    for key in ("attn_factor", "yarn_attn_factor"):
        if found.get(key) == 1:
            del found[key]
    refuse_more(header, found)
    if not 0 < log < 1e6:
        key = header.name("rope.scaling.yarn_log_multiplier")
        raise UnsupportedError(f"{header.file}: {key} is {log!r}; YaRN needs it to be positive.")
    # In float32, as it was written.
    mscale = float(str(np.float32(log) / np.float32(0.1)))
    return {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale}}


def latent_heads(header: Header) -> Config:
    """Return the widths of latent attention. Files that keep the latent's map whole have heads of
    keys and values in place of those of latents."""
    rank, turned = header.number("attention.kv_lora_rank"), header.number("rope.dimension_count")
    width = header.number("attention.key_length_mla", None)
    values = header.number("attention.value_length_mla", None)
    if (width is None) != (values is None):
        lacks = "attention.key_length_mla" if width is None else "attention.value_length_mla"
        raise ConfigError(f"{header.file}: the metadata lacks {header.name(lacks)}.")
    if width is None:
        width = header.number("attention.key_length")
        values = header.number("attention.value_length")
    else:
        header.only("attention.key_length", rank + turned)
        header.only("attention.value_length", rank)
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": width - turned,
        "v_head_dim": values,
    }


def gating(header: Header) -> str:
    """Return the scores of experts. GLM-4.7-Flash's files may lack the key; llama.cpp knows them by
    their size, and computes others without it, DeepSeek-V2's, by a softmax."""
    size = header.number("block_count"), header.number("vocab_size", 0)
    flash = size in ((47, 154880), (48, 154880))
    header.only("expert_gating_func", SIGMOID, SIGMOID if flash else SOFTMAX)
    return "sigmoid"


def delta_net(header: Header) -> Config:
    """Return the keys of gated delta nets, and which layers have them."""
    heads = header.number("ssm.time_step_rank")
    inner = header.number("ssm.inner_size")
    if not (type(heads) is type(inner) is int and 0 < heads <= inner) or inner % heads:
        raise ConfigError(
            f"{header.file}: {header.name('ssm.inner_size')} {inner!r} is no multiple of "
            f"{header.name('ssm.time_step_rank')} {heads!r}."
        )
    config = {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": header.number("ssm.group_count"),
        "linear_key_head_dim": header.number("ssm.state_size"),
        "linear_conv_kernel_dim": header.number("ssm.conv_kernel"),
        "full_attention_interval": header.number("full_attention_interval", 4),
    }
    recurrent = header.integers("attention.recurrent_layers", [])
    if recurrent:
        kinds = ("full_attention", "linear_attention")
        layers = layers_of(header)
        config["layer_types"] = [kinds[bool(n)] for n in recurrent[: max(layers, 0)]]
    return config


MOST_LAYERS = 10_000
"""More than any model has; lists of so many are made before the tensors are counted."""


def layers_of(header: Header) -> int:
    """Return the number of layers; those of multi-token prediction behind them do not count."""
    every = header.number("block_count")
    prediction = header.number("nextn_predict_layers", 0)
    whole = type(every) is int and type(prediction) is int
    if not whole or not 0 <= prediction < every <= MOST_LAYERS:
        raise ConfigError(
            f"{header.file}: {header.name('block_count')} is {every!r} and "
            f"{header.name('nextn_predict_layers')} {prediction!r}; expected whole numbers, the "
            f"first larger and at most {MOST_LAYERS}."
        )
    return every - prediction


def chosen_positions(header: Header) -> Config:
    """Return the keys of attention to chosen positions."""
    return {
        "index_n_heads": header.number("attention.indexer.head_count"),
        "index_head_dim": header.number("attention.indexer.key_length"),
        "index_topk": header.number("attention.indexer.top_k"),
    }


def of_layers(header: Header, key: str) -> list[Any]:
    """Return a number for each layer, the same one if the file has one."""
    found, layers = header.get(key), layers_of(header)
    every = found if isinstance(found, list) else [found] * layers
    if len(every) < layers or any(type(n) is not int for n in every):
        raise header.wrong(key, found, "a whole number, or one for each layer")
    return every[:layers]


# --- Keys ---

COMMON_KEYS: Keys = {
    "num_hidden_layers": layers_of,
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_experts_per_tok": "expert_used_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": lambda h: h.number("rope.freq_base", 10000.0),
}
"""Of every family."""
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
HEAD_KEYS = {
    "num_key_value_heads": lambda h: h.number(
        "attention.head_count_kv", h.number("attention.head_count")
    ),
    "head_dim": head_dim,
}
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# Experts that a sigmoid scores.
SCORED_KEYS = {
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
DELTA_KEYS = (
    HEAD_KEYS
    | EXPERT_KEYS
    | {
        "partial_rotary_factor": turned_part,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
)
