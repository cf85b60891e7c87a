"""Mix S residual streams into the input of a mixer or MLP, and compute its injection factors.

    n = rms_norm of each stream of x, times norm
    read = mean over streams of sigmoid(up silu(down n / S)) n
    inject = 2 sigmoid(w n / S), a number for each stream

Shapes:
    x: ``[..., S C]``, N rows; norm: ``[S C]``; weights: the matrices down ``[R, S C]`` and, unless
    nothing is injected, w ``[S, S C]``, apart or as one; up: a matrix ``[S C, R]``.
    returns: read ``[..., C]``; inject ``[..., S]``, or None. Both are in the dtype of x.

Source: transformers 5.24 `Qwen4ExpTextGatedResidual`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear import project
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.matvec import (
    WIDE,
    WIDE_COLUMNS,
    rows_at_once,
    simdgroups_of,
    words_at_once,
)
from mlx_moeflux.kernels.linear.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.rounding import rounded
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, float_bits, most_threads

# A lane has a sum for each stream of each of its columns.
MOST_STREAMS, MOST_SUMS, SIMDGROUPS = 32, 16, 4


class References:
    """The products in plain MLX."""

    project = staticmethod(project.project)


def grouped_norm(x: mx.array, weight: mx.array, *, groups: int, eps: float) -> mx.array:
    """RMS norm of each of the groups of a row, times weight ``[S C]``: x ``[..., S C]`` -> the same
    shape and dtype; computed in float32."""
    f = x.astype(mx.float32).reshape(*x.shape[:-1], groups, -1)
    normed = (f * mx.rsqrt(rounded(f.square().mean(-1, keepdims=True)) + eps)).reshape(x.shape)
    return (normed * weight.astype(mx.float32)).astype(x.dtype)


def read_streams(
    x: mx.array,
    weights: Sequence[Weight],
    up: Weight,
    *,
    norm: mx.array,
    eps: float,
    streams: int,
    steps: Any = References,
) -> tuple[mx.array, mx.array | None]:
    """The module's formula in plain MLX; `steps` computes the products."""
    normed = grouped_norm(x, norm, groups=streams, eps=eps)
    down, *inject = steps.project(normed, weights)
    gate = mx.sigmoid(steps.project(nn.silu(down / streams), [up])[0])
    read = (gate * normed).reshape(*x.shape[:-1], streams, -1).mean(axis=-2)
    return read, 2.0 * mx.sigmoid(inject[0] / streams) if inject else None


def _down(inject: bool) -> MetalKernel:
    """The first launch: low = silu(down n / S), and behind those of all rows the streams' norms."""
    product = """
        float total;
        const uint row = normed_product<ROWS{0}, SIMDGROUPS, S, C, BASE{0}, OUT{0}, BITS{0},
                                        GROUP{0}, V{0}, M{0}, EXACT>(
            total, x + token * S * C, norm, inverse, w{0}, scales{0}, biases{0}, partial, {1},
            simdgroup, lane);
        if (index < ROWS{0}) {{
            {2};
        }}
    """
    low = product.format(0, "group", "low[token * OUT0 + row] = silu(total / float(S))")
    factor = "factors[token * S + row] = T(2.0f * sigmoid(total / float(S)))"
    factors = product.format(1, "group - GROUPS0", factor)
    choice = f"if (group < GROUPS0) {{ {low} }} else {{ {factors} }}" if inject else low
    matrices = [f"{p}{m}" for m in range(1 + inject) for p in ("w", "scales", "biases")]
    return MetalKernel(
        "streams_down_inject" if inject else "streams_down",
        file="read_streams.metal",
        inputs=("x", "norm", *matrices),
        outputs=("low", *["factors"] * inject),
        body=f"""
            threadgroup float squares[S * SIMDGROUPS];
            threadgroup float inverse[S];
            threadgroup float partial[PARTIAL];
            const uint group = threadgroup_position_in_grid.x;
            const uint token = threadgroup_position_in_grid.y;
            const uint simdgroup = simdgroup_index_in_threadgroup;
            const uint lane = thread_index_in_simdgroup, index = simdgroup * 32 + lane;
            stream_norms<S, C, SIMDGROUPS>(
                x + token * S * C, squares, inverse, as_type<float>(EPSILON), simdgroup, lane);
            if (group == 0 && index < S) {{
                low[threadgroups_per_grid.y * OUT0 + token * S + index] = inverse[index];
            }}
            {choice}
        """,
    )


