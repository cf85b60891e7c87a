"""Join parts of latent attention and put each head's result through its matrix.

    y[b, h] = w_h sum_i 2^(top_i - top) partial[b, i, h] / sum_i 2^(top_i - top) total_i

Shapes:
    partial: ``[B, parts, H, R]`` and stats: ``[B, parts, H, 2]`` (tops and totals) float32, as
    :mod:`~mlx_moeflux.kernels.mla.latent_token` gives them; top: the highest of the tops;
    matrices: ``[Dv, R]`` of each head.
    returns: ``[B, H, 1, Dv]`` in `dtype`; 0 where a head saw no key.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.linear.quantised import Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.mla.head_product import HeadMatrices, narrow_rows
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_threads

# SIMDGROUPS: or half as many, where there may not be so many threads. MOST_STEPS: a lane holds so
# many parts of rows. MOST_COLUMNS: threadgroup memory holds ten floats for each.
SIMDGROUPS, MOST_STEPS, MOST_COLUMNS = 16, 8, 512

KERNEL = MetalKernel(
    "attend_values",
    file="latent_values.metal",
    inputs=("partial", "stats", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float shared[8 * (DV + 1)];
        threadgroup float values[2 * DV];
        attend_values<ROWS, SIMDGROUPS, HEADS, DV, OUT, FIRST, BLOCK, PACKS, BITS, GROUP, V, EXACT>(
            partial, stats, w, scales, biases, y, shared, values, partial_shape[1],
            threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


def takes_values(matrices: HeadMatrices, R: int) -> bool:
    """Return True if the kernel reads these matrices of rows of R numbers."""
    try:
        layout = matrix_of(matrices, matrices.width)
    except UnsupportedError:
        return False
    known = matrices.heads is None and matrices.width == R <= MOST_COLUMNS
    return known and _values_rows(layout, matrices.count, R, most_threads()) is not None


def _values_rows(layout: Matrix, out: int, R: int, threads: int) -> dict[str, int] | None:
    """Template arguments for rows of the matrices: each simdgroup has equally many."""
    simdgroups = SIMDGROUPS if threads >= 32 * SIMDGROUPS else SIMDGROUPS // 2
    narrow, rows = narrow_rows(layout, out, R), out // simdgroups
    if R % 32 or out % simdgroups or narrow is None:
        return None
    numbers = narrow["V"] * (32 // layout.bits if layout.bits else 1)
    even = rows * R % (32 * numbers) == 0 and rows * R // (32 * numbers) <= MOST_STEPS
    return {"ROWS": rows, "V": narrow["V"], "SIMDGROUPS": simdgroups} if even else None


def attend_values(
    partial: mx.array, stats: mx.array, matrices: HeadMatrices, dtype: mx.Dtype
) -> mx.array:
    """The module's formula, for matrices that :func:`takes_values` takes.

    Raises:
        UnsupportedError: MLX drives no GPU.
    """
    layout = matrix_of(matrices, matrices.width)
    launch = _launch(
        partial.shape, matrices.weight.shape, layout, matrices.first, matrices.count, dtype,
        most_threads(),
    )  # fmt: skip
    return KERNEL(partial, stats, *arrays_of(matrices), **launch)[0]


@functools.lru_cache(maxsize=64)
def _launch(
    partial: tuple[int, ...],
    weight: tuple[int, ...],
    layout: Matrix,
    first: int,
    out: int,
    dtype: mx.Dtype,
    threads: int,
) -> dict[str, Any]:
    (B, _, H, R), rows = partial, _values_rows(layout, out, partial[3], threads)
    assert rows is not None, "takes_values() was not asked"
    return {
        "template": {
            **{"T": dtype, **rows, "HEADS": H},
            **{"DV": R, "OUT": out, "FIRST": first, "BLOCK": weight[1], "PACKS": weight[2]},
            **{"BITS": layout.bits, "GROUP": layout.group},
            "EXACT": dtype == mx.float32,
        },
        "grid": (32 * rows["SIMDGROUPS"] * H, B, 1),
        "threadgroup": (32 * rows["SIMDGROUPS"], 1, 1),
        "output_shapes": [(B, H, 1, out)],
        "output_dtypes": [dtype],
    }
