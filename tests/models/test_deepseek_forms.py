"""Oracles: the same model in safetensors, bit for bit; stated sizes and peaks of memory at the
published layer shapes."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES
from tests.checkpoint import foreign

TOKENS = mx.array(np.random.default_rng(0).integers(0, 1023, (2, 19)))


def logits(directory: Path, **options) -> np.ndarray:
    with load_model(directory, **options) as model:
        result = np.array(model(TOKENS))
    assert np.isfinite(result).all()
    return result


@pytest.mark.parametrize("missing", [False, True])
def test_a_moeflux_directory_whose_experts_begin_at_a_later_layer(tmp_path, missing):
    """Packed by hand, from the published description: blocks of gate, up and down, each weight,
    scales, biases; trunk tensors on 64-byte boundaries."""
    source = synthesize("deepseek-tiny", tmp_path / "source")
    tensors = foreign.read_safetensors(source / "model.safetensors")
    out = tmp_path / "moeflux"
    (out / "packed_experts").mkdir(parents=True)
    for layer in (1, 2, 3):
        blob = b""
        for e in range(32):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                for part in ("weight", "scales", "biases"):
                    name = f"model.layers.{layer}.mlp.switch_mlp.{projection}.{part}"
                    size = len(tensors[name][2]) // 32
                    blob += tensors[name][2][e * size : (e + 1) * size]
        (out / "packed_experts" / f"layer_{layer:02d}.bin").write_bytes(blob)
    entries, weights = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        if ".switch_mlp." not in name:
            weights += bytes(-len(weights) % 64)
            entries[name] = {"offset": len(weights), "size": len(data), "shape": shape}
            entries[name]["dtype"] = dtype
            weights += data
    (out / "model_weights.bin").write_bytes(weights)
    (out / "model_weights.json").write_text(json.dumps({"tensors": entries}))
    config = json.loads((source / "config.json").read_text())
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    (out / "config.json").write_text(json.dumps(config))
    if missing:
        (out / "packed_experts" / "layer_02.bin").unlink()
        with pytest.raises(ExpertFileError, match="layer_02") as caught:
            load_model(out)
        assert "\n" not in str(caught.value)
        return
    expected = logits(source)
    assert np.array_equal(logits(out), expected)
    assert np.array_equal(logits(out, expert_memory="20%"), expected)


# One MoE layer of 256 experts behind three dense layers, in FP8: 17 GB.
EXPERTS = 256


def _write_like_published(out: Path) -> None:
    """Random FP8 bytes without the two that are no number, in one safetensors file."""
    config = json.loads((Path(__file__).parents[1] / "published" / "deepseek-v3.json").read_text())
    tensors, config = config["tensors"], config["config"]
    config |= {"num_hidden_layers": 4, "n_routed_experts": EXPERTS, "num_nextn_predict_layers": 0}
    listed = {}
    for pattern, (kind, dtype, shape) in tensors.items():
        if ".layers.61." in pattern:
            continue
        layers = {"all": range(4), "dense": range(3), "sparse": [3], "one": [0]}[kind]
        for layer in layers:
            for e in range(EXPERTS) if "{e}" in pattern else [0]:
                name = pattern.replace("{l}", str(layer)).replace("{e}", str(e))
                rows = [EXPERTS, *shape[1:]] if ".mlp.gate." in name else shape
                listed[name] = (dtype, rows)
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    header, position = {}, 0
    for name, (dtype, shape) in listed.items():
        end = position + sizes[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, 32 << 20, dtype=np.uint8)
    codes[(codes & 127) == 127] = 0
    out.mkdir()
    with open(out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, shape) in listed.items():
            count = int(np.prod(shape))
            if dtype == "F8_E4M3":
                for start in range(0, count, len(codes)):
                    file.write(codes[: min(len(codes), count - start)].data)
            elif dtype == "F32":
                scale = shape[-1] ** -0.5 / 2000
                values = 0.1 if name.endswith("bias") else scale
                file.write((values * random.uniform(0.5, 1, count)).astype(np.float32).data)
            else:
                spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
                for start in range(0, count, 8 << 20):
                    part = random.standard_normal(min(8 << 20, count - start), np.float32)
                    part = part * spread + (0 if len(shape) > 1 else 1)
                    file.write(foreign.bf16_bits(part).data)
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_full_layers_convert_and_generate_in_little_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 28e9:
        pytest.skip("needs 28 GB of disk")
    _write_like_published(tmp_path / "fp8")
    code = (
        "import sys, json, time\n"
        "import mlx.core as mx\n"
        "def hwm():\n"
        "    line = next(x for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "    return int(line.split()[1]) * 1024\n"
        "from mlx_moeflux.conversion.convert import convert\n"
        "from mlx_moeflux.loading import load_model\n"
        "from mlx_moeflux.generation.text import generate_step\n"
        "start = time.time()\n"
        f"convert({str(tmp_path / 'fp8')!r}, {str(tmp_path / 'q')!r}, quantize=True)\n"
        "converted = hwm(), time.time() - start\n"
        f"model = load_model({str(tmp_path / 'q')!r}, expert_memory='2GB', verbose=True)\n"
        "prompt = mx.array(list(range(7, 40)))\n"
        "ids = [int(t) for t, _ in generate_step(prompt, model, max_tokens=4)]\n"
        "print(json.dumps([*converted, hwm(), model.trunk_bytes(), ids]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(done.stdout, done.stderr)  # noqa: T201
    peak, _, whole, trunk, ids = json.loads(done.stdout)
    assert peak < 3e9
    assert whole <= 24e9
    assert whole <= trunk + 2e9 + 3e9
    assert len(ids) == 4
    experts = (tmp_path / "q" / "experts" / "layer_03.bin").stat().st_size
    assert experts == EXPERTS * 24_772_608
    assert SHAPES["deepseek-v3"].num_experts == 256
