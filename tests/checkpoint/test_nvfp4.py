"""NVFP4 with a scale for a whole matrix, and MXFP4, as mlx-lm, NVIDIA ModelOpt and
compressed-tensors store them. Oracles: an independent NumPy writer that knows what its bytes mean,
mlx-lm's own quantisation, and mlx-lm's own model with the decoded numbers."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from mlx_moeflux.checkpoint.quantization import Quantization, QuantSpec
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, MoefluxError, UnsupportedError
from mlx_moeflux.kernels.moe.expert_ffn import ProjectionBank
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.plan import open_sizes
from mlx_moeflux.models.layers import ScaledLinear
from tests.checkpoint import foreign
from tests.models.twins import GOLDEN, relative_error

FORMS = ("modelopt", "quark", *foreign.COMPRESSED_FP4)
TWINS = ("qwen3_moe_top2", "deepseek_v3_yarn40", "deepseek_v32_yarn40", "minimax_m2_norms")
TOKENS = np.random.default_rng(5).integers(0, 81, (2, 9))


def logits(directory: Path, **options) -> np.ndarray:
    """Logits of a prompt of 6 tokens and of three decode steps."""
    with load_model(directory, **options) as model:
        cache = model.make_cache()
        parts = [model(mx.array(TOKENS[:, :6]), cache)]
        parts += [model(mx.array(TOKENS[:, t : t + 1]), cache) for t in range(6, 9)]
        result = np.array(mx.concatenate(parts, axis=1))
    assert np.isfinite(result).all()
    return result


def near(found: np.ndarray, expected: np.ndarray, limit: float = 1e-5) -> bool:
    return relative_error(mx.array(found), mx.array(expected)) <= limit


@pytest.mark.parametrize(("twin", "form"), [
    ("qwen3_moe_top2", "modelopt"), ("minimax_m2_norms", "mxfp4-pack-quantized"),
    ("deepseek_v32_yarn40", "quark"), *(
        pytest.param(twin, form, marks=pytest.mark.slow) for twin in TWINS for form in FORMS),
])  # fmt: skip
def test_a_pack_means_its_numbers(tmp_path, twin, form):
    """Resident within float32's tolerance of the decoded numbers; streamed, packed bit for bit."""
    path = foreign.write_fp4(GOLDEN / twin, tmp_path, form)
    expected = logits(path)
    assert near(expected, logits(tmp_path / "meaning"))
    assert np.array_equal(logits(path, fuse=True), expected)
    for reader, memory in (("pread", "51%"), ("mmap", "67%"), ("memory", "90%")):
        options = {"expert_memory": memory, "expert_reader": reader, "expert_threads": 1}
        assert np.array_equal(logits(path, **options), expected), reader
    out = convert(path, tmp_path / "packed", verify_written=True)
    assert np.array_equal(logits(out), expected)
    assert np.array_equal(logits(out, expert_memory="51%", expert_threads=1), expected)
    assert open_sizes(path).blocks == open_sizes(out).blocks


