"""Directories of moeflux / flash-moe; the oracles are mx.quantize and the published byte tables."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.formats.moeflux import (
    MoefluxDirectory,
    MoefluxExperts,
    MoefluxTrunk,
    block_components,
)
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import ITEMSIZE
from mlx_moeflux.errors import CheckpointError, ExpertFileError, ShapeError

C, F, E = 128, 64, 5
CODES = {mx.uint32: "U32", mx.bfloat16: "BF16", mx.float32: "F32"}


def raw(array):
    return bytes(memoryview(array).cast("B"))


def quantised(rows, width, bits, *, group_size=64):
    weight = mx.random.normal((rows, width)).astype(mx.bfloat16)
    return mx.quantize(weight, group_size=group_size, bits=bits)


def write_trunk(directory, tensors, bits=None, config=None):
    """Lay tensors out as the extractor does: sorted by name, each on a 64-byte boundary."""
    directory.mkdir(parents=True, exist_ok=True)
    blob, entries = b"", {}
    for name in sorted(tensors):
        blob += b"\0" * (-len(blob) % 64)
        data = raw(tensors[name])
        entries[name] = {
            "offset": len(blob), "size": len(data), "shape": list(tensors[name].shape),
            "dtype": CODES[tensors[name].dtype],
        }  # fmt: skip
        if name in (bits or {}):
            entries[name]["bits"] = bits[name]
        blob += data
    manifest = {"model": "x", "num_tensors": len(entries), "tensors": entries}
    if config is not None:
        manifest["config"] = config
    (directory / "model_weights.bin").write_bytes(blob)
    (directory / "model_weights.json").write_text(json.dumps(manifest))
    return manifest


def module(path, parts):
    names = (f"{path}.{part}" for part in ("weight", "scales", "biases"))
    return dict(zip(names, parts, strict=True))


@pytest.fixture
def tensors():
    """A trunk with 4-bit, 8-bit (the router) and plain tensors."""
    return {
        **module("lm_head", quantised(19, C, 4)),
        **module("model.layers.0.mlp.gate", quantised(E, C, 8)),
        **module("model.layers.0.mlp.up", quantised(7, C, 4, group_size=32)),
        "model.norm.weight": mx.random.normal((C,)).astype(mx.bfloat16),
        "model.layers.0.linear_attn.A_log": mx.random.normal((3,)),
        "model.layers.0.linear_attn.conv1d.weight": mx.zeros((11, 4, 1), dtype=mx.bfloat16),
    }


BITS = {
    "lm_head.weight": 4,
    "model.layers.0.mlp.gate.weight": 8,
    "model.layers.0.mlp.up.weight": 4,
}


def one_sentence(message, *parts):
    assert "\n" not in message
    assert message.endswith(".")
    for part in parts:
        assert str(part) in message, (part, message)


def test_the_trunk_loads_bit_for_bit(tensors, tmp_path):
    write_trunk(tmp_path, tensors, BITS)
    trunk = MoefluxTrunk.open(tmp_path)
    assert set(trunk) == set(tensors)
    assert len(trunk) == len(tensors)
    for name, array in tensors.items():
        loaded = trunk[name].load()
        assert loaded.dtype == array.dtype
        assert raw(loaded) == raw(array), name
        assert loaded.shape == array.shape


def test_bits_of_each_tensor_and_group_sizes_of_the_shapes_are_the_quantisation(tensors, tmp_path):
    write_trunk(tmp_path, tensors, BITS)
    quantization = MoefluxTrunk.open(tmp_path).quantization
    assert quantization.default is None
    assert quantization.overrides == {
        "lm_head": QuantSpec(4, 64),
        "model.layers.0.mlp.gate": QuantSpec(8, 64),
        "model.layers.0.mlp.up": QuantSpec(4, 32),
    }


@pytest.mark.parametrize(("config", "group_size"), [
    (None, 64), ({}, 64), ({"default_group_size": 64}, 64), ({"default_group_size": 32}, 32),
    ({"default_group_size": "x"}, 64),
])  # fmt: skip
def test_without_bits_the_shapes_tell_an_8_bit_router_from_4_bit(config, group_size, tmp_path):
    tensors = {
        **module("a", quantised(3, C, 4, group_size=group_size)),
        **module("gate", quantised(E, C, 8, group_size=group_size)),
    }
    write_trunk(tmp_path, tensors, config=config)
    assert MoefluxTrunk.open(tmp_path).quantization.overrides == {
        "a": QuantSpec(4, group_size),
        "gate": QuantSpec(8, group_size),
    }


def change(**changes):
    return lambda manifest: manifest["tensors"]["model.norm.weight"].update(changes)


def change_gate(**changes):
    return lambda manifest: manifest["tensors"]["model.layers.0.mlp.gate.weight"].update(changes)


def drop(name):
    return lambda manifest: manifest["tensors"].pop(name)


WRONG = {
    "no tensors": (lambda manifest: manifest.pop("tensors"), "has no object of tensors"),
    "tensors empty": (lambda manifest: manifest.update(tensors={}), "has no object of tensors"),
    "tensors a list": (lambda manifest: manifest.update(tensors=[1]), "has no object of tensors"),
    "entry": (lambda m: m["tensors"].update(x=[1]), "Tensor 'x' of"),
    "dtype": (change(dtype="F16"), "has dtype 'F16', not one of U32, BF16, F32"),
    "dtype missing": (change(dtype=None), "has dtype None"),
    "dtype list": (change(dtype=["BF16"]), "has dtype ['BF16']"),
    "shape": (change(shape=[128.0]), "has shape [128.0]"),
    "shape negative": (change(shape=[-128]), "has shape [-128]"),
    "shape missing": (change(shape=None), "has shape None"),
    "size": (change(size=255), "has 255 bytes, but BF16 [128] takes 256"),
    "size text": (change(size="256"), "size '256'"),
    "offset negative": (change(offset=-64), "has offset -64"),
    "offset true": (change(offset=True), "has offset True"),
    "offset beyond": (change(offset=10**12), "ends at byte 1000000000256, but"),
    "bits wrong": (change_gate(bits=3), "has 3 bits, weight [5, 32] and scales [5, 2]"),
    "bits unknown": (change_gate(bits=7), "has 7 bits"),
    "bits zero": (change_gate(bits=0), "has bits 0"),
    "bits text": (change_gate(bits="8"), "has bits '8'"),
    "no scales": (drop("model.layers.0.mlp.gate.scales"), "scales or biases are missing"),
    "no biases": (drop("lm_head.biases"), "scales or biases are missing"),
    "no weight": (
        lambda m: m["tensors"].update(odd=m["tensors"]["lm_head.weight"]), "Tensor 'odd' of"),
    "scales of another": (
        lambda m: m["tensors"].update(
            {f"lm_head.{part}": m["tensors"][f"model.layers.0.mlp.gate.{part}"]
             for part in ("scales", "biases")}),
        "Tensor 'lm_head' of"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_manifest_is_one_sentence(case, tensors, tmp_path):
    manifest = write_trunk(tmp_path, tensors, BITS)
    alter, words = WRONG[case]
    alter(manifest)
    (tmp_path / "model_weights.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        MoefluxTrunk.open(tmp_path)
    one_sentence(str(caught.value), tmp_path / "model_weights.json", words)


def test_a_truncated_or_missing_weight_file_is_named(tensors, tmp_path):
    write_trunk(tmp_path, tensors, BITS)
    weights = tmp_path / "model_weights.bin"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(CheckpointError) as caught:
        MoefluxTrunk.open(tmp_path)
    manifest = tmp_path / "model_weights.json"
    one_sentence(str(caught.value), manifest, f"{weights.name} has {len(content) - 1} bytes")
    weights.unlink()
    with pytest.raises(CheckpointError) as caught:
        MoefluxTrunk.open(tmp_path)
    one_sentence(str(caught.value), weights, "cannot be read")
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        MoefluxTrunk.open(tmp_path)


# The published sizes: variant -> (C, F, bits, bytes of a block, of weight and of scales, and
# the offset of the down projection's scales).
PUBLISHED = {
    "a17b 4-bit": (4096, 1024, 4, 7_077_888, 2_097_152, 131_072, 6_815_744),
    "a3b 4-bit": (2048, 512, 4, 1_769_472, 524_288, 32_768, 1_703_936),
    "cogito 4-bit": (7168, 2048, 4, 24_772_608, 7_340_032, 458_752, 23_855_104),
    "a17b 2-bit": (4096, 1024, 2, 3_932_160, 1_048_576, 131_072, 3_670_016),
    "a3b 2-bit": (2048, 512, 2, 983_040, 262_144, 32_768, 917_504),
}


@pytest.mark.parametrize("variant", PUBLISHED)
def test_blocks_have_the_published_sizes_and_offsets(variant):
    hidden, intermediate, bits, block, weight, scales, offset = PUBLISHED[variant]
    components = block_components(hidden, intermediate, QuantSpec(bits))
    sizes = {name: int(np.prod(s)) * ITEMSIZE[dtype] for name, (dtype, s) in components.items()}
    assert list(sizes.values()) == [weight, scales, scales] * 3
    assert sum(sizes.values()) == block
    assert block - sizes["down_proj.biases"] - sizes["down_proj.scales"] == offset


def write_layers(directory, layers, bits, experts=E):
    """Blocks of mx.quantize'd matrices; returns (layer, expert) -> component name -> array."""
    directory.mkdir(parents=True, exist_ok=True)
    held = {}
    for layer in layers:
        blob = b""
        for e in range(experts):
            arrays = {}
            for name, (rows, width) in (("gate", (F, C)), ("up", (F, C)), ("down", (C, F))):
                arrays |= module(f"{name}_proj", quantised(rows, width, bits))
            blob += b"".join(raw(a) for a in arrays.values())
            held[layer, e] = arrays
        (directory / f"layer_{layer:02d}.bin").write_bytes(blob)
    return held


