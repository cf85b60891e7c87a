"""Routed experts, the shared expert and the residual become the layer's output.

    y = residual + experts + sigmoid(score) shared

Shapes:
    residual, shared: ``[N, C]``; experts: ``[N, C]`` float32; score: ``[N, 1]`` or None (shared
    is added as it is).
    returns: ``[N, C]`` in the dtype of residual, one rounding, at the end.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof, is_prompt
from mlx_moeflux.kernels.rounding import rounded
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_threads

MOST_THREADS = 512

_KERNEL = MetalKernel(
    "moe_combine",
    file="moe_combine.metal",
    inputs=("residual", "experts", "shared", "score"),
    outputs=("y",),
    body="""
        moe_combine<T, C, SHARED, THREADS>(
            residual, experts, shared, score, y, threadgroup_position_in_grid.x,
            thread_index_in_threadgroup);
    """,
)


def moe_combine(
    residual: mx.array,
    experts: mx.array,
    *,
    shared: mx.array | None = None,
    score: mx.array | None = None,
) -> mx.array:
    """The module's formula in float32."""
    total = residual.astype(mx.float32) + experts
    if shared is not None:
        shared = shared.astype(mx.float32)
        if score is not None:
            shared = rounded(mx.sigmoid(score.astype(mx.float32)) * shared)
        total = total + shared
    return total.astype(residual.dtype)


def moe_combine_fused(residual, experts, *, shared=None, score=None) -> mx.array:
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
    if C % 4 or C < 8:
        raise ShapeError(f"moe_combine: rows of {C} values; the kernel takes multiples of 4.")
    threads = min(MOST_THREADS, most_threads(), -(-C // 128) * 32)
    terms = 0 if shared is None else 1 if score is None else 2
    template = {"T": dtype, "C": C, "SHARED": terms, "THREADS": threads}
    launch = launch_of(template, (N, 1), threads, [(N, C)], dtype)
    # Arrays that are not there are not read: any of the right dtype will do.
    second = residual if shared is None else shared
    factor = residual if shared is None or score is None else score
    return _KERNEL(residual, experts, second, factor, **launch)[0]


def _check(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ShapeError(
            f"moe_combine: {name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}."
        )


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(n, s.C), x(n, s.C, dtype=mx.float32)), {"shared": x(n, s.C), "score": x(n, 1)}


MOE_COMBINE = Operation(
    name="moe_combine",
    reference=moe_combine,
    others={"fused": Implementation(moe_combine_fused, kernels=(_KERNEL,), joins=True)},
    size=slice(0, 1),
    tokens=dict.fromkeys(("residual", "experts", "shared", "score"), 0),
    reference_joins=True,
    proof=Proof(
        example=_workload,
        example_tokens=examples.N,
        workloads={"": _workload},
        by_rows=True,
        timed=is_prompt,
    ),
)
