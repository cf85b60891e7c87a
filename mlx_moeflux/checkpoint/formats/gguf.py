"""GGUF files of Qwen3-MoE: metadata as config.json, tensors under Hugging Face's names.

Read with the `gguf` package (extra: gguf). Experts stream as byte ranges of the file. Where they
are read, blocks become MLX's affine form: element = q * scale + bias in groups of 32.

    Q8_0  32 elements: f16 d, int8 q                       8 bits  scale d, bias -128 d
    Q4_K  256: f16 d, f16 m, 8 pairs of 6 bits, 4-bit q    4 bits  scale d s, bias -m t
    Q5_K  256: the same and a fifth bit apart              5 bits
    Q6_K  256: 6-bit q, int8 scale for each 16, f16 d      8 bits, quantised anew

The first three are exact: scales and biases are products of few bits, kept in float32. Groups of
16 do not exist in MLX: Q6_K is quantised anew, with an error of at most half a 255th of the range
of 32 elements.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlx_moeflux.checkpoint.files import opened
from mlx_moeflux.checkpoint.formats.decoded import DecodedRef, row_chunks
from mlx_moeflux.checkpoint.formats.gguf_files import check_shards, shards
from mlx_moeflux.checkpoint.names import PARTS, PROJECTIONS, in_block_order
from mlx_moeflux.checkpoint.tensors import ExpertRefs, StackedRefs, TensorRef
from mlx_moeflux.checks import is_shape
from mlx_moeflux.errors import CheckpointError, ConfigError, UnsupportedError

GROUP = 32
# Decoded together: float32 values of Q6_K, codes, words that are packed.
ELEMENTS_AT_ONCE = 1 << 15
SCRATCH_PER_ELEMENT = 32

Affine = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class BlockKind:
    """One type of block.

    elements, nbytes: Of a block.
    bits: Of the affine form.
    codes: blocks ``[n, nbytes]`` uint8 -> q ``[n, elements]`` uint8.
    affine: blocks -> scales and biases ``[n, elements / 32]`` float32.
    exact: Whether nothing is lost.
    """

    name: str
    elements: int
    nbytes: int
    bits: int
    codes: Callable[[np.ndarray], np.ndarray]
    affine: Callable[[np.ndarray], Affine]
    exact: bool = True


class BlocksRef(DecodedRef):
    """One part of the affine form of a matrix whose rows are blocks.

    source: ``[R, bytes of a row]`` U8. part: ``weight`` (U32), ``scales`` or ``biases`` (F32).
    """

    __slots__ = ("kind", "part", "width")

    def __init__(self, name: str, source: TensorRef, *, kind: BlockKind, part: str) -> None:
        rows, row_bytes = source.shape
        if row_bytes % kind.nbytes:
            raise CheckpointError(
                f"{source.file}: a row of '{name}' has {row_bytes} bytes, no whole blocks of "
                f"{kind.name}."
            )
        self.kind, self.part = kind, part
        self.width = row_bytes // kind.nbytes * kind.elements
        columns = self.width * kind.bits // 32 if part == "weight" else self.width // GROUP
        dtype = "U32" if part == "weight" else "F32"
        super().__init__(f"{name}.{part}", (source,), dtype=dtype, shape=(rows, columns))

    @classmethod
    def parts(cls, name: str, source: TensorRef, kind: BlockKind) -> dict[str, TensorRef]:
        """All three of one matrix, by part."""
        parts = {part: cls(name, source, kind=kind, part=part) for part in PARTS}
        # Readers ask for what both kinds of reference have.
        return cast("dict[str, TensorRef]", parts)

    def rows(self, start: int, stop: int) -> BlocksRef:
        """See :meth:`DecodedRef.rows`."""
        self._check_rows(start, stop)
        name = f"{self.name.removesuffix(f'.{self.part}')}[{start}:{stop}]"
        return BlocksRef(name, self.sources[0].rows(start, stop), kind=self.kind, part=self.part)

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        rows, kind = self.shape[0], self.kind
        blocks = raw[0].reshape(rows, -1, kind.nbytes)
        out = out.reshape(rows, -1)
        for start, stop in row_chunks(rows, ELEMENTS_AT_ONCE // self.width):
            some = blocks[start:stop].reshape(-1, kind.nbytes)
            if self.part == "weight":
                out[start:stop] = pack(kind.codes(some), kind.bits).reshape(stop - start, -1)
            else:
                values = np.ascontiguousarray(kind.affine(some)[self.part == "biases"])
                out[start:stop] = values.view(np.uint8).reshape(stop - start, -1)

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`."""
        elements = min(self.shape[0] * self.width, ELEMENTS_AT_ONCE + self.width)
        return SCRATCH_PER_ELEMENT * elements


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """q ``[n, elements]`` uint8 -> MLX's bytes ``[n, elements * bits / 8]``, low bits first."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    # Eight elements fill `bits` bytes.
    eight = codes.reshape(len(codes), -1, 8).astype(np.uint64)
    words = (eight << (np.uint64(bits) * np.arange(8, dtype=np.uint64))).sum(axis=-1)
    return words.astype("<u8")[..., None].view(np.uint8)[..., :bits].reshape(len(codes), -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 ``[n, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _q8_codes(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:] ^ 0x80


def _q8_affine(blocks: np.ndarray) -> Affine:
    d = _half(blocks, 0)
    return d, -128 * d


def _k_affine(blocks: np.ndarray) -> Affine:
    """Scales and minima have six bits. Of the 12 bytes behind the two halves, eight hold four of
    each in their low six bits; of the other four the low halves, then the high ones on top."""
    low, high, both = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([low & 63, both & 15 | (low >> 6) << 4], axis=1)
    minima = np.concatenate([high & 63, both >> 4 | (high >> 6) << 4], axis=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """Stretches of 32 bytes ``[n, 128]``: their low nibbles are 32 elements, their high ones the
    next 32."""
    stretch = stored.reshape(len(stored), -1, 1, 32)
    return np.concatenate([stretch & 15, stretch >> 4], axis=2).reshape(len(stored), -1)


def _q4_codes(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks[:, 16:])


def _q5_codes(blocks: np.ndarray) -> np.ndarray:
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _nibbles(blocks[:, 48:]) | fifth.reshape(len(blocks), -1) << 4


def q6_values(blocks: np.ndarray) -> np.ndarray:
    """Blocks of Q6_K ``[n, 210]`` -> elements ``[n, 256]`` float32."""
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 2, 32)  # halves of 128 elements, two stretches of bytes
    high = blocks[:, 128:192].reshape(n, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    pairs = high >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    q = (nibbles | pairs << 4).reshape(n, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[..., None].astype(np.float32) * q


def _q6_affine(blocks: np.ndarray) -> Affine:
    groups = q6_values(blocks).reshape(len(blocks), -1, GROUP)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    return ((high - low) / np.float32(255)).astype(np.float32), low


def _q6_codes(blocks: np.ndarray) -> np.ndarray:
    scales, biases = _q6_affine(blocks)
    groups = q6_values(blocks).reshape(len(blocks), -1, GROUP)
    steps = np.where(scales == 0, np.float32(1), scales)[..., None]
    q = np.rint((groups - biases[..., None]) / steps)
    return np.clip(q, 0, 255).astype(np.uint8).reshape(len(blocks), -1)


KINDS = {
    "Q8_0": BlockKind("Q8_0", 32, 34, 8, _q8_codes, _q8_affine),
    "Q4_K": BlockKind("Q4_K", 256, 144, 4, _q4_codes, _k_affine),
    "Q5_K": BlockKind("Q5_K", 256, 176, 5, _q5_codes, _k_affine),
    "Q6_K": BlockKind("Q6_K", 256, 210, 8, _q6_codes, _q6_affine, exact=False),
}
"""By GGUF's name."""