def open_experts(directory, bits=4, experts=E, **options):
    return MoefluxExperts.open(
        directory, hidden=C, intermediate=F, num_experts=experts, spec=QuantSpec(bits), **options
    )


@pytest.mark.parametrize("bits", [2, 4])
def test_experts_load_bit_for_bit_and_layers_may_start_at_3(bits, tmp_path):
    held = write_layers(tmp_path, [3, 4], bits)
    experts = open_experts(tmp_path, bits)
    assert experts.layers == (3, 4)
    assert experts.num_experts == E
    for layer in experts.layers:
        refs = experts.refs(layer)
        for e in range(E):
            assert list(refs) == list(held[layer, e])
            for name, array in held[layer, e].items():
                loaded = refs[name][e].load()
                assert loaded.dtype == array.dtype
                assert raw(loaded) == raw(array), (layer, e, name)


def test_a_gap_between_layer_files_is_named(tmp_path):
    write_layers(tmp_path, [3, 4, 6], 4)
    with pytest.raises(ExpertFileError) as caught:
        open_experts(tmp_path)
    one_sentence(str(caught.value), tmp_path / "layer_05.bin", "is missing", "3 to 6")
    (tmp_path / "layer_06.bin").unlink()
    with pytest.raises(ExpertFileError, match="no experts of layer 6"):
        open_experts(tmp_path).refs(6)


