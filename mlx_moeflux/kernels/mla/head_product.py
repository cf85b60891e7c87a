"""Products of rows with one matrix for each head.

    y[b, h, t] = w_h x[b, h, t]        (transposed: w_h^T x[b, h, t])

Shapes:
    x: ``[B, H, T, in]``, or ``[B, 1, T, in]`` where all heads have the same rows; matrices:
    ``[out, in]`` of each head, quantised or not.
    returns: ``[B, H, T, out]`` in the dtype of x; `transposed`: out and in swapped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.dequantise import dequantise, made_dense
from mlx_moeflux.kernels.linear.matvec import simdgroups_of, tiling
from mlx_moeflux.kernels.linear.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_threads, on_nvidia


@dataclass(frozen=True)
class HeadMatrices:
    """Rows first .. first + count - 1 of each head's block of a matrix ``[H, block, in]``.

    heads: Of them, those from `heads[0]` to `heads[1]` - 1; None: all.
    """

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    spec: QuantSpec | None
    first: int
    count: int
    heads: tuple[int, int] | None = None

    @functools.cached_property
    def number(self) -> int:
        """Number of heads."""
        first, last = self.heads or (0, self.weight.shape[0])
        return last - first

    @functools.cached_property
    def width(self) -> int:
        """Inputs of each matrix."""
        words = self.weight.shape[-1]
        return words if self.spec is None else words * 32 // self.spec.bits

    def parts(self) -> list[mx.array | None]:
        """weight, scales and biases of these heads and rows, as views."""
        rows, arrays = slice(self.first, self.first + self.count), []
        for array in (self.weight, self.scales, self.biases):
            if array is not None and self.count < self.weight.shape[1]:
                array = array[:, rows]
            if array is not None and self.heads is not None:
                array = array[slice(*self.heads)]
            arrays.append(array)
        return arrays

    def dense(self, dtype: mx.Dtype, make: Callable = made_dense) -> mx.array:
        """``[H, out, in]`` in `dtype`; make: :func:`dequantise` or another that does the same."""
        weight, scales, biases = self.parts()
        assert weight is not None
        return make(Weight(weight, scales, biases, self.spec), dtype)


def head_product(x: mx.array, matrices: HeadMatrices, *, transposed: bool = False) -> mx.array:
    """Stock MLX, with matrices as they are stored; dense on NVIDIA, where MLX 0.32.4 gives wrong
    products of several sequences with quantised matrices of several heads, and refuses some shapes.
    """
    _check_product(x, matrices, transposed)
    spec = matrices.spec
    if spec is None or (mx.default_device().type == mx.gpu and on_nvidia()):
        return _dense_product(x, matrices.dense(x.dtype, dequantise), transposed)
    weight, scales, biases = matrices.parts()
    assert weight is not None
    assert scales is not None
    return mx.quantized_matmul(
        x, weight, scales, biases, not transposed, spec.group_size, spec.bits, spec.mode
    )


def head_product_dequantised(x, matrices, *, transposed=False):
    """:func:`head_product` with matrices made dense first, in the dtype of x."""
    _check_product(x, matrices, transposed)
    return _dense_product(x, matrices.dense(x.dtype), transposed)


def _dense_product(x: mx.array, weight: mx.array, transposed: bool) -> mx.array:
    return x @ (weight if transposed else weight.swapaxes(-1, -2))


_MATVEC = MetalKernel(
    "head_matvec",
    file="matvec.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float memory[MEMORY];
        const uint row = threadgroup_position_in_grid.y;
        const uint block = row / uint(x_shape[2]) % HEADS * BLOCK;
        norm_matvec<1, ROWS, SIMDGROUPS, IN, FIRST, OUT, BITS, GROUP, V, SPLIT, EXACT, PLAIN,
                    false>(
            x, x, 0.0f, x, w + ulong(block) * PACKS, scales + ulong(block) * (IN / GROUP),
            biases + ulong(block) * (IN / GROUP), y, memory, OUT, row,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
_NARROW = MetalKernel(
    "head_narrow",
    file="per_head_matmul.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        const uint row = threadgroup_position_in_grid.y;
        const uint block = row / uint(x_shape[2]) % HEADS * BLOCK;
        narrow_matvec<ROWS, SIMDGROUPS, IN, FIRST, OUT, BITS, GROUP, V, EXACT>(
            x + ulong(row) * IN, w + ulong(block) * PACKS, scales + ulong(block) * (IN / GROUP),
            biases + ulong(block) * (IN / GROUP), y + ulong(row) * OUT,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
_VECMAT = MetalKernel(
    "head_vecmat",
    file="per_head_matmul.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float sums[SUMS];
        head_vecmat<HEADS, IN, OUT, FIRST, BLOCK, BITS, GROUP, V, SIMDGROUPS>(
            x, w, scales, biases, y, sums, x_shape[2], threadgroup_position_in_grid.y,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
# CUDA allows 65535 threadgroups in the second direction.
_MOST_ROWS = 32768
_WIDE = 8  # simdgroups of a threadgroup of head_vecmat
# Of one for narrow rows, and how often each takes rows.
NARROW_SIMDGROUPS, MOST_NARROW = 4, 4


def head_product_fused(x, matrices, *, transposed=False):
    """:func:`head_product` in one launch, for a few rows of each head. Rows that heads share, and
    some heads only, go to :func:`head_product_dequantised`.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or there are too many rows.
        UnsupportedError: The matrices are stored in another way, or there is no GPU.
    """
    _check_product(x, matrices, transposed)
    B, H, T, _ = x.shape
    if matrices.heads is not None or matrices.number != H:
        return head_product_dequantised(x, matrices, transposed=transposed)
    if not 0 < B * H * T <= _MOST_ROWS or x.dtype not in FLOATS:
        raise ShapeError(
            f"head_product: x is {x.dtype} {list(x.shape)}; expected {_MOST_ROWS} rows at most."
        )
    layout = matrix_of(matrices, matrices.width)
    launch = _launch(
        x.shape, matrices.weight.shape, layout, matrices.first, matrices.count, x.dtype, transposed,
        most_threads(),
    )  # fmt: skip
    kernel, launch = launch
    return kernel(x, *arrays_of(matrices), **launch)[0]


@functools.lru_cache(maxsize=256)
def _launch(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    layout: Matrix,
    first: int,
    count: int,
    dtype: mx.Dtype,
    transposed: bool,
    threads: int,
) -> tuple[MetalKernel, dict[str, Any]]:
    B, H, T, width = x
    kernel, narrow = _MATVEC, narrow_rows(layout, count, width)
    template = {"HEADS": H, "IN": width, "FIRST": first, "BLOCK": weight[1]}
    if transposed:
        kernel = _VECMAT
        columns = weight[2] * 32 // layout.bits if layout.bits else weight[2]
        words = 1 if layout.bits else 4
        numbers = words * (32 // layout.bits) if layout.bits else words
        groups, simdgroups = -(-columns // (32 * numbers)), _WIDE
        template |= {"OUT": columns, "BITS": layout.bits, "GROUP": layout.group, "V": words}
        template |= {"SUMS": simdgroups * numbers * 32}
    elif narrow:
        kernel, columns, simdgroups = _NARROW, count, NARROW_SIMDGROUPS
        groups = -(-count // (simdgroups * narrow["ROWS"]))
        template |= {"OUT": count, "PACKS": weight[2], "BITS": layout.bits, "GROUP": layout.group}
        template |= {"EXACT": dtype == mx.float32, **narrow}
    else:
        groups, tile, memory = tiling(layout, count, width, dtype, threads)
        columns, simdgroups = count, simdgroups_of(width, threads)
        template |= {"OUT": count, "PACKS": weight[2], "MEMORY": memory, **tile}
        template |= {"EXACT": dtype == mx.float32}
    return kernel, {
        "template": template | {"SIMDGROUPS": simdgroups},
        "grid": (groups * simdgroups * 32, B * H * T, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [(B, H, T, columns)],
        "output_dtypes": [dtype],
    }


def narrow_rows(layout: Matrix, count: int, width: int) -> dict[str, int] | None:
    """Return the layout of a matrix ``[count, width]`` of which a simdgroup computes several rows
    together: words of a lane and rows of a simdgroup; None if rows are wider or uneven."""
    words = min(4, layout.group * layout.bits // 32) if layout.bits else 8
    while words > (0 if layout.bits else 2):
        lanes, rest = divmod(width, words * (32 // layout.bits if layout.bits else 1))
        rows = math.gcd(count, MOST_NARROW * 32 // max(lanes, 1))
        if not rest and 0 < lanes <= 16 and not lanes & (lanes - 1) and rows * lanes % 32 == 0:
            return {"V": words, "ROWS": rows}
        words //= 2
    return None


def _check_product(x: mx.array, matrices: HeadMatrices, transposed: bool) -> None:
    width = matrices.count if transposed else matrices.width
    if x.ndim != 4 or x.shape[1] not in (1, matrices.number) or x.shape[3] != width:
        raise ShapeError(
            f"head_product: x is {list(x.shape)}, expected [B, {matrices.number} or 1, T, {width}]."
        )


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    parts = examples.quantised(s, x, s.heads, s.Dn + s.Dv, s.latent)
    return (x(s.B, s.heads, n, s.latent), HeadMatrices(*parts, s.spec, s.Dn, s.Dv)), {}


HEAD_PRODUCT = Operation(
    name="head_product",
    reference=head_product,
    others={
        "fused": Implementation(head_product_fused, kernels=(_MATVEC, _NARROW, _VECMAT)),
        "dequantised": Implementation(head_product_dequantised),
    },
    size=slice(0, 3, 2),
    tokens={"x": 2},
    proof=Proof(
        example=_workload,
        example_tokens=1,
        workloads={"": _workload},
        by_rows=True,
        keeps_axes=True,
    ),
)
