"""What a model is made of, from config.json and tensor headers alone. No MLX.

Exact where the checkpoint is streamed as it is; with `bits`, what a conversion would give.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.checkpoint.hub import remote_headers
from mlx_moeflux.checkpoint.packed import PackedExperts, is_packed
from mlx_moeflux.checkpoint.refs import ITEMSIZE, ExpertRefs
from mlx_moeflux.checkpoint.source import CONFIG_NAME, open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorIndex
from mlx_moeflux.errors import CheckpointError, ConfigError, InputError

# Routed experts under the names of Hugging Face, mlx-lm and others.
_EXPERT = re.compile(r"layers\.(\d+)\.(?:mlp|block_sparse_moe)\.(?:switch_mlp|experts)\.")
_LAYER = re.compile(r"layers\.(\d+)\.")
_DROPPED = re.compile(r"(^|\.)(mtp|visual|vision_tower|multi_modal_projector|vision_model)\.")
_FLOATS = ("F32", "F16", "BF16", "F64")
GROUP = 64
ROWS = 256
"""Key-value buffers grow by so many positions."""


class Header(NamedTuple):
    """What a file says of a tensor: safetensors' dtype code and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Sizes:
    """What a model is made of. blocks: MoE layer id -> bytes of one expert. trunk_bytes: As it is
    held on a GPU, floats in bfloat16. embedding_bytes: The part of it of which a token reads one
    row. state_bytes: Key-value cache and recurrent state at `context` positions."""

    model_type: str
    num_experts: int
    experts_per_token: int
    blocks: Mapping[int, int]
    trunk_bytes: int
    embedding_bytes: int
    state_bytes: int
    context: int

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return sum(self.blocks.values()) * self.num_experts

    @property
    def bytes_per_token(self) -> int:
        """Routed experts that a token needs."""
        return sum(self.blocks.values()) * self.experts_per_token


