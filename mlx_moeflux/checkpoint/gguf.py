"""GGUF files of Qwen3-MoE: metadata as config.json, tensors under Hugging Face's names.

Read with the `gguf` package (extra: gguf). Experts stream as byte ranges of the file; blocks
become MLX's affine form where they are read, see :mod:`mlx_moeflux.checkpoint.gguf_blocks`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mlx_moeflux.checkpoint.decoded import DecodedRef
from mlx_moeflux.checkpoint.gguf_blocks import KINDS, BlocksRef
from mlx_moeflux.checkpoint.names import COMPONENT_ORDER
from mlx_moeflux.checkpoint.refs import ExpertRefs, StackedRefs, TensorRef
from mlx_moeflux.errors import CheckpointError, ConfigError, UnsupportedError

ARCHITECTURE = "qwen3moe"
PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
# config.json's key -> GGUF's, behind the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}


@dataclass
class GgufFile:
    """What a file, or all shards of one, holds.

    config: As config.json. tensors: The trunk. blocks: MoE layer id -> component -> references.
    metadata: Of the first shard, strings and numbers. requantised: Names of tensors that are
    quantised anew, with their type.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorRef | DecodedRef]
    blocks: dict[int, dict[str, ExpertRefs]]
    metadata: dict[str, Any]
    requantised: dict[str, str] = field(default_factory=dict)


def find_gguf(path: Path) -> Path | None:
    """The first shard: `path` itself, or the only GGUF model in that directory.

    Raises:
        CheckpointError: The directory holds several models.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    first = [f for f in files if (m := _shard(f)) is None or m == 1]
    if len(first) > 1:
        raise CheckpointError(
            f"{path} holds {len(first)} GGUF models; pass the file, such as {first[0].name}."
        )
    return first[0] if first else None


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of `path` and of the shards beside it; no tensor.

    Raises:
        CheckpointError: A file is damaged or missing, or a tensor is not the model's.
        UnsupportedError: Another architecture, or a type of block that is not decoded.
    """
    files = _shards(path)
    readers = [(file, _reader(file)) for file in files]
    metadata = _metadata(readers[0][1], path)
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedError(
            f"{path}: the architecture is {architecture!r}; of GGUF only {ARCHITECTURE!r} is read."
        )
    found = GgufFile(path, {}, {}, {}, metadata)
    for file, reader in readers:
        size = file.stat().st_size
        for tensor in reader.tensors:
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                raise CheckpointError(
                    f"{file}: '{tensor.name}' ends behind the file's {size} bytes; the file is "
                    "truncated, download it again."
                )
            _take(found, tensor, file)
    found.blocks = {
        layer: {c: found.blocks[layer][c] for c in COMPONENT_ORDER if c in found.blocks[layer]}
        for layer in sorted(found.blocks)
    }
    found.config = _config(found, path)
    return found


def gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values of a file's header."""
    return _metadata(_reader(path), path)


def _shard(file: Path) -> int | None:
    match = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file.name)
    return None if match is None else int(match[1])


def _shards(path: Path) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    count = int(match[3])
    files = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the model has {count} shards, fetch it.")
    return files


def _reader(file: Path):
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedError(
            f"{file} needs the gguf package; pip install 'mlx_moeflux[gguf]'."
        ) from error
    try:
        return GGUFReader(file)
    except (OSError, ValueError, LookupError, OverflowError, MemoryError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file} is damaged, truncated or no GGUF file ({reason}); download it again."
        ) from error


def _metadata(reader, path: Path) -> dict[str, Any]:
    try:
        return {name: f.contents() for name, f in reader.fields.items() if "." in name}
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be read ({error}).") from error


def _take(found: GgufFile, tensor, file: Path) -> None:
    """Put one tensor of a file where it belongs."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
    if match is None or match[2] not in _NAMES | _EXPERTS:
        raise CheckpointError(f"{file}: the tensor '{tensor.name}' is none of Qwen3-MoE's.")
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    if kind not in PLAIN and kind not in KINDS:
        raise UnsupportedError(
            f"{file}: '{tensor.name}' is {kind}; only {', '.join([*KINDS, *PLAIN])} are decoded."
        )
    if kind in KINDS and not KINDS[kind].exact:
        found.requantised[tensor.name] = kind
    raw = TensorRef(tensor.name, file, int(tensor.data_offset), PLAIN.get(kind, "U8"), shape)
    if kind in KINDS:
        raw = TensorRef(raw.name, file, raw.offset, "U8", (*shape[:-1], _row_bytes(shape, kind)))
    if prod(raw.shape) and raw.nbytes != int(tensor.n_bytes):
        raise CheckpointError(
            f"{file}: '{tensor.name}' has {tensor.n_bytes} bytes, its shape {list(shape)} in "
            f"{kind} needs {raw.nbytes}."
        )
    if match[2] in _EXPERTS:
        _take_experts(found, int(match[1] or 0), _EXPERTS[match[2]], raw, kind)
        return
    name = f"{prefix}{_NAMES[match[2]]}"
    if kind in PLAIN:
        found.tensors[f"{name}.{match[3]}"] = raw
    else:
        for part, ref in BlocksRef.parts(name, raw, KINDS[kind]).items():
            found.tensors[f"{name}.{part}"] = ref


def _row_bytes(shape: tuple[int, ...], kind: str) -> int:
    block = KINDS[kind]
    return shape[-1] // block.elements * block.nbytes


def _take_experts(found: GgufFile, layer: int, projection: str, raw: TensorRef, kind: str) -> None:
    if len(raw.shape) != 3 or not raw.shape[0]:
        raise CheckpointError(f"{raw.file}: '{raw.name}' has shape {list(raw.shape)}, not three.")
    components = found.blocks.setdefault(layer, {})
    stacked = StackedRefs(raw)
    if kind in PLAIN:
        components[f"{projection}.weight"] = stacked
        return
    experts = [BlocksRef.parts(raw.name, ref, KINDS[kind]) for ref in stacked]
    for part in ("weight", "scales", "biases"):
        components[f"{projection}.{part}"] = tuple(parts[part] for parts in experts)


def _config(found: GgufFile, path: Path) -> dict[str, Any]:
    """The metadata under config.json's keys."""
    config: dict[str, Any] = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    for key, theirs in _KEYS.items():
        value = found.metadata.get(f"{ARCHITECTURE}.{theirs}")
        if value is None and key == "intermediate_size":
            value = found.metadata.get(f"{ARCHITECTURE}.expert_feed_forward_length")
        if value is None:
            raise ConfigError(f"{path}: the metadata lacks '{ARCHITECTURE}.{theirs}'.")
        config[key] = value
    scaling = found.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling}
    for row in ("weight", "scales"):
        if f"model.embed_tokens.{row}" in found.tensors:
            config["vocab_size"] = found.tensors[f"model.embed_tokens.{row}"].shape[0]
    if "vocab_size" not in config:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight'.")
    dense = sorted(set(range(config["num_hidden_layers"])) - set(found.blocks))
    eos = found.metadata.get("tokenizer.ggml.eos_token_id")
    return config | {
        "mlp_only_layers": dense,
        # llama.cpp divides by the sum in this architecture, whatever the file says.
        "norm_topk_prob": True,
        "tie_word_embeddings": "lm_head.weight" not in found.tensors,
        "eos_token_id": eos,
    }
