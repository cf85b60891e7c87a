"""Oracle: the same model loaded from safetensors. The moeflux directory is packed here, by hand,
from the published description of its format; logits must agree bit for bit, texts letter for
letter."""

from __future__ import annotations

import json
import shutil
import struct
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model

E, LAYERS, C, F = 32, 6, 256, 64
PROMPT = "import os\n\ndef main(argv):\n"
ITEM_BYTES = {"U32": 4, "BF16": 2, "F32": 4}
EXPERTS = "language_model.model.layers.{}.mlp.switch_mlp.{}.{}"
# Where, from the directory that is opened, the trunk and the experts lie.
PLACES = {"one directory": (".", "."), "mlx beside artifacts": ("../artifacts", "..")}


def read_safetensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> dtype, shape, bytes."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    start = 8 + length
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (h["dtype"], h["shape"], content[slice(*(start + at for at in h["data_offsets"]))])
        for name, h in header.items()
    }


def pack_trunk(tensors: dict, directory: Path, *, bits_told: bool, flat_taps: bool) -> None:
    """model_weights.bin and .json: names sorted, each tensor on a 64-byte boundary, and no head of
    multi-token prediction."""
    entries = {}
    names = sorted(n for n in tensors if ".switch_mlp." not in n and not n.startswith("mtp."))
    with open(directory / "model_weights.bin", "wb") as blob:
        for name in names:
            dtype, shape, data = tensors[name]
            if flat_taps and name.endswith("conv1d.weight"):
                shape = shape[:2]
            blob.write(bytes(-blob.tell() % 64))
            entry = {"offset": blob.tell(), "size": len(data), "shape": shape, "dtype": dtype}
            assert len(data) == prod(shape) * ITEM_BYTES[dtype]
            if dtype == "U32" and bits_told:
                scales = tensors[name.removesuffix("weight") + "scales"][1]
                entry["bits"] = shape[-1] * 32 // (scales[-1] * 64)
            entries[name.removeprefix("language_model.")] = entry
            blob.write(data)
    manifest = {"model": "tiny", "num_tensors": len(entries), "tensors": entries}
    if not bits_told:
        manifest["config"] = {"hidden_size": C, "default_bits": 4, "default_group_size": 64}
    (directory / "model_weights.json").write_text(json.dumps(manifest))


def pack_experts(tensors: dict, directory: Path, bits: int) -> None:
    """layer_NN.bin: E blocks without header or padding; offsets as the format's table has them."""
    directory.mkdir()
    weight, scale = F * C * bits // 8, F * C // 64 * 2
    block = weight + 2 * scale
    for layer in range(LAYERS):
        blob = bytearray(E * 3 * block)
        for i, projection in enumerate(("gate_proj", "up_proj", "down_proj")):
            for part, offset, size in (
                ("weight", 0, weight),
                ("scales", weight, scale),
                ("biases", weight + scale, scale),
            ):
                data = tensors[EXPERTS.format(layer, projection, part)][2]
                assert len(data) == E * size
                for e in range(E):
                    at = (3 * e + i) * block + offset
                    blob[at : at + size] = data[e * size : (e + 1) * size]
        (directory / f"layer_{layer:02d}.bin").write_bytes(blob)


