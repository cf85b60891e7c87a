"""Oracles of MXFP4, MXFP8 and NVFP4: the bit layouts of the OCP and NVIDIA formats, decoded in
float64; and the same model with the decoded numbers as float32."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import MX_MODES, Quantization, QuantSpec
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import MoefluxError, UnsupportedError
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.expert_ffn import ProjectionBank
from mlx_moeflux.loading import load_model
from tests.models.twins import GOLDEN, relative_error

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent, one of mantissa; no infinities."""
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Sign, four bits of exponent with bias 7, three of mantissa; 0x7f is NaN."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    values = np.where(exponent == 0, 2.0**-6 * mantissa / 8, normal)
    return np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -values, values))


def decoded(weight: np.ndarray, scales: np.ndarray, mode: str) -> np.ndarray:
    """weight ``[out, words]`` uint32, scales ``[out, groups]`` uint8 -> float64 ``[out, in]``."""
    data = weight.view(np.uint8)
    if MX_MODES[mode].bits == (4,):
        values = e2m1(np.stack([data & 15, data >> 4], axis=-1)).reshape(len(data), -1)
    else:
        values = e4m3(data)
    factors = e4m3(scales) if mode == "nvfp4" else 2.0 ** (scales.astype(np.int64) - 127)
    return values * np.repeat(factors, *MX_MODES[mode].group_sizes, axis=1)


