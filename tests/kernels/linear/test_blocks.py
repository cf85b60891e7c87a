"""Products with blocks against the decoded matrices in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.linear import blocks as module
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank, expert_ffn

gguf = pytest.importorskip("gguf")

from tests.checkpoint.gguf_files import random_blocks  # noqa: E402


def projection(name: str, slots: int, out: int, width: int) -> tuple[ProjectionBank, np.ndarray]:
    """Random blocks, and their values."""
    kind = name.upper()
    raw = random_blocks(kind, slots * out, width, np.random.default_rng(out))
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(slots, out, width)
    weight = mx.array(raw.reshape(slots, out, -1))
    return ProjectionBank(weight, None, None, QuantSpec.of_mode(name)), values


def rows_of(count: int, width: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((count, width), key=mx.random.key(count)).astype(dtype)


def check(actual: mx.array, x: mx.array, values: np.ndarray, slots: np.ndarray) -> None:
    """Within twice the error of one product and one sum at a time in float32."""
    rows = np.array(x.astype(mx.float32))
    exact = np.einsum("pi,poi->po", rows.astype(np.float64), values[slots].astype(np.float64))
    naive = np.zeros(exact.shape, np.float32)
    for i in range(rows.shape[1]):
        naive += rows[:, i, None] * values[slots][:, :, i]
    assert actual.dtype == mx.float32
    error = np.abs(np.array(actual) - exact).max()
    assert error <= 2 * np.abs(naive - exact).max()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", BLOCK_MODES)
def test_products(name, dtype):
    bank, values = projection(name, 3, 37, 768)
    slots = np.array([2, 0, 2, 2, 1], np.uint32)
    x = rows_of(len(slots), 768, dtype)
    check(bank.matmul(x, mx.array(slots)), x, values, slots)


def test_of_one_expert_one_block():
    bank, values = projection("q6_k", 1, 5, 256)
    x, slots = rows_of(1, 256, mx.float32), np.zeros(1, np.uint32)
    check(bank.matmul(x, mx.array(slots)), x, values, slots)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("count", [7, module.FEW_ROWS, module.FEW_ROWS + 1, 150])
def test_a_row_has_the_same_bits_with_any_others(monkeypatch, count, at_once):
    """However few matrices are decoded together, and whether slots are read on the host."""
    bank, values = projection("q2_k", 5, 11, 512)
    monkeypatch.setattr(module, "DECODED_BYTES", at_once * 4 * 11 * 512)
    slots = np.random.default_rng(count).integers(0, 5, count).astype(np.uint32)
    x = rows_of(count, 512, mx.float32)
    whole = np.array(bank.matmul(x, mx.array(slots)))
    check(mx.array(whole), x, values, slots)
    alone = [bank.matmul(x[i : i + 1], mx.array(slots[i : i + 1])) for i in range(count)]
    assert np.array_equal(whole, np.concatenate([np.array(row) for row in alone]))


@pytest.mark.slow  # MLX compiles for the CPU
@pytest.mark.parametrize("name", BLOCK_MODES)
def test_a_trace_has_the_same_bits(name):
    bank, _ = projection(name, 4, 7, 512)
    x, slots = rows_of(70, 512, mx.float32), mx.array([i % 4 for i in range(70)], mx.uint32)
    assert np.array_equal(
        *map(np.array, (mx.compile(bank.matmul)(x, slots), bank.matmul(x, slots)))
    )


def test_a_trace_evaluates_nothing():
    bank, _ = projection("q6_k", 2, 3, 256)
    x, slots = rows_of(70, 256, mx.float32), mx.zeros((70,), mx.uint32)
    assert mx.compile(bank.matmul)(x, slots).shape == (70, 3)


def test_decodes_few_matrices_at_a_time_and_each_once(monkeypatch):
    bank, _ = projection("q6_k", 6, 8, 256)
    monkeypatch.setattr(module, "DECODED_BYTES", 2 * 4 * 8 * 256)
    mode, decoded = BLOCK_MODES["q6_k"], []

    class Counted:
        def decode(self, rows, xp):
            decoded.append(rows.shape[0])
            return mode.decode(rows, xp)

    slots = mx.array([5, 0, 1, 3, 4] * 30, mx.uint32)
    x = rows_of(150, 256, mx.float32).reshape(150, 1, 256)
    module.gather_blocks(x, bank.weight, slots, Counted())
    assert decoded == [2, 2, 1]
    decoded.clear()
    module.gather_blocks(x[:5], bank.weight, slots[:5], Counted())
    assert decoded == [2, 2, 1]


def mixed_bank() -> tuple[ExpertBank, list[np.ndarray]]:
    """Gate in Q6_K, up in affine 4 bits, down in IQ4_XS."""
    gate, g = projection("q6_k", 4, 256, 512)
    down, d = projection("iq4_xs", 4, 512, 256)
    u = mx.random.normal((4, 256, 512), key=mx.random.key(3)) * 512**-0.5
    up = ProjectionBank(*mx.quantize(u, 64, 4), QuantSpec(4, 64))
    values = mx.dequantize(up.weight, up.scales, up.biases, 64, 4)
    return ExpertBank(gate, up, down), [g, np.array(values), d]


def test_experts_of_several_modes():
    bank, (g, u, d) = mixed_bank()
    x, slots = rows_of(6, 512, mx.float32), np.array([0, 0, 1, 3, 3, 2])
    rows = np.array(x).astype(np.float64)
    gate = np.einsum("pi,poi->po", rows, g[slots].astype(np.float64))
    inner = gate / (1 + np.exp(-gate)) * np.einsum("pi,poi->po", rows, u[slots].astype(np.float64))
    exact = np.einsum("pi,poi->po", inner, d[slots].astype(np.float64))
    for given in (bank, bank.take(mx.arange(4), mx.float32)):
        actual = np.array(expert_ffn(x, mx.array(slots.astype(np.uint32)), given))
        assert np.abs(actual - exact).max() <= 1e-5 * np.abs(exact).max()
    assert np.array_equal(
        np.array(bank.take(mx.arange(4), mx.float32).gate.weight), bank.gate.weight
    )


def test_blas_leaves_them_to_the_reference():
    bank, _ = mixed_bank()
    x, weights = rows_of(1, 512, mx.float32), mx.ones((1, 2))
    assert not blas.takes_bank(x, None, weights, bank)


@pytest.mark.parametrize("count", [7, module.FEW_ROWS + 6])
def test_gradients_pass(monkeypatch, count):
    bank, values = projection("q3_k", 2, 6, 256)
    monkeypatch.setattr(module, "DECODED_BYTES", 4 * 6 * 256)
    x = rows_of(count, 256, mx.float32)
    slots = mx.array([i % 2 for i in range(len(x))], mx.uint32)
    found = np.array(mx.grad(lambda x: bank.matmul(x, slots).sum())(x))
    expected = values.sum(axis=1)[np.array(slots)]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
