"""Which positions a query of latent attention sees: those that an indexer scores best.

    score[t, s] = sum over heads h of weight[t, h] relu(q[h, t] . k[s])

Shapes:
    queries: ``[B, H, T, Di]``; weights: ``[B, T, H]``; keys: ``[B, 1, S, Di]``; length: int, or
    int32 ``[1]``: columns in use, of which the T queries are the last; start: int32 ``[B]``, each
    sequence's first column, or None; tail: keys ``[B, 1, R, Di]`` of the newest rows, or None, as
    in :mod:`mlx_moeflux.kernels.attention.attention`.
    returns: int32 ``[B, T, k]``, ascending: the k best columns from a sequence's first one to the
    query's own. Fewer are followed by the query's own.

Of equal scores, of which zeros are common, the lower column is taken.

Source: transformers 5.24 `DeepseekV32Indexer`, which takes equal ones in the order of torch's topk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.attention import joined
from mlx_moeflux.kernels.attention.choose_blocks import best_blocks
from mlx_moeflux.kernels.examples import TINY, Arguments, Normal, Sizes, normal
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import FLOATS
from mlx_moeflux.kernels.mla.latent_attention import SCORES_AT_ONCE
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import ranges
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_bytes, most_threads

# Tokens of a launch; simdgroups that score; simdgroups that choose, where so many are allowed.
MOST_TOKENS, SCORING, CHOOSING, CHOOSING_FEW = 8, 4, 32, 8


def position_scores(queries: mx.array, weights: mx.array, keys: mx.array) -> mx.array:
    """The module's formula in float32: queries ``[B, H, T, Di]``, weights ``[B, T, H]``, keys
    ``[B, 1, S, Di]`` -> ``[B, T, S]``. It holds the products of some heads at a time."""
    (B, H, T, _), S = queries.shape, keys.shape[2]
    keys = keys.astype(mx.float32).swapaxes(2, 3)
    weights = weights.astype(mx.float32).swapaxes(1, 2)[..., None]
    scores, heads = mx.zeros((B, T, S)), max(1, SCORES_AT_ONCE // (B * T * S))
    for first in range(0, H, heads):
        own = slice(first, first + heads)
        product = mx.maximum(queries[:, own].astype(mx.float32) @ keys, 0.0)
        scores = scores + (weights[:, own] * product).sum(axis=1)
    return scores


def best_positions(scores: mx.array, last: mx.array, first: mx.array, k: int) -> mx.array:
    """Return the columns int32 ``[B, T, k]`` of the k best of scores ``[B, T, S]``, ascending, the
    lower of equals. last: Column of each query, ``[B or 1, T, 1]``; first: Of each sequence,
    ``[B or 1, 1, 1]``. If a query has fewer columns from `first` to `last`, `last` fills up."""
    (B, T, S), column = scores.shape, mx.arange(scores.shape[2])
    chosen = best_blocks(scores, (column >= first) & (column <= last), k)
    # One place more takes what is not chosen.
    place = mx.where(chosen, mx.cumsum(chosen.astype(mx.int32), axis=-1) - 1, k)
    found = mx.broadcast_to(last, (B, T, k + 1)).astype(mx.int32)
    columns = mx.broadcast_to(column.astype(mx.int32), (B, T, S))
    return mx.put_along_axis(found, place, columns, axis=-1)[..., :k]


def choose_positions(
    queries: mx.array,
    weights: mx.array,
    keys: mx.array,
    *,
    k: int,
    length: int | mx.array,
    start: mx.array | None = None,
    tail: mx.array | None = None,
) -> mx.array:
    """The module's formula in plain MLX, in float32."""
    if tail is not None:
        keys = joined(keys, tail, length)
    if isinstance(length, int):
        keys = keys[:, :, :length]
    T = queries.shape[2]
    last = mx.array(length).reshape(-1, 1, 1) - T + mx.arange(T)[:, None]
    first = mx.zeros((1,), mx.int32) if start is None else start
    scores = position_scores(queries, weights, keys)
    return best_positions(scores, last, first[:, None, None], k)


