"""The stock MLX operations that references call, each held against NumPy in float64.

References define what an operation means, and they are made of stock operations; one that is wrong
on a GPU makes every fallback wrong without a word. :func:`cases` has small calls of each, at sizes
and in memory layouts as references use them, odd ones first. ``mlx_moeflux check`` runs them on the
user's machine, and ``pytest -m gpu`` on a developer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.kernels.attention.norm_rope import for_each_sequence
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.expert_ffn import ProjectionBank
from mlx_moeflux.kernels.runtime import device

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Of the largest value; a wrong operation is off by about 1.
ROUNDING = {mx.float32: 2e-5, mx.float16: 2e-2, mx.bfloat16: 1.5e-1}
LIMIT_OF_TF32 = 4e-3
# The CPU adds 2,048 quantised products up in the dtype of x, and comes to these limits in 16 bits.
TIMES_ON_CPU = 2.0

# in, out of a matrix: widths that are no multiples of 64, of 32, of 8; then published ones.
WIDTHS = ((40, 24), (96, 48), (80, 33), (64, 128), (2048, 512))
ROWS, ROWS_OF_WIDE = (1, 3, 17, 148), (1, 9)
# MLX compiles its quantised kernels on CUDA for each width, dtype and tile, some 6 s each: of their
# rows, the fewest and the most.
SPECS = (
    (64, 48, QuantSpec(4, 32)),
    (96, 40, QuantSpec(3, 32)),
    (128, 33, QuantSpec(8, 64)),
    (256, 96, QuantSpec(6, 128)),
    (2048, 128, QuantSpec(4, 64)),
)


@dataclass(frozen=True)
class Case:
    """One call of a stock operation: how it is called, and what it must give."""

    operation: str
    what: str
    run: Callable[[], mx.array]
    truth: np.ndarray

    def error(self) -> float:
        """The largest error by the largest value; infinite for NaN or another shape."""
        actual, truth = float64(self.run()), self.truth
        if actual.shape != truth.shape or not np.isfinite(actual).all():
            return float("inf")
        return float(np.abs(actual - truth).max() / max(np.abs(truth).max(), 1e-30))


@dataclass(frozen=True)
class Worst:
    """The call of an operation that had the largest error; one that fails has an infinite one."""

    operation: str
    error: float
    what: str
    reason: str = ""


class Limits:
    """dtype -> the largest error that is taken for rounding on the device in use."""

    def __getitem__(self, dtype: mx.Dtype) -> float:
        if dtype == mx.float32:
            return LIMIT_OF_TF32 if device.rounds_to_tf32() else ROUNDING[dtype]
        return ROUNDING[dtype] * (TIMES_ON_CPU if mx.default_device() == mx.cpu else 1.0)


LIMITS = Limits()


def worst(dtype: mx.Dtype) -> list[Worst]:
    """Run all cases: the worst of each operation."""
    found: dict[str, Worst] = {}
    for case in cases(dtype):
        try:
            new = Worst(case.operation, case.error(), case.what)
        except MoefluxError:
            raise
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            new = Worst(case.operation, float("inf"), case.what, reason)
        if case.operation not in found or new.error > found[case.operation].error:
            found[case.operation] = new
    return list(found.values())


def float64(array: mx.array) -> np.ndarray:
    """The numbers of an array, evaluated."""
    if mx.issubdtype(array.dtype, mx.floating):
        array = array.astype(mx.float32)
    return np.array(array).astype(np.float64)


class _Draw:
    """Random arrays, and the same in float64. Own random numbers: those of users stay theirs."""

    def __init__(self, dtype: mx.Dtype):
        self.dtype, self.random = dtype, np.random.default_rng()

    def __call__(self, *shape: int) -> tuple[mx.array, np.ndarray]:
        scale = shape[-1] ** -0.5
        array = mx.array((scale * self.random.standard_normal(shape)).astype(np.float32))
        array = array.astype(self.dtype)
        mx.eval(array)
        return array, float64(array)

    def ids(self, count: int, *shape: int) -> tuple[mx.array, np.ndarray]:
        ids = self.random.integers(0, count, shape).astype(np.uint32)
        return mx.array(ids), ids


def cases(dtype: mx.Dtype) -> Iterator[Case]:
    """Calls in `dtype`; arguments are new random numbers each time."""
    draw = _Draw(dtype)
    for make in (_matmul, _experts, _quantised, _attention, _norms, _rotations, _choices):
        yield from make(draw)


def _rows(width: int) -> tuple[int, ...]:
    return ROWS_OF_WIDE if width >= 512 else ROWS


def _specs(draw: _Draw) -> tuple[tuple[int, int, QuantSpec], ...]:
    """All in float32; of the dtypes that models run in, published ones."""
    return SPECS if draw.dtype == mx.float32 else tuple(s for s in SPECS if s[2].bits in (4, 8))


def _ends(width: int) -> tuple[int, int]:
    rows = _rows(width)
    return rows[0], rows[-1]


def _matmul(draw: _Draw) -> Iterator[Case]:
    for C, out in WIDTHS:
        for rows in _rows(C):
            (x, x64), (w, w64) = draw(2, rows, C), draw(out, C)
            what = f"2 x {rows} x {C} @ {C} x {out}"
            yield Case("matmul", what, lambda x=x, w=w: x @ w.T, x64 @ w64.T)
            (q, q64), (k, k64) = draw(2, rows, 3, C), draw(2, 3, out, C)
            yield Case("matmul", f"heads {what}", partial(_scores, q, k), _scores(q64, k64))


def _scores(q: Any, k: Any) -> Any:
    """Multiply queries ``[B, T, H, D]`` by keys ``[B, H, S, D]``, of MLX or of NumPy."""
    return q.swapaxes(1, 2) @ k.swapaxes(-1, -2)


def _experts(draw: _Draw) -> Iterator[Case]:
    # MLX's gather_mm takes nothing but float32 on the CPU; the package casts there.
    for C, out in WIDTHS if draw.dtype == mx.float32 or mx.default_device() != mx.cpu else ():
        w, w64 = draw(7, out, C)
        bank = ProjectionBank(w, None, None, None)
        for rows in _rows(C):
            yield from _gathered("gather_mm", draw, bank, w64, rows)
    for C, out, spec in _specs(draw):
        parts, w64 = _quantised_matrix(draw, spec, 7, out, C)
        for rows in _ends(C):
            yield from _gathered("gather_qmm", draw, ProjectionBank(*parts, spec), w64, rows)


def _gathered(
    operation: str, draw: _Draw, bank: ProjectionBank, w64: np.ndarray, rows: int
) -> Iterator[Case]:
    x, x64 = draw(rows, w64.shape[-1])
    _, ids = draw.ids(w64.shape[0], rows)
    run = partial(bank.matmul, x, mx.array(ids))
    truth = np.einsum("pc,poc->po", x64, w64[ids])
    yield Case(operation, f"{rows} of {list(w64.shape)}", run, truth)


def _quantised(draw: _Draw) -> Iterator[Case]:
    for C, out, spec in _specs(draw):
        parts, w64 = _quantised_matrix(draw, spec, out, C)
        run = partial(mx.dequantize, *parts, group_size=spec.group_size, bits=spec.bits)
        yield Case("dequantize", f"{out} x {C} {spec}", run, w64)
        for rows in _ends(C):
            x, x64 = draw(2, rows, C)
            run, what = partial(Weight(*parts, spec).matmul, x), f"2 x {rows} x {C} to {out} {spec}"
            yield Case("quantized_matmul", what, run, x64 @ w64.T)


def _quantised_matrix(
    draw: _Draw, spec: QuantSpec, *shape: int
) -> tuple[tuple[mx.array, mx.array, mx.array], np.ndarray]:
    """weight, scales, biases, and what they say in float64 by the published layout."""
    parts = mx.quantize(draw(*shape)[0], group_size=spec.group_size, bits=spec.bits)
    mx.eval(parts)
    bits = np.unpackbits(np.array(parts[0]).view(np.uint8), axis=-1, bitorder="little")
    numbers = bits.reshape(*shape, spec.bits) @ (1 << np.arange(spec.bits))
    scales, biases = (np.repeat(float64(a), spec.group_size, axis=-1) for a in parts[1:])
    return parts, numbers * scales + biases


def _attention(draw: _Draw) -> Iterator[Case]:
    for D, Dv, Hq, Hkv in ((20, 20, 4, 2), (32, 32, 6, 2), (24, 12, 3, 3), (128, 128, 8, 2)):
        for T, S in ((1, 9), (1, 300), (5, 5), (29, 64)):
            q, q64 = draw(2, T, Hq, D)
            k, k64 = draw(2, Hkv, S + 7, D)
            v, v64 = draw(2, Hkv, S + 7, Dv)
            keys, values, scale = k[:, :, :S], v[:, :, :S], D**-0.5
            seen: np.ndarray = np.tri(T, S, S - T, dtype=bool)
            for mask in (None, "causal", "array"):
                given = mx.array([[seen.tolist()]]) if mask == "array" else mask
                attend = partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=given)
                yield Case(
                    "scaled_dot_product_attention",
                    f"{Hq}/{Hkv} heads of {D}/{Dv}, {T} to {S}, mask {mask}",
                    partial(attend, q.swapaxes(1, 2), keys, values),
                    _attended(q64, k64[:, :, :S], v64[:, :, :S], None if mask is None else seen),
                )


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    k, v = (np.repeat(a, q.shape[2] // a.shape[1], axis=1) for a in (k, v))
    scores = _scores(q, k) * q.shape[-1] ** -0.5
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    return _softmax(scores) @ v


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _norms(draw: _Draw) -> Iterator[Case]:
    for C in (7, 20, 48, 96, 2048, 7168):
        x, x64 = draw(2, 5, C + 9)
        w, w64 = draw(C)
        # A variance of about 1, as behind an embedding.
        x, x64 = x[..., 9:] * C**0.5, float64(x[..., 9:] * C**0.5)
        normed = x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + 1e-6)
        for weight, truth in ((w, normed * w64), (None, normed)):
            what = f"{C} columns{' and a weight' * (weight is not None)}"
            yield Case("rms_norm", what, partial(mx.fast.rms_norm, x, weight, 1e-6), truth)
        wide, what = x.astype(mx.float32), f"{C} columns"
        yield Case("softmax", what, partial(mx.softmax, wide, axis=-1), _softmax(x64))
        run, truth = partial(mx.cumsum, wide, axis=-2), np.cumsum(x64, axis=-2)
        yield Case("cumsum", f"{what}, second to last axis", run, truth)


def _rotations(draw: _Draw) -> Iterator[Case]:
    for D, dims, interleaved in ((20, 8, False), (24, 24, True), (64, 16, False), (128, 128, True)):
        for offset in (0, 100, [3], [3, 70]):
            first = offset if isinstance(offset, int) else mx.array(offset, dtype=mx.int32)
            rope = partial(
                mx.fast.rope, dims=dims, traditional=interleaved, base=1e2, scale=1.0,
                offset=for_each_sequence(first, 2),
            )  # fmt: skip
            for T in (1, 29):
                x, x64 = draw(2, T, 4, D)
                what = f"{dims} of {D}, {T} from {offset}{' interleaved' * interleaved}"
                truth = _rotated(x64, dims, interleaved, np.ravel(offset))
                yield Case("rope", what, partial(rope, x.swapaxes(1, 2)), truth)


def _rotated(x: np.ndarray, dims: int, interleaved: bool, first: np.ndarray) -> np.ndarray:
    x, T = x.swapaxes(1, 2).copy(), x.shape[1]
    angle = (first[:, None, None] + np.arange(T)[:, None]) * 1e2 ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (
        slice(dims // 2), slice(dims // 2, dims)
    )  # fmt: skip
    x[..., a], x[..., b] = (x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos)
    return x


def _choices(draw: _Draw) -> Iterator[Case]:
    for E in (7, 48, 256, 512):
        # Many ties: routers give the lower id.
        scores, small = draw.ids(9, 11, E)
        scores = scores.astype(draw.dtype)
        order = np.argsort(-small.astype(np.float64), axis=-1, kind="stable")
        yield Case("argsort", f"{E} with ties", lambda s=scores: mx.argsort(-s, axis=-1), order)
        x, x64 = draw(11, E)
        yield Case("sort", f"{E}", partial(mx.sort, x, axis=-1), np.sort(x64, -1))
        ids, ids64 = draw.ids(E, 11, 5)
        take, truth = partial(mx.take_along_axis, axis=-1), np.take_along_axis(x64, ids64, -1)
        yield Case("take_along_axis", f"5 of {E}", partial(take, x, ids), truth)
