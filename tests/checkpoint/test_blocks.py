"""Oracle: the dequantisation of the `gguf` package, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES, DECODED
from mlx_moeflux.checkpoint.quantization import Quantization, QuantSpec
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.io.layout import BlockLayout, Component

gguf = pytest.importorskip("gguf")

MODES = {mode.mode: mode for mode in DECODED.values()}
SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 65504.0, 6e-8], np.float16)


def same_bits(actual: np.ndarray, expected: np.ndarray) -> bool:
    """NaN have many bits, and all are one."""
    assert actual.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    equal = actual.view(np.uint32) == expected.view(np.uint32)
    return actual.shape == expected.shape and bool((equal | (nan & np.isnan(actual))).all())


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 21, 2)], ids=str)
@pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])
@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")
def test_values_are_ggml_s(name, xp, shape):
    mode, random = MODES[name], np.random.default_rng(sum(shape))
    blocks = random.integers(0, 256, (*shape, mode.nbytes), dtype=np.uint8)
    if len(shape) == 3:
        halves = random.choice(SPECIAL, (*shape, len(mode.halves)))
        for i, at in enumerate(mode.halves):
            blocks[..., at : at + 2] = halves[..., i : i + 1].view(np.uint8)
        if name == "mxfp4":
            blocks[..., 0] = random.choice([0, 1, 2, 3, 254, 255], shape)
    rows = blocks.reshape(*shape[:-1], -1)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    actual = np.array(mode.decode(xp.array(rows), xp))
    assert same_bits(actual, expected)
    assert expected.shape == (*shape[:-1], shape[-1] * mode.elements)
    assert len(np.unique(expected)) >= 12


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"group": 48}, "no whole groups"),
        ({"halves": (17,)}, "not in the block"),
        ({"halves": (0, 2, 4)}, "other factors"),
        ({"table": tuple(range(16))}, "no zero"),
    ],
)
def test_an_incomplete_record_is_an_error(change, fault):
    with pytest.raises(TypeError, match=f"'Q4_0' is wrong: .*{fault}"):
        replace(BLOCK_MODES["q4_0"], **change)


@pytest.mark.parametrize("name", BLOCK_MODES)
def test_rows_of_a_mode(name):
    spec, mode = QuantSpec.of_mode(name), BLOCK_MODES[name]
    for width in (mode.elements, 3 * 256, 2048):
        assert spec.row(width) == (name, width // mode.elements * mode.nbytes)
        assert spec.width(spec.row(width)[1]) == width
    assert not spec.is_affine
    with pytest.raises(ShapeError, match="does not divide"):
        spec.row(mode.elements + 16)
    block = {"quantization": Quantization(spec, {}).to_config()}
    assert Quantization.from_config(block).spec("any") == spec


def layout(down: Component, *more: Component) -> BlockLayout:
    inner = [Component(f"{p}_proj.weight", "q6_k", (256, 2 * 210)) for p in ("gate", "up")]
    return BlockLayout((*inner, down, *more))


def test_layout_of_blocks():
    down = Component("down_proj.weight", "q3_k", (512, 110))
    found = layout(down)
    assert {p: spec.mode for p, spec in found.specs.items()} == {
        "gate_proj": "q6_k", "up_proj": "q6_k", "down_proj": "q3_k",
    }  # fmt: skip
    assert found.nbytes == 2 * 256 * 420 + 512 * 110
    # Of as many bytes: the dtype alone tells them apart.
    for mode in ("q4_k", "q4_0", "iq4_nl"):
        other = layout(Component("down_proj.weight", mode, (512, 144)))
        assert other.specs["down_proj"] == QuantSpec.of_mode(mode)
    with pytest.raises(ShapeError, match=r"weight q3_k \[512, 111\]' .* q3_k \[512, 110"):
        layout(Component("down_proj.weight", "q3_k", (512, 111)))
    with pytest.raises(ShapeError, match=r"'down_proj.weight U8 \[512, 110\]' .* must be BF16"):
        layout(Component("down_proj.weight", "U8", (512, 110)))
    with pytest.raises(ShapeError, match="'down_proj' of an expert is in blocks of q3_k and must"):
        layout(down, Component("down_proj.scales", "U8", (512, 1)))


def test_blocks_are_not_made(tmp_path):
    with pytest.raises(InputError, match="'q6_k' is read and not made"):
        convert(tmp_path, tmp_path / "out", quantize=True, q_mode="q6_k")
