"""RMS norm and the products of a few rows with several matrices of the same input, at once.

    y_i[n] = (residual[n] +) w_i norm(x[n]),   norm(x) = weight x / sqrt(mean x^2 + eps)

Shapes:
    x: ``[N, C]``; norm: ``[C]`` or None (x is taken as it is); weights: matrices
    ``[out_i, C]``, quantised each in its own way or not; residual: ``[N, out]`` like x or None,
    with one matrix only.
    returns: a list of ``[N, out_i]`` in the dtype of x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.metal import MetalKernel
from mlx_moeflux.kernels.quantised import FLOATS, Matrix, arrays_of, matrix_of, staged_floats

MOST_WEIGHTS = 6
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


def norm_matvec(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """The module's formula in stock MLX."""
    if norm is not None:
        x = mx.fast.rms_norm(x, norm, eps)
    products = [weight.matmul(x).astype(x.dtype) for weight in weights]
    return products if residual is None else [residual + products[0]]


def norm_matvec_fused(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """The module's formula in one launch for a few rows, each on its own, and at most 6 matrices;
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
    outs = tuple(weight.weight.shape[0] for weight in weights)
    if residual is not None and (
        len(weights) > 1 or residual.shape != (N, outs[0]) or residual.dtype != x.dtype
    ):
        raise ShapeError(f"residual {list(residual.shape)} does not fit one matrix of {outs}.")
    launch = _launch(
        N,
        C,
        x.dtype,
        norm is not None,
        residual is not None,
        tuple((matrix_of(w, C), out) for w, out in zip(weights, outs, strict=True)),
    )
    arrays = [array for weight in weights for array in arrays_of(weight)]
    return _KERNELS[len(weights)](
        x,
        x if norm is None else norm,
        _constant(eps),
        x if residual is None else residual,
        *arrays,
        **launch,
    )


def _kernel(count: int) -> MetalKernel:
    """The kernel for `count` matrices: threadgroups are dealt out among them."""
    body = """
        threadgroup float values[STAGED];
        threadgroup float sums[SUMS];
        threadgroup float squares[SIMDGROUPS];
        uint group = threadgroup_position_in_grid.x, token = threadgroup_position_in_grid.y;
    """
    for i in range(count):
        body += f"""
            if (group < GROUPS{i}) {{
                norm_matvec<ROWS{i}, SIMDGROUPS, IN, OUT{i}, BITS{i}, GROUP{i}, V{i},
                            EXACT, NORM, RESIDUAL>(
                    x, norm, eps, residual, w{i}, scales{i}, biases{i}, y{i}, values, sums,
                    squares, token, group, simdgroup_index_in_threadgroup,
                    thread_index_in_simdgroup);
                return;
            }}
            group -= GROUPS{i};
        """
    return MetalKernel(
        f"norm_matvec_{count}",
        file="quantised.metal",
        inputs=(
            *("x", "norm", "eps", "residual"),
            *(f"{part}{i}" for i in range(count) for part in ("w", "scales", "biases")),
        ),
        outputs=tuple(f"y{i}" for i in range(count)),
        body=body,
    )


_KERNELS = {count: _kernel(count) for count in range(1, MOST_WEIGHTS + 1)}


@functools.lru_cache(maxsize=64)
def _constant(value: float) -> mx.array:
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
    parts: tuple[tuple[Matrix, int], ...],
) -> dict[str, Any]:
    template = {"IN": C, "NORM": norm, "RESIDUAL": residual}
    template |= {"EXACT": dtype == mx.float32, "SIMDGROUPS": SIMDGROUPS}
    groups, staged, sums = 0, 0, 0
    for i, (matrix, out) in enumerate(parts):
        rows = math.gcd(ROWS, out)
        words = matrix.access(C, 16)
        own = -(-out // (rows * SIMDGROUPS))
        groups += own
        staged, sums = map(max, (staged, sums), staged_floats(matrix, words, C))
        template |= {
            **{f"ROWS{i}": rows, f"GROUPS{i}": own, f"OUT{i}": out},
            **{f"BITS{i}": matrix.bits, f"GROUP{i}": matrix.group, f"V{i}": words},
        }
    return {
        "template": template | {"STAGED": staged, "SUMS": sums},
        "grid": (groups * SIMDGROUPS * 32, N, 1),
        "threadgroup": (32 * SIMDGROUPS, 1, 1),
        "output_shapes": [(N, out) for _, out in parts],
        "output_dtypes": [dtype] * len(parts),
    }
