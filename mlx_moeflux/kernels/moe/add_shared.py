"""The end of a layer: routed experts if there are any, the last matrix of a SwiGLU, the residual.

    y = residual + experts + sigmoid(score) w (silu(gate) up)

Shapes:
    residual: ``[..., C]``, N rows; experts: ``[N, C]`` float32, or None: there are none; gate, up:
    ``[N, F]``, the first two products of the shared expert or of a dense MLP; score: ``[N, 1]`` or
    None (the factor is 1); down: a matrix ``[C, F]``.
    returns: like residual.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear import small_batch
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.matvec import rows_together, simdgroups_of, tiling
from mlx_moeflux.kernels.linear.project import BLOCKS, in_blocks
from mlx_moeflux.kernels.linear.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.linear.small_batch import (
    most_token_tiles,
    partial_floats,
    row_count,
    simdgroups,
    token_tiles,
)
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe import moe_combine
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.rounding import rounded
from mlx_moeflux.kernels.runtime.launch_args import filled
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_bytes, most_threads


class References:
    """The sum in plain MLX."""

    moe_combine = staticmethod(moe_combine.moe_combine)


def add_shared(
    residual: mx.array,
    experts: mx.array | None,
    gate: mx.array,
    up: mx.array,
    down: Weight,
    *,
    score: mx.array | None = None,
    steps: Any = References,
) -> mx.array:
    """The module's formula in stock MLX; `steps` adds the terms if there are routed experts."""
    shared = down.matmul(nn.silu(gate) * up)
    return _added(steps.moe_combine, residual, experts, shared, score)


def add_shared_dequantised(residual, experts, gate, up, down, *, score=None) -> mx.array:
    """:func:`add_shared` for many rows: the matrix is made dense first (not for float32, see
    ``project_dequantised``), the sum is one launch."""
    inner = _inner(gate, up)
    if isinstance(down, Weight) and inner.dtype != mx.float32:
        down = Weight(down.dense(inner.dtype))
    shared = down.matmul(inner).astype(inner.dtype)
    return _added(moe_combine.moe_combine_fused, residual, experts, shared, score)


