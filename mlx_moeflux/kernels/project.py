"""RMS norm and the products of rows with several matrices of the same input.

    y_i[n] = (residual[n] +) w_i norm(x[n]),   norm(x) = weight x / sqrt(mean x^2 + eps)

Shapes:
    x: ``[N, C]``; norm: ``[C]`` or None (x is taken as it is); weights: matrices
    ``[out_i, C]``, quantised each in its own way or not; residual: ``[N, out]`` like x or None,
    with one matrix only.
    returns: a list of ``[N, out_i]`` in the dtype of x, and with `normed` norm(x) ``[N, C]``
    behind them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.metal import MetalKernel, launches
from mlx_moeflux.kernels.quantised import FLOATS, Matrix, arrays_of, matrix_of, staged_floats

MOST_WEIGHTS = 4
# Rows of a matrix for each simdgroup, and simdgroups for each threadgroup.
ROWS, SIMDGROUPS = 4, 4


@dataclass(frozen=True)
class Weight:
    """A matrix ``[out, in]``; see :class:`~mlx_moeflux.kernels.expert_ffn.ProjectionBank`."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    spec: QuantSpec | None = None

    def matmul(self, x: mx.array) -> mx.array:
        """x ``[N, in]`` -> ``[N, out]``."""
        if self.spec is None:
            return x @ self.weight.T
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.spec.group_size,
            bits=self.spec.bits,
            mode=self.spec.mode,
        )

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """``[out, in]`` in `dtype`."""
        if self.spec is None:
            return self.weight.astype(dtype)
        return mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=self.spec.group_size,
            bits=self.spec.bits,
            mode=self.spec.mode,
        ).astype(dtype)


def project(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
) -> list[mx.array]:
    """The module's formula in stock MLX. Of a weight nothing is asked but ``matmul``."""
    if norm is not None:
        x = mx.fast.rms_norm(x, norm, eps)
    products = [weight.matmul(x).astype(x.dtype) for weight in weights]
    if residual is not None:
        products = [residual + products[0]]
    return [*products, x] if normed else products


def project_dequantised(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
) -> list[mx.array]:
    """:func:`project` with matrices made dense first: for many rows the cheaper way on GPUs.

    Raises:
        UnsupportedError: x is float32, of which dense products on NVIDIA keep 11 bits (TF32).
    """
    if x.dtype == mx.float32:
        raise UnsupportedError(
            "dense products of float32 are not exact enough; take the reference."
        )
    dense = [
        Weight(weight.dense(x.dtype)) if isinstance(weight, Weight) else weight
        for weight in weights
    ]
    return project(x, dense, norm=norm, eps=eps, residual=residual, normed=normed)


def project_fused(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
) -> list[mx.array]:
    """The module's formula in one launch for a few rows, each on its own, and at most 4 matrices;
    one rounding, at the end.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or there are too many matrices.
        UnsupportedError: A matrix is stored in another way, or there is no GPU.
    """
    N, C = x.shape
    if N < 1 or not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ShapeError(
            f"{N} rows and {len(weights)} matrices; one launch takes 1 to {MOST_WEIGHTS}."
        )
    if x.dtype not in FLOATS or (norm is not None and norm.shape != (C,)):
        raise ShapeError(f"x is {x.dtype} {list(x.shape)}, which does not fit the norm's weight.")
    if normed and norm is None:
        raise ShapeError("without a norm there is no normed x to return.")
    parts = tuple((matrix_of(w, C), w.weight.shape[0]) for w in weights)
    if residual is not None and (
        len(weights) > 1 or residual.shape != (N, parts[0][1]) or residual.dtype != x.dtype
    ):
        raise ShapeError(f"residual {list(residual.shape)} does not fit the matrices {parts}.")
    arrays = [array for weight in weights for array in arrays_of(weight)]
    return _KERNELS[len(weights), normed](
        x,
        x if norm is None else norm,
        filled(eps),
        x if residual is None else residual,
        *arrays,
        **_launch(N, C, x.dtype, norm is not None, residual is not None, normed, parts),
    )


