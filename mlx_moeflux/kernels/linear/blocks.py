"""Products with matrices in ggml's blocks, in plain MLX: decoded, some at a time, and multiplied.

    y[p] = W[slots[p]] x[p]

Both in float32. Every row is multiplied alone, whichever rows and matrices are computed with it, so
that it gets the same bits with all of them.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.blocks import BlockMode

# MLX multiplies fewer rows by another kernel on CUDA.
LEAST_ROWS = 8
# Bounds the matrices in float32 that are multiplied at a time.
DECODED_BYTES = 32 << 20
# Times as many bytes MLX allocates at most: decoding takes some, and it allocates ahead of what it
# computes. Measured on the CPU: up to 5.9.
ALLOCATED = 8
# Up to this many rows the matrix of each is decoded; of more, each matrix once.
FEW_ROWS = 64


def gather_blocks(x: mx.array, weight: mx.array, slots: mx.array, mode: BlockMode) -> mx.array:
    """x ``[P, 1, in]``, weight ``[S, out, bytes of a row]`` uint8, slots ``[P]`` -> ``[P, 1, out]``
    float32.

    Evaluates: slots and the product of more than :data:`FEW_ROWS` rows, unless MLX traces.
    """
    x = x.astype(mx.float32)
    at_once = max(1, DECODED_BYTES // (4 * x.shape[-1] * weight.shape[1]))
    known = None if len(x) <= FEW_ROWS else _on_host(slots)
    if known is None:
        return _by_row(x, weight, slots, mode, at_once)
    matrices, place = np.unique(known, return_inverse=True)
    order = np.argsort(place, kind="stable")
    products = []
    for start in range(0, len(matrices), at_once):
        chosen = matrices[start : start + at_once]
        first, last = np.searchsorted(place[order], (start, start + at_once))
        rows = order[first:last]
        own = _indices(place[rows] - start)
        products.append(_product(x[_indices(rows)], weight[_indices(chosen)], own, mode))
        mx.eval(products[-1])
    return mx.concatenate(products)[_indices(np.argsort(order))]


def multiply_blocks(x: mx.array, weight: mx.array, mode: BlockMode) -> mx.array:
    """x ``[..., in]``, weight ``[out, bytes of a row]`` uint8 -> ``[..., out]`` in the dtype of x:
    one matrix for all rows, decoded some of its own rows at a time."""
    wide = x.astype(mx.float32)
    step = max(1, DECODED_BYTES // (4 * x.shape[-1]))
    products: list[mx.array] = []
    for start in range(0, len(weight), step):
        some = weight[start : start + step]
        if products:
            # MLX would decode everything before it multiplies. Blocks have no gradient.
            some = mx.stop_gradient(mx.depends([some], [products[-1]])[0])
        products.append(wide @ mode.decode(some, mx).T)
    return (products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)).astype(
        x.dtype
    )


def decoding_bytes(out: int, width: int) -> int:
    """Return a bound of the bytes that the products with matrices ``[out, width]`` of one call
    allocate to decode them."""
    return ALLOCATED * max(DECODED_BYTES, 4 * out * width)


def _by_row(
    x: mx.array, weight: mx.array, slots: mx.array, mode: BlockMode, at_once: int
) -> mx.array:
    products: list[mx.array] = []
    for start in range(0, len(x), at_once):
        rows, some = x[start : start + at_once], slots[start : start + at_once]
        if products:
            # MLX would decode everything before it multiplies. A slot has no gradient.
            some = mx.stop_gradient(mx.depends([some], [products[-1]])[0])
        own = mx.arange(len(rows), dtype=mx.uint32)
        products.append(_product(rows, weight[some], own, mode))
    return products[0] if len(products) == 1 else mx.concatenate(products)


def _product(x: mx.array, blocks: mx.array, own: mx.array, mode: BlockMode) -> mx.array:
    """x ``[n, 1, in]``, blocks ``[m, out, bytes of a row]``, own ``[n]``, the matrix of each row
    -> ``[n, 1, out]``."""
    n = len(x)
    if n < LEAST_ROWS and mx.default_device().type == mx.gpu:
        padding = mx.zeros((LEAST_ROWS - n,), mx.uint32)
        x, own = mx.concatenate([x, x[padding]]), mx.concatenate([own, own[padding]])
    return mx.gather_mm(x, mode.decode(blocks, mx).swapaxes(-1, -2), rhs_indices=own)[:n]


def _on_host(slots: mx.array) -> np.ndarray | None:
    """Return the numbers, or None where MLX traces: a compiled function refuses evaluation."""
    try:
        return np.asarray(slots)
    except ValueError:
        return None


def _indices(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.uint32))
