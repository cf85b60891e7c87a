"""An independent writer of foreign checkpoints: NumPy and the formats' descriptions, none of the
package's code. Values are computed in float64 loops or tables of their own."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np

NUMPY = {"F32": np.float32, "I32": np.int32, "U32": np.uint32, "I64": np.int64}


def bf16_bits(values) -> np.ndarray:
    """Nearest bfloat16 (ties to even), by choosing between the two neighbours in float64."""
    values = np.asarray(values, np.float32)
    low = values.view(np.uint32) >> 16
    below = (low.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    above = ((low + 1).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    up, down = np.abs(above - values), np.abs(values - below)
    take = (up < down) | ((up == down) & (low % 2 == 1))
    return (low + take).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_value(code: int) -> float:
    """Of one byte, by the definition: 1 sign, 4 exponent, 3 mantissa bits, bias 7, no infinity."""
    sign = -1.0 if code >= 128 else 1.0
    exponent, mantissa = code // 8 % 16, code % 8
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * (mantissa / 8) * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = np.array([e4m3_value(code) for code in range(256)])


def nearest(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Places in a table of the numbers that are nearest to values."""
    order = np.argsort(table, kind="stable")
    between = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(between, values)]


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """The byte of the nearest value."""
    finite = np.flatnonzero(np.isfinite(E4M3_VALUES))
    return finite[nearest(E4M3_VALUES[finite], values)].astype(np.uint8)


