"""Routed experts, the shared expert and the residual become the layer's output.

    y = residual + experts + sigmoid(score) shared
    n = norm y / sqrt(mean(y^2) + eps)                 if the next layer's norm is asked for

Shapes:
    residual, shared: ``[N, C]``; experts: ``[N, C]`` float32; score: ``[N, 1]`` or None (shared
    is added as it is); norm: ``[C]`` or None.
    returns: y ``[N, C]`` in the dtype of residual, one rounding, at the end; with `norm` also n,
    which is computed from the rounded y.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.metal import MetalKernel, float_bits, launches, most_threads

MOST_THREADS = 512

_BODY = """
    threadgroup float scratch[32];
    moe_combine<T, C, SHARED, NORM, EPS, THREADS>(
        residual, experts, shared, score, norm, y, {scaled}, scratch,
        threadgroup_position_in_grid.x, thread_index_in_threadgroup);
"""
_INPUTS = ("residual", "experts", "shared", "score", "norm")
_COMBINE = MetalKernel(
    "moe_combine",
    file="moe_combine.metal",
    inputs=_INPUTS,
    outputs=("y",),
    body=_BODY.format(scaled="y"),
)
_COMBINE_NORM = MetalKernel(
    "moe_combine_norm",
    file="moe_combine.metal",
    inputs=_INPUTS,
    outputs=("y", "scaled"),
    body=_BODY.format(scaled="scaled"),
)


def moe_combine(
    residual: mx.array,
    experts: mx.array,
    *,
    shared: mx.array | None = None,
    score: mx.array | None = None,
    norm: mx.array | None = None,
    eps: float = 1e-6,
) -> mx.array | tuple[mx.array, mx.array]:
    """The module's formula in float32."""
    total = residual.astype(mx.float32) + experts
    if shared is not None:
        shared = shared.astype(mx.float32)
        total = total + (shared if score is None else mx.sigmoid(score.astype(mx.float32)) * shared)
    y = total.astype(residual.dtype)
    return y if norm is None else (y, mx.fast.rms_norm(y, norm, eps))


@launches(_COMBINE, _COMBINE_NORM)
def moe_combine_fused(
    residual: mx.array,
    experts: mx.array,
    *,
    shared: mx.array | None = None,
    score: mx.array | None = None,
    norm: mx.array | None = None,
    eps: float = 1e-6,
) -> mx.array | tuple[mx.array, mx.array]:
    """:func:`moe_combine` in one launch, a threadgroup a row.

    Raises:
        ShapeError: C is no multiple of 4, or shapes or dtypes are not those of the module.
    """
    N, C = residual.shape
    dtype = residual.dtype
    _check("experts", experts, (N, C), mx.float32)
    if shared is not None:
        _check("shared", shared, (N, C), dtype)
    if score is not None:
        _check("score", score, (N, 1), dtype)
    if norm is not None:
        _check("norm", norm, (C,), dtype)
    if C % 4 or C < 8:
        raise ShapeError(f"moe_combine: rows of {C} values; the kernel takes multiples of 4.")
    threads = min(MOST_THREADS, most_threads(), -(-C // 128) * 32)
    template = {
        "T": dtype,
        "C": C,
        "SHARED": 0 if shared is None else 1 if score is None else 2,
        "NORM": norm is not None,
        "EPS": float_bits(eps if norm is not None else 0.0),
        "THREADS": threads,
    }
    # Arrays that are not there are not read: any of the right dtype will do.
    outputs = (_COMBINE if norm is None else _COMBINE_NORM)(
        residual,
        experts,
        residual if shared is None else shared,
        residual if score is None or shared is None else score,
        residual if norm is None else norm,
        template=template,
        grid=(N * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(N, C)] * (1 if norm is None else 2),
        output_dtypes=[dtype] * (1 if norm is None else 2),
    )
    return outputs[0] if norm is None else tuple(outputs)


def _check(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ShapeError(
            f"moe_combine: {name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}."
        )
