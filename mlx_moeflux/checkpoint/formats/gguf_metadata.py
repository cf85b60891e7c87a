"""What the metadata of GGUF files say in config.json's words: functions of a header that
:mod:`mlx_moeflux.checkpoint.formats.gguf_architectures` puts together.

Source: llama.cpp's `src/llama-model.cpp`, `src/llama-context.cpp` (YaRN's factors) and
`src/models/`; what an absent key means is what llama.cpp computes then. Every function may raise
ConfigError for a key that is missing or of another type.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.errors import ConfigError, UnsupportedError

Config = dict[str, Any]
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


def _scaled(header: Header) -> tuple[Config, Config] | None:
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


def _no_more(header: Header, found: Config) -> None:
    if unknown := [key for key, value in found.items() if value]:
        key = header.name(f"rope.scaling.{unknown[0]}")
        raise UnsupportedError(f"{header.file}: nothing here computes {key}.")


def rope(header: Header) -> Config:
    """Return ``rope_scaling`` of config.json, None for a plain rope.

    Defaults and the attention factor are llama.cpp's: YaRN's own factor times two of the file.
    """
    scaled = _scaled(header)
    if scaled is None:
        return {"rope_scaling": None}
    scaling, found = scaled
    attention = found.pop("attn_factor", 1.0) * found.pop("yarn_attn_factor", 1.0)
    _no_more(header, found)
    if attention != 1:
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(max(scaling["factor"], 1)))
    return {"rope_scaling": scaling}


def exact_rope(header: Header) -> Config:
    """Return ``rope_scaling`` of gpt-oss, whose YaRN keeps fractions of pairs; llama.cpp rounds
    them, and files do not say it. Layers with a window have the same base."""
    header.only("rope.freq_base_swa", header.get("rope.freq_base", 10000.0))
    scaling = rope(header)["rope_scaling"]
    return {"rope_scaling": scaling and scaling | {"truncate": False}}


def latent_rope(header: Header) -> Config:
    """Return ``rope_scaling`` of a model with latent attention: the softmax alone is scaled, by
    ``yarn_log_multiplier``, a tenth of ``mscale_all_dim``."""
    scaled = _scaled(header)
    if scaled is None:
        return {"rope_scaling": None}
    scaling, found = scaled
    log = found.pop("yarn_log_multiplier", 0)
    for key in ("attn_factor", "yarn_attn_factor"):
        if found.get(key) == 1:
            del found[key]
    _no_more(header, found)
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


def chosen_positions(header: Header) -> Config:
    """Return the keys of attention to chosen positions."""
    return {
        "index_n_heads": header.number("attention.indexer.head_count"),
        "index_head_dim": header.number("attention.indexer.key_length"),
        "index_topk": header.number("attention.indexer.top_k"),
    }


LONG_CONTEXT = 1 << 20
"""Of GLM-5.2 and 5.3, by which llama.cpp knows them in files that do not say which layers have an
indexer."""


def indexer_types(header: Header) -> Config:
    """Return which layers have an indexer. Without the key all have one; in GLM-5.2 and 5.3 the
    first two and every fourth from there."""
    layers = layers_of(header)
    late = header.number("context_length") >= LONG_CONTEXT
    default = [int(i < 2 or (i - 2) % 4 == 0 or not late) for i in range(layers)]
    own = header.integers("attention.indexer.types", []) or default
    return {"indexer_types": ["full" if one else "shared" for one in own[:layers]]}


WINDOWED, FULL = "sliding_attention", "full_attention"
# Pairs whose frequency is divided by so much do not turn.
NO_TURN = 1e20


def _of_layers(header: Header, key: str) -> list[Any]:
    """Return a number for each layer, the same one if the file has one."""
    found, layers = header.get(key), layers_of(header)
    every = found if isinstance(found, list) else [found] * layers
    if len(every) < layers or any(type(n) is not int for n in every):
        raise header.wrong(key, found, "a whole number, or one for each layer")
    return every[:layers]


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
    heads, dense = _of_layers(header, "attention.head_count"), _leading_dense(header)
    scaled = _scaled(header)
    full: Config = {"rope_type": "default"}
    if scaled is not None:
        full, found = scaled
        factor = found.pop("yarn_attn_factor", None)
        _no_more(header, found)
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
    rows = _of_layers(header, "attention.head_count_kv")
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


def turned_share(factors: np.ndarray, file: Any) -> float:
    """Return the share of a head's pairs that turn, of factors that divide their frequencies.

    Raises:
        UnsupportedError: A factor is neither 1 nor so large that its pair does not turn, or they
            are in another order.
    """
    turns = int((factors == 1).sum())
    if not (factors[:turns] == 1).all() or not (factors[turns:] >= NO_TURN).all() or not turns:
        raise UnsupportedError(
            f"{file}: 'rope_freqs.weight' has other factors than 1 and, behind them, 1e30; only "
            "those are computed."
        )
    return turns / len(factors)
