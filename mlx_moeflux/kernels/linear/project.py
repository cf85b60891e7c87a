"""RMS norm and the products of rows with several matrices of the same input.

    y_i[n] = (residual[n] +) w_i norm(x[n]),   norm(x) = weight x / sqrt(mean x^2 + eps)

Shapes:
    x: ``[..., C]``; norm: ``[C]`` or None (x is taken as it is); weights: matrices
    ``[out_i, C]``, quantised each in its own way or not, or several concatenated ones;
    residual: ``[..., out]`` like x or None, with one matrix only.
    returns: a list of ``[..., out_i]`` in the dtype of x (float32 where a weight is `precise`),
    and with `normed` norm(x) ``[..., C]`` behind them; with `flat` all of them ``[N, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear import matvec, small_batch
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Builder, Proof

# Bytes of a matrix that are dense at a time, in rows that are a multiple of this: where a result's
# rows do not begin at multiples of 16 bytes, cuBLAS takes a kernel of a third of the speed.
MOST_DENSE, ROWS_AT_ONCE = 256 * 2**20, 128
# Calls with matrices in ggml's blocks.
BLOCKS = "blocks"


@dataclass(frozen=True)
class Dense:
    """Rows first .. last - 1 of a matrix, dequantised when they are used, `most` bytes at a time:
    an output matrix of 250,000 rows is never dense as a whole."""

    stored: Weight
    first: int
    last: int
    most: int
    outs: ClassVar[tuple[int, ...]] = ()
    precise: ClassVar[bool] = False

    def matmul(self, x: mx.array) -> mx.array:
        """x ``[..., in]`` -> ``[..., last - first]``."""
        step = max(1, self.most // (x.shape[-1] * x.itemsize * ROWS_AT_ONCE)) * ROWS_AT_ONCE
        parts = []
        for start in range(self.first, self.last, step):
            rows = self.stored.rows(start, min(start + step, self.last))
            parts.append(Weight(rows.dense(x.dtype)).matmul(x))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def project(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """Compute the module's formula in stock MLX; of a weight it needs ``matmul``, ``outs`` and
    ``precise``."""
    if flat:
        x = x.reshape(-1, x.shape[-1])
    if norm is not None:
        x = mx.fast.rms_norm(x, norm, eps)
    products = []
    for weight in weights:
        y, outs = weight.matmul(x).astype(mx.float32 if weight.precise else x.dtype), weight.outs
        products += mx.split(y, list(accumulate(outs))[:-1], axis=-1) if outs else [y]
    if residual is not None:
        products = [residual + products[0]]
    return [*products, x] if normed else products


def project_dequantised(
    x,
    weights,
    *,
    norm=None,
    eps=1e-6,
    residual=None,
    normed=False,
    flat=False,
    most_dense=MOST_DENSE,
) -> list[mx.array]:
    """:func:`project` with matrices made dense first: for many rows the cheaper way on GPUs. Not
    for float32, of which dense products may keep TF32's 11 bits.

    most_dense: Bytes of a matrix that are dense at a time.
    """
    dense = weights
    if x.dtype != mx.float32:
        dense = [part for weight in weights for part in _made_dense(weight, x.dtype, most_dense)]
    return project(x, dense, norm=norm, eps=eps, residual=residual, normed=normed, flat=flat)


def _made_dense(weight: Any, dtype: mx.Dtype, most: int) -> list[Any]:
    """A matrix for each of its results, which are arrays of their own, if it is quantised: all in
    one launch, or, of a large one, each when it is used."""
    if not isinstance(weight, Weight) or weight.spec is None or weight.precise:
        return [weight]
    width, ends = weight.spec.width(weight.weight.shape[-1]), [*accumulate(weight.results)]
    if ends[-1] * width * dtype.size > most:
        starts = [0, *ends]
        return [Dense(weight, *rows, most) for rows in zip(starts, ends, strict=False)]
    dense = weight.dense(dtype)
    return [Weight(rows) for rows in (mx.split(dense, ends[:-1]) if ends[1:] else [dense])]


def project_rows(
    x, weights, *, norm=None, eps=1e-6, residual=None, normed=False, flat=False
) -> list[mx.array]:
    """:func:`project` for some dozens of rows, see :func:`small_batch.project_rows`; float32, of
    which products in tiles lose bits, goes to the reference, and matrices in blocks are made
    dense."""
    if x.dtype == mx.float32 and x.size:
        return project(x, weights, norm=norm, eps=eps, residual=residual, normed=normed, flat=flat)
    if in_blocks(*weights):
        return project_dequantised(
            x, weights, norm=norm, eps=eps, residual=residual, normed=normed, flat=flat
        )
    return small_batch.project_rows(
        x, weights, norm=norm, eps=eps, residual=residual, normed=normed, flat=flat
    )


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    widths = (2 * s.Hk * s.Dk + s.Hv * s.Dv, s.Hv * s.Dv)
    return (x(1, n, s.C), [examples.weight(s, x, *widths, width=s.C)]), {"norm": x(s.C)}


def in_blocks(*weights: Any) -> str:
    """Name the kind of calls with matrices in ggml's blocks."""
    return BLOCKS if any(isinstance(w, Weight) and w.in_blocks for w in weights) else ""


def _kind(x: mx.array, weights: Sequence[Weight]) -> str:
    return in_blocks(*weights)


def _blocks_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    width, outs = examples.block_width(s.C), (2 * s.Hk * s.Dk + s.Hv * s.Dv, s.Hv * s.Dv)
    stored = examples.block_weight("q4_k", *outs, width=width)
    return (x(1, n, width), [stored]), {"norm": x(width)}


def _in_blocks(mode: str) -> Builder:
    """An example with a matrix in ggml's blocks beside floats."""

    def example(s: Sizes, n: int, x: Normal) -> Arguments:
        width = examples.block_width(s.C)
        weights = [Weight(0.2 * x(examples.N, width))]
        weights.append(examples.block_weight(mode, s.F, s.F, width=width))
        return (x(3, width), weights), {"norm": x(width), "eps": 1e-6, "normed": True}

    return example


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    weights = [Weight(0.2 * x(examples.N, s.C)), examples.weight(s, x, s.F, s.F, width=s.C)]
    return (x(3, s.C), weights), {"norm": x(s.C), "eps": 1e-6, "normed": True}


def _are_weights(x: mx.array, weights: Sequence[Any], **options: Any) -> bool:
    """Return True if no function stands in for a matrix."""
    return all(isinstance(weight, Weight) for weight in weights)


PROJECT = Operation(
    name="project",
    reference=project,
    others={
        "fused": Implementation(matvec.project_fused, kernels=matvec.KERNELS, joins=True),
        "rows": Implementation(project_rows, kernels=small_batch.KERNELS),
        "dequantised": Implementation(project_dequantised),
        "blas": Implementation(blas.project_blas, on_cpu=True, joins=_are_weights),
    },
    size=slice(None, -1),
    tokens={"x": -2, "residual": -2},
    kind=_kind,
    proof=Proof(
        example=_example,
        workloads={"": _workload, BLOCKS: _blocks_workload},
        forms={mode: _in_blocks(mode) for mode in BLOCK_MODES},
        by_rows=True,
        shrunk=("x", "residual"),
    ),
)
