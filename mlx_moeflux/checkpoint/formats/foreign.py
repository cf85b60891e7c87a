"""Other libraries' quantised tensors under the names and in the form of this package.

    X.weight F8_E4M3 + X.weight_scale_inv          -> X.weight BF16         (DeepSeek's FP8)
    X.weight_packed I32 + X.weight_scale           -> X.weight U32 + X.scales + X.biases
        (+ X.weight_shape)                            (compressed-tensors, symmetric int4)
    X.weight_packed U8 + X.weight_scale U8         -> X.weight U32 + X.scales
                                                      (compressed-tensors, MXFP4)
    X.weight_packed U8 + X.weight_scale F8_E4M3    -> X.weight U32 + X.scales + X.global_scale
        + X.weight_global_scale                       (compressed-tensors, NVFP4; it divides)
    X.weight U8 + X.weight_scale U8                -> X.weight U32 + X.scales  (AMD Quark, MXFP4)
    X.weight U8 + X.weight_scale F8_E4M3           -> X.weight U32 + X.scales + X.global_scale
        + X.weight_scale_2                            (NVIDIA ModelOpt, NVFP4; it multiplies)
    X_blocks U8 [..., groups, 16] + X_scales U8    -> X.weight U32 + X.scales    (gpt-oss's MXFP4)

Scales of inputs, keys and values are left out: these stay floats here. Nothing is read. The first
two and global scales are decoded where they are read; the others have MLX's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

from mlx_moeflux.checkpoint.formats.decoded import BlockScaledRef, GlobalScaleRef, ScaledRef
from mlx_moeflux.checkpoint.names import GLOBAL_SCALE
from mlx_moeflux.checkpoint.tensors import Ref, TensorRef
from mlx_moeflux.checks import is_positive
from mlx_moeflux.errors import CheckpointError, ConfigError, UnsupportedError

DEFAULT_BLOCK = (128, 128)
# DeepSeek's and MiniMax's name of the same format.
E4M3 = ("e4m3", "float8_e4m3fn")
BLOCKS, SCALES = "_blocks", "_scales"
SCALE_DTYPES = ("F32", "BF16")
FLOAT_CODES = ("F32", "F16", "BF16")
# Scales of weights, found through them; those of inputs, keys and values; and other methods'.
_OF_WEIGHTS = ("weight_scale", "weight_shape", "weight_scale_2", "weight_global_scale")
_OF_INPUTS = ("input_scale", "input_global_scale", "q_scale", "k_scale", "v_scale")
_REFUSED = dict.fromkeys(
    ("weight_zero_point", "weight_g_idx"), "an asymmetric or reordered quantisation"
) | {
    "qweight": "AWQ or GPTQ",
    "pre_quant_scale": "AWQ (NVFP4_AWQ or W4A8_AWQ of ModelOpt)",
    "tq_packed": "JANGTQ (of jang_tools, which vMLX runs)",
}
_OF_ADAPTER = re.compile(r"\.lora_[abAB](\.|$)")
# q of 4 bits stands for q - 8.
INT4_ZERO = 8
# Format of compressed-tensors -> what its groups must say of weights.
_PACKS = {
    "pack-quantized": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"},
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32},
}
# What Quark's settings of quantised weights must say.
_QUARK = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "ch_axis": -1,
    "is_dynamic": False,
}


def in_our_form(
    tensors: Mapping[str, TensorRef], block: tuple[int, int] = DEFAULT_BLOCK
) -> Mapping[str, TensorRef]:
    """The tensors of a checkpoint with foreign ones translated; the same mapping if there are none.

    block: Rows and columns that share a scale in FP8.

    Raises:
        CheckpointError: A tensor lacks the one that belongs to it, or their shapes do not fit.
        UnsupportedError: A form that is not decoded here.
    """
    if not any(_is_foreign(name, ref) for name, ref in tensors.items()):
        return tensors
    refuse_undecoded(tensors)
    ours: dict[str, Ref] = {}
    for name, ref in tensors.items():
        base, _, leaf = name.rpartition(".")
        if leaf in _OF_INPUTS:
            continue
        if name.endswith("_scale_inv"):
            _partner(tensors, name, name.removesuffix("_scale_inv"))
        elif leaf in _OF_WEIGHTS:
            packed = f"{base}.weight_packed"
            _partner(tensors, name, packed if packed in tensors else f"{base}.weight")
        elif leaf == "weight_packed":
            packs = _fp4 if ref.dtype == "U8" else _int4
            ours |= packs(base, ref, tensors)
        elif leaf == "weight" and ref.dtype == "U8" and f"{base}.weight_scale" in tensors:
            ours |= _fp4(base, ref, tensors)
        elif ref.dtype.startswith("F8"):
            ours[name] = _fp8(name, ref, tensors, block)
        elif name.endswith(BLOCKS):
            ours |= _mxfp4(name.removesuffix(BLOCKS), ref, tensors)
        elif name.endswith(SCALES) and f"{name.removesuffix(SCALES)}{BLOCKS}" in tensors:
            continue
        else:
            ours[name] = ref
    # Readers ask for what both kinds of reference have.
    return cast("dict[str, TensorRef]", ours)


def refuse_adapter(place: Path | str, names: Collection[str]) -> None:
    """Raise CheckpointError if the files of a place without config.json are an adapter's."""
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{place} holds an adapter (adapter_config.json) and no model; merge it into its base"
            " model with mlx_lm.fuse, or pass the base model."
        )