def measure_sizes(
    config: Mapping[str, Any],
    tensors: Mapping[str, Header],
    *,
    blocks: Mapping[int, int] | None = None,
    context: int = 8192,
    bits: int | None = None,
    name: str = "config.json",
) -> Sizes:
    """Sizes from a config.json and the headers of all tensors.

    Args:
        blocks: MoE layer id -> bytes of one expert, for layouts that keep them in files of their
            own. bits: As if the weights were quantised to so many bits in groups of 64.

    Raises:
        ConfigError: A key is missing. CheckpointError: There are no routed experts.
        InputError: `bits` of weights that are quantised already.
    """
    text = config.get("text_config")
    text = {**config, **(text if isinstance(text, Mapping) else {})}
    E = _integer(text, name, "num_experts", "n_routed_experts", "num_local_experts")
    K = _integer(text, name, "num_experts_per_tok")
    layers = _integer(text, name, "num_hidden_layers")
    if bits is not None and bits not in (2, 3, 4, 5, 6, 8):
        raise InputError(f"weights cannot have {bits} bits; choose 2, 3, 4, 5, 6 or 8.")
    if bits is not None and any(header.dtype == "U32" for header in tensors.values()):
        raise InputError(f"{name}: the weights are quantised already; leave --bits out.")
    trunk = embedding = 0
    experts: dict[int, int] = {}
    for tensor, header in tensors.items():
        layer = _LAYER.search(tensor)
        if _DROPPED.search(tensor) or (layer is not None and int(layer[1]) >= layers):
            continue
        if match := _EXPERT.search(tensor):
            size = header.nbytes if bits is None else _quantised(tensor, header, bits)
            experts[int(match[1])] = experts.get(int(match[1]), 0) + size
            continue
        size = _in_memory(header) if bits is None else _quantised(tensor, header, bits)
        trunk += size
        embedding += size if "embed_tokens" in tensor else 0
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    blocks = blocks or {layer: size // E for layer, size in sorted(experts.items())}
    if not blocks:
        raise CheckpointError(f"{name}: there are no routed experts to plan for.")
    return Sizes(
        model_type=str(config.get("model_type")),
        num_experts=E,
        experts_per_token=K,
        blocks=blocks,
        trunk_bytes=trunk,
        embedding_bytes=0 if tied else embedding,
        state_bytes=_state_bytes(text, layers, context, name),
        context=context,
    )


def open_sizes(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    context: int = 8192,
    bits: int | None = None,
) -> Sizes:
    """:func:`measure_sizes` of a directory, or of a hub id without downloading its weights.

    Raises:
        MoefluxError: One of its kinds; the checkpoint cannot be read.
    """
    name, path, blocks = os.fspath(model), Path(model).expanduser(), {}
    if not path.is_dir():
        config, found = remote_headers(name, revision=revision)
    else:
        config = read_json_object(path / CONFIG_NAME, error=ConfigError)
        if any(path.glob("*.safetensors")):
            index = TensorIndex.open(path)
        else:
            checkpoint = open_checkpoint(path)
            index, blocks = checkpoint.tensors, _block_bytes(checkpoint.blocks)
        if is_packed(path):
            packed = PackedExperts.open(path)
            blocks = _block_bytes({layer: packed.refs(layer) for layer in packed.layers})
        found = {tensor: (ref.dtype, ref.shape) for tensor, ref in index.items()}
    tensors = {tensor: Header(dtype, shape) for tensor, (dtype, shape) in found.items()}
    return measure_sizes(config, tensors, blocks=blocks, context=context, bits=bits, name=name)


def _block_bytes(blocks: Mapping[int, Mapping[str, ExpertRefs]]) -> dict[int, int]:
    return {
        layer: sum(refs[0].nbytes for refs in components.values())
        for layer, components in blocks.items()
    }


def _integer(config: Mapping[str, Any], name: str, *keys: str) -> int:
    for key in keys:
        if type(config.get(key)) is int and config[key] > 0:
            return config[key]
    raise ConfigError(f"{name}: '{keys[0]}' is missing or no positive integer; add it.")


def _in_memory(header: Header) -> int:
    """Floats are held in bfloat16, packed bits as they are, FP8 decoded."""
    if header.dtype in _FLOATS or header.dtype.startswith("F8"):
        return 2 * prod(header.shape)
    return header.nbytes


def _quantised(tensor: str, header: Header, bits: int) -> int:
    if tensor.endswith(("weight_scale_inv", "weight_scale")):
        return 0
    routes = tensor.endswith((".mlp.gate.weight", "shared_expert_gate.weight"))
    if len(header.shape) < 2 or header.shape[-1] % GROUP or "conv1d" in tensor:
        return _in_memory(header)
    weights = prod(header.shape)
    return weights * (8 if routes else bits) // 8 + 4 * weights // GROUP


def _state_bytes(text: Mapping[str, Any], layers: int, context: int, name: str) -> int:
    """One sequence's state after `context` positions, floats in bfloat16."""
    rows = -(-context // ROWS) * ROWS
    if text.get("kv_lora_rank"):
        latent = text["kv_lora_rank"] + _integer(text, name, "qk_rope_head_dim")
        return 2 * layers * latent * rows
    heads = _integer(text, name, "num_attention_heads")
    width = text.get("head_dim") or _integer(text, name, "hidden_size") // heads
    linear = 0
    if text.get("linear_num_value_heads"):
        interval = text.get("full_attention_interval") or 4
        kinds = text.get("layer_types") or [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(layers)
        ]
        linear = sum(kind == "linear_attention" for kind in kinds)
    kv = 2 * 2 * (text.get("num_key_value_heads") or heads) * width * rows
    return (layers - linear) * kv + (linear * _recurrent_bytes(text, name) if linear else 0)


def _recurrent_bytes(text: Mapping[str, Any], name: str) -> int:
    Hk = _integer(text, name, "linear_num_key_heads")
    Hv = _integer(text, name, "linear_num_value_heads")
    Dk = _integer(text, name, "linear_key_head_dim")
    Dv = _integer(text, name, "linear_value_head_dim")
    width = _integer(text, name, "linear_conv_kernel_dim")
    return 4 * Hv * Dv * Dk + 2 * (width - 1) * (2 * Hk * Dk + Hv * Dv)
