"""Oracle: the `gguf` package, which writes the files and dequantises their blocks; the same values
in float32 safetensors must give the same logits."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import struct
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES, DECODED
from mlx_moeflux.checkpoint.formats import gguf as ours
from mlx_moeflux.checkpoint.formats.gguf_blocks import (
    ELEMENTS_AT_ONCE,
    EXACT,
    REQUANTISED,
    BlocksRef,
    BlockValuesRef,
)
from mlx_moeflux.checkpoint.formats.gguf_container import TYPES, read_container
from mlx_moeflux.checkpoint.quantization import Quantization, QuantSpec
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    MoefluxError,
    UnsupportedError,
)
from mlx_moeflux.generation.text import generate
from mlx_moeflux.kernels.linear import blocks
from mlx_moeflux.loading import load, load_model, steps
from mlx_moeflux.measure.plan import open_sizes
from mlx_moeflux.models import runtime
from mlx_moeflux.models.layers import BlocksLinear
from mlx_moeflux.models.qwen3_moe_config import Config
from mlx_moeflux.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

from tests.checkpoint import gguf_files  # noqa: E402
from tests.kernels.experts import BETWEEN  # noqa: E402
from tests.kernels.harness import emulated, launched  # noqa: E402
from tests.models.twins import relative_error  # noqa: E402

TOKENS = mx.array(np.random.default_rng(0).integers(0, gguf_files.V, (2, 5)))
KEPT = [kind.name for kind in BLOCK_MODES.values()]
OF_MLX = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "MXFP4")
INEXACT = [name for name in DECODED if name not in OF_MLX]


def logits(path: Path, **options) -> np.ndarray:
    with load_model(path, **options) as model:
        result = np.array(model(TOKENS))
    assert np.isfinite(result).all()
    return result


def parts_of(kind: str, rows: int, width: int, file: Path):
    """The parts of random blocks in MLX's form as arrays, and gguf's values."""
    raw = gguf_files.random_blocks(kind, rows, width, np.random.default_rng(rows))
    file.write_bytes(raw.tobytes())
    source = TensorRef("x", file, 0, "U8", raw.shape)
    parts = BlocksRef.parts("x", source, DECODED[kind], REQUANTISED[kind])
    return parts, gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])


def dequantised(parts, bits: int) -> np.ndarray:
    arrays = [ref.load() for ref in parts.values()]
    if len(arrays) == 2:
        return np.array(mx.dequantize(*arrays, None, 32, bits, mode="mxfp4", dtype=mx.float32))
    return np.array(mx.dequantize(*arrays, 32, bits))


@pytest.mark.parametrize(("rows", "chunks"), [(37, 1), (137, 3)])
@pytest.mark.parametrize("kind", EXACT)
def test_blocks_have_forms_exactly(tmp_path, kind, rows, chunks):
    assert chunks == -(-rows // (ELEMENTS_AT_ONCE // 512))
    parts, expected = parts_of(kind, rows, 512, tmp_path / "x")
    assert EXACT[kind] is REQUANTISED[kind]
    assert np.array_equal(dequantised(parts, DECODED[kind].bits), expected)
    some = {part: ref.rows(5, 19) for part, ref in parts.items()}
    assert np.array_equal(dequantised(some, DECODED[kind].bits), expected[5:19])
    values = BlockValuesRef("x", parts["weight"].sources[0], kind=DECODED[kind])
    assert np.array_equal(np.array(values.load()), expected)
    assert np.array_equal(np.array(values.rows(5, 19).load()), expected[5:19])
    assert np.isfinite(expected).all()
    # A number of MXFP4 has few values.
    assert len(np.unique(expected)) > (20 if kind == "MXFP4" else 1000)


@pytest.mark.parametrize("kind", INEXACT)
def test_other_blocks_are_floats_exactly(tmp_path, kind):
    raw = gguf_files.random_blocks(kind, 67, 512, np.random.default_rng(7))
    (tmp_path / "x").write_bytes(raw.tobytes())
    source = TensorRef("x", tmp_path / "x", 0, "U8", raw.shape)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    values = BlockValuesRef("x", source, kind=DECODED[kind])
    assert np.array_equal(np.array(values.load()), expected)
    assert np.array_equal(np.array(values.rows(5, 19).load()), expected[5:19])


@pytest.mark.parametrize("kind", INEXACT)
def test_quantised_anew_they_are_within_half_a_step(tmp_path, kind):
    parts, expected = parts_of(kind, 23, 768, tmp_path / "x")
    actual = dequantised(parts, 8).reshape(-1, 32)
    groups = expected.reshape(-1, 32)
    step = np.ptp(groups, axis=1) / 255
    error = np.abs(actual - groups).max(axis=1)
    assert (error <= step * 0.5001 + 1e-7 * np.abs(expected).max()).all()
    assert error.max() > 0


def test_equal_elements_quantised_anew(tmp_path):
    raw = np.zeros((2, 210), np.uint8)
    raw[1, 208:210] = np.array([0.5], np.float16).view(np.uint8)
    raw[1, 192:208] = 3
    (tmp_path / "x").write_bytes(raw.tobytes())
    ref = TensorRef("x", tmp_path / "x", 0, "U8", raw.shape)
    values = dequantised(BlocksRef.parts("x", ref, DECODED["Q6_K"], REQUANTISED["Q6_K"]), 8)
    assert np.array_equal(values, gguf.dequantize(raw, gguf.GGMLQuantizationType.Q6_K))
    assert set(values.flat) == {0.0, -48.0}


def mixed(name: str) -> str:
    """As Q4_K_M and Q5_K_M are: several types, and routers in float32."""
    if name.endswith("ffn_gate_inp"):
        return "F32"
    for ending, kind in (("_down_exps", "Q5_K"), ("attn_v", "Q8_0"), ("ffn_down", "Q8_0")):
        if name.endswith(ending):
            return kind
    return {"token_embd": "Q8_0", "output": "Q5_K"}.get(name, "Q4_K")


CASES = {
    "mixed": (mixed, {}),
    "Q8_0": (lambda name: "F32" if "inp" in name else "Q8_0", {"dense": (1,)}),
    "BF16": (lambda name: "BF16", {"tied": True}),
    "F16": (lambda name: "F16", {"dense": (0, 2)}),
}


# Q8_0 is among the mixed, and F16 has dense layers as well.
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "Q8_0")) for case in CASES]
)
def test_logits_are_those_of_the_values(tmp_path, case):
    kind_of, options = CASES[case]
    path = gguf_files.write(tmp_path / "model.gguf", kind_of, **options, meaning=True)
    expected = logits(tmp_path / "meaning")
    resident = logits(path)
    assert relative_error(resident, expected) <= 1e-5
    for reader in ("pread", "mmap"):
        options = {"expert_memory": "80%", "expert_reader": reader, "expert_threads": 1}
        assert np.array_equal(logits(tmp_path, **options), resident)
    packed = convert(path, tmp_path / "packed", verify_written=True)
    assert np.array_equal(logits(packed), resident)
    assert np.array_equal(logits(packed, expert_memory="60%"), resident)


def q4_k_m(name: str) -> str:
    """Down in Q6_K, gate and up in Q4_K; one layer differs."""
    if name in ("output", "blk.1.ffn_gate_exps", "blk.2.attn_v"):
        return "Q6_K"
    return "Q6_K" if "_down" in name and "blk.1" not in name else mixed(name)


def q3_k_m(name: str) -> str:
    """Down in Q6_K, gate and up in Q3_K."""
    return "Q6_K" if "_down" in name else "Q3_K" if "_exps" in name else mixed(name)


def beside_floats(name: str) -> str:
    """Down in Q6_K, gate and up in F16, which no kernel reads together."""
    return "Q6_K" if "down_exps" in name else "F16" if "_exps" in name else mixed(name)


def each_kind(name: str) -> str:
    """Types by turns, three others for the experts of each layer, MXFP4 for the last; routers in
    float32."""
    i = list(gguf_files.shapes(())).index(name)
    return "F32" if "inp" in name else list(DECODED)[(i + 4 * (i // 12) + 1) % len(DECODED)]


KEPT_CASES = {"Q4_K_M": q4_k_m, "each": each_kind, "floats": beside_floats}
KEPT_CASES |= {kind: lambda name, kind=kind: "F32" if "inp" in name else kind for kind in KEPT}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case not in ("Q4_K_M", "each")))
        for case in KEPT_CASES
    ],
)
def test_experts_keep_blocks(tmp_path, case, capsys):
    kind_of = KEPT_CASES[case]
    path = gguf_files.write(tmp_path / "model.gguf", kind_of, meaning=True)
    expected = logits(tmp_path / "meaning")
    with load_model(path, verbose=True) as model:
        resident = np.array(model(TOKENS))
        assert model.store.stats().lossy == []
    assert relative_error(resident, expected) <= 1e-5
    words = capsys.readouterr().err
    names = [name for name, shape in gguf_files.shapes(()).items() if len(shape) > 1]
    for kind, count in Counter(kind_of(name) for name in names if "_exps" not in name).items():
        line = f"{count} tensor{'s' * (count > 1)} of {kind} decoded to float32, "
        assert (line in words) == (kind in INEXACT)
    tensors = [t for t in gguf.GGUFReader(path).tensors if "_exps" in t.name]
    stored = {tensor.name: tensor.n_bytes // gguf_files.E for tensor in tensors}
    for memory in ("85%", "75%"):
        with load_model(path, expert_memory=memory, expert_threads=1) as model:
            assert np.array_equal(np.array(model(TOKENS)), resident)
            layers, blocks = model.store.stats().layers, model.store.block_bytes
        for layer, found in layers.items():
            size = sum(size for name, size in stored.items() if f"blk.{layer}." in name)
            assert blocks[layer] == size
            assert 0 < found.bytes_read == (found.misses + found.prefetches) * size
        assert len(layers) == gguf_files.L
    packed = convert(path, tmp_path / "packed", verify_written=True)
    assert np.array_equal(logits(packed), resident)
    assert np.array_equal(logits(packed, expert_memory="60%"), resident)
    modes = Quantization.from_config(json.loads((packed / "config.json").read_text()))
    down = modes.spec("model.layers.0.mlp.switch_mlp.down_proj")
    assert down == QuantSpec.of_mode(kind_of("blk.0.ffn_down_exps").lower())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Open files as where the back end's kernels read the trunk's blocks."""
    opened = lambda path, **given: open_checkpoint(path, **given | {"trunk_blocks": True})  # noqa: E731
    monkeypatch.setattr(steps, "open_checkpoint", opened)