@functools.partial(mx.compile, shapeless=True)
def _inner(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


def _added(
    combine: Callable[..., mx.array],
    residual: mx.array,
    experts: mx.array | None,
    shared: mx.array,
    score: mx.array | None,
) -> mx.array:
    """Add the terms by `combine`, which takes rows, if there are routed experts."""
    if experts is not None:
        rows = residual.reshape(experts.shape)
        return combine(rows, experts, shared=shared, score=score).reshape(residual.shape)
    if score is not None:
        shared = rounded(shared * mx.sigmoid(score))
    return residual + shared.reshape(residual.shape)


_KERNEL = MetalKernel(
    "add_shared",
    file="matvec.metal",
    inputs=("residual", "experts", "gate", "up", "score", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float memory[MEMORY];
        add_shared<TOKENS, ROWS, SIMDGROUPS, IN, OUT, BITS, GROUP, V, SPLIT, EXACT, ROUTED, SCORED>(
            residual, experts, gate, up, score, w, scales, biases, y, memory,
            threadgroup_position_in_grid.y * TOKENS, threadgroup_position_in_grid.x,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


_IN_BLOCKS = MetalKernel(
    "add_shared_blocks",
    file="block_matvec.metal",
    inputs=("residual", "experts", "gate", "up", "score", "w"),
    outputs=("y",),
    body="""
        add_shared_blocks<ROWS, SIMDGROUPS, IN, OUT, EXACT, ROUTED, SCORED, E>(
            residual, experts, gate, up, score, w, y, threadgroup_position_in_grid.y,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
_PRODUCT = MetalKernel(
    "shared_product",
    file="matvec.metal",
    inputs=("gate", "up", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float memory[MEMORY];
        shared_product<TOKENS, ROWS, SIMDGROUPS, IN, OUT, BITS, GROUP, V, SPLIT, EXACT>(
            gate, up, w, scales, biases, y, memory, threadgroup_position_in_grid.y * TOKENS,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
_SUM = MetalKernel(
    "add_products",
    file="matvec.metal",
    inputs=("residual", "experts", "score", "products"),
    outputs=("y",),
    body="""
        uint at = thread_position_in_grid.x * N;
        if (at < END) {
            add_products<OUT, N, SCORED>(residual, experts, score, products, y, at);
        }
    """,
)
# From so many numbers on a matrix gets a launch of its own beside the routed experts: it waits for
# none of them, and little work is left after them.
APART, THREADS = 1 << 23, 128


def add_shared_fused(
    residual, experts, gate, up, down, *, score=None, apart_from=APART
) -> mx.array:
    """The module's formula in one launch for a few rows, each on its own, with one rounding; or
    with a matrix of `apart_from` numbers or more, if it is not in blocks, in two, of which the
    first does not need `experts`, with the same bits.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The matrix is stored in another way, or there is no GPU.
    """
    summed, scores, known = checked(residual, experts, gate, up, down, score)
    launch = _launch(known, most_threads(), apart_from)
    if isinstance(launch, tuple):
        product, rest = launch
        products = _PRODUCT(gate, up, *arrays_of(down), **product)[0]
        return _SUM(residual, summed, scores, products, **rest)[0]
    if known.matrix.block:
        kernel = _IN_BLOCKS.using(E=known.matrix.block)
        return kernel(residual, summed, gate, up, scores, down.weight, **launch)[0]
    return _KERNEL(residual, summed, gate, up, scores, *arrays_of(down), **launch)[0]


class Shared(NamedTuple):
    """The properties of a call that decide its launch. shape: Of the residual. routed, scored: True
    if there are routed experts, and a score. matrix: The storage of the down projection."""

    shape: tuple[int, ...]
    F: int
    dtype: mx.Dtype
    routed: bool
    scored: bool
    matrix: Matrix


def checked(residual, experts, gate, up, down, score) -> tuple[mx.array, mx.array, Shared]:
    """The experts' sum and the score that a kernel is given, where there are none too, and what a
    launch depends on.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The matrix is stored in another way.
    """
    C, F = residual.shape[-1], gate.shape[-1]
    N = residual.size // C
    matrix = matrix_of(down, F, blocks=True)
    if residual.dtype not in FLOATS or any(a.dtype != residual.dtype for a in (gate, up)):
        raise ShapeError(f"residual is {residual.dtype}, gate {gate.dtype} and up {up.dtype}.")
    if score is not None and (score.size != N or score.dtype != residual.dtype):
        raise ShapeError(f"score is {score.dtype} {list(score.shape)}; expected [{N}, 1].")
    routed = experts is not None
    summed = experts if routed else filled(0.0)
    shapes = (summed.shape if routed else (N, C), gate.shape, up.shape, down.weight.shape[0])
    if shapes != ((N, C), (N, F), (N, F), C) or summed.dtype != mx.float32:
        raise ShapeError(
            f"experts {summed.dtype} {list(shapes[0])}, gate {list(gate.shape)}, up "
            f"{list(up.shape)} and down {list(down.weight.shape)} do not fit {N} rows of {C}."
        )
    known = Shared(residual.shape, F, residual.dtype, routed, score is not None, matrix)
    return summed, gate if score is None else score, known


@functools.lru_cache(maxsize=64)
def _launch(
    known: Shared, threads: int, apart_from: int
) -> dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]:
    """The launch, or the two."""
    (*leading, C), F, dtype, scored = known.shape, known.F, known.dtype, known.scored
    groups, tile, memory = tiling(known.matrix, C, F, dtype, threads)
    simdgroups = simdgroups_of(F, threads)
    template = {"IN": F, "OUT": C, "EXACT": dtype == mx.float32, **tile}
    rows = math.prod(leading)
    at_once = 1 if known.matrix.block else rows_together(rows, F, groups, simdgroups, memory)
    template |= {"SIMDGROUPS": simdgroups, "MEMORY": at_once * memory, "TOKENS": at_once}
    if not known.routed or apart_from > F * C or known.matrix.block:
        template |= {"ROUTED": known.routed, "SCORED": scored}
        return launch_of(template, (groups, rows // at_once), 32 * simdgroups, [known.shape], dtype)
    launch = groups, rows // at_once
    product = launch_of(template, launch, 32 * simdgroups, [(rows, C)], mx.float32)
    together = math.gcd(C, 4)
    template = {"OUT": C, "END": rows * C, "N": together, "SCORED": scored}
    blocks = -(-rows * C // (together * THREADS))
    return product, launch_of(template, (blocks, 1), THREADS, [known.shape], dtype)


_ROWS = MetalKernel(
    "add_shared_rows",
    file="small_batch.metal",
    inputs=("residual", "experts", "gate", "up", "score", "tokens", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float partial[PARTIAL];
        add_shared_rows<MT, NT, W, IN, OUT, BITS, GROUP, V, ROUTED, SCORED>(
            residual, experts, gate, up, score, w, scales, biases, y, partial,
            threadgroup_position_in_grid.x * 16 * MT, threadgroup_position_in_grid.y * 8 * NT,
            tokens[0], thread_index_in_threadgroup);
    """,
)


def add_shared_rows(residual, experts, gate, up, down, *, score=None) -> mx.array:
    """:func:`add_shared` in one launch for some dozens of rows: SwiGLU is rounded to the dtype of
    the rows, each weight read once for up to 32. float32 goes to the kernel of a few rows, whose
    bits are the same in a trace and outside; a matrix in blocks is made dense.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The matrix is stored in another way, or there is no GPU.
    """
    if residual.dtype == mx.float32:
        return add_shared_fused(residual, experts, gate, up, down, score=score)
    if in_blocks(down):
        return add_shared_dequantised(residual, experts, gate, up, down, score=score)
    summed, scores, known = checked(residual, experts, gate, up, down, score)
    launch = _rows_launch(known, most_bytes())
    tokens = row_count(residual.size // residual.shape[-1])
    return _ROWS(residual, summed, gate, up, scores, tokens, *arrays_of(down), **launch)[0]


@functools.lru_cache(maxsize=64)
def _rows_launch(known: Shared, memory: int) -> dict[str, Any]:
    (*leading, C), F, dtype = known.shape, known.F, known.dtype
    tokens = math.prod(leading)
    tile, W = small_batch.tiling(known.matrix, (C,), F), simdgroups(F)
    NT = token_tiles(tokens, W * tile.groups(C), most_token_tiles(tile.MT, W, memory))
    template = {"T": dtype, "NT": NT, "W": W, "IN": F, "OUT": C}
    template |= {"ROUTED": known.routed, "SCORED": known.scored}
    template |= tile.arguments() | {"PARTIAL": partial_floats(tile.MT, NT, W)}
    groups = tile.groups(C), -(-tokens // (8 * NT))
    return launch_of(template, groups, 32 * W, [known.shape], dtype)


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    inner = (x(n, s.F), x(n, s.F), examples.weight(s, x, s.C, width=s.F))
    return (x(1, n, s.C), x(n, s.C, dtype=mx.float32), *inner), {"score": x(n, 1)}


def _blocks_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    width = examples.block_width(s.F)
    down = examples.block_weight("q4_k", s.C, width=width)
    sums = x(1, n, s.C), x(n, s.C, dtype=mx.float32)
    return (*sums, x(n, width), x(n, width), down), {"score": x(n, 1)}


def _kind(residual: mx.array, experts: Any, gate: mx.array, up: mx.array, down: Weight) -> str:
    return in_blocks(down)


def _is_weight(residual: Any, experts: Any, gate: Any, up: Any, down: Any, **options: Any) -> bool:
    """Return True if nothing stands in for the matrix."""
    return isinstance(down, Weight)


ADD_SHARED = Operation(
    name="add_shared",
    reference=add_shared,
    others={
        "fused": Implementation(
            add_shared_fused, kernels=(_KERNEL, _IN_BLOCKS, _PRODUCT, _SUM), joins=True
        ),
        "rows": Implementation(add_shared_rows, kernels=(_ROWS,)),
        "dequantised": Implementation(
            add_shared_dequantised, kernels=moe_combine.MOE_COMBINE.others["fused"].kernels
        ),
        "blas": Implementation(blas.add_shared_blas, on_cpu=True, joins=_is_weight),
    },
    size=slice(None, -1),
    tokens=dict.fromkeys(("residual", "experts", "gate", "up", "score"), -2),
    replaces=("moe_combine",),
    kind=_kind,
    proof=Proof(
        example=_workload,
        example_tokens=3,
        workloads={"": _workload, BLOCKS: _blocks_workload},
        by_rows=True,
        shrunk=("residual", "experts"),
    ),
)