ARCHITECTURE = "qwen3moe"
# Of a header: Qwen3 has 150,000 tokens, and as many types and merges.
MOST_VALUES = 700_000
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
_EXPERTS = {f"ffn_{p.removesuffix('_proj')}_exps": p for p in PROJECTIONS}
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
    """The content of a file or of all its shards.

    config: As config.json.
    tensors: The trunk.
    blocks: MoE layer id -> component -> references.
    metadata: Of the first shard, strings and numbers.
    requantised: Names of tensors that are quantised anew, with their type.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorRef]
    blocks: dict[int, dict[str, ExpertRefs]]
    metadata: dict[str, Any]
    requantised: dict[str, str] = field(default_factory=dict)


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of `path` and of the shards beside it; no tensor.

    Raises:
        CheckpointError: A file is damaged or missing, or a tensor is not the model's.
        UnsupportedError: Another architecture, or a type of block that is not decoded.
    """
    files = shards(path)
    readers = [(file, _reader(file)) for file in files]
    headers = [_metadata(reader, file) for file, reader in readers]
    check_shards(files, headers)
    metadata = headers[0]
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
    found.blocks = in_block_order(found.blocks)
    found.config = _config(found, path)
    return found


def gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values of a file's header."""
    return _metadata(_reader(path), path)


