"""Checkpoints of transformers as llama.cpp's converters write them: names from the `gguf` package's
own tables, transforms and metadata as in llama.cpp's `conversion/`, in NumPy alone.

Of qwen4exp, deepseek32 and laguna, which gguf 0.19 does not know, names are those of llama.cpp's
`constants.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint import foreign, gguf_files

Tensors = dict[str, np.ndarray]
PREFIXES = {"model.language_model.": "model.", "language_model.": "", "model.visual.": "visual."}
LEFT_OUT = re.compile(
    r"mtp\..*|visual\..*|vision_tower\..*|mm_projector\..*|.*inv_freq"
    r"|.*\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)"
)


def read_twin(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """The text model's config, and its tensors in float32 under one spelling of their names."""
    config = json.loads((directory / "config.json").read_text())
    config |= config.pop("text_config", {})
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config = {"rope_theta": 10000.0} | config | rope | {"rope": rope}
    tensors = {}
    for file in sorted(directory.glob("model*.safetensors")):
        for name, (dtype, shape, data) in foreign.read_safetensors(file).items():
            for prefix, better in PREFIXES.items():
                if name.startswith(prefix):
                    name = better + name.removeprefix(prefix)
                    break
            if not LEFT_OUT.fullmatch(name):
                kind = {"BF16": "<u2", "F32": "<f4", "F16": "<f2"}[dtype]
                values = np.frombuffer(data, kind).reshape(shape)
                values = foreign.bf16_values(values) if dtype == "BF16" else values
                tensors[name] = values.astype(np.float32)
    return config, tensors


# --- Transforms: (config, tensors of the checkpoint) -> tensors under names that gguf's tables know


def stacked(tensors: Tensors) -> Tensors:
    """Experts of a layer in one tensor for each projection."""
    found, single = {}, {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name):
            single.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        elif name.endswith("mlp.experts.gate_up_proj"):
            half = values.shape[1] // 2
            base = name.removesuffix("gate_up_proj")
            found[f"{base}gate_proj.weight"] = values[:, :half]
            found[f"{base}up_proj.weight"] = values[:, half:]
        elif name.endswith("mlp.experts.down_proj"):
            found[f"{name}.weight"] = values
        else:
            found[name] = values
    return found | {n: np.stack([by[e] for e in sorted(by)]) for n, by in single.items()}