_DOWN = {inject: _down(inject) for inject in (False, True)}
_UP = MetalKernel(
    "streams_up",
    file="read_streams.metal",
    inputs=("low", "x", "norm", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        const uint token = threadgroup_position_in_grid.y;
        const uint group = threadgroup_position_in_grid.x;
        mix_streams<COLUMNS, S, C, IN, BITS, GROUP, V, EXACT>(
            low + token * IN, low + threadgroups_per_grid.y * IN + token * S, x + token * S * C,
            norm, w, scales, biases, y + token * C,
            (group * SIMDGROUPS + simdgroup_index_in_threadgroup) * COLUMNS,
            thread_index_in_simdgroup);
    """,
)


def read_streams_fused(
    x, weights, up, *, norm, eps, streams, steps=None
) -> tuple[mx.array, mx.array | None]:
    """:func:`read_streams` in two launches for a few rows, each on its own: what is low, and the
    factors; then what is read. Each result has one rounding, at the end. `steps` plays no part.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or there are more than 32 streams.
        UnsupportedError: A matrix is stored in another way, rows are too wide, or there is no GPU.
    """
    call = _checked(x, weights, up, norm, eps, streams)
    first, second = _launches(call, most_threads())
    arrays = [array for matrix in weights for array in arrays_of(matrix)]
    arrays *= 2 if call.joined else 1  # one array: the rows of down, then those of w
    low, *factors = _DOWN[len(call.outs) > 1](x, norm, *arrays, **first)
    read = _UP(low, x, norm, *arrays_of(up), **second)[0]
    return read, factors[0] if factors else None


class Stored(NamedTuple):
    """The storage of a matrix, and the words of a row that a lane reads together."""

    matrix: Matrix
    words: int


class Call(NamedTuple):
    """The properties of a call that decide its launches. down: The matrix of each result. outs: The
    rows of each, R and, unless nothing is injected, S. joined: True if one matrix has both."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    eps: float
    streams: int
    down: tuple[Stored, ...]
    outs: tuple[int, ...]
    joined: bool
    up: Stored


def _checked(x, weights, up, norm, eps: float, streams: int) -> Call:
    """Return what the launches depend on."""
    width = x.shape[-1]
    if not x.size or x.dtype not in FLOATS or width % streams or streams > MOST_STREAMS:
        raise ShapeError(
            f"read_streams: x is {x.dtype} {list(x.shape)}; the kernels take rows of floats and up "
            f"to {MOST_STREAMS} streams, here {streams}."
        )
    if norm.shape != (width,) or norm.dtype not in FLOATS:
        raise ShapeError(f"read_streams: norm is {norm.dtype} {list(norm.shape)}, not [{width}].")
    if any(weight.precise for weight in (*weights, up)):
        raise UnsupportedError("read_streams: the kernels take no precise matrices.")
    matrices = [_stored(weight, width) for weight in weights]
    outs = tuple(out for weight in weights for out in weight.results)
    upward = _stored(up, outs[0])
    if outs[1:] not in ((), (streams,)) or up.results != (width,):
        raise ShapeError(
            f"read_streams: results {outs} and {up.results} do not fit {streams} streams of "
            f"{width // streams}."
        )
    joined = len(matrices) < len(outs)
    down = tuple(matrices) * (2 if joined else 1)
    return Call(x.shape, x.dtype, eps, streams, down, outs, joined, upward)


def _stored(weight: Weight, width: int) -> Stored:
    """Return the storage of a matrix with rows of `width`; floats may have rows of any width.

    Raises:
        ShapeError: The arrays do not fit together.
        UnsupportedError: The kernels cannot read them.
    """
    if weight.spec is not None or weight.weight is None:
        matrix = matrix_of(weight, width)
        return Stored(matrix, words_at_once(matrix, width))
    if weight.weight.dtype not in FLOATS or weight.weight.shape[-1] != width:
        raise ShapeError(
            f"read_streams: a matrix is {weight.weight.dtype} {list(weight.weight.shape)}, not "
            f"floats in rows of {width}."
        )
    return Stored(Matrix(0, 32), math.gcd(width, 16 // weight.weight.itemsize))


def _simdgroups(width: int, threads: int) -> int:
    """Return how many simdgroups share a row. What is summed in which order depends on it, and so
    on the width and the back end alone."""
    return simdgroups_of(width, threads) if width >= WIDE else -(-width // WIDE_COLUMNS)


@functools.lru_cache(maxsize=64)
def _launches(call: Call, threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    *leading, width = call.shape
    S, (R, *_), dtype = call.streams, call.outs, call.dtype
    C, rows, simdgroups = width // S, math.prod(leading), _simdgroups(width, threads)
    exact = dtype == mx.float32
    template: dict[str, Any] = {"T": dtype, "S": S, "C": C, "SIMDGROUPS": simdgroups}
    template |= {"EPSILON": float_bits(call.eps), "EXACT": exact, "PARTIAL": 0}
    groups = 0
    for m, ((matrix, words), out) in enumerate(zip(call.down, call.outs, strict=True)):
        own, together = rows_at_once(matrix, out, dtype, sum(call.outs), simdgroups)
        template |= {f"ROWS{m}": own, f"M{m}": together, f"OUT{m}": out}
        template |= {f"BASE{m}": R if m and call.joined else 0, f"GROUPS{m}": out // own}
        template |= {f"BITS{m}": matrix.bits, f"GROUP{m}": matrix.group, f"V{m}": words}
        template["PARTIAL"] = max(template["PARTIAL"], own * simdgroups)
        groups += out // own
    shapes = [(rows * (R + S),), *[(*leading, S)] * (len(call.outs) > 1)]
    dtypes = (mx.float32, dtype)[: len(shapes)]
    down = launch_of(template, (groups, rows), 32 * simdgroups, shapes, *dtypes)
    columns = math.gcd(C, max(1, MOST_SUMS // S))
    template = {"COLUMNS": columns, "S": S, "C": C, "IN": R, "SIMDGROUPS": SIMDGROUPS}
    matrix, words = call.up
    template |= {"BITS": matrix.bits, "GROUP": matrix.group, "V": words, "EXACT": exact}
    places = -(-C // (columns * SIMDGROUPS)), rows
    return down, launch_of(template, places, 32 * SIMDGROUPS, [(*leading, C)], dtype)


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    S, R = 4, s.group * max(s.C // (8 * s.group), 1)
    down = examples.weight(s, x, R, S, width=S * s.C)
    norm = x(S * s.C, dtype=mx.float32)
    options = {"norm": norm, "eps": 1e-6, "streams": S}
    return (x(1, n, S * s.C), [down], examples.weight(s, x, S * s.C, width=R)), options


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    S, R = 3, 40
    weights = [Weight(0.1 * x(out, S * s.C)) for out in (R, S)]
    options = {"norm": x(S * s.C, dtype=mx.float32), "eps": 1e-6, "streams": S}
    return (x(n, S * s.C), weights, Weight(0.2 * x(S * s.C, R))), options


READ_STREAMS = Operation(
    name="read_streams",
    reference=read_streams,
    others={
        "fused": Implementation(read_streams_fused, kernels=(*_DOWN.values(), _UP), joins=True)
    },
    size=slice(None, -1),
    tokens={"x": -2},
    replaces=("project",),
    reference_joins=lambda *args, steps=None, **options: steps is not None,
    proof=Proof(example=_example, workloads={"": _workload}, by_rows=True, shrunk=("x",)),
)
