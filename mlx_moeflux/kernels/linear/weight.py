"""A matrix that rows are multiplied by, stored in any way that the trunk knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.linear.blocks import multiply_blocks
from mlx_moeflux.kernels.linear.dequantise import made_dense
from mlx_moeflux.kernels.linear.quantised import settings
from mlx_moeflux.kernels.runtime import pieces
from mlx_moeflux.kernels.runtime.launcher import on_nvidia


def multiplied(function: Callable[[mx.array], mx.array], x: mx.array, out: int) -> mx.array:
    """Return ``function(x)`` ``[..., out]``, the product of rows x ``[..., in]`` with a matrix
    ``[out, in]``, in pieces."""
    cut = in_pieces(function, x, out)
    return function(x) if cut is None else cut


def in_pieces(function: Callable[[mx.array], mx.array], x: mx.array, out: int) -> mx.array | None:
    """Return what :func:`multiplied` does; None if the product is one launch."""
    width = x.shape[-1]
    parts = pieces.pieces(x.size // width, 2 * width * out)
    if len(parts) == 1:
        return None
    rows = x.reshape(-1, width)
    return mx.concatenate([function(rows[part]) for part in parts]).reshape(*x.shape[:-1], out)


@dataclass(frozen=True)
class Weight:
    """A matrix ``[out, in]``; see :class:`~mlx_moeflux.kernels.moe.expert_ffn.ProjectionBank`.

    outs: Rows of each of several concatenated matrices. precise: Its result is computed in float32
    and stays so.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    spec: QuantSpec | None = None
    outs: tuple[int, ...] = ()
    precise: bool = False

    @property
    def results(self) -> tuple[int, ...]:
        """Widths of what it gives."""
        return self.outs or (self.weight.shape[0],)

    @property
    def in_blocks(self) -> bool:
        """True if it is stored in ggml's blocks."""
        return self.spec is not None and self.spec.block is not None

    def stored(self) -> dict[str, mx.array]:
        """Its arrays by name."""
        named = {"weight": self.weight, "scales": self.scales, "biases": self.biases}
        return {name: array for name, array in named.items() if array is not None}

    def matmul(self, x: mx.array) -> mx.array:
        """x ``[..., in]`` -> ``[..., out]``."""
        out = sum(self.results)
        if 2 * x.size * out > pieces.MOST_OPERATIONS:
            cut = in_pieces(self.matmul, x, out)
            if cut is not None:
                return cut
        x = x.astype(mx.float32) if self.precise else x
        if self.spec is None:
            return x @ self.weight.T
        if self.spec.block is not None:
            return multiply_blocks(x, self.weight, self.spec.block)
        known, scales, biases = settings(self.spec), self.scales, self.biases
        assert scales is not None
        group = self.spec.group_size
        one_group = group == x.shape[-1] and group > 32
        too_wide = group == 128 and x.dtype == mx.float32
        if (one_group or too_wide) and biases is not None and on_nvidia():
            # Of rows of one group MLX 0.32.4 gives wrong products there (supports_qmm_sm90 in
            # backend/cuda/quantized/qmm/qmm.cu takes these instead of all others); float32 tiles of
            # 128 columns need more shared memory than a launch may ask for (qmm_naive.cu).
            # The same numbers in groups half as wide take another.
            known["group_size"] = group // 2
            scales, biases = (mx.contiguous(mx.repeat(a, 2, 1)) for a in (scales, biases))
        return mx.quantized_matmul(x, self.weight, scales, biases, transpose=True, **known)

    def rows(self, first: int, last: int) -> Weight:
        """Rows first .. last - 1 of it."""
        parts = {name: array[first:last] for name, array in self.stored().items()}
        return replace(self, **parts, outs=())

    def split(self) -> list[Weight]:
        """A matrix for each of its results."""
        ends = [*accumulate(self.results)]
        if len(ends) == 1:
            return [self]
        return [self.rows(*rows) for rows in zip([0, *ends], ends, strict=False)]

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """``[out, in]`` in `dtype`."""
        return made_dense(self, dtype)