def tiled(values: np.ndarray, keys: int, width: int, axis: int = 0) -> np.ndarray:
    """Value heads of `width`: the first of every key head, then the second of every one ..."""
    moved = np.moveaxis(values, axis, 0)
    heads = moved.reshape(keys, -1, width, *moved.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def delta_net(config: dict, tensors: Tensors, *, reorder: bool, plain: bool) -> Tensors:
    """plain: Values are places of elements, which no function may change."""
    keys, dims = config["linear_num_key_heads"], config["linear_value_head_dim"]
    behind = 2 * keys * config["linear_key_head_dim"]
    found = {}
    for name, values in tensors.items():
        leaf = name.rpartition("linear_attn.")[2]
        if reorder and ".linear_attn." in name:
            if leaf.startswith(("in_proj_qkv.", "conv1d.")):
                values = np.concatenate([values[:behind], tiled(values[behind:], keys, dims)])
            elif leaf == "in_proj_z.weight":
                values = tiled(values, keys, dims)
            elif leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
                values = tiled(values, keys, 1)
            elif leaf == "out_proj.weight":
                values = tiled(values, keys, dims, axis=1)
        if name.endswith(".A_log"):
            values = values if plain else -np.exp(values)
        elif name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        elif "conv1d" in name:
            values = values.squeeze(1)
        elif name.endswith(CENTRED) and not name.endswith("linear_attn.norm.weight"):
            values = values if plain else values + np.float32(1)
        if name.endswith("in_proj_qkvz.weight"):
            # Rows lie together for each key head: q, k, v, z.
            of = values.reshape(keys, -1, values.shape[1])
            dk = config["linear_key_head_dim"]
            own = (of.shape[1] - 2 * dk) // 2
            q, k, v, z = np.split(of, [dk, 2 * dk, 2 * dk + own], axis=1)
            flat = [part.reshape(-1, values.shape[1]) for part in (q, k, v, z)]
            found[name.replace("qkvz", "qkv")] = np.concatenate(flat[:3])
            found[name.replace("qkvz", "z")] = flat[3]
        elif name.endswith("index_qk_proj.weight"):
            rows = config["indexer_n_heads"] * config["indexer_head_dim"]
            found[name.replace("index_qk_proj", "q_proj")] = values[:rows]
            found[name.replace("index_qk_proj", "k_proj")] = values[rows:]
        else:
            found[name] = values
    return found


CENTRED = (
    "norm.weight",
    *(f".ple.norm_{n}.weight" for n in ("key", "query", "conv")),
    *(f".indexer.{n}_layernorm.weight" for n in "qk"),
)


def qwen3_next(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    return delta_net(config, tensors, reorder=False, plain=plain)


def qwen3_5(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    return delta_net(config, tensors, reorder=True, plain=plain)


def qwen4(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    shards = sorted(
        (n for n in tensors if ".ngram_embedding.shard_" in n),
        key=lambda n: int(n.rpartition(".shard_")[2].partition(".")[0]),
    )
    rest = {n: v for n, v in tensors.items() if n not in shards}
    found = delta_net(config, rest, reorder=True, plain=plain)
    if shards:
        found["per_layer_token_embd.weight"] = np.concatenate([tensors[n] for n in shards])
    return found


def deepseek(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    found, layers = {}, config["num_hidden_layers"]
    for name, values in tensors.items():
        if (match := re.match(r"model\.layers\.(\d+)\.", name)) and int(match[1]) >= layers:
            continue
        if name.endswith("kv_b_proj.weight"):
            of = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            k, v = np.split(of, [config["qk_nope_head_dim"]], axis=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = k.swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = v
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return found


def glm(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    old, new = "e_score_correction_bias", "e_score_correction.bias"
    return {name.replace(old, new): values for name, values in tensors.items()}


def gpt_oss(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    found = {}
    for name, values in tensors.items():
        base, _, leaf = name.rpartition(".")
        if leaf == "sinks":
            found[f"{name}.weight"] = values
        elif leaf in ("gate_up_proj", "gate_up_proj_bias"):
            end = "bias" if leaf.endswith("bias") else "weight"
            values = values.swapaxes(1, 2) if end == "weight" else values
            found[f"{base}.gate_proj.{end}"] = values[:, ::2]
            found[f"{base}.up_proj.{end}"] = values[:, 1::2]
        elif leaf == "down_proj_bias":
            found[f"{base}.down_proj.bias"] = values
        elif leaf == "down_proj":
            found[f"{name}.weight"] = values.swapaxes(1, 2)
        else:
            found[name] = values
    return found


def laguna(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    old, new = "experts.e_score_correction_bias", "gate.e_score_correction.bias"
    return {name.replace(old, new): values for name, values in tensors.items()}


def gemma(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    found = {}
    for name, values in tensors.items():
        whole = name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj"))
        found[f"{name}.weight" if whole else name] = values
    width = config["global_head_dim"]
    full = config["rope_parameters"]["full_attention"]
    turns = int(width * full["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * turns + [1e30] * (width // 2 - turns), np.float32)
    return found | {"rope_freqs.weight": factors}


def as_it_is(config: dict, tensors: Tensors, plain: bool = False) -> Tensors:
    return tensors


# --- Metadata: GGUF's key -> key of the config, or a function of it; what is None is not written

Keys = dict[str, "str | Callable[[dict], Any]"]
ALL: Keys = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": lambda c: float(c["rope_theta"]),
    "attention.layer_norm_rms_epsilon": lambda c: float(c["rms_norm_eps"]),
    "expert_used_count": "num_experts_per_tok",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_count": lambda c: (
        c.get("num_local_experts") or c.get("num_experts") or c["n_routed_experts"]
    ),
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
YARN: Keys = {
    "rope.scaling.type": lambda c: "yarn" if _yarn(c) else None,
    "rope.scaling.factor": lambda c: float(c["factor"]) if _yarn(c) else None,
    "rope.scaling.original_context_length": lambda c: (
        c["original_max_position_embeddings"] if _yarn(c) else None
    ),
    "rope.scaling.yarn_beta_fast": lambda c: float(c["beta_fast"]) if _yarn(c) else None,
    "rope.scaling.yarn_beta_slow": lambda c: float(c["beta_slow"]) if _yarn(c) else None,
    # So that YaRN's own factor times this one is transformers'.
    "rope.scaling.yarn_attn_factor": lambda c: (
        c["attention_factor"] / (1 + 0.1 * np.log(c["factor"])) if "attention_factor" in c else None
    ),
}


def _yarn(config: dict) -> bool:
    return "yarn" in (config["rope"].get("rope_type"), config["rope"].get("type"))


def _interval(config: dict) -> int:
    kinds = config.get("layer_types") or []
    full = [i + 1 for i, kind in enumerate(kinds) if kind != "linear_attention"]
    return full[0] if full else config["full_attention_interval"]


def _turned(default: float) -> Callable[[dict], int]:
    return lambda c: int(c["head_dim"] * c.get("partial_rotary_factor", default))


DELTA: Keys = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda c: c["linear_value_head_dim"] * c["linear_num_value_heads"],
    "full_attention_interval": _interval,
    "rope.dimension_count": _turned(0.25),
}
SECTIONS: Keys = {"rope.dimension_sections": lambda c: [11, 11, 10, 0]}
SCORED: Keys = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": lambda c: float(c["routed_scaling_factor"]),
    "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": lambda c: 2,
}
PREDICTED: Keys = {
    "block_count": lambda c: c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0),
    "nextn_predict_layers": "num_nextn_predict_layers",
}
LATENT: Keys = {
    "attention.head_count_kv": lambda c: 1,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda c: c["kv_lora_rank"] + c["qk_rope_head_dim"],
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": lambda c: (
        0.1 * c["mscale_all_dim"] if "mscale_all_dim" in c else None
    ),
}
STREAMS: Keys = {
    "hyper_connection.count": "hc_count",
    "hyper_connection.low_rank": "hc_lowrank",
    "attention.indexer.head_count": "indexer_n_heads",
    "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
    "attention.compress_ratios": lambda c: [
        0 if kind == "linear_attention" else c["indexer_compress_ratio"]
        for kind in c["layer_types"]
    ],
}


POSITIONS: Keys = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "attention.indexer.types": lambda c: (
        [kind == "full" for kind in c["indexer_types"]] if "indexer_types" in c else None
    ),
}
FULL, WINDOWED = "full_attention", "sliding_attention"


def _of_kind(kind: str, key: str, default: Any = None) -> Callable[[dict], Any]:
    return lambda c: c["rope_parameters"][kind].get(key, default)


def _turned_of(kind: str) -> Callable[[dict], int]:
    part = _of_kind(kind, "partial_rotary_factor", 1.0)
    return lambda c: int(c["head_dim"] * part(c))


LAGUNA: Keys = {
    "attention.head_count": "num_attention_heads_per_layer",
    "attention.sliding_window": "sliding_window",
    # Every second layer of the twin.
    "attention.sliding_window_pattern": lambda c: 2,
    "expert_weights_norm": lambda c: True,
    "expert_weights_scale": lambda c: float(c["moe_routed_scaling_factor"]),
    "expert_gating_func": lambda c: 2,
    "leading_dense_block_count": lambda c: c["mlp_layer_types"].index("sparse"),
    "rope.dimension_count": _turned_of(FULL),
    "rope.dimension_count_swa": _turned_of(WINDOWED),
    "rope.freq_base": lambda c: float(_of_kind(FULL, "rope_theta")(c)),
    "rope.freq_base_swa": lambda c: float(_of_kind(WINDOWED, "rope_theta")(c)),
    "rope.scaling.type": _of_kind(FULL, "rope_type"),
    "rope.scaling.factor": _of_kind(FULL, "factor"),
    "rope.scaling.original_context_length": _of_kind(FULL, "original_max_position_embeddings"),
    "rope.scaling.yarn_beta_fast": lambda c: float(_of_kind(FULL, "beta_fast")(c)),
    "rope.scaling.yarn_beta_slow": lambda c: float(_of_kind(FULL, "beta_slow")(c)),
    "rope.scaling.yarn_attn_factor": _of_kind(FULL, "attention_factor"),
}
GEMMA: Keys = {
    "attention.head_count_kv": lambda c: [
        c["num_key_value_heads" if kind == WINDOWED else "num_global_key_value_heads"]
        for kind in c["layer_types"]
    ],
    "attention.key_length": "global_head_dim",
    "attention.value_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": lambda c: [kind == WINDOWED for kind in c["layer_types"]],
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_used_count": "top_k_experts",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.dimension_count": "global_head_dim",
    "rope.dimension_count_swa": "head_dim",
    "rope.freq_base": lambda c: float(_of_kind(FULL, "rope_theta")(c)),
    "rope.freq_base_swa": lambda c: float(_of_kind(WINDOWED, "rope_theta")(c)),
}


@dataclass(frozen=True)
class Converter:
    """architecture: GGUF's. table: Of `gguf`, MODEL_ARCH. names: More of them, by pattern. stacks:
    Experts have a tensor each, or gate and up are halves of one."""

    architecture: str
    table: str
    transform: Callable[..., Tensors]
    keys: Keys
    names: dict[str, str] = field(default_factory=dict)
    stacks: bool = True


HC = {
    rf"model\.layers\.(\d+)\.{ours}_hyper_connection\.{name}\.weight": rf"blk.\1.hc_{theirs}_{part}"
    for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))
    for name, part in (
        ("hc_norm", "norm"),
        ("input_mix_weight_down", "down"),
        ("input_mix_weight_up", "up"),
        ("block_inject_weight", "inject"),
    )
}
HC |= {
    rf"model\.hyper_connection_mixer\.{name}\.weight": f"output_hc_{part}"
    for name, part in (
        ("hc_norm", "norm"),
        ("input_mix_weight_down", "down"),
        ("input_mix_weight_up", "up"),
    )
}
HC |= {
    rf"model\.layers\.(\d+)\.self_attn\.indexer\.{ours}\.weight": rf"blk.\1.indexer.{theirs}"
    for ours, theirs in (
        ("q_proj", "q_proj"),
        ("k_proj", "k_proj"),
        ("q_layernorm", "q_norm"),
        ("k_layernorm", "k_norm"),
    )
}
HC |= {
    rf"model\.layers\.(\d+)\.ple\.{ours}\.weight": rf"blk.\1.ple_{theirs}"
    for ours, theirs in (
        ("key_proj", "key"),
        ("value_proj", "value"),
        ("norm_key", "norm_key"),
        ("norm_query", "norm_query"),
        ("norm_conv", "norm_conv"),
        ("conv1d", "conv1d"),
    )
}
HC |= {r"per_layer_token_embd\.weight": "per_layer_token_embd"}
GATED_HEADS = {
    rf"model\.layers\.(\d+)\.self_attn\.{ours}\.weight": rf"blk.\1.{theirs}"
    for ours, theirs in (
        ("g_proj", "attn_gate"),
        ("q_norm", "attn_q_norm"),
        ("k_norm", "attn_k_norm"),
    )
}
ROUTED = {
    r"rope_freqs\.weight": "rope_freqs",
    r"model\.layers\.(\d+)\.router\.scale": r"blk.\1.ffn_gate_inp.scale",
    r"model\.layers\.(\d+)\.router\.per_expert_scale": r"blk.\1.ffn_down_exps.scale",
}

CONVERTERS = {
    "qwen3_moe": Converter("qwen3moe", "QWEN3MOE", as_it_is, ALL | YARN),
    "qwen3_next": Converter("qwen3next", "QWEN3NEXT", qwen3_next, ALL | YARN | DELTA),
    "qwen3_5_moe": Converter("qwen35moe", "QWEN35MOE", qwen3_5, ALL | YARN | DELTA | SECTIONS),
    "qwen4_exp": Converter(
        "qwen4exp", "QWEN35MOE", qwen4, ALL | YARN | DELTA | SECTIONS | STREAMS, HC
    ),
    "gpt_oss": Converter(
        "gpt-oss",
        "GPT_OSS",
        gpt_oss,
        ALL
        | YARN
        | {
            "attention.sliding_window": "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        stacks=False,
    ),
    "deepseek_v3": Converter("deepseek2", "DEEPSEEK2", deepseek, ALL | YARN | SCORED | LATENT),
    "glm4_moe": Converter(
        "glm4moe",
        "GLM4_MOE",
        glm,
        ALL | YARN | SCORED | PREDICTED | {"rope.dimension_count": _turned(0.5)},
    ),
    "deepseek_v32": Converter(
        "deepseek32", "GLM_DSA", deepseek, ALL | YARN | SCORED | LATENT | POSITIONS
    ),
    "glm_moe_dsa": Converter(
        "glm-dsa", "GLM_DSA", deepseek, ALL | YARN | SCORED | LATENT | PREDICTED | POSITIONS
    ),
    "laguna": Converter("laguna", "DEEPSEEK2", laguna, ALL | LAGUNA, GATED_HEADS),
    "gemma4": Converter("gemma4", "GEMMA4", gemma, ALL | GEMMA, ROUTED, stacks=False),
}


def converted(converter: Converter, config: dict, tensors: Tensors, **options) -> Iterator:
    """Yield GGUF's name and values of each tensor."""
    import gguf

    layers = config["num_hidden_layers"] + 1
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[converter.table], layers)
    tensors = stacked(tensors) if converter.stacks else tensors
    for name, values in converter.transform(config, tensors, **options).items():
        for pattern, better in converter.names.items():
            if re.fullmatch(pattern, name):
                new = re.sub(pattern, better, name)
                yield new if new.endswith(".scale") else f"{new}.weight", values
                break
        else:
            found = table.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            yield found, values


def as_floats(converter: Converter, config: dict, tensors: Tensors) -> dict:
    """What :func:`write_gguf` takes, all in float32."""
    found = converted(converter, config, tensors)
    return {name: (values.astype(np.float32), "F32") for name, values in found}


def as_blocks(
    converter: Converter, config: dict, tensors: Tensors, kind_of: Callable[[str], str]
) -> tuple[dict, Tensors]:
    """What :func:`write_gguf` takes, with random blocks in matrices; and the values of the same as
    transformers has them. kind_of: GGUF's name -> type.

    Which element of the file is which of transformers, the converter says of their places.
    """
    import gguf

    places, end = {}, 0
    for name, values in tensors.items():
        places[name] = np.arange(end, end + values.size, dtype=np.float64).reshape(values.shape)
        end += values.size
    flat = np.concatenate([values.reshape(-1) for values in tensors.values()])
    stored = as_floats(converter, config, tensors)
    random = np.random.default_rng(5)
    for name, where in converted(converter, config, places, plain=True):
        kind = kind_of(name)
        if where.ndim > 1 and kind not in ("F32", "F16", "BF16"):
            qtype = gguf.GGMLQuantizationType[kind]
            rows, width = int(np.prod(where.shape[:-1])), where.shape[-1]
            raw = gguf_files.random_blocks(kind, rows, width, random)
            raw = raw.reshape(*where.shape[:-1], -1)
            stored[name] = raw, kind
            flat[where.astype(np.int64)] = gguf.dequantize(raw, qtype).reshape(where.shape)
    return stored, {name: flat[p.astype(np.int64)].astype(np.float32) for name, p in places.items()}


def write_meaning(out: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """The checkpoint that transformers would read."""
    out.mkdir()
    entries = {name: foreign.entry("F32", values) for name, values in tensors.items()}
    foreign.write_safetensors(out / "model.safetensors", entries)
    (out / "config.json").write_text(json.dumps(config))
    return out


def write_gguf(
    path: Path,
    converter: Converter,
    config: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, str]],
    more: dict[str, Any] | None = None,
    skip: tuple[str, ...] = (),
) -> Path:
    """tensors: GGUF's name -> bytes or numbers as they are stored, and their type. more: Metadata
    besides."""
    import gguf

    writer = gguf.GGUFWriter(str(path), converter.architecture)
    found = {}
    for key, ours in converter.keys.items():
        value = config.get(ours) if isinstance(ours, str) else ours(config)
        if value is not None and key not in skip:
            found[f"{converter.architecture}.{key}"] = value
    for key, value in (found | (more or {})).items():
        add = {
            str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
            bool: writer.add_bool, np.float64: writer.add_float32, list: writer.add_array,
        }  # fmt: skip
        if isinstance(value, list) and max(value, default=0) >= 1 << 31:
            kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
            writer.add_key_value(key, value, *kinds)
        else:
            add[type(value)](key, value)
    writer.add_eos_token_id(config["vocab_size"] - 1)
    for name, (values, kind) in tensors.items():
        if name not in skip:
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
