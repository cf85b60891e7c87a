"""Affine matrices, and such in ggml's blocks, as floats.

    y = scale number + bias

Shapes:
    weight: uint32 ``[..., out, in * bits / 32]``; scales, biases: ``[..., out, in / group]``; or
    blocks, uint8 ``[..., out, bytes of a row]``.
    returns: ``[..., out, in]`` in the dtype asked for.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import FLOATS, Stored, arrays_of, matrix_of, settings
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, on_nvidia

# Of a threadgroup, and words that each takes.
_THREADS, _WORDS = 256, 4
# Words are counted in 32 bits.
_MOST_WORDS = 2**31


def dequantise(stored: Stored, dtype: mx.Dtype) -> mx.array:
    """The module's formula in stock MLX, in any of its modes; in the dtype of the scales, whose
    products and sums are rounded each. Floats are cast."""
    if stored.spec is None:
        return stored.weight.astype(dtype)
    if stored.spec.block is not None:
        return stored.spec.block.decode(stored.weight, mx).astype(dtype)
    assert stored.scales is not None
    dense = mx.dequantize(stored.weight, stored.scales, stored.biases, **settings(stored.spec))
    return dense.astype(dtype)


_KERNEL = MetalKernel(
    "dequantise",
    file="dequantise.metal",
    inputs=("w", "scales", "biases"),
    outputs=("y",),
    body="""
        dequantise<BITS, GROUP, V, THREADS>(
            w, scales, biases, y, w_shape[0] * w_shape[1], threadgroup_position_in_grid.x,
            thread_index_in_threadgroup);
    """,
    packed=False,
)


_BLOCKS = MetalKernel(
    "dequantise_blocks",
    file="dequantise.metal",
    inputs=("w",),
    outputs=("y",),
    body="""
        const uint at = thread_position_in_grid.x;
        if (at < END) {
            dequantise_eight<E>(w, y, at);
        }
    """,
)


def dequantise_fused(stored: Stored, dtype: mx.Dtype) -> mx.array:
    """The module's formula in one launch, with one rounding.

    Raises:
        ShapeError: The arrays do not fit together, or are too large.
        UnsupportedError: The matrix is stored in another way, or there is no GPU.
    """
    weight, spec = stored.weight, stored.spec
    if spec is None or dtype not in FLOATS:
        raise UnsupportedError(f"dequantise: of {spec} there is no kernel to {dtype}.")
    width = spec.width(weight.shape[-1])
    layout, shape = matrix_of(stored, width, blocks=True), (*weight.shape[:-1], width)
    if not 0 < weight.size < _MOST_WORDS:
        raise ShapeError(f"dequantise: a matrix {list(weight.shape)} has too many words, or none.")
    if layout.block:
        eights = math.prod(shape) // 8
        groups = -(-eights // _THREADS), 1
        launch = launch_of({"END": eights}, groups, _THREADS, [shape], dtype)
        return _BLOCKS.using(E=layout.block)(weight, **launch)[0]
    arrays = arrays_of(stored)
    if weight.ndim != 2:  # MLX makes an operation of a reshape that changes nothing
        arrays = (array.reshape(-1, array.shape[-1]) for array in arrays)
    template = {"BITS": layout.bits, "GROUP": layout.group, "V": _WORDS, "THREADS": _THREADS}
    groups = -(-weight.size // (_WORDS * _THREADS))
    return _KERNEL(*arrays, **launch_of(template, (groups, 1), _THREADS, [shape], dtype))[0]


def made_dense(stored: Stored, dtype: mx.Dtype) -> mx.array:
    """:func:`dequantise` in the quickest way that there is here."""
    if stored.spec is not None and (stored.spec.block is not None or on_nvidia()):
        try:
            return dequantise_fused(stored, dtype)
        except (ShapeError, UnsupportedError):
            pass
    return dequantise(stored, dtype)