@pytest.mark.parametrize("form", FORMS)
def test_blocks_and_trunk_stay_in_four_bits(tmp_path, form):
    path = foreign.write_fp4(GOLDEN / "qwen3_moe_top2", tmp_path, form)
    group = 16 if form in ("modelopt", "nvfp4-pack-quantized") else 32
    with load_model(path, expert_memory="51%", expert_threads=1) as model:
        bank = model.store.bank(0)
        assert bank.gate.weight.dtype == mx.uint32
        assert bank.gate.scales.shape[1:] == (64, 64 // group)
        each = 64 * (32 + 64 // group) + (0 if group == 32 else 4)
        assert model.store.block_bytes[0] == 3 * each
        q = model.layers[0].self_attn.q_proj
        assert (q.weight.dtype, q.scales.dtype) == (mx.uint32, mx.uint8)
        assert isinstance(q, ScaledLinear) == (group == 16)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_product_in_a_narrow_type(dtype):
    """Largest numbers without their global scale exceed float16; the error is that of the type."""
    random = np.random.default_rng(1)
    weight = (random.standard_normal((3, 24, 64)) * [[[1e-3]], [[1.0]], [[40.0]]]).astype(
        np.float32
    )
    parts, truth = [], []
    for each in weight:
        codes, scales, number, meaning = foreign.nvfp4(each)
        parts.append((codes.view(np.uint32), scales, number * np.float32(2688)))
        truth.append(meaning)
    packed, scales, numbers = (mx.array(np.stack(part)) for part in zip(*parts, strict=True))
    x = mx.array(random.standard_normal((6, 64)) * 30).astype(dtype)
    slots = np.array([2, 0, 1, 2, 0, 1])
    rows = np.array(x.astype(mx.float32)).astype(np.float64)
    expected = np.stack([truth[s] @ row for s, row in zip(slots, rows, strict=True)])
    spec = QuantSpec.of_mode("nvfp4")
    limit = {mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    for shape in ((3,), (3, 1)):
        bank = ProjectionBank(packed, scales, None, spec, global_scale=numbers.reshape(shape))
        for given, where in ((bank, slots), (bank.take(mx.array([2, 0, 1]), dtype), [0, 1, 2] * 2)):
            found = given.matmul(x, mx.array(where).astype(mx.uint32))
            assert found.dtype == dtype
            found = np.array(found.astype(mx.float32))
            assert np.isfinite(found).all()
            scale = np.abs(expected).max(axis=1, keepdims=True)
            assert (np.abs(found - expected) <= limit * scale).all()


@pytest.fixture(scope="module")
def of_mlx_lm(tmp_path_factory):
    """A twin quantised by mlx-lm with global scales, and mlx-lm's own model with what they mean."""
    utils = pytest.importorskip("mlx_lm.utils")
    out = tmp_path_factory.mktemp("mlx-lm")
    source = convert(GOLDEN / "qwen3_moe_top2", out / "source", layout="safetensors")
    model, config = utils.load_model(source)
    model.set_dtype(mx.float32)
    model, config = utils.quantize_model(
        model, config, None, None, mode="nvfp4", global_scale=True
    )  # fmt: skip
    utils.save_model(out, model)
    utils.save_config(config, out / "config.json")
    assert '"global_scale": true' in (out / "config.json").read_text()
    meaning, _ = utils.load_model(source)
    for layer, known in zip(meaning.layers, model.layers, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            theirs = known.mlp.switch_mlp[name]
            assert theirs.global_scale.shape == (6,)
            layer.mlp.switch_mlp[name].weight = mx.stack([
                mx.dequantize(*each[:2], mode="nvfp4", global_scale=each[2], dtype=mx.float32)
                for each in zip(theirs.weight, theirs.scales, theirs.global_scale, strict=True)
            ])  # fmt: skip
    for path, module in model.named_modules():
        if path.endswith(("_proj", "gate", "head", "tokens")) and "switch" not in path:
            place = meaning
            for part in path.split("."):
                place = place[int(part)] if part.isdigit() else place[part]
            place.weight = mx.dequantize(
                module.weight, module.scales, module.get("biases"), module.group_size, module.bits,
                module.mode, dtype=mx.float32,
            )  # fmt: skip
    meaning.set_dtype(mx.float32)
    return out, np.array(meaning(mx.array(TOKENS)))


def test_global_scales_of_mlx_lm(of_mlx_lm, tmp_path):
    """Its own model does not run on a CPU with them: its model with the decoded numbers does."""
    path, expected = of_mlx_lm
    found = logits(path)
    assert near(found, expected)
    assert np.array_equal(logits(path, expert_memory="51%"), found)
    packed = convert(path, tmp_path / "packed")
    again = convert(packed, tmp_path / "again", layout="safetensors")
    for each in (packed, again):
        assert np.array_equal(logits(each, expert_memory="51%"), found)
    # The same tensors and entries, in mlx-lm's names: it loads them again, strictly.
    theirs, ours = (mx.load(str(p / "model.safetensors")) for p in (path, again))
    assert theirs.keys() == ours.keys()
    assert all(mx.array_equal(theirs[name], ours[name]) for name in theirs)
    config = json.loads((again / "config.json").read_text())["quantization"]
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    assert QuantSpec.of_mode("nvfp4").to_config() | {"global_scale": True} == (
        config.get(name) or config_of(config)
    )
    dense = convert(path, tmp_path / "dense", dequantize=True, dtype="float32")
    assert near(logits(dense), expected)


def config_of(block: dict) -> dict:
    """The default entry."""
    return {key: value for key, value in block.items() if not isinstance(value, (dict, bool))} | {
        "global_scale": block.get("global_scale")
    }


def test_mlx_lm_loads_what_convert_wrote(of_mlx_lm, tmp_path):
    utils = pytest.importorskip("mlx_lm.utils")
    path, _ = of_mlx_lm
    out = convert(path, tmp_path / "out", layout="safetensors")
    model, _ = utils.load_model(out)
    assert model.layers[1].mlp.switch_mlp.down_proj.global_scale.shape == (6,)
    # A trunk with global scales is no form of mlx-lm's: it gets the numbers.
    source = foreign.write_fp4(GOLDEN / "qwen3_moe_top2", tmp_path, "modelopt")
    out = convert(source, tmp_path / "ours", layout="safetensors", dtype="float32")
    model, _ = utils.load_model(out)
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.float32
    assert near(logits(out), logits(tmp_path / "meaning"))


def test_an_edited_global_scale_acts(of_mlx_lm):
    path, _ = of_mlx_lm
    with load_model(path) as model:
        before = np.array(model(mx.array(TOKENS)))
        model.layers[0].mlp.switch_mlp.up_proj.global_scale *= 2
        assert not near(np.array(model(mx.array(TOKENS))), before, 1e-3)


def test_a_matrix_of_zeros_was_written(of_mlx_lm, tmp_path):
    """Its scales are zeros too, as those of a layer that adds nothing."""
    tensors = foreign.read_safetensors(of_mlx_lm[0] / "model.safetensors")
    for part in ("weight", "scales"):
        name = f"model.layers.0.self_attn.o_proj.{part}"
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, bytes(len(data))
    foreign.copy_config(of_mlx_lm[0], tmp_path)
    foreign.write_safetensors(tmp_path / "model.safetensors", tensors)
    with load_model(tmp_path) as model:
        assert np.isfinite(np.array(model(mx.array(TOKENS)))).all()


def test_an_adapter_is_not_fused_without_the_global_scale(tmp_path):
    path = foreign.write_fp4(GOLDEN / "qwen3_moe_top2", tmp_path, "modelopt")
    with load_model(path) as model:
        adapter = LoRALinear.from_base(model.layers[0].self_attn.o_proj)
        assert mx.isfinite(adapter(mx.ones((1, adapter.lora_a.shape[0])))).all()
        with pytest.raises(UnsupportedError, match=r"cannot be fused .* global_scale"):
            adapter.fuse()


def test_a_global_scale_that_is_missing_is_one_line(of_mlx_lm, tmp_path):
    tensors = foreign.read_safetensors(of_mlx_lm[0] / "model.safetensors")
    lost = "model.layers.1.mlp.switch_mlp.down_proj"
    del tensors[f"{lost}.global_scale"]
    foreign.copy_config(of_mlx_lm[0], tmp_path)
    foreign.write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"'{lost}' has a global_scale, but there is none"):
        load_model(tmp_path)
    packed = convert(
        foreign.write_fp4(GOLDEN / "qwen3_moe_top2", tmp_path, "modelopt"), tmp_path / "p"
    )
    tensors = foreign.read_safetensors(packed / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.global_scale"]
    foreign.write_safetensors(packed / "model.safetensors", tensors)
    # An index as it was before it described the trunk.
    index = json.loads((packed / "experts" / "index.json").read_text())
    del index["trunk"], index["blake2b"]
    (packed / "experts" / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="o_proj' has a global_scale, but there is"):
        load_model(packed)


def test_entries():
    found = Quantization.from_config({"quantization": {
        "group_size": 16, "bits": 4, "mode": "nvfp4",
        "a": {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True},
        "b": {"mode": "nvfp4", "global_scale": False}, "c": {"mode": "mxfp8"},
    }})  # fmt: skip
    assert found.spec("a") == QuantSpec(4, 16, "nvfp4", global_scale=True)
    assert found.spec("b") == found.default == QuantSpec(4, 16, "nvfp4")
    assert found.to_config()["a"]["global_scale"] is True
    assert "global_scale" not in found.to_config()
    for wrong in (
        {"mode": "nvfp4", "global_scale": 1}, {"mode": "mxfp4", "global_scale": True},
        {"bits": 4, "global_scale": True}, {"mode": "nvfp4", "global_scale": "yes"},
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"^[^\n]*global_scale[^\n]*$"):
            Quantization.from_config({"quantization": {"x": wrong}})


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
PACK = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}


@pytest.mark.parametrize(("block", "words"), [
    (MODELOPT | {"quant_algo": "FP8"}, "'FP8' of ModelOpt"),
    (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ' of ModelOpt"),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION"}}, "MIXED"),
    ({"quant_method": "awq", "bits": 4}, "'awq'"), ({"quant_method": "gptq"}, "'gptq'"),
    (PACK | {"format": "float-quantized"}, "'float-quantized' of compressed-tensors"),
    (PACK | {"format": "mixed-precision", "config_groups": {"g": {}}}, "'mixed-precision'"),
    (PACK | {"config_groups": {"g": {"weights": FLOAT4 | {"type": "int"}}}}, "type 'int'"),
    (PACK | {"config_groups": {"g": {"weights": FLOAT4 | {"group_size": 32}}}}, "group_size 32"),
    (PACK | {"config_groups": {"g": {}}, "transform_config": {"a": 1}}, "rotated"),
])  # fmt: skip
def test_other_methods_are_named(block, words):
    with pytest.raises(UnsupportedError, match=words) as caught:
        Quantization.from_config({"quantization_config": block})
    assert "\n" not in str(caught.value)


BASE = "model.layers.1.mlp.experts.2.up_proj"
BAD = {
    "no scale of all": (lambda t: t.pop(f"{BASE}.weight_scale_2"), CheckpointError),
    "no scales": (lambda t: t.pop(f"{BASE}.weight_scale"), MoefluxError),
    "two numbers": (
        lambda t: t.update({f"{BASE}.weight_scale_2": ("F32", (2,), bytes(8))}), CheckpointError),
    "an integer": (
        lambda t: t.update({f"{BASE}.weight_scale_2": ("I32", (), bytes(4))}), CheckpointError),
    "scales of another width": (
        lambda t: t.update({f"{BASE}.weight_scale": ("F8_E4M3", (64, 2), bytes(128))}),
        CheckpointError),
    "FP8 beside": (
        lambda t: t.update({f"{BASE}.weight": ("F8_E4M3", (64, 64), bytes(4096)),
                            f"{BASE}.weight_scale": ("F32", (), bytes(4))}), UnsupportedError),
    "AWQ beside": (
        lambda t: t.update({f"{BASE}.pre_quant_scale": ("F32", (64,), bytes(256))}),
        UnsupportedError),
    "GPTQ beside": (
        lambda t: t.update({f"{BASE}.qweight": ("I32", (8, 64), bytes(2048))}), UnsupportedError),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_one_line(tmp_path, case):
    change, kind = BAD[case]
    path = foreign.write_fp4(GOLDEN / "qwen3_moe_top2", tmp_path, "modelopt")
    tensors = foreign.read_safetensors(path / "model.safetensors")
    change(tensors)
    foreign.write_safetensors(path / "model.safetensors", tensors)
    with pytest.raises(kind) as caught:
        load_model(path)
    assert BASE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_beside_config_json_are_read(tmp_path):
    path = foreign.write_fp4(GOLDEN / "qwen3_moe_top2", tmp_path, "modelopt")
    file = path / "hf_quant_config.json"
    content = json.loads(file.read_text())
    assert open_checkpoint(path).config["quantization_config"]["quant_method"] == "modelopt"
    content["quantization"]["quant_algo"] = "W4A8_AWQ"
    file.write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="'W4A8_AWQ' of ModelOpt"):
        load_model(path)