@pytest.mark.parametrize("case", ["Q4_K_M", pytest.param("each", marks=pytest.mark.slow)])
def test_the_trunk_keeps_blocks_on_gpus(tmp_path, as_on_a_gpu, capsys, case):
    path = gguf_files.write(tmp_path / "model.gguf", KEPT_CASES[case], meaning=True)
    expected = logits(tmp_path / "meaning")
    with load_model(path, verbose=True) as model:
        resident = np.array(model(TOKENS))
        layers = {n: m for n, m in model.named_modules() if isinstance(m, BlocksLinear)}
        assert model.store.stats().lossy == []
        assert model.runtime.decoding_bytes > 0
    assert relative_error(resident, expected) <= 1e-5
    assert "attn" not in capsys.readouterr().err
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {"output": "lm_head"}
    for i in range(gguf_files.L):
        for theirs, ours_ in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
            names[f"blk.{i}.attn_{theirs}"] = f"model.layers.{i}.self_attn.{ours_}_proj"
    kept = {n for n in names if stored[f"{n}.weight"].tensor_type.name in KEPT}
    assert {names[n] for n in kept} == set(layers)
    assert len(kept) > len(names) // 2
    for name in kept:
        tensor, layer = stored[f"{name}.weight"], layers[names[name]]
        assert layer.mode == tensor.tensor_type.name.lower()
        assert np.array_equal(np.array(layer.weight), tensor.data)
    assert np.array_equal(logits(path, expert_memory="80%", expert_threads=1), resident)