def refuse_undecoded(tensors: Mapping[str, TensorRef]) -> None:
    """Raise UnsupportedError, which names the method, for tensors of one that is not decoded, and
    CheckpointError for those of an adapter."""
    for name, ref in tensors.items():
        leaf = name.rpartition(".")[2]
        if leaf in _REFUSED:
            raise UnsupportedError(
                f"{ref.file}: '{name}' belongs to {_REFUSED[leaf]}, which is not decoded here; use "
                "a checkpoint in bf16, in FP8, in NVFP4 or one quantised by mlx-lm."
            )
        if _OF_ADAPTER.search(name):
            raise CheckpointError(
                f"{ref.file}: '{name}' belongs to an adapter, which is no model; merge it into its "
                "base model with mlx_lm.fuse, or pass the base model."
            )


def _is_foreign(name: str, ref: TensorRef) -> bool:
    known = name.endswith(("_scale_inv", ".weight_packed", ".weight_scale", BLOCKS))
    return known or ref.dtype.startswith("F8") or name.rpartition(".")[2] in _REFUSED


def _partner(tensors: Mapping[str, TensorRef], name: str, wanted: str) -> TensorRef:
    if wanted not in tensors:
        raise CheckpointError(
            f"{tensors[name].file}: '{name}' is there without '{wanted}'; fetch the shard that "
            "holds it."
        )
    return tensors[wanted]


def _fp8(
    name: str, weight: TensorRef, tensors: Mapping[str, TensorRef], block: tuple[int, int]
) -> BlockScaledRef:
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise UnsupportedError(
            f"{weight.file}: '{name}' is {weight.dtype} {list(weight.shape)}; of FP8 only "
            "matrices in E4M3 are decoded."
        )
    if f"{name}_scale" in tensors:
        raise UnsupportedError(
            f"{weight.file}: '{name}' is FP8 with one scale for a whole tensor or row, which is "
            "not decoded; use a checkpoint in bf16, in NVFP4 or in FP8 with blocks."
        )
    scales = _partner(tensors, name, f"{name}_scale_inv")
    wanted = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    if scales.shape != wanted or scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{scales.file}: '{scales.name}' is {scales.dtype} {list(scales.shape)}, but "
            f"'{name}' {list(weight.shape)} in blocks of {list(block)} needs {list(wanted)} in "
            f"{' or '.join(SCALE_DTYPES)}."
        )
    return BlockScaledRef(name, weight, scales, block=block)


