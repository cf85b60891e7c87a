"""Oracles: an independent NumPy writer of FP8 and int4 files, and mx.from_fp8; a checkpoint in a
foreign form must mean, bit for bit, the same as its values in a form of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.formats.decoded import E4M3, BlockScaledRef
from mlx_moeflux.checkpoint.quantization import Quantization
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, ConfigError, MoefluxError, UnsupportedError
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.plan import open_sizes
from tests.checkpoint import foreign

TWIN = Path(__file__).parents[1] / "golden" / "deepseek_v3_yarn40"
SPARSE = TWIN.with_name("deepseek_v32_yarn40")


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16))


def logits(directory: Path, **options) -> np.ndarray:
    tokens = mx.array(np.random.default_rng(0).integers(0, 81, (2, 11)))
    with load_model(directory, **options) as model:
        result = np.array(model(tokens))
    assert np.isfinite(result).all()
    return result


def test_all_values_of_e4m3():
    theirs = np.array(mx.from_fp8(mx.arange(256).astype(mx.uint8), dtype=mx.float32))
    defined = foreign.E4M3_VALUES.astype(np.float32)
    assert np.array_equal(E4M3, defined, equal_nan=True)
    assert np.isnan(defined).sum() == 2
    finite = np.isfinite(defined)
    assert np.array_equal(E4M3[finite], theirs[finite])


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 129), (257, 1)])
def test_fp8_blocks_of_128(tmp_path, shape):
    random = np.random.default_rng(shape[0])
    weight = random.standard_normal(shape) * 10.0 ** random.integers(-6, 3, shape)
    codes, scales, meaning = foreign.fp8_blocks(weight.astype(np.float32), (128, 128))
    (tmp_path / "x").write_bytes(codes.tobytes() + scales.tobytes())
    ref = BlockScaledRef(
        "x",
        TensorRef("x", tmp_path / "x", 0, "F8_E4M3", shape),
        TensorRef("s", tmp_path / "x", codes.size, "F32", scales.shape),
        block=(128, 128),
    )
    assert np.array_equal(bits(ref.load()), meaning)
    # Any rows, and rows of rows, whatever blocks they cut.
    for start, stop in ((0, 1), (100, 130), (127, 129), (200, 300), (5, 5), (0, shape[0])):
        if stop <= shape[0]:
            part = ref.rows(start, stop)
            assert np.array_equal(bits(part.load()), meaning[start:stop])
            if stop - start > 2:
                assert np.array_equal(bits(part.rows(1, 2).load()), meaning[start + 1 : start + 2])
    with pytest.raises(IndexError):
        ref.rows(0, shape[0] + 1)


def test_scales_in_bfloat16(tmp_path):
    """As Qwen publishes its FP8."""
    codes = np.random.default_rng(1).integers(0, 120, (70, 90)).astype(np.uint8)
    scales = foreign.bf16_bits(np.random.default_rng(2).uniform(0.5, 2, (3, 2)))
    (tmp_path / "x").write_bytes(codes.tobytes() + scales.tobytes())
    ref = BlockScaledRef(
        "x",
        TensorRef("x", tmp_path / "x", 0, "F8_E4M3", codes.shape),
        TensorRef("s", tmp_path / "x", codes.size, "BF16", scales.shape),
        block=(32, 64),
    )
    each = np.repeat(np.repeat(foreign.bf16_values(scales), 32, 0), 64, 1)[:70, :90]
    expected = foreign.bf16_bits(foreign.E4M3_VALUES[codes].astype(np.float32) * each)
    assert np.array_equal(bits(ref.load()), expected)
    assert np.array_equal(bits(ref.rows(31, 66).load()), expected[31:66])


FORMS = {
    "fp8": lambda out: foreign.write_fp8(TWIN, out, (48, 40)),
    "fp8 in blocks of 128": lambda out: foreign.write_fp8(TWIN, out, (128, 128)),
    "fp8 with indexers": lambda out: foreign.write_fp8(SPARSE, out, (48, 40)),
    "int4": lambda out: foreign.write_int4(TWIN, out, 32),
    "int4 in groups of 64": lambda out: foreign.write_int4(TWIN, out, 64),
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Form -> its directory, written when first asked for; to be copied before it is changed."""
    known: dict[str, Path] = {}

    def form(name: str) -> Path:
        if name not in known:
            known[name] = FORMS[name](tmp_path_factory.mktemp("foreign"))
        return known[name]

    return form


# They differ from the form before them in a number.
LIKE_OTHERS = ("fp8 in blocks of 128", "int4 in groups of 64")


@pytest.fixture(
    params=[pytest.param(f, marks=[pytest.mark.slow] * (f in LIKE_OTHERS)) for f in FORMS]
)
def written(request, forms) -> tuple[Path, Path]:
    path = forms(request.param)
    return path, path.parent / "meaning"


def test_it_means_what_it_should_bit_for_bit(written, tmp_path):
    path, meaning = written
    expected = logits(meaning)
    assert np.array_equal(logits(path), expected)
    for reader in ("pread", "mmap", "memory"):
        options = {"expert_reader": reader, "expert_threads": 1}
        streamed = logits(path, expert_memory="70%", **options)
        assert np.array_equal(streamed, expected), reader
    for layout in ("packed", "safetensors"):
        out = convert(path, tmp_path / layout, layout=layout, verify_written=True)
        assert np.array_equal(logits(out), expected)
        config = json.loads((out / "config.json").read_text())
        assert "quant_method" not in str(config)