def test_adapters_of_a_trunk_in_blocks_learn(tmp_path, as_on_a_gpu):
    tuner = pytest.importorskip("mlx_lm.tuner.utils")
    path = gguf_files.write(tmp_path / "model.gguf", q4_k_m)
    with load_model(path) as model:
        before = np.array(model(TOKENS[:, :5]))
        model.freeze()
        config = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
        tuner.linear_to_lora_layers(model, gguf_files.L, config)
        assert np.array_equal(np.array(model(TOKENS[:, :5])), before)
        model.train()
        loss = nn.value_and_grad(model, lambda model: model(TOKENS[:, :5]).square().mean())
        _, gradients = loss(model)
    found = {n: np.abs(np.array(g)).max() for n, g in tree_flatten(gradients)}
    learning = [value for name, value in found.items() if name.endswith("lora_b")]
    assert len(learning) == gguf_files.L
    assert all(0 < value < np.inf for value in learning)


@pytest.mark.slow  # g++ compiles the kernels of a model
def test_kernels_read_the_trunk_in_blocks(tmp_path, as_on_a_gpu):
    path, few = gguf_files.write(tmp_path / "model.gguf", q4_k_m, meaning=True), TOKENS[:, :2]
    expected = np.array(load_model(tmp_path / "meaning", dtype=mx.float32)(few))
    with emulated(partly_written=BETWEEN), load_model(path, dtype=mx.float32) as model:
        with launched() as names:
            found = np.array(model(few))
        assert any(name.startswith("project") for name in names)
        assert model.kernels.fallbacks() == []
    assert relative_error(found, expected) <= 1e-5
    with emulated(partly_written=BETWEEN), load_model(path, dtype=mx.bfloat16) as model:
        assert model.runtime.decoding_bytes == 0
        with launched() as names:
            found = np.array(model(TOKENS).astype(mx.float32))
        assert "dequantise_blocks" in names
    with load_model(path, dtype=mx.bfloat16) as model:
        wanted = np.array(model(TOKENS).astype(mx.float32))
    # Some positions choose other experts.
    assert np.median(np.abs(found - wanted)) <= 5e-3 * np.abs(wanted).max()