_SCORES = MetalKernel(
    "position_scores",
    file="choose_positions.metal",
    inputs=("q", "factors", "keys", "tail", "ranges"),
    outputs=("scores",),
    body="""
        threadgroup T tile[8 * NS * W * (DI + 8)];
        threadgroup T queries[16 * ((H + 15) / 16) * (DI + 8)];
        position_scores<H, DI, TOKENS, W, NS, TAIL>(
            q, factors, keys, tail, ranges, scores, tile, queries, keys_shape[2],
            threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_threadgroup);
    """,
)
_CHOICE = MetalKernel(
    "best_positions",
    file="choose_positions.metal",
    inputs=("scores", "ranges"),
    outputs=("chosen",),
    body="""
        threadgroup atomic_uint bins[2048];
        threadgroup uint counts[3 * SIMDGROUPS];
        const uint row = threadgroup_position_in_grid.x;
        const uint b = row / TOKENS, after = TOKENS - 1 - row % TOKENS;
        best_positions<K, SIMDGROUPS>(
            scores + ulong(row) * uint(scores_shape[1]), chosen + ulong(row) * K, bins, counts,
            ranges[2 * b], ranges[2 * b + 1] - int(after), simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)


def choose_positions_fused(queries, weights, keys, *, k, length, start=None, tail=None) -> mx.array:
    """:func:`choose_positions` of a few tokens in two launches: threadgroups score positions, one
    chooses for each query.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, there are more than 8 tokens, Di is no
            multiple of 16, or a tile does not fit into threadgroup memory.
        UnsupportedError: MLX drives no GPU.
    """
    (B, H, T, Di), S = queries.shape, keys.shape[2]
    rows = 0 if tail is None else tail.shape[2]
    good = queries.dtype in FLOATS and keys.dtype == queries.dtype and weights.dtype in FLOATS
    good = good and keys.shape == (B, 1, S, Di) and weights.shape == (B, T, H) and queries.size
    if tail is not None:
        good = good and tail.shape == (B, 1, rows, Di) and tail.dtype == keys.dtype
        good = good and rows > 0 and S % rows == 0
    launches = good and _launches(
        queries.shape, S, rows, k, queries.dtype, most_bytes(), most_threads()
    )
    if not launches or k < 1 or not S:
        raise ShapeError(
            f"choose_positions: {k} of keys {keys.dtype} {list(keys.shape)} for queries "
            f"{queries.dtype} {list(queries.shape)} and weights {weights.dtype} "
            f"{list(weights.shape)}."
        )
    first, second = launches
    bounds = ranges(B, S, length, start)
    scores = _SCORES(queries, weights, keys, keys if tail is None else tail, bounds, **first)[0]
    return _CHOICE(scores, bounds, **second)[0]


@functools.lru_cache(maxsize=256)
def _launches(
    shape: tuple[int, ...], S: int, rows: int, k: int, dtype: mx.Dtype, memory: int, threads: int
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return both launches; None if there are none for such a call."""
    B, H, T, Di = shape
    queries = -(-H // 16) * 16
    tiles = (n for n in (2, 1) if (8 * n * SCORING + queries) * (Di + 8) * dtype.size <= memory)
    tiles = next(tiles, 0)
    if T > MOST_TOKENS or Di % 16 or not tiles:
        return None
    groups = -(-S // (8 * tiles * SCORING))
    columns = groups * 8 * tiles * SCORING
    template = {"T": dtype, "H": H, "DI": Di, "TOKENS": T, "W": SCORING, "NS": tiles, "TAIL": rows}
    scores = launch_of(template, (groups, B), 32 * SCORING, [(B * T, columns)], mx.float32)
    choosing = CHOOSING if threads >= 32 * CHOOSING else CHOOSING_FEW
    template = {"K": k, "SIMDGROUPS": choosing, "TOKENS": T}
    return scores, launch_of(template, (B * T, 1), 32 * choosing, [(B, T, k)], mx.int32)


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    S = s.keys + -(-n // s.step) * s.step
    heads = min(32, s.heads)
    arrays = x(1, heads, n, 128), x(1, n, heads), x(1, 1, S, 128)
    return arrays, {"k": max(1, s.keys // 4), "length": s.keys + n}


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    """Queries of two sequences, in a buffer of whole tails."""
    S = 48 + -(-n // s.tail) * s.tail
    options = {"k": 7, "start": mx.array([0, 3], mx.int32), "length": 40 + n}
    return (x(2, 5, n, 32), x(2, n, 5), x(2, 1, S, 32)), options


def _cases(example: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield what traced steps pass too: a tail, and a length on the device."""
    args, options = example
    yield "a length of the host", example
    if args[0].shape[2] == 1:
        tail = normal(args[2].dtype)(2, 1, TINY.tail, 32)
        length = mx.array([options["length"]], dtype=mx.int32)
        yield "a tail", (args, options | {"tail": tail, "length": length})


CHOOSE_POSITIONS = Operation(
    name="choose_positions",
    reference=choose_positions,
    others={"fused": Implementation(choose_positions_fused, kernels=(_SCORES, _CHOICE))},
    size=slice(2, 3),
    tokens={"queries": 2, "weights": 1},
    proof=Proof(example=_example, workloads={"": _workload}, cases=_cases, chooses=True),
)