def _reader(file: Path):
    try:
        reader = _bounded_reader()
    except ImportError as error:
        raise UnsupportedError(
            f"{file} needs the gguf package; pip install 'mlx_moeflux[gguf]'."
        ) from error
    with opened(file):
        pass  # a regular file
    try:
        return reader(file)
    except (
        OSError, ValueError, LookupError, OverflowError, MemoryError, TypeError, RecursionError
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file} is damaged, truncated or no GGUF file ({reason}); download it again."
        ) from error


def _bounded_reader() -> Any:
    """Return gguf's reader, which alone would go on behind the end of a file, with an end.

    Raises:
        ImportError: The package gguf is missing.
    """
    from gguf import GGUFReader, GGUFValueType

    class Bounded(GGUFReader):
        read_values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, **options)
            if len(found) < count:
                raise ValueError("the file ends early")
            return found

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            array = raw_type == GGUFValueType.ARRAY
            coming = int(self._get(orig_offs + 4, np.uint64)[0]) if array else 0
            self.read_values += 1
            if self.read_values + coming > MOST_VALUES:
                raise ValueError(f"the header has more than {MOST_VALUES} values")
            return super()._get_field_parts(orig_offs, raw_type)

    return Bounded


def _metadata(reader, path: Path) -> dict[str, Any]:
    try:
        return {name: f.contents() for name, f in reader.fields.items() if "." in name}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be read ({error}).") from error