def random_matrix(mode: str, rows: int, width: int) -> tuple[mx.array, mx.array]:
    """Every code of an element, and scales of many sizes."""
    random = np.random.default_rng(5)
    (bits,), (group,) = MX_MODES[mode].bits, MX_MODES[mode].group_sizes
    data = random.integers(0, 256, (rows, width * bits // 8)).astype(np.uint8)
    if bits == 8:
        data[data & 127 == 127] = 0  # NaN
    low, high = (0, 127) if mode == "nvfp4" else (112, 140)
    scales = random.integers(low, high, (rows, width // group)).astype(np.uint8)
    return mx.array(data.view(np.uint32)), mx.array(scales)


@pytest.mark.parametrize("mode", MX_MODES)
def test_matrices_are_decoded_exactly(mode):
    weight, scales = random_matrix(mode, 24, 192)
    truth = decoded(np.array(weight), np.array(scales), mode)
    spec = QuantSpec.of_mode(mode)
    dense = Weight(weight, scales, spec=spec).dense(mx.float32)
    assert np.array_equal(np.array(dense).astype(np.float64), truth)
    # Products with unit vectors are the numbers themselves.
    one = mx.eye(192)
    assert np.array_equal(np.array(Weight(weight, scales, spec=spec).matmul(one)).T, truth)
    bank = ProjectionBank(weight[None], scales[None], None, spec)
    slots = mx.zeros((192,), mx.uint32)
    for given in (bank, bank.take(mx.array([0], mx.uint32), mx.float32)):
        assert np.array_equal(np.array(given.matmul(one, slots)).T, truth)


# Of NVFP4 there is test_nvfp4.py.
MODES = [pytest.param(mode, marks=[pytest.mark.slow] * (mode == "nvfp4")) for mode in MX_MODES]


@pytest.fixture(scope="module", params=MODES)
def quantised(request, tmp_path_factory) -> tuple[str, Path]:
    """A twin with every width a multiple of 64, in one mode and mlx-lm's layout."""
    out = tmp_path_factory.mktemp("mx") / request.param
    source = GOLDEN / "qwen3_moe_top2"
    convert(source, out, layout="safetensors", quantize=True, q_mode=request.param)
    return request.param, out


def as_float32(directory: Path, out: Path, mode: str) -> Path:
    """The same checkpoint with the decoded numbers; what is affine stays."""
    out.mkdir()
    tensors = mx.load(str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    for name in [n for n, array in tensors.items() if array.dtype == mx.uint8]:
        base = name.removesuffix(".scales")
        weight, scales = np.array(tensors[f"{base}.weight"]), np.array(tensors.pop(name))
        rows = decoded(
            weight.reshape(-1, weight.shape[-1]), scales.reshape(-1, scales.shape[-1]), mode
        )
        tensors[f"{base}.weight"] = mx.array(rows.astype(np.float32)).reshape(
            *weight.shape[:-1], -1
        )
    mx.save_safetensors(str(out / "model.safetensors"), tensors)
    affine = {k: v for k, v in config["quantization"].items() if k.endswith(".gate")}
    config |= {"quantization": affine, "quantization_config": affine}
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_model_computes_with_the_decoded_numbers(quantised, tmp_path):
    """The tolerance is float32's; experts streamed and packed give the bits of resident ones."""
    mode, directory = quantised
    config = json.loads((directory / "config.json").read_text())
    assert Quantization.from_config(config).default == QuantSpec.of_mode(mode)
    dense = as_float32(directory, tmp_path / "dense", mode)
    packed = convert(directory, tmp_path / "packed", verify_written=True)
    tokens = mx.array(np.random.default_rng(2).integers(0, 101, (2, 13)))
    answers = []
    for path, memory, reader in (
        (dense, "auto", "pread"),
        (directory, "auto", "pread"),
        (directory, "51%", "pread"),
        (directory, "67%", "mmap"),
        (packed, "51%", "memory"),
    ):
        with load_model(path, expert_memory=memory, expert_reader=reader) as model:
            cache = model.make_cache()
            parts = [model(tokens[:, :10], cache)]
            parts += [model(tokens[:, t : t + 1], cache) for t in range(10, 13)]
            answers.append(np.array(mx.concatenate(parts, axis=1)))
    assert relative_error(mx.array(answers[1]), mx.array(answers[0])) <= 1e-5
    assert all(np.array_equal(answer, answers[1]) for answer in answers[2:])


def test_the_stored_bytes_are_streamed(quantised):
    """No expert is held in another form: a block has the bytes of the file."""
    mode, directory = quantised
    mapped = open_checkpoint(directory)
    stored = sum(r.nbytes for n, r in mapped.tensors.items() if ".layers.0.mlp.switch_mlp." in n)
    with load_model(directory, expert_memory="51%") as model:
        assert model.store.block_bytes[0] * 6 == stored
        arrays = model.store.bank(0)
        assert arrays.gate.spec == QuantSpec.of_mode(mode)
        assert (arrays.gate.weight.dtype, arrays.gate.scales.dtype) == (mx.uint32, mx.uint8)


def test_mlx_lm_gives_the_same_logits(quantised):
    utils = pytest.importorskip("mlx_lm.utils")
    _, directory = quantised
    theirs, _ = utils.load_model(directory)
    tokens = mx.array(np.random.default_rng(3).integers(0, 101, (1, 21)))
    theirs.set_dtype(mx.float32)
    with load_model(directory) as model:
        assert relative_error(model(tokens), theirs(tokens)) <= 1e-5


def test_the_command_line_takes_the_mode(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--model", str(GOLDEN / "qwen3_moe_top2"), "--out", str(out), "-q"]
    assert main(["convert", *arguments, "--q-mode", "mxfp4", "--q-bits", "8"]) == 1
    assert "mode 'mxfp4' has 4 bits in groups of 32, not 8 in groups of 32" in (
        capsys.readouterr().err
    )
    assert main(["convert", *arguments, "--q-mode", "mxfp4", "--layout", "packed"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"]["mode"] == "mxfp4"


def test_mixed_modes_and_contradictions():
    block = {"bits": 4, "group_size": 64, "a.gate": {"mode": "mxfp8"}, "b": False}
    found = Quantization.from_config({"quantization": block})
    assert found.spec("a.gate") == QuantSpec(8, 32, "mxfp8")
    assert found.spec("b") is None
    for wrong in ({"mode": "mxfp4", "bits": 8}, {"mode": "nvfp4", "group_size": 32}, {"mode": []}):
        with pytest.raises(MoefluxError, match=r"^[^\n]*mode[^\n]*$"):
            Quantization.from_config({"quantization": wrong})
    with pytest.raises(UnsupportedError, match="scales of one byte"):
        QuantSpec.of_shapes(128, 16, 2, byte_scales=True)


def test_a_mode_of_the_trunk_may_differ_from_the_experts(tmp_path):
    """mlx-lm's mixed predicates: an entry for each module that differs."""
    directory = synthesize("qwen3-tiny", tmp_path / "model", layers=2, experts=8)
    mixed = convert(directory, tmp_path / "float", layout="safetensors", dequantize=True)
    out = convert(mixed, tmp_path / "mx", layout="safetensors", quantize=True, q_mode="nvfp4")
    config = json.loads((out / "config.json").read_text())["quantization"]
    assert config["model.layers.0.mlp.gate"] == QuantSpec(8).to_config()
    with load_model(out, expert_memory="60%") as model:
        assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()