@pytest.mark.slow  # g++ compiles the kernels of a model
def test_a_kernel_computes_experts_in_blocks_on_a_gpu(tmp_path):
    """So nothing is marked, and slots change no bit; experts that no kernel reads are marked."""
    path = gguf_files.write(tmp_path / "model.gguf", q3_k_m)
    few = TOKENS[:, :2]
    with load_model(path, dtype=mx.float32) as model:
        expected = np.array(model(few))
    with emulated(partly_written=BETWEEN), load_model(path, dtype=mx.float32) as model:
        with launched() as names:
            found = np.array(model(few))
        assert "moe_step_inner_blocks" in names
        assert model.store.stats().lossy == []
    for memory in ("85%", "67%"):
        options = {"expert_memory": memory, "expert_threads": 1, "dtype": mx.float32}
        with emulated(partly_written=BETWEEN), load_model(path, **options) as model:
            with launched() as names:
                assert np.array_equal(np.array(model(few)), found)
            assert "block_inner" in names
            assert model.store.stats().lossy == []
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.slow
def test_experts_that_no_kernel_reads_are_marked_on_a_gpu(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", beside_floats)
    with emulated(partly_written=BETWEEN), load_model(path, dtype=mx.float32) as model:
        assert model.store.stats().lossy == []
        mx.eval(model(TOKENS[:, :2]))
        (mark,) = model.store.stats().lossy
    assert re.fullmatch(r"expert_mix=\w+ refused: stock MLX promises no equal bits .*", mark)


def in_two_kinds(name: str) -> str:
    """Experts in types that kernels read."""
    kinds = {"gate_exps": "IQ4_NL", "up_exps": "IQ4_NL", "down_exps": "Q6_K"}
    return kinds.get(name.rpartition("ffn_")[2], "Q8_0")


@pytest.mark.parametrize("memory", [pytest.param("100%", marks=pytest.mark.slow), "80%"])
def test_peak_memory_counts_what_decoding_takes(tmp_path, monkeypatch, memory):
    """Of a prompt and of tokens after it. Without the other parts' bounds, which are much larger
    than what so small a model needs of them, the formula holds by that part alone."""
    path = gguf_files.write(tmp_path / "model.gguf", in_two_kinds)
    monkeypatch.setattr(blocks, "DECODED_BYTES", 4 << 20)
    monkeypatch.setattr(runtime, "compute_scratch_bytes", lambda: 1 << 20)
    options = {"expert_memory": memory, "expert_threads": 1, "kernels": "reference"}
    with load_model(path, **options) as model:
        cache = model.make_cache()
        mx.eval(model.parameters(), TOKENS)
        gc.collect()  # models of other tests
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        logits = model(TOKENS[:1], cache, last_only=True)
        mx.eval(logits)
        for _ in range(3):
            logits = model(mx.argmax(logits[:, -1:], axis=-1), cache)
            mx.eval(logits)
        peak = mx.get_peak_memory() - before
        tokens = TOKENS.shape[1]
        allowed = model.state_bytes(tokens + 3) + model.activation_bytes(tokens)
        assert allowed - model.runtime.decoding_bytes < peak <= allowed


def test_what_kernels_read_takes_no_memory_to_decode(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", in_two_kinds)
    options = {"dtype": mx.float32, "expert_memory": "100%"}
    with load_model(path, **options) as model:
        assert model.runtime.decoding_bytes >= 3 * blocks.DECODED_BYTES
        needed = model.activation_bytes(9) - model.runtime.decoding_bytes
    with load_model(path, requantize=True, **options) as model:
        assert model.runtime.decoding_bytes == 0
        assert model.activation_bytes(9) == needed
    with emulated(partly_written=BETWEEN):
        with load_model(path, **options) as model:
            assert model.runtime.decoding_bytes == 0
        with load_model(path, kernels={"expert_mix": "reference"}, **options) as model:
            assert model.runtime.decoding_bytes > 0
        beside = gguf_files.write(tmp_path / "floats.gguf", beside_floats)
        with load_model(beside, **options) as model:
            assert model.runtime.decoding_bytes > 0
            assert model.kernels.fallbacks() == []


def test_a_token_at_a_time_is_the_prompt(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", q4_k_m)
    with load_model(path, expert_memory="80%", expert_threads=1) as model:
        tokens, cache = TOKENS.reshape(1, -1)[:, :9], model.make_cache()
        whole = model(tokens)
        steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(9)]
    assert relative_error(mx.concatenate(steps, axis=1), whole) <= 1e-5


def test_blocks_become_floats_and_other_forms_refuse_them(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", q4_k_m, meaning=True)
    expected = logits(tmp_path / "meaning")
    for layout in ("packed", "safetensors"):
        out = convert(path, tmp_path / layout, layout=layout, dequantize=True)
        assert relative_error(logits(out), expected) <= 1e-5
    with pytest.raises(InputError, match=r"mlx-lm has no q\d_k, in which 'blk\.\d\.ffn_"):
        convert(path, tmp_path / "no", layout="safetensors")
    with pytest.raises(InputError, match="quantised already"):
        convert(path, tmp_path / "no", quantize=True)
    assert not (tmp_path / "no").exists()


def test_requantize_says_so(tmp_path, capsys):
    """With the error of the logits: 8 bits in groups of 32 for 6 bits in groups of 16. Q4_K of the
    same experts gets its exact form."""
    kind_of = lambda name: "Q6_K" if "down" in name else mixed(name)  # noqa: E731
    path = gguf_files.write(tmp_path / "model.gguf", kind_of, meaning=True)
    expected = logits(tmp_path / "meaning")
    for components in ours.open_gguf(path, requantize=True).blocks.values():
        forms = {name: refs[0].dtype for name, refs in components.items()}
        assert forms.pop("up_proj.weight") == forms.pop("down_proj.weight") == "U32"
        assert len(forms) == 7
    with load_model(path, requantize=True, verbose=True) as model:
        actual = np.array(model(TOKENS))
        words = "Q6_K quantised anew to 8 bits in groups of 32 in 3 tensors"
        assert model.store.stats().lossy == [words]
    streamed = logits(path, requantize=True, expert_memory="80%", expert_threads=1)
    assert np.array_equal(streamed, actual)
    assert words in capsys.readouterr().err
    errors = np.abs(actual - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    # Of most tokens; a few may go to other experts.
    assert 1e-5 < np.median(errors) <= 1e-2
    with pytest.raises(InputError, match="no GGUF file"):
        load_model(tmp_path / "meaning", requantize=True)


@pytest.mark.parametrize("layout", ["packed", pytest.param("safetensors", marks=pytest.mark.slow)])
def test_what_was_quantised_anew_is_converted_so(tmp_path, capsys, layout):
    """Bit for bit what loading with the option computes, and marked as that is."""
    path = gguf_files.write(
        tmp_path / "model.gguf", lambda name: "Q6_K" if "v" in name or "down" in name else "Q4_K"
    )
    expected = logits(path, requantize=True)
    words = ["convert", "--model", str(path), "--layout", layout, "--out"]
    assert main([*words, str(tmp_path / "lossy"), "--requantize"]) == 0
    note = "Q6_K quantised anew to 8 bits in groups of 32 in 6 tensors"
    assert capsys.readouterr().err.endswith(f"{note}\n")
    again = convert(tmp_path / "lossy", tmp_path / "again")
    for out in (tmp_path / "lossy", again):
        assert json.loads((out / "config.json").read_text())["_approximated"] == note
        with load_model(out, verbose=True) as model:
            assert np.array_equal(np.array(model(TOKENS)), expected)
            assert model.store.stats().lossy == [note]
        assert note in capsys.readouterr().err
    if layout == "packed":
        assert main([*words, str(tmp_path / "exact")]) == 0
        assert "in groups" not in capsys.readouterr().err
        assert "_approximated" not in json.loads((tmp_path / "exact/config.json").read_text())
        exact = logits(path)
        assert np.array_equal(logits(tmp_path / "exact"), exact)
        assert not np.array_equal(exact, expected)


def test_quantising_anew_has_something_to_do(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", mixed)
    out = convert(path, tmp_path / "exact", requantize=True)
    with load_model(out) as model:
        assert model.store.stats().lossy == []
    with pytest.raises(InputError, match="no GGUF file"):
        convert(out, tmp_path / "no", requantize=True)
    with pytest.raises(InputError, match="either requantize or dequantize"):
        convert(path, tmp_path / "no", requantize=True, dequantize=True)
    config = json.loads((out / "config.json").read_text())
    for wrong in (3, ["x"], "", "a\nb"):
        (out / "config.json").write_text(json.dumps(config | {"_approximated": wrong}))
        refused(out, ConfigError, "'_approximated' is .*; expected a line of text")


def test_tokenizer_comes_with_the_file(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", mixed)
    model, tokenizer = load(path, expert_memory="80%", expert_threads=1)
    with model:
        ids = tokenizer.encode("ab ba")
        assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "Ġ", "b", "a"]
        assert tokenizer.decode(ids) == "ab ba"
        assert tokenizer.eos_token_ids == {gguf_files.V - 1}
        assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "ab"
        text = generate(model, tokenizer, "ab", max_tokens=5)
    out = convert(path, tmp_path / "packed")
    model, tokenizer = load(out, expert_memory="80%")
    with model:
        assert tokenizer.encode("ab ba") == ids
        assert generate(model, tokenizer, "ab", max_tokens=5) == text


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "m.gguf", lambda name: "Q8_0")


S = "qwen3moe.rope.scaling."
YARN = {f"{S}type": "yarn", f"{S}factor": 4.0, f"{S}original_context_length": 32}
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = 1 + 0.1 * math.log(4.0)
ROPES = {
    "whole": (YARN, HF_YARN),
    "factors and limits": (
        YARN
        | {f"{S}attn_factor": 0.5, f"{S}yarn_attn_factor": 1.5, f"{S}yarn_ext_factor": 1.0}
        | {f"{S}yarn_beta_fast": 8.0, f"{S}yarn_beta_slow": 2.0, f"{S}finetuned": 1},
        HF_YARN | {"attention_factor": 0.75 * MSCALE, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "from the context length": (
        {f"{S}type": "yarn", f"{S}factor": 4.0},
        HF_YARN | {"original_max_position_embeddings": 512},
    ),
    "none": (YARN | {f"{S}type": "none"}, None),
    "linear by one": ({f"{S}factor": 1.0, "qwen3moe.rope.dimension_count": 64}, None),
}


def with_metadata(monkeypatch, path: Path, more: dict) -> None:
    """Make a file carry `more`."""
    right = ours.gguf_metadata(path)
    gguf_files.carry(monkeypatch, right | more)


@pytest.mark.parametrize("case", ROPES)
def test_the_whole_group_of_the_rope_is_read(small, monkeypatch, case):
    """Oracle: config.json's spelling of the same; llama.cpp for what a key means."""
    more, scaling = ROPES[case]
    with_metadata(monkeypatch, small, more)
    found = ours.open_gguf(small).config
    expected = Config.from_dict(found | {"rope_scaling": scaling}, file=small)
    assert Config.from_dict(found, file=small) == expected
    assert (expected.yarn is None) == (scaling is None)


def test_logits_with_a_scaled_rope(tmp_path):
    more, scaling = ROPES["factors and limits"]
    options = {"more": more, "scaling": scaling, "meaning": True}
    path = gguf_files.write(tmp_path / "model.gguf", mixed, **options)
    expected = logits(tmp_path / "meaning")
    assert relative_error(logits(path), expected) <= 1e-5
    config = json.loads((tmp_path / "meaning/config.json").read_text())
    (tmp_path / "meaning/config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    assert relative_error(logits(tmp_path / "meaning"), expected) > 1e-3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({f"{S}type": "linear", f"{S}factor": 2.0}, "'linear'"),
        ({f"{S}factor": 2.0}, "'linear'"),
        ({"qwen3moe.rope.scale_linear": 2.0}, "'linear'"),
        ({f"{S}type": "longrope"}, "'longrope'"),
        (YARN | {f"{S}yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        (YARN | {f"{S}yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"qwen3moe.rope.dimension_count": 32}, "dimension_count"),
    ],
)
def test_a_rope_that_is_not_computed_is_one_line(small, monkeypatch, more, words):
    with_metadata(monkeypatch, small, more)
    refused(small, UnsupportedError, words)


KEYS = ("factor", "attn_factor", "original_context_length", "type")
NO_NUMBERS = ("x", [4.0], [[]], None, True, float("inf"), float("nan"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(
            key, value, id=f"{value}-{key}",
            # By default each key with some values, each value with two keys.
            marks=[pytest.mark.slow] * ((i + j) % 2),
        )
        for i, key in enumerate(KEYS)
        for j, value in enumerate(NO_NUMBERS)
    ],
)  # fmt: skip
def test_a_rope_of_no_numbers_is_one_line(small, monkeypatch, key, value):
    with_metadata(monkeypatch, small, YARN | {S + key: value})
    refused(small, (ConfigError, UnsupportedError), "rope")


def test_the_ends_of_turns_and_messages_end_a_reply(tmp_path):
    ends = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("eot", 7), ("eom", 9))}
    path = gguf_files.write(tmp_path / "model.gguf", mixed, more=ends)
    whole = {gguf_files.V - 1, 7, 9}
    assert load_tokenizer(path).eos_token_ids == whole
    out = convert(path, tmp_path / "packed")
    assert load_tokenizer(out).eos_token_ids == whole
    # Beside a tokenizer that somebody fetched.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(out / name, tmp_path)
    assert load_tokenizer(path).eos_token_ids == whole
    assert load_tokenizer(tmp_path).eos_token_ids == whole


@pytest.mark.parametrize("wrong", [2**32 - 1, gguf_files.V, -1, "x", None])
def test_ends_that_are_not_in_the_vocabulary_are_none(small, monkeypatch, wrong):
    with_metadata(monkeypatch, small, {"tokenizer.ggml.eot_token_id": wrong})
    assert ours.open_gguf(small).config["eos_token_id"] == [gguf_files.V - 1]


def test_metadata_that_nothing_reads_have_a_way_out(tmp_path, capsys):
    """The keys change nothing then."""
    more = {"qwen3moe.new_trick": 3, "qwen3moe.note": "x", "qwen3moe.empty": "", "vendor.n": "x"}
    path = gguf_files.write(tmp_path / "model.gguf", mixed, more=more)
    keys = "nothing here reads 'qwen3moe.new_trick' (3), 'qwen3moe.note' ('x') of the metadata"
    refused(path, UnsupportedError, re.escape(keys))
    words = ["convert", "--model", str(path), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    said = capsys.readouterr().err
    for part in (keys, "--no-strict-config", "strict_config=False"):
        assert part in said
    assert main(["plan", str(path), "--ssd-gbps", "1"]) == 0
    assert main([*words, "--no-strict-config"]) == 0
    plain = gguf_files.write(tmp_path / "plain.gguf", mixed)
    expected = logits(plain)
    assert np.array_equal(logits(path, strict_config=False), expected)
    assert np.array_equal(logits(tmp_path / "out"), expected)
    with load_model(plain, expert_path=path, strict_config=False) as model:
        assert np.array_equal(np.array(model(TOKENS)), expected)


def test_shards(tmp_path):
    whole = gguf_files.write(tmp_path / "model.gguf", mixed)
    out = tmp_path / "shards"
    gguf_files.split(whole, out, "m", 2)
    assert np.array_equal(logits(out), logits(whole))
    # A plan takes the path that loading takes.
    assert open_sizes(whole) == open_sizes(out)
    (out / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        load_model(out)


def refused(path: Path, kind, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value) or str(path.parent) in str(caught.value)


def nested(depth: int) -> bytes:
    """An array of arrays, the innermost of one uint32."""
    return b"".join(struct.pack("<IQ", 9, 1) for _ in range(depth)) + struct.pack("<IQI", 4, 1, 7)


@pytest.mark.parametrize("depth", [1, 2, 300, 5000, 100_000])
@pytest.mark.parametrize("key", ["general.architecture", "a.b", "qwen3moe.rope.scaling.type"])
def test_nested_arrays_are_one_line(tmp_path, depth, key):
    name, content = key.encode(), struct.pack("<I", 9) + nested(depth)
    head = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + head + content + bytes(64))
    refused(path, MoefluxError, "architecture|damaged|metadata")


def test_bad_files_are_one_line(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", mixed)
    content = path.read_bytes()
    for size in (0, 3, 40, 5000, len(content) - 100):
        path.write_bytes(content[:size])
        refused(path, CheckpointError, "truncated|damaged")
    path.write_bytes(b"GGML" + content[4:])
    refused(path, CheckpointError, "no GGUF")
    path.write_bytes(content)
    (tmp_path / "mmproj-F16.gguf").write_bytes(content)
    assert open_checkpoint(tmp_path).described_by == path
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="2 GGUF models"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"architecture": "llama"}, UnsupportedError, "llama"),
        ({"architecture": "clip"}, UnsupportedError, "vision projector"),
        ({"skip": ("expert_used_count",)}, ConfigError, "expert_used_count"),
        ({"skip": ("blk.1.ffn_up_exps",)}, CheckpointError, "up_proj"),
        ({"skip": ("blk.1.attn_q",)}, CheckpointError, "q_proj"),
        ({"skip": ("token_embd",)}, CheckpointError, "token_embd"),
    ],
)
def test_other_models_are_one_line(tmp_path, options, kind, words):
    refused(gguf_files.write(tmp_path / "model.gguf", mixed, **options), kind, words)


@pytest.mark.parametrize(
    "name", [kind.name for kind in TYPES.values() if kind.name not in (*DECODED, *ours.PLAIN)]
)
def test_other_types_are_refused_by_name(small, monkeypatch, name):
    container = read_container(small)
    other = next(kind for kind in TYPES.values() if kind.name == name)
    tensors = [
        tensor._replace(kind=other) if "gate_exps" in tensor.name else tensor
        for tensor in container.tensors
    ]
    monkeypatch.setattr(ours, "read_container", lambda _: container._replace(tensors=tensors))
    refused(small, UnsupportedError, rf"ffn_gate_exps\.weight' is {name}; only Q4_0, Q4_1")


WRONG = [2_000_000_000]
MORE = ["text", [1], [], {"a": 1}, None, True, -1, 0, 1.5, float("nan")]


@pytest.mark.parametrize(
    "value", [*WRONG, *(pytest.param(value, marks=pytest.mark.slow) for value in MORE)], ids=str
)
def test_metadata_that_is_no_model_is_one_line(small, monkeypatch, value):
    """Each key in turn; a value that a model may have loads."""
    right = ours.gguf_metadata(small)
    for key in right:
        gguf_files.carry(monkeypatch, right | {key: value})
        try:
            load(small, expert_memory="100%", expert_threads=1)[0].close()
        except MoefluxError as error:
            assert "\n" not in str(error), key  # noqa: PT017