def _take(found: GgufFile, tensor, file: Path) -> None:
    """Put one tensor of a file where it belongs."""
    match = re.fullmatch(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)", tensor.name)
    if match is None or match[2] not in _NAMES | _EXPERTS:
        raise CheckpointError(f"{file}: the tensor '{tensor.name}' is none of Qwen3-MoE's.")
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    shape = [int(n) for n in reversed(tensor.shape)]
    if not is_shape(shape):
        raise CheckpointError(f"{file}: '{tensor.name}' has {len(shape)} axes; download it again.")
    shape = tuple(shape)
    kind = tensor.tensor_type.name
    if kind not in PLAIN and kind not in KINDS:
        raise UnsupportedError(
            f"{file}: '{tensor.name}' is {kind}; only {', '.join([*KINDS, *PLAIN])} are decoded."
        )
    if kind in KINDS and not KINDS[kind].exact:
        found.requantised[tensor.name] = kind
    stored = shape
    if kind in KINDS:
        stored = (*shape[:-1], shape[-1] // KINDS[kind].elements * KINDS[kind].nbytes)
    raw = TensorRef(tensor.name, file, int(tensor.data_offset), PLAIN.get(kind, "U8"), stored)
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
    elif len(raw.shape) != 2:
        raise CheckpointError(
            f"{file}: '{tensor.name}' has shape {list(shape)}, no matrix's; download it again."
        )
    else:
        parts = BlocksRef.parts(name, raw, KINDS[kind])
        found.tensors |= {f"{name}.{part}": ref for part, ref in parts.items()}


def _take_experts(found: GgufFile, layer: int, projection: str, raw: TensorRef, kind: str) -> None:
    if len(raw.shape) != 3 or not raw.shape[0]:
        raise CheckpointError(f"{raw.file}: '{raw.name}' has shape {list(raw.shape)}, not three.")
    components = found.blocks.setdefault(layer, {})
    stacked = StackedRefs(raw)
    if kind in PLAIN:
        components[f"{projection}.weight"] = stacked
        return
    experts = [BlocksRef.parts(raw.name, ref, KINDS[kind]) for ref in stacked]
    for part in PARTS:
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
        if type(value) not in (int, float):
            raise ConfigError(f"{path}: '{ARCHITECTURE}.{theirs}' is {value!r}; expected a number.")
        config[key] = value
    layers, tensors = config["num_hidden_layers"], len(found.tensors)
    if type(layers) is not int or layers > tensors:
        raise ConfigError(
            f"{path}: '{ARCHITECTURE}.block_count' is {layers}, but the file has {tensors} tensors "
            "besides experts; download it again."
        )
    _check_rotated(found.metadata, config["head_dim"], path)
    config["rope_scaling"] = _rope_scaling(found.metadata, path)
    for row in ("weight", "scales"):
        if f"model.embed_tokens.{row}" in found.tensors:
            config["vocab_size"] = found.tensors[f"model.embed_tokens.{row}"].shape[0]
    if "vocab_size" not in config:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight'.")
    dense = sorted(set(range(config["num_hidden_layers"])) - set(found.blocks))
    return config | {
        "mlp_only_layers": dense,
        # llama.cpp divides by the sum in this architecture and ignores the file.
        "norm_topk_prob": True,
        "tie_word_embeddings": "lm_head.weight" not in found.tensors,
        "eos_token_id": end_ids(found.metadata),
    }


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end a reply: the ends of the text, of a turn and of a message.

    llama.cpp, which wrote the file, ignores ids that are not in the vocabulary.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else MOST_VALUES
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for i in found if type(i) is int and 0 <= i < size))


def _check_rotated(metadata: dict[str, Any], head_dim: Any, path: Path) -> None:
    key = f"{ARCHITECTURE}.rope.dimension_count"
    if key in metadata and metadata[key] != head_dim:
        raise UnsupportedError(
            f"{path}: '{key}' is {metadata[key]!r}; only all {head_dim} dimensions of a head are "
            "rotated."
        )


# GGUF's keys of the group rope.scaling -> config.json's.
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _rope_scaling(metadata: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of config.json, None for a plain rope.

    Defaults and the attention factor are llama.cpp's: YaRN's own factor times two of the file.

    Raises:
        ConfigError: A value is no number.
        UnsupportedError: The scaling is another than YaRN's.
    """
    group = f"{ARCHITECTURE}.rope.scaling."
    found = {k.removeprefix(group): v for k, v in metadata.items() if k.startswith(group)}
    factor = found.setdefault("factor", metadata.get(f"{ARCHITECTURE}.rope.scale_linear", 1.0))
    kind = found.pop("type", "linear")
    found.pop("finetuned", None)
    for key, value in found.items():
        if type(value) not in (int, float):
            raise ConfigError(f"{path}: '{group}{key}' is {value!r}; expected a number.")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind != "yarn":
        raise UnsupportedError(f"{path}: '{group}type' is {kind!r}; only 'yarn' is computed.")
    attention = found.pop("attn_factor", 1.0) * found.pop("yarn_attn_factor", 1.0)
    if (extrapolation := found.pop("yarn_ext_factor", 1.0)) not in (1, -1):
        raise UnsupportedError(
            f"{path}: '{group}yarn_ext_factor' is {extrapolation}; only 1 is computed."
        )
    if unknown := [key for key, value in found.items() if key not in _SCALING and value]:
        raise UnsupportedError(f"{path}: nothing here computes '{group}{unknown[0]}'.")
    scaling = {ours: found[theirs] for theirs, ours in _SCALING.items() if theirs in found}
    scaling["rope_type"] = kind
    if attention != 1:
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(max(factor, 1)))
    return scaling