def fp8_blocks(weight: np.ndarray, block: tuple[int, int]):
    """Bytes, float32 scales of blocks, and what they mean: float32(value) * scale in bfloat16."""
    rows, width = weight.shape
    counts = -(-rows // block[0]), -(-width // block[1])
    codes, scales = np.zeros(weight.shape, np.uint8), np.zeros(counts, np.float32)
    meaning = np.zeros(weight.shape, np.uint16)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale = np.float32(np.abs(weight[part]).max() / 448 + 1e-6)
            scales[i, j] = scale
            codes[part] = to_e4m3(weight[part].astype(np.float64) / float(scale))
            product = E4M3_VALUES[codes[part]].astype(np.float32) * scale
            meaning[part] = bf16_bits(product)
    return codes, scales, meaning


def int4_groups(weight: np.ndarray, group: int):
    """int32 words of 8 values (lowest bits first, 8 stands for zero) and bfloat16 scales."""
    groups = weight.reshape(len(weight), -1, group).astype(np.float64)
    scales = bf16_bits(np.abs(groups).max(axis=-1) / 7 + 1e-6)
    q = np.rint(groups / bf16_values(scales).astype(np.float64)[..., None])
    q = (np.clip(q, -8, 7) + 8).astype(np.int64).reshape(len(weight), -1, 8)
    words = (q << (4 * np.arange(8))).sum(axis=-1)
    return words.astype(np.uint32).view(np.int32), scales


def read_safetensors(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            raw[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def write_safetensors(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        ends = [position, position + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def as_array(tensor) -> np.ndarray:
    """float32 of a BF16 or F32 tensor."""
    dtype, shape, data = tensor
    if dtype == "F32":
        return np.frombuffer(data, np.float32).reshape(shape)
    return bf16_values(np.frombuffer(data, np.uint16)).reshape(shape)


def entry(dtype: str, array: np.ndarray):
    return dtype, array.shape, np.ascontiguousarray(array).tobytes()


def is_quantised_by_them(name: str) -> bool:
    """Published checkpoints leave embeddings, norms, the head, routers and indexers alone."""
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")) and "indexer" not in name


def copy_config(source: Path, out: Path, **keys) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | keys
    (out / "config.json").write_text(json.dumps(config))


def write_fp8(source: Path, out: Path, block: tuple[int, int]) -> Path:
    """`source` in FP8, and in ``out / "meaning"`` the same values in bfloat16."""
    theirs, meaning = {}, {}
    for name, tensor in read_safetensors(source / "model.safetensors").items():
        theirs[name] = meaning[name] = tensor
        # DeepSeek's FP8 has the products of its indexers too, but not their weights.
        if is_quantised_by_them(name) or name.endswith((".wq_b.weight", ".wk.weight")):
            codes, scales, values = fp8_blocks(as_array(tensor), block)
            theirs[name] = entry("F8_E4M3", codes)
            theirs[f"{name}_scale_inv"] = entry("F32", scales)
            meaning[name] = entry("BF16", values)
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    copy_config(source, out / "fp8", quantization_config=quantization)
    copy_config(source, out / "meaning")
    write_safetensors(out / "fp8" / "model.safetensors", theirs)
    write_safetensors(out / "meaning" / "model.safetensors", meaning)
    return out / "fp8"


def write_int4(source: Path, out: Path, group: int) -> Path:
    """`source` in compressed-tensors' int4, and in ``out / "meaning"`` in MLX's affine form."""
    theirs, meaning = {}, {}
    for name, tensor in read_safetensors(source / "model.safetensors").items():
        if not is_quantised_by_them(name) or "layers.3." in name:
            theirs[name] = meaning[name] = tensor
            continue
        base = name.removesuffix(".weight")
        words, scales = int4_groups(as_array(tensor), group)
        theirs[f"{base}.weight_packed"] = entry("I32", words)
        theirs[f"{base}.weight_scale"] = entry("BF16", scales)
        theirs[f"{base}.weight_shape"] = entry("I64", np.array(tensor[1], np.int64))
        meaning[name] = entry("U32", words.view(np.uint32))
        meaning[f"{base}.scales"] = entry("BF16", scales)
        meaning[f"{base}.biases"] = entry("BF16", bf16_bits(-8 * bf16_values(scales)))
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "actorder": None,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    copy_config(source, out / "int4", quantization_config=quantization)
    copy_config(source, out / "meaning", quantization={"bits": 4, "group_size": group})
    write_safetensors(out / "int4" / "model.safetensors", theirs)
    write_safetensors(out / "meaning" / "model.safetensors", meaning)
    return out / "int4"


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4_groups(weight: np.ndarray, group: int, scale_of):
    """Bytes of two numbers, the first in the low half, and scales of one byte; `scale_of` maps the
    largest number of each group to its scale's byte and value. And what they mean, float64."""
    groups = weight.astype(np.float64).reshape(len(weight), -1, group)
    scales, factors = scale_of(np.abs(groups).max(axis=-1))
    wanted = groups / np.where(factors == 0, 1, factors)[..., None]
    codes = nearest(E2M1_VALUES, wanted)
    meaning = (E2M1_VALUES[codes] * factors[..., None]).reshape(weight.shape)
    codes = codes.reshape(len(weight), -1, 2).astype(np.uint8)
    return codes[..., 0] | codes[..., 1] << 4, scales, meaning


def nvfp4(weight: np.ndarray):
    """Bytes, E4M3 scales, the float32 number that multiplies all, and the meaning."""
    number = np.float32(np.abs(weight).max() / (6 * 448))

    def scale_of(largest):
        scales = to_e4m3(largest / 6 / float(number))
        return scales, E4M3_VALUES[scales] * float(number)

    codes, scales, meaning = fp4_groups(weight, 16, scale_of)
    return codes, scales, number, meaning


def mxfp4(weight: np.ndarray):
    """Bytes, E8M0 scales and the meaning."""

    def scale_of(largest):
        exponents = np.ceil(np.log2(np.maximum(largest, 1e-30) / 6))
        return (exponents + 127).astype(np.uint8), 2.0**exponents

    return fp4_groups(weight, 32, scale_of)


COMPRESSED_FP4 = {
    "nvfp4-pack-quantized": ("tensor_group", 16),
    "mxfp4-pack-quantized": ("group", 32),
}


def quark(**weights) -> dict:
    """The settings of AMD's MXFP4 checkpoints; `weights` replaces some of the default's."""
    numbers = {
        "ch_axis": -1, "dtype": "fp4", "group_size": 32, "is_dynamic": False,
        "is_scale_quant": False, "mx_element_dtype": None, "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group", "round_method": "half_even", "scale_calculation_mode": "even",
        "scale_format": "e8m0", "scale_type": "float", "symmetric": None,
    }  # fmt: skip
    default = {
        "bias": None, "output_tensors": None, "target_device": None,
        "input_tensors": numbers | {"is_dynamic": True}, "weight": numbers | weights,
    }  # fmt: skip
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
              "weight_format": "real_quantized", "weight_merge_groups": None}  # fmt: skip
    return {
        "algo_config": None, "exclude": ["lm_head", "re:.*mlp.gate$", "re:.*indexer.*"],
        "export": export, "global_quant_config": default, "kv_cache_post_rope": False,
        "kv_cache_quant_config": {}, "layer_quant_config": {}, "layer_type_quant_config": {},
        "quant_method": "quark", "quant_mode": "eager_mode", "softmax_quant_spec": None,
        "version": "0.11",
    }  # fmt: skip


def write_fp4(source: Path, out: Path, form: str) -> Path:
    """`source` as ModelOpt ("modelopt", its settings in hf_quant_config.json), Quark ("quark") or a
    format of compressed-tensors writes it; in ``out / "meaning"`` the same values in float32."""
    theirs, meaning = {}, {}
    for name, tensor in read_safetensors(source / "model.safetensors").items():
        theirs[name] = meaning[name] = tensor
        if not (is_quantised_by_them(name) or re.search(r"experts\.\d+\.w\d\.weight$", name)):
            continue
        base, weight = name.removesuffix(".weight"), as_array(theirs.pop(name))
        packed, number = name if form in ("modelopt", "quark") else f"{base}.weight_packed", None
        if form in ("quark", "mxfp4-pack-quantized"):
            codes, scales, values = mxfp4(weight)
            theirs[f"{base}.weight_scale"] = entry("U8", scales)
        else:
            codes, scales, number, values = nvfp4(weight)
            theirs[f"{base}.weight_scale"] = entry("F8_E4M3", scales)
        theirs[packed] = entry("U8", codes)
        if form == "modelopt":
            theirs[f"{base}.weight_scale_2"] = entry("F32", np.array(number))
            theirs[f"{base}.input_scale"] = entry("F32", np.array(7e-3, np.float32))
        elif number is not None:
            inverse = np.float32(1 / float(number))
            values *= 1 / float(inverse) / float(number)
            theirs[f"{base}.weight_global_scale"] = entry("F32", np.array([inverse]))
            theirs[f"{base}.input_global_scale"] = entry("F32", np.array([77], np.float32))
        if base.endswith(".k_proj"):
            theirs[f"{base}.k_scale"] = entry("F32", np.array(0.5, np.float32))
        meaning[name] = entry("F32", values.astype(np.float32))
    path = out / form
    copy_config(source, out / "meaning")
    if form == "modelopt":
        copy_config(source, path)
        settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
        settings |= {"exclude_modules": ["lm_head", "*.mlp.gate"]}
        content = {"producer": {"name": "modelopt", "version": "0.39"}, "quantization": settings}
        (path / "hf_quant_config.json").write_text(json.dumps(content))
    elif form == "quark":
        copy_config(source, path, quantization_config=quark())
    else:
        strategy, group = COMPRESSED_FP4[form]
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy}
        weights |= {"group_size": group, "actorder": None, "dynamic": False}
        groups = {"group_0": {"format": form, "targets": ["Linear"], "weights": weights}}
        method = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
        copy_config(source, path, quantization_config=method | {"transform_config": {}})
    write_safetensors(path / "model.safetensors", theirs)
    write_safetensors(out / "meaning" / "model.safetensors", meaning)
    return path
