"""Oracles: the source's own bytes, mx.quantize, and mlx-lm on what it is meant to load."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.formats.packed import verify
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorIndex
from mlx_moeflux.checkpoint.writer import SafetensorsWriter, Tensor
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import CheckpointError, ExpertFileError, InputError, MoefluxError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models import model_class
from tests.models.twins import relative_error

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(p.parent.name for p in GOLDEN.glob("*/golden.safetensors"))


def logits(directory: Path, **options) -> mx.array:
    config = json.loads((directory / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    tokens = mx.array(np.random.default_rng(0).integers(0, vocabulary, (2, 21)))
    with load_model(directory, **options) as model:
        result = model(tokens)
        mx.eval(result)
    assert mx.isfinite(result).all().item()
    return result


def bytes_of(refs) -> bytes:
    buffer = bytearray(refs.nbytes)
    refs.read_into(memoryview(buffer))
    return bytes(buffer)


def mapped(directory: Path):
    checkpoint = open_checkpoint(directory)
    kind = model_class(checkpoint.config["model_type"])
    config = kind.Config.from_dict(checkpoint.config, file=checkpoint.config_file)
    return checkpoint.mapped(config.name_rules())


LAYOUTS = ("packed", "safetensors")
# One of each family, one whose norms are stored otherwise, one without a head, one in a wrapper;
# their layouts by turns.
KEPT = ("deepseek_v3_groups", "glm4_moe_norms", "gpt_oss_sinks", "kimi_k25_wrapped")
KEPT += ("minimax_m2_norms", "qwen3_moe_top2", "qwen3_next_top3", "gemma4_shared")
KEPT += ("glm_moe_dsa_shared", "laguna_heads", "text_tied_top1", "text_top_all", "vision_top2")
BY_TURNS = {case: LAYOUTS[i % 2] for i, case in enumerate(KEPT)} | {"bundled": "packed"}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[pytest.mark.slow] * (not usual))
        for case in (*CASES, "bundled")
        for layout in LAYOUTS
        for usual in [layout == BY_TURNS.get(case)]
    ],
)
def test_bits_kept_means_the_same_bytes_and_logits(tmp_path, case, layout):
    source = BUNDLED_MODEL if case == "bundled" else GOLDEN / case
    out = convert(source, tmp_path / "out", layout=layout, verify_written=True)
    zero_centred = case.startswith(("text_", "vision_", "qwen3_next")) and case != "text_top_all"
    if layout == "safetensors" and zero_centred:
        # Zero-centred norms get their one in bfloat16, as in mlx-lm's own conversion: only in
        # float32 is that exact.
        exact = convert(source, tmp_path / "exact", layout=layout, dtype="float32")
        assert mx.array_equal(logits(source), logits(exact))
    else:
        assert mx.array_equal(logits(source), logits(out))
    before, after = (mapped(d) for d in (source, out))
    assert before.experts.keys() == after.experts.keys()
    for layer, components in before.experts.items():
        assert components.keys() == after.experts[layer].keys()
        for name, refs in components.items():
            for e in (0, len(refs) - 1):
                assert bytes_of(refs[e]) == bytes_of(after.experts[layer][name][e])


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_quantising_is_mlx_lms(tmp_path, bits):
    from mlx_lm.utils import load_model as mlx_lm_load

    floats = convert(BUNDLED_MODEL, tmp_path / "f", layout="safetensors", dequantize=True)
    assert all(ref.dtype != "U32" for ref in TensorIndex.open(floats).values())
    out = convert(floats, tmp_path / "q", layout="safetensors", quantize=True, q_bits=bits)
    theirs, _ = mlx_lm_load(out)
    theirs.set_dtype(mx.float32)
    tokens = mx.array(np.random.default_rng(0).integers(0, 4096, (2, 21)))
    expected, actual = theirs(tokens), logits(out)
    assert (mx.abs(actual - expected).max() / mx.abs(expected).max()).item() <= 1e-4
    before, after = TensorIndex.open(floats), TensorIndex.open(out)
    for base, own in (
        ("language_model.model.layers.2.self_attn.q_proj", bits),
        ("language_model.model.layers.1.mlp.switch_mlp.down_proj", bits),
        ("language_model.model.layers.1.mlp.gate", 8),
    ):
        parts = mx.quantize(before[f"{base}.weight"].load(), 64, own)
        for part, expected in zip(("weight", "scales", "biases"), parts, strict=True):
            assert mx.array_equal(after[f"{base}.{part}"].load(), expected), (base, part)
    with pytest.raises(InputError, match="quantised already"):
        convert(out, tmp_path / "twice", quantize=True)


def test_dtype_is_that_of_the_floats(tmp_path):
    out = convert(GOLDEN / "text_top3", tmp_path / "out", layout="safetensors", dtype="float16")
    dtypes = {name: ref.dtype for name, ref in TensorIndex.open(out).items()}
    assert {d for n, d in dtypes.items() if not n.endswith(("A_log", "dt_bias"))} == {"F16"}
    assert {d for n, d in dtypes.items() if n.endswith(("A_log", "dt_bias"))} == {"F32"}
    for options in ({"dtype": "int4"}, {"layout": "zip"}, {"quantize": True, "dequantize": True}):
        with pytest.raises(InputError):
            convert(GOLDEN / "text_top3", tmp_path / "no", **options)
    assert not (tmp_path / "no").exists()


def test_a_flipped_bit_of_the_trunk_is_found(tmp_path):
    out = convert(GOLDEN / "text_top3", tmp_path / "out")
    file, index_file = out / "model.safetensors", out / "experts" / "index.json"
    index, content = json.loads(index_file.read_text()), file.read_bytes()
    assert index["trunk"] == [
        {
            "file": file.name,
            "bytes": len(content),
            "blake2b": hashlib.blake2b(content, digest_size=32).hexdigest(),
            "tail_crc32": f"{zlib.crc32(content[-65536:]):08x}",
        }
    ]
    verify(out)
    # The lowest bit of a number: structure, and that it is finite, stay as they are.
    ref = TensorIndex.open(out)["model.norm.weight"]
    flipped = bytearray(content)
    flipped[ref.offset] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs from what was written"):
        verify(out)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"must have {len(content)}"):
        verify(out)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors with the trunk is missing"):
        verify(out)
    # An index of before the trunk was hashed opens, and its experts are verified.
    file.write_bytes(flipped)
    del index["trunk"], index["blake2b"]
    index_file.write_text(json.dumps(index))
    verify(out)
    assert mx.isfinite(logits(out)).all().item()


def changed(directory: Path, change) -> None:
    file = directory / "experts" / "index.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def every_layer(change):
    return lambda index: [change(layer) for layer in index["layers"].values()]


@pytest.fixture(scope="module")
def of_bfloat16(tmp_path_factory) -> Path:
    return convert(BUNDLED_MODEL, tmp_path_factory.mktemp("packed") / "out", dtype="bfloat16")


LIES = {
    "no crc32": every_layer(lambda layer: layer.pop("crc32")),
    "no crc32 in one layer": lambda index: index["layers"]["1"].pop("crc32"),
    "no trunk": lambda index: index.pop("trunk"),
    "no end of the trunk": lambda index: index["trunk"][0].pop("tail_crc32"),
    "another crc32": every_layer(lambda layer: layer.update(crc32=layer["crc32"][::-1])),
    "another source": lambda index: index.update(source="x"),
    "scales of float16": every_layer(lambda layer: layer["components"][1].update(dtype="F16")),
    "biases of float16": every_layer(lambda layer: layer["components"][2].update(dtype="F16")),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_was_changed_is_one_line(of_bfloat16, tmp_path, lie):
    """The dtypes have the size of the right ones: no length and no checksum of a block differs."""
    out = shutil.copytree(of_bfloat16, tmp_path / "out")
    index = json.loads((out / "experts" / "index.json").read_text())
    assert [c["dtype"] for c in index["layers"]["1"]["components"]][:3] == ["U32", "BF16", "BF16"]
    changed(out, LIES[lie])
    with pytest.raises(ExpertFileError, match=r"index\.json is not usable: it was changed"):
        load_model(out)


@pytest.mark.parametrize("dtype", ["I16", "U16", "BOOL", "I32", "F32", "F64", "F8_E4M3"])
def test_dtypes_that_no_expert_has_are_one_line(of_bfloat16, tmp_path, dtype):
    """In an index without a hash of itself too."""
    out = shutil.copytree(of_bfloat16, tmp_path / "out")

    def lie(index):
        del index["blake2b"]
        every_layer(lambda layer: layer["components"][1].update(dtype=dtype))(index)

    changed(out, lie)
    with pytest.raises(MoefluxError, match=r"^[^\n]*(index\.json|layer_00\.bin)"):
        load_model(out)


def test_some_layers_without_checksums_are_one_line(of_bfloat16, tmp_path):
    out = shutil.copytree(of_bfloat16, tmp_path / "out")

    def lie(index):
        del index["blake2b"], index["layers"]["1"]["crc32"]

    changed(out, lie)
    with pytest.raises(ExpertFileError, match="some layers have no crc32"):
        load_model(out)


@pytest.mark.parametrize("count", [64, 5000, 65_536, 200_000])
def test_a_trunk_whose_end_is_zeros_is_one_line(tmp_path, count):
    out = convert(GOLDEN / "text_top3", tmp_path / "out")
    file = out / "model.safetensors"
    content = file.read_bytes()
    assert count < len(content)
    assert any(content[-count:])
    file.write_bytes(content[:-count] + bytes(count))
    for action in (lambda: load_model(out), lambda: convert(out, tmp_path / "again")):
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors differs .* its end is another"
        ):
            action()
    file.write_bytes(content)
    load_model(out).close()


def test_the_trunk_is_hashed_shard_by_shard(tmp_path):
    tensors = {name: Tensor("F32", (3, 5)) for name in "abc"}
    with SafetensorsWriter(tmp_path, tensors, metadata={}, shard_bytes=100) as writer:
        for name in tensors:
            writer.write(name, 0, bytes(60))
    assert len(writer.files) == 4
    assert sorted(writer.files) == sorted(f.name for f in tmp_path.iterdir())


@pytest.mark.parametrize("where", ["ftruncate", "fsync", "replace"])
def test_an_interrupted_file_is_removed(tmp_path, monkeypatch, where):
    """At its beginning, and while it is completed: with another shard complete."""
    real, calls = getattr(os, where), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(os, where, interrupted)
    tensors = {name: Tensor("F32", (3, 5)) for name in "abc"}

    def write() -> None:
        with SafetensorsWriter(tmp_path, tensors, metadata={}, shard_bytes=100) as writer:
            for name in tensors:
                writer.write(name, 0, bytes(60))

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options", ["", ", layout='safetensors', dequantize=True"])
def test_peak_memory_is_a_few_chunks(tmp_path, options):
    path = synthesize("qwen3.5-35b-a3b", tmp_path / "model", layers=2)
    code = (
        "def hwm():\n"
        "    line = next(x for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "    return int(line.split()[1]) * 1024\n"
        "from mlx_moeflux.conversion.convert import convert\nbase = hwm()\n"
        f"convert({str(path)!r}, {str(tmp_path / 'out')!r}{options})\nprint(hwm() - base)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 300_000_000 + 64 * 2**20 + 3 * 1_769_472


# One of each type; by default those whose type mlx-lm has under another name, or has not.
OF_MLX_LM = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("text_top_all", "qwen4_exp_rows")))
    for name in (
        *("text_top3", "text_top_all", "vision_top2"),
        *("qwen4_exp_rows", "qwen4_exp_vision", "qwen3_moe_top2"),
        *("qwen3_next_top3", "deepseek_v3_groups", "deepseek_v32_yarn40", "glm4_moe_plain"),
        *("glm4_moe_lite_flash", "glm_moe_dsa_shared", "gpt_oss_sinks", "kimi_k2_group1"),
        *("kimi_k25_wrapped", "laguna_heads", "minimax_m2_norms", "gemma4_shared"),
    )
]

LACKING = {
    "qwen4_exp_rows": "model_type 'qwen4_exp'",
    "qwen4_exp_vision": "model_type 'qwen4_exp'",
    "deepseek_v3_groups": "head that is the embedding in 'deepseek_v3'",
    "glm4_moe_plain": "head that is the embedding in 'glm4_moe'",
    "glm_moe_dsa_shared": "layers that share an indexer",
}


@pytest.mark.parametrize("twin", OF_MLX_LM)
def test_mlx_lm_has_the_type_that_is_written_or_a_line_says_so(tmp_path, capsys, twin):
    utils = pytest.importorskip("mlx_lm.utils")
    out = convert(GOLDEN / twin, tmp_path / "out", layout="safetensors")
    said = capsys.readouterr().err.splitlines()
    tokens = mx.array([[1, 2, 3]])
    with load_model(GOLDEN / twin, dtype=mx.float32) as model:
        expected = model(tokens)
    with load_model(out, dtype=mx.float32) as model:
        assert relative_error(model(tokens), expected) <= 1e-2
    if twin not in LACKING:
        assert said == []
        utils.load_model(out, lazy=True)
        return
    (line,) = said
    assert f"mlx-lm has no {LACKING[twin]}" in line
    with pytest.raises(ValueError, match=r"not supported|parameters"):
        utils.load_model(out, lazy=True)