def _int4(base: str, packed: TensorRef, tensors: Mapping[str, TensorRef]) -> dict[str, Ref]:
    scales = _partner(tensors, f"{base}.weight_packed", f"{base}.weight_scale")
    fits = packed.dtype in ("I32", "U32") and len(packed.shape) == len(scales.shape) == 2
    if not fits or packed.shape[0] != scales.shape[0] or not scales.shape[1]:
        raise CheckpointError(
            f"{packed.file}: '{packed.name}' {packed.dtype} {list(packed.shape)} with "
            f"'{scales.name}' {scales.dtype} {list(scales.shape)} is no int4 matrix in groups."
        )
    weight = TensorRef(f"{base}.weight", packed.file, packed.offset, "U32", packed.shape)
    return {
        f"{base}.weight": weight,
        f"{base}.scales": scales,
        f"{base}.biases": ScaledRef(f"{base}.biases", scales, -float(INT4_ZERO)),
    }


def _fp4(base: str, packed: TensorRef, tensors: Mapping[str, TensorRef]) -> dict[str, Ref]:
    """Two numbers in a byte, the first in its low half, and a scale of one byte for each group of a
    row, as MLX packs them."""
    scales = _partner(tensors, packed.name, f"{base}.weight_scale")
    group = {"F8_E4M3": 16, "U8": 32, "F8_E8M0": 32}.get(scales.dtype, 0)
    rows, half = packed.shape if len(packed.shape) == 2 else (0, 1)
    if packed.dtype != "U8" or not group or half % 4 or scales.shape != (rows, 2 * half // group):
        raise CheckpointError(
            f"{packed.file}: '{packed.name}' {packed.dtype} {list(packed.shape)} with "
            f"'{scales.name}' {scales.dtype} {list(scales.shape)} is no matrix in NVFP4 or MXFP4."
        )
    weight = TensorRef(f"{base}.weight", packed.file, packed.offset, "U32", (rows, half // 4))
    found: dict[str, Ref] = {
        f"{base}.weight": weight,
        f"{base}.scales": replace(scales, name=f"{base}.scales", dtype="U8"),
    }
    if group == 16:
        divides = packed.name.endswith("_packed")
        leaf = "weight_global_scale" if divides else "weight_scale_2"
        number = _partner(tensors, packed.name, f"{base}.{leaf}")
        if number.dtype not in FLOAT_CODES or prod(number.shape) != 1:
            raise CheckpointError(
                f"{number.file}: '{number.name}' is {number.dtype} {list(number.shape)}, but must "
                "be one number."
            )
        name = f"{base}.{GLOBAL_SCALE}"
        found[name] = GlobalScaleRef(name, number, inverse=divides)
    return found


def _mxfp4(base: str, blocks: TensorRef, tensors: Mapping[str, TensorRef]) -> dict[str, Ref]:
    """Blocks of 32 numbers in 16 bytes, the first in the low half of a byte, as MLX packs them."""
    scales = _partner(tensors, blocks.name, f"{base}{SCALES}")
    *rows, groups, size = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
    if (blocks.dtype, scales.dtype, size) != ("U8", "U8", 16) or scales.shape != (*rows, groups):
        raise CheckpointError(
            f"{blocks.file}: '{blocks.name}' {blocks.dtype} {list(blocks.shape)} with "
            f"'{scales.name}' {scales.dtype} {list(scales.shape)} is no MXFP4 in blocks of 16 "
            "bytes with a scale of one byte each."
        )
    shape = (*rows, groups * size // 4)
    return {
        f"{base}.weight": TensorRef(f"{base}.weight", blocks.file, blocks.offset, "U32", shape),
        f"{base}.scales": replace(scales, name=f"{base}.scales"),
    }


def check_fp8(block: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block, from the ``quantization_config`` of an FP8 checkpoint.

    Raises:
        UnsupportedError: Another number format, or no blocks.
        ConfigError: The block is no pair of sizes.
    """
    if block.get("fmt", "e4m3") not in E4M3:
        raise UnsupportedError(
            f"quantization_config of config.json has fmt {block['fmt']!r}; only 'e4m3' is decoded."
        )
    size = block.get("weight_block_size", list(DEFAULT_BLOCK))
    if size is None:
        raise UnsupportedError(
            "quantization_config of config.json has no weight_block_size; FP8 with one scale for "
            "a whole tensor is not decoded."
        )
    pair = isinstance(size, (list, tuple)) and len(size) == 2
    if not pair or not all(map(is_positive, size)):
        raise ConfigError(
            f"weight_block_size of config.json is {size!r}, but must be two positive integers."
        )
    rows, columns = size
    return rows, columns


def check_compressed_tensors(block: Mapping[str, object]) -> None:
    """See that the ``quantization_config`` of compressed-tensors means symmetric int4 in groups,
    NVFP4 or MXFP4.

    Raises:
        UnsupportedError: It means something else.
    """
    form, groups = block.get("format", "pack-quantized"), block.get("config_groups")
    known = _PACKS.get(form) if isinstance(form, str) else None
    if known is None or not isinstance(groups, Mapping) or not groups:
        raise UnsupportedError(
            f"quantization_config of config.json: the format {form!r} of compressed-tensors is not "
            f"decoded, only {', '.join(map(repr, _PACKS))} with config_groups are."
        )
    if block.get("transform_config"):
        raise UnsupportedError(
            "quantization_config of config.json has a transform_config: rotated weights of "
            "compressed-tensors are not decoded."
        )
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        for key, wanted in known.items():
            if weights.get(key, wanted) != wanted:
                raise UnsupportedError(
                    f"quantization_config of config.json: {name} has {key} {weights[key]!r}; only "
                    f"{wanted!r} is decoded."
                )
        if weights.get("actorder") not in (None, "weight"):
            raise UnsupportedError(
                f"quantization_config of config.json: {name} has actorder "
                f"{weights['actorder']!r}; only columns in order are decoded."
            )


def check_modelopt(block: Mapping[str, object]) -> None:
    """See that the ``quantization_config`` of NVIDIA ModelOpt means NVFP4, as does its
    ``hf_quant_config.json``, which nests the settings.

    Raises:
        UnsupportedError: It means something else.
    """
    nested = block.get("quantization", block)
    found = nested.get("quant_algo") if isinstance(nested, Mapping) else None
    if found not in (None, "NVFP4"):
        raise UnsupportedError(
            f"quantization_config of config.json or hf_quant_config.json has quant_algo {found!r} "
            "of ModelOpt; only 'NVFP4' is decoded."
        )


def check_quark(block: Mapping[str, object]) -> None:
    """See that the ``quantization_config`` of AMD Quark means MXFP4, by default and in layers with
    settings of their own; what it excludes is stored as floats.

    Source: vLLM's `quark.py` and `quark_ocp_mx.py`; the order of two numbers in a byte is that of
    its `tests/quantization/reference_mxfp4.py`.

    Raises:
        UnsupportedError: It means something else.
    """
    default = block.get("global_quant_config")
    weights = default.get("weight") if isinstance(default, Mapping) else None
    found = [("global_quant_config", weights)]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        layers = block.get(key)
        for name, layer in layers.items() if isinstance(layers, Mapping) else ():
            own = layer.get("weight") if isinstance(layer, Mapping) else None
            found += [(f"{key} of {name[:80]!r}", own)] if own is not None else []
    for name, weights in found:
        settings = weights if isinstance(weights, Mapping) else {}
        for key, wanted in _QUARK.items():
            if (value := settings.get(key, wanted if settings else None)) != wanted:
                raise UnsupportedError(
                    f"quantization_config of config.json: {name} of Quark has {key} {value!r} of "
                    f"weights; only MXFP4 is decoded, which has {wanted!r}."
                )
    steps = block.get("algo_config")
    for step in steps if isinstance(steps, list) else [steps]:
        name = step.get("name") if isinstance(step, Mapping) else None
        if isinstance(name, str) and ("rot" in name):
            raise UnsupportedError(
                f"quantization_config of config.json: algo_config of Quark has {name[:80]!r}; "
                "rotated weights are not decoded."
            )