def test_it_can_be_quantised(written, tmp_path):
    path, meaning = written
    if "int4" in path.name:
        path, meaning = (
            convert(p, tmp_path / p.name, dequantize=True, layout="safetensors")
            for p in (path, meaning)
        )
    out, expected = (
        convert(p, tmp_path / f"{p.name}-8", quantize=True, q_bits=8) for p in (path, meaning)
    )
    assert np.array_equal(logits(out), logits(expected))


def test_bytes_that_were_read_are_counted(written):
    path, _ = written
    tokens = mx.array([[3, 1, 4, 1, 5]])
    with load_model(path, expert_memory="70%", expert_threads=1) as model:
        mx.eval(model(tokens))
        total = model.store.stats().total
        stored = sum(
            len(data)
            for name, (_, _, data) in foreign.read_safetensors(path / "model.safetensors").items()
            if "layers.1.mlp.experts.0." in name and "weight_shape" not in name
        )
        assert total.misses > 0
        assert total.bytes_read == total.misses * stored


def test_multi_token_prediction_counts_as_it_is_stored(forms):
    path = forms("fp8 with indexers")
    tensors = foreign.read_safetensors(path / "model.safetensors")
    stored = {k: v for k, v in tensors.items() if k.startswith("model.layers.3.")}
    assert any(dtype == "F8_E4M3" for dtype, _, _ in stored.values())
    expected = sum(len(data) for _, _, data in stored.values())
    assert open_sizes(path).prediction_bytes == expected


def changed(path: Path, tmp_path: Path, change) -> Path:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    tensors = foreign.read_safetensors(copy / "model.safetensors")
    change(tensors)
    foreign.write_safetensors(copy / "model.safetensors", tensors)
    return copy


BASE = "model.layers.1.mlp.experts.2.up_proj"


def _retyped(name: str, dtype: str):
    def change(tensors):
        tensors[name] = (dtype, *tensors[name][1:])

    return change


BAD_TENSORS = {
    "no scales": ("fp8", lambda t: t.pop(f"{BASE}.weight_scale_inv"), CheckpointError),
    "no weight": ("fp8", lambda t: t.pop(f"{BASE}.weight"), CheckpointError),
    "scales of another shape": (
        "fp8",
        lambda t: t.update({f"{BASE}.weight_scale_inv": ("F32", (1, 1), bytes(4))}),
        CheckpointError,
    ),
    "another FP8": ("fp8", _retyped(f"{BASE}.weight", "F8_E5M2"), UnsupportedError),
    "integer scales": ("fp8", _retyped(f"{BASE}.weight_scale_inv", "I32"), CheckpointError),
    "no int4 scales": ("int4", lambda t: t.pop(f"{BASE}.weight_scale"), CheckpointError),
    "no int4 weight": ("int4", lambda t: t.pop(f"{BASE}.weight_packed"), CheckpointError),
    "zero points": (
        "int4",
        lambda t: t.update({f"{BASE}.weight_zero_point": ("I32", (1,), bytes(4))}),
        UnsupportedError,
    ),
    "int4 of another shape": (
        "int4",
        lambda t: t.update({f"{BASE}.weight_scale": ("BF16", (3, 1), bytes(6))}),
        CheckpointError,
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_one_line(forms, tmp_path, case):
    form, change, kind = BAD_TENSORS[case]
    path = changed(forms(form), tmp_path, change)
    with pytest.raises(kind) as caught:
        load_model(path)
    assert BASE in str(caught.value) or "experts" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_one_line(forms, tmp_path):
    path = Path(shutil.copytree(forms("fp8"), tmp_path / "copy"))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        load_model(path)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def _int4(**keys):
    groups = {"group_0": {"weights": INT4 | keys}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }


BAD_CONFIGS = {
    "another FP8": ({"quant_method": "fp8", "fmt": "e5m2"}, UnsupportedError, "e5m2"),
    "one scale": ({"quant_method": "fp8", "weight_block_size": None}, UnsupportedError, "whole"),
    "no pair": ({"quant_method": "fp8", "weight_block_size": [128]}, ConfigError, "128"),
    "zero": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ConfigError, "positive"),
    "another method": ({"quant_method": "awq"}, UnsupportedError, "awq"),
    "8 bits": (_int4(num_bits=8), UnsupportedError, "num_bits"),
    "floats": (_int4(type="float"), UnsupportedError, "type"),
    "asymmetric": (_int4(symmetric=False), UnsupportedError, "symmetric"),
    "channels": (_int4(strategy="channel"), UnsupportedError, "strategy"),
    "reordered": (_int4(actorder="group"), UnsupportedError, "actorder"),
    "another format": (_int4() | {"format": "float-quantized"}, UnsupportedError, "float-quant"),
    "Quark's FP8": (foreign.quark(dtype="fp8_e4m3"), UnsupportedError, "fp8_e4m3"),
    "Quark's int4": (foreign.quark(group_size=128), UnsupportedError, "group_size 128"),
    "no weights of Quark": ({"quant_method": "quark"}, UnsupportedError, "dtype None"),
    "weights of Quark are no object": (
        foreign.quark() | {"global_quant_config": {"weight": ["fp4"]}}, UnsupportedError, "dtype",
    ),
    "FP8 in some layers": (
        foreign.quark()
        | {"layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}}},
        UnsupportedError, r"layer_quant_config of '\*self_attn\*'.*fp8_e4m3",
    ),
    "rotated": (
        foreign.quark() | {"algo_config": [{"name": "rotation"}]}, UnsupportedError, "rotated",
    ),
    "no groups": (_int4() | {"config_groups": {}}, UnsupportedError, "config_groups"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_that_are_refused(case):
    block, kind, word = BAD_CONFIGS[case]
    with pytest.raises(kind, match=word) as caught:
        Quantization.from_config({"quantization_config": block})
    assert issubclass(kind, MoefluxError)
    assert "\n" not in str(caught.value)