def _kernel(count: int, normed: bool) -> MetalKernel:
    """The kernel for `count` matrices: threadgroups are dealt out among them."""
    body = """
        threadgroup float values[STAGED];
        threadgroup float sums[SUMS];
        threadgroup float squares[SIMDGROUPS];
        uint group = threadgroup_position_in_grid.x, token = threadgroup_position_in_grid.y;
        uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    """
    for i in range(count):
        call = f"""
            norm_matvec<ROWS{i}, SIMDGROUPS, IN, OUT{i}, BITS{i}, GROUP{i}, V{i}, EXACT, FORM,
                        RESIDUAL>(
                x, norm, eps, residual, w{i}, scales{i}, biases{i}, y{i}, values, sums, squares,
                token, group, simdgroup, lane);
        """
        if normed or i + 1 < count:
            call = f"if (group < GROUPS{i}) {{ {call} return; }} group -= GROUPS{i};"
        body += call
    if normed:
        body += """
            norm_row<SIMDGROUPS, IN>(x, norm, eps, normed, squares, token, simdgroup, lane);
        """
    return MetalKernel(
        f"project_{count}" + "_normed" * normed,
        file="quantised.metal",
        inputs=(
            *("x", "norm", "eps", "residual"),
            *(f"{part}{i}" for i in range(count) for part in ("w", "scales", "biases")),
        ),
        outputs=(*(f"y{i}" for i in range(count)), *(("normed",) if normed else ())),
        body=body,
    )


_KERNELS = {
    (count, normed): _kernel(count, normed)
    for count in range(1, MOST_WEIGHTS + 1)
    for normed in (False, True)
}
launches(*_KERNELS.values())(project_fused)


@functools.lru_cache(maxsize=64)
def filled(value: float) -> mx.array:
    """`value` as kernels take numbers of a call: eight times, float32, evaluated."""
    array = mx.full((8,), value, mx.float32)
    mx.eval(array)
    return array


@functools.lru_cache(maxsize=256)
def _launch(
    N: int,
    C: int,
    dtype: mx.Dtype,
    norm: bool,
    residual: bool,
    normed: bool,
    parts: tuple[tuple[Matrix, int], ...],
) -> dict[str, Any]:
    template = {"IN": C, "FORM": int(norm), "RESIDUAL": residual, "EXACT": dtype == mx.float32}
    template["SIMDGROUPS"] = SIMDGROUPS
    groups, staged, sums = 0, 0, 0
    for i, (matrix, out) in enumerate(parts):
        own, tile, memory = tiling(matrix, out, C)
        groups += own
        staged, sums = map(max, (staged, sums), memory)
        template |= {f"{name}{i}": value for name, value in tile.items()}
        template |= {f"GROUPS{i}": own, f"OUT{i}": out}
    return {
        "template": template | {"STAGED": staged, "SUMS": sums},
        "grid": ((groups + normed) * SIMDGROUPS * 32, N, 1),
        "threadgroup": (32 * SIMDGROUPS, 1, 1),
        "output_shapes": [(N, out) for _, out in parts] + [(N, C)] * normed,
        "output_dtypes": [dtype] * (len(parts) + normed),
    }


def tiling(matrix: Matrix, out: int, width: int) -> tuple[int, dict[str, int], tuple[int, int]]:
    """How ``rows_of`` in quantised.metal is laid out for a matrix ``[out, width]``: threadgroups,
    template arguments, floats of threadgroup memory for values and for sums."""
    rows, words = math.gcd(ROWS, out), matrix.access(width, 16)
    tile = {"ROWS": rows, "BITS": matrix.bits, "GROUP": matrix.group, "V": words}
    return -(-out // (rows * SIMDGROUPS)), tile, staged_floats(matrix, words, width)
