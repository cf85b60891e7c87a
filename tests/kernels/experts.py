"""Random experts and routes for tests of kernels, and what they must give, in float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.linear.quantised import Stored
from mlx_moeflux.kernels.moe.expert_ffn import (
    ClampedSwiGLU,
    ExpertBank,
    ProjectionBank,
    geglu,
    swiglu,
)
from mlx_moeflux.kernels.moe.expert_mix import ABSENT
from tests.kernels.harness import float64

# What the launches between hold for absent experts is never read.
BETWEEN = ("h", "order", "out")
# Drawing more takes seconds. A prime, which divides no row.
MOST_DRAWN = 1_000_003


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Normal numbers. Those of a large array repeat, at other places of each row and expert."""
    numbers = rng.normal(size=min(math.prod(shape), MOST_DRAWN)).astype(np.float32)
    return mx.array(np.resize(numbers, shape)).astype(dtype)


def random_matrix(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    *,
    bits: int | str,
    group: int,
    dtype: mx.Dtype,
) -> tuple[mx.array, mx.array | None, mx.array | None, QuantSpec | None]:
    """Weight, scales, biases and spec of a random matrix; bits 0: floats; "mxfp4": every code, and
    scales of several sizes; a mode of ggml's blocks: random ones."""
    if bits in BLOCK_MODES:
        # It needs the `gguf` package.
        from tests.checkpoint.gguf_files import random_blocks

        raw = random_blocks(bits.upper(), math.prod(shape[:-1]), shape[-1], rng)
        return mx.array(raw.reshape(*shape[:-1], -1)), None, None, QuantSpec.of_mode(bits)
    dense = random_array(rng, shape, mx.float32) * shape[-1] ** -0.5
    if bits == "mxfp4":
        words = rng.integers(0, 1 << 32, (*shape[:-1], shape[-1] // 8), np.uint32)
        scales = rng.integers(121, 125, (*shape[:-1], shape[-1] // 32), np.uint8)
        return mx.array(words), mx.array(scales), None, QuantSpec.of_mode(bits)
    if bits == 0:
        return dense.astype(dtype), None, None, None
    weight, scales, biases = mx.quantize(dense, group_size=group, bits=bits)
    return weight, scales.astype(dtype), biases.astype(dtype), QuantSpec(bits, group)


def random_bank(
    *,
    slots: int,
    C: int,
    F: int,
    bits: int | str,
    group: int,
    dtype: mx.Dtype,
    down: int | str | None = None,
    biased: bool = False,
    activation: str = "swiglu",
) -> ExpertBank:
    """down: Bits of the down projection where they differ."""
    rng = np.random.default_rng((0 if bits == "mxfp4" else 1000 * bits) + C + F)
    arrays, specs = {}, {}
    for name, out, width in (("gate", F, C), ("up", F, C), ("down", C, F)):
        of_this = down if name == "down" and down is not None else bits
        parts = random_matrix(rng, (slots, out, width), bits=of_this, group=group, dtype=dtype)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            if array is not None:
                arrays[f"{name}_proj.{part}"] = array
        specs[f"{name}_proj"] = parts[3]
        if biased:
            arrays[f"{name}_proj.bias"] = random_array(rng, (slots, out), dtype)
    return ExpertBank.of(arrays, specs, activation=ACTIVATIONS[activation])


# Most gates and ups are within the limit, and some are not.
ACTIVATIONS = {"swiglu": swiglu, "clamped": ClampedSwiGLU(1.702, 1.25), "geglu": geglu}


def random_route(
    rng: np.random.Generator, *, tokens: int, K: int, slots: int, absent: float = 0.0
) -> tuple[mx.array, mx.array]:
    """Distinct slots in random order and weights, both ``[tokens, K]``."""
    chosen = np.stack([rng.permutation(slots)[:K] for _ in range(tokens)]).astype(np.uint32)
    # Both what stores write for "none", and what routers do.
    chosen[rng.random(chosen.shape) < absent / 2] = ABSENT
    chosen[rng.random(chosen.shape) < absent / 2] = slots
    return mx.array(chosen), mx.array(rng.random((tokens, K)).astype(np.float32))


def dense(matrix: Stored) -> np.ndarray:
    """The values of a stored matrix."""
    if matrix.spec is None:
        return float64(matrix.weight)
    if matrix.spec.block is not None:
        import gguf

        kind = gguf.GGMLQuantizationType[matrix.spec.mode.upper()]
        return gguf.dequantize(np.array(matrix.weight), kind).astype(np.float64)
    bits, group = matrix.spec.bits, matrix.spec.group_size
    if not matrix.spec.is_affine:
        codes = np.array(matrix.weight).view(np.uint8)
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
        return values * np.repeat(2.0 ** (np.array(matrix.scales).astype(int) - 127), group, -1)
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    words = np.array(matrix.weight)[..., None] >> shifts
    numbers = (words & ((1 << bits) - 1)).reshape(*matrix.weight.shape[:-1], -1)
    scales, biases = (np.repeat(float64(a), group, -1) for a in (matrix.scales, matrix.biases))
    return numbers * scales + biases


def mix(
    x: mx.array,
    slots: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    initial: mx.array | None = None,
    *,
    rounded: mx.Dtype | None = None,
) -> np.ndarray:
    """The sum over experts by loops in float64; with `rounded` in that dtype, the naive way: every
    weight, product and inner value is rounded to it."""

    def keep(values: np.ndarray) -> np.ndarray:
        if rounded is None:
            return values
        return float64(mx.array(values.astype(np.float32)).astype(rounded))

    def product(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
        if rounded is None:
            return matrix @ values
        terms = (matrix * values).astype(np.float32)
        return keep(np.cumsum(terms, axis=-1, dtype=np.float32)[:, -1])

    def product_of(part: ProjectionBank, matrices: np.ndarray, s: int, values: np.ndarray):
        y = product(matrices[s], values)
        return y if part.bias is None else keep(y + float64(part.bias)[s])

    def activated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if bank.activation is swiglu:
            return keep(keep(a / (1 + np.exp(-a))) * b)
        if bank.activation is geglu:
            z = keep((2 / np.pi) ** 0.5 * keep(a + keep(0.044715 * a**3)))
            return keep(keep(0.5 * a * keep(1 + keep(np.tanh(z)))) * b)
        alpha, limit = bank.activation.alpha, bank.activation.limit
        a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
        return keep(keep(b + 1) * keep(a * keep(1 / (1 + np.exp(-keep(alpha * a))))))

    gate, up, down = (keep(dense(p)) for p in (bank.gate, bank.up, bank.down))
    rows, share, chosen = float64(x), float64(weights), np.array(slots)
    y = np.zeros((len(rows), down.shape[1])) if initial is None else float64(initial)
    for n, k in np.ndindex(chosen.shape):
        s = chosen[n, k]
        if s < len(gate):
            a, b = (product_of(p, w, s, rows[n]) for p, w in ((bank.gate, gate), (bank.up, up)))
            y[n] += share[n, k] * product_of(bank.down, down, s, activated(a, b))
            if rounded is not None:
                y[n] = y[n].astype(np.float32)
    return y
