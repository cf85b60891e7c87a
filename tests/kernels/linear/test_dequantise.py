"""Affine matrices as floats, against numpy's reading of the words."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear import dequantise as module
from mlx_moeflux.kernels.linear.dequantise import dequantise, dequantise_fused, made_dense
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.runtime.launcher import NoBackend, set_backend
from tests.kernels.experts import dense, random_matrix
from tests.kernels.harness import Case, emulated, float64, launched

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
# shape, bits, group, dtype of the scales and of the result
SIZES = [
    ((3, 64), 4, 32, BF16, BF16),
    ((137, 96), 4, 32, F16, F32),
    ((2, 35, 128), 4, 64, F32, BF16),
    ((5, 96), 8, 32, F32, F16),
    ((9, 128), 2, 64, BF16, BF16),
    ((1, 160), 2, 32, F16, F32),
    ((33, 256), 8, 128, BF16, F32),
]


def matrix(shape, bits, group, dtype) -> tuple[Weight, np.ndarray]:
    """Random words with scales and biases, and what they say: every product and sum is exact in
    float64, or lost behind the 53rd bit."""
    rng = np.random.default_rng(shape[-1] + bits)
    *rows, width = shape
    words = rng.integers(0, 2**32, (*rows, width * bits // 32), dtype=np.uint32)
    numbers = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    scales, biases = (
        mx.array(rng.normal(size=(*rows, width // group)).astype(np.float32)).astype(dtype)
        for _ in range(2)
    )
    each = [np.repeat(float64(a), group, axis=-1) for a in (scales, biases)]
    truth = numbers.reshape(shape) * each[0] + each[1]
    return Weight(mx.array(words), scales, biases, QuantSpec(bits, group)), truth


def rounded(truth: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """By way of float32, as the kernel rounds."""
    return float64(mx.array(truth.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_number_arrives(device, sizes):
    *given, dtype = sizes
    stored, truth = matrix(*given)
    y = dequantise_fused(stored, dtype)
    assert y.dtype == dtype
    assert np.array_equal(float64(y), rounded(truth, dtype))
    # Stock MLX rounds product and sum, to the dtype of the scales.
    unit = max({F32: 2.0**-22, F16: 2.0**-9, BF16: 2.0**-6}[t] for t in (given[3], dtype))
    assert np.abs(float64(dequantise(stored, dtype)) - truth).max() <= unit * np.abs(truth).max()


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        # By default each mode in one of the dtypes, in turns.
        pytest.param(mode, dtype, marks=[pytest.mark.slow] * (i % 3 != j), id=f"{mode}-{dtype}")
        for i, mode in enumerate(BLOCK_MODES)
        for j, dtype in enumerate((F32, BF16, F16))
    ],
)
def test_every_number_of_blocks_arrives(device, mode, dtype):
    stored, truth = in_blocks(mode)
    for y in (dequantise_fused(stored, dtype), dequantise(stored, dtype)):
        assert y.dtype == dtype
        assert np.array_equal(float64(y), rounded(truth, dtype))


def test_rows_of_a_matrix(device):
    """A view that begins within the array."""
    stored, truth = matrix((40, 64), 4, 32, BF16)
    y = dequantise_fused(stored.rows(7, 33), BF16)
    assert np.array_equal(float64(y), rounded(truth[7:33], BF16))


def in_blocks(mode: str) -> tuple[Weight, np.ndarray]:
    """Random blocks, and what they say."""
    rng = np.random.default_rng(9)
    stored = Weight(*random_matrix(rng, (2, 35, 768), bits=mode, group=0, dtype=F32))
    return stored, dense(stored)


def test_the_quickest_way(monkeypatch):
    stored, truth = matrix((6, 64), 4, 32, F32)
    other = Weight(*mx.quantize(mx.ones((6, 64)), bits=6), QuantSpec(6, 64))
    plain = Weight(mx.ones((6, 64)))
    for there in (False, True):
        monkeypatch.setattr(module, "on_nvidia", lambda there=there: there)
        with emulated(name="cuda"), launched() as names:
            assert np.abs(float64(made_dense(stored, F32)) - truth).max() < 1e-5
            assert mx.abs(made_dense(other, F16) - 1.0).max() < 1e-3
            assert made_dense(plain, F16).dtype == F16
            assert made_dense(in_blocks("q4_k")[0], F16).dtype == F16
        assert names == ["dequantise"] * there + ["dequantise_blocks"]


def test_wrong_arguments():
    stored, _ = matrix((6, 64), 4, 32, F32)
    with emulated():
        with pytest.raises(ShapeError, match="scales and biases"):
            dequantise_fused(Weight(stored.weight, stored.scales, None, stored.spec), F32)
        with pytest.raises(ShapeError, match="none"):
            dequantise_fused(stored.rows(2, 2), F32)
        for wrong, dtype in ((Weight(stored.weight), F32), (stored, mx.int32)):
            with pytest.raises(UnsupportedError, match="dequantise"):
                dequantise_fused(wrong, dtype)
    before = set_backend(NoBackend())
    try:
        with pytest.raises(UnsupportedError, match="GPU"):
            dequantise_fused(stored, F32)
    finally:
        set_backend(before)


def case(sizes):
    *given, dtype = sizes
    stored, truth = matrix(*given)
    call = lambda: [dequantise_fused(stored, dtype)]  # noqa: E731
    return Case(str(sizes), call, lambda: [rounded(truth, dtype)], 0.0)


def case_in_blocks(mode: str, dtype: mx.Dtype):
    stored, truth = in_blocks(mode)
    call = lambda: [dequantise_fused(stored, dtype)]  # noqa: E731
    return Case(f"{mode} {dtype}", call, lambda: [rounded(truth, dtype)], 0.0)


CASES = {
    "dequantise": [case(sizes) for sizes in SIZES],
    "dequantise_blocks": [
        case_in_blocks(*each) for each in (("q4_k", BF16), ("q6_k", F32), ("iq4_nl", F16))
    ],
}

EQUIVALENT = {
    "dequantise.metal": {
        "dequantise: off by one > -> >=": "both are the same at 16",
        "dequantise: off by one < -> + 1 < (3)": "words are multiples of a pack",
        "dequantise: swapped arguments 1 and 2 of metal::fma": "commutes",
        "dequantise_eight: off by one < -> + 1 <": "eight are multiples of a pack",
        "dequantise_eight: swapped arguments 1 and 2 of metal::fma": "commutes",
    },
}