def two_bit_checkpoint(out: Path) -> Path:
    """The bundled model with its experts quantised again, to 2 bits, in safetensors."""
    shutil.copytree(BUNDLED_MODEL, out)
    tensors = mx.load(str(out / "model.safetensors"))
    config = json.loads((out / "config.json").read_text())
    for layer in range(LAYERS):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = [EXPERTS.format(layer, projection, p) for p in ("weight", "scales", "biases")]
            floats = mx.dequantize(*(tensors[n] for n in names), group_size=64, bits=4)
            tensors |= zip(names, mx.quantize(floats, group_size=64, bits=2), strict=True)
            config["quantization"][names[0].removesuffix(".weight")] = {
                "group_size": 64,
                "bits": 2,
            }
    config["quantization_config"] = config["quantization"]
    mx.eval(tensors)
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def pack(source: Path, parent: Path, *, bits: int, places: str) -> Path:
    """A moeflux directory of what `source` holds in safetensors; where its config.json is."""
    opened = parent / "mlx"
    opened.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, opened)
    trunk, experts = ((opened / place).resolve() for place in PLACES[places])
    trunk.mkdir(exist_ok=True)
    tensors = read_safetensors(source / "model.safetensors")
    beside = places != "one directory"
    pack_trunk(tensors, trunk, bits_told=not beside, flat_taps=beside)
    pack_experts(tensors, experts / ("packed_experts" + "_2bit" * (bits == 2)), bits)
    return opened


def measure(directory: Path, memory: str) -> tuple[list[np.ndarray], str]:
    """Logits of a prompt and of two steps after it, and a reply."""
    tokens = np.random.default_rng(7).integers(0, 4096, (1, 37))
    model, tokenizer = load(directory, expert_memory=memory)
    with model:
        assert model.plan.resident == (memory == "100%")
        cache = model.make_cache()
        parts = (slice(0, 35), slice(35, 36), slice(36, 37))
        logits = [np.array(model(mx.array(tokens[:, part]), cache)) for part in parts]
        assert all(np.isfinite(part).all() for part in logits)
        text = generate(model, tokenizer, PROMPT, max_tokens=6)
        total = model.store.stats().total
        if not model.plan.resident:
            assert total.misses > 0
    return logits, text


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {
        4: BUNDLED_MODEL,
        2: two_bit_checkpoint(tmp_path_factory.mktemp("safetensors") / "two_bit"),
    }


@pytest.fixture(scope="module")
def expected(sources):
    """Bits of the experts -> what :func:`measure` finds in safetensors."""
    return {bits: measure(source, "100%") for bits, source in sources.items()}


@pytest.mark.parametrize(
    ("bits", "places"),
    [
        pytest.param(
            bits, places, marks=[pytest.mark.slow] * (bits == 2 or places == "one directory")
        )
        for bits in (4, 2)
        for places in PLACES
    ],
)
def test_a_whole_directory_gives_the_logits_of_safetensors(
    sources, expected, tmp_path, bits, places
):
    packed = pack(sources[bits], tmp_path, bits=bits, places=places)
    right, text = expected[bits]
    assert text
    for memory in ("100%", "25%"):
        logits, same_text = measure(packed, memory)
        assert same_text == text
        assert [part.tobytes() for part in logits] == [part.tobytes() for part in right]


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_layer_file_of_zeros_is_one_line(tmp_path, layer):
    packed = pack(BUNDLED_MODEL, tmp_path, bits=4, places="one directory")
    file = packed / "packed_experts" / f"layer_{layer:02d}.bin"
    size = file.stat().st_size
    file.write_bytes(bytes(size))
    for memory in ("25%", "100%"):
        with pytest.raises(ExpertFileError, match=rf"{file.name} has zeros as 'gate_proj\.scales'"):
            load_model(packed, expert_memory=memory)


@pytest.mark.parametrize("layout", [pytest.param("packed", marks=pytest.mark.slow), "safetensors"])
def test_it_converts(sources, expected, tmp_path, layout):
    packed = pack(sources[2], tmp_path, bits=2, places="mlx beside artifacts")
    out = convert(packed, tmp_path / "out", layout=layout, verify_written=True)
    right, text = expected[2]
    logits, same_text = measure(out, "25%")
    assert same_text == text
    assert [part.tobytes() for part in logits] == [part.tobytes() for part in right]


def test_the_bits_of_the_experts_show(expected):
    """Else a directory of the wrong bits could pass above."""
    four, two = (expected[bits][0] for bits in (4, 2))
    assert not np.array_equal(four[0], two[0])