@pytest.mark.parametrize("options", [{"bits": 2}, {"experts": E + 1}, {"experts": 1}])
def test_files_of_other_bits_or_another_number_of_experts_are_refused(options, tmp_path):
    write_layers(tmp_path, [0], 4)
    with pytest.raises(ExpertFileError) as caught:
        open_experts(tmp_path, **options)
    one_sentence(str(caught.value), tmp_path / "layer_00.bin", "experts of", "make")


def test_a_truncated_layer_file_is_refused(tmp_path):
    write_layers(tmp_path, [0, 1], 4)
    file = tmp_path / "layer_01.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ExpertFileError, match=r"layer_01\.bin has \d+ bytes"):
        open_experts(tmp_path)


def test_a_directory_without_layers_and_widths_that_do_not_divide(tmp_path):
    with pytest.raises(ExpertFileError, match=r"holds no layer_NN\.bin"):
        open_experts(tmp_path)
    with pytest.raises(ExpertFileError, match="cannot be read"):
        open_experts(tmp_path / "missing")
    with pytest.raises(ShapeError, match="row of 100 elements"):
        block_components(128, 100, QuantSpec(4))


@pytest.mark.parametrize(("weights", "experts", "asked"), [
    ("root", "root/packed_experts", "root"),
    ("root/artifacts", "root/packed_experts", "root"),
    ("root/artifacts", "root/artifacts/packed_experts", "root"),
    ("parent/artifacts", "parent/packed_experts", "parent/mlx"),
    ("parent/artifacts", "parent/artifacts/packed_experts", "parent/mlx"),
])  # fmt: skip
def test_the_parts_are_found_in_every_published_arrangement(weights, experts, asked, tmp_path):
    for name in (weights, experts, asked):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert MoefluxDirectory.find(tmp_path / asked) is None
    (tmp_path / weights / "model_weights.json").write_text("{}")
    found = MoefluxDirectory.find(tmp_path / asked)
    assert (found.root, found.bits) == (tmp_path / asked, 4)
    assert (found.weights, found.experts) == (tmp_path / weights, tmp_path / experts)


def test_the_4_bit_experts_come_first(tmp_path):
    (tmp_path / "model_weights.json").write_text("{}")
    with pytest.raises(CheckpointError, match="packed_experts or packed_experts_2bit"):
        MoefluxDirectory.find(tmp_path)
    (tmp_path / "packed_experts_2bit").mkdir()
    assert MoefluxDirectory.find(tmp_path).bits == 2
    (tmp_path / "packed_experts").mkdir()
    assert MoefluxDirectory.find(tmp_path).bits == 4
