"""Which blocks of tokens a query sees: those that an indexer scores best.

    score[t, i] = sum over heads h of relu(q[h, t] . k[i])

Shapes:
    q: ``[B, H, T, Di]``; blocks: ``[B, 1, N, Di]``, the keys of blocks; complete: int32 ``[B, T]``,
    how many blocks, from the first one on, a query chooses from; tail: ``[B, 1, M, Di]``, the keys
    of the newest blocks, or None: block i is number i - before of them from `before` int32 ``[B]``
    on, which may be negative, and of `blocks` before.
    returns: int32 ``[B, T, k + 1]``: the min(k, complete) best blocks, ascending, then `complete`.

Of equal scores, of which zeros are common, the lower block is taken.

Source: transformers 5.24 `Qwen4ExpTextQSAIndexer`, which takes equal ones in the order of torch's
topk.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import FLOATS
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

# Threads of a launch; products of a lane; bytes of threadgroup memory for queries.
THREADS, CHOOSING, MOST_SUMS, MOST_BYTES = 128, 256, 32, 16 * 1024


def block_scores(q: mx.array, blocks: mx.array) -> mx.array:
    """q ``[B, H, T, Di]``, blocks ``[B, 1, N, Di]`` -> ``[B, 1, T, N]`` float32: the module's
    formula by sqrt(Di)."""
    (B, H, T, Di), keys = q.shape, blocks.astype(mx.float32).swapaxes(2, 3)
    scores = mx.zeros((B, 1, T, blocks.shape[2]))
    for head in range(H):
        product = q[:, head : head + 1].astype(mx.float32) @ keys
        scores = scores + mx.maximum(product, 0.0)
    return scores / Di**0.5


def best_blocks(scores: mx.array, counts: mx.array, most: int) -> mx.array:
    """scores ``[..., N]`` of blocks, which `counts` ``[..., N]`` or not -> bool ``[..., N]``: the
    `most` best, the lower of equals, or all if there are fewer."""
    scores = mx.where(counts, scores, -mx.inf)
    least = mx.topk(scores, min(most, scores.shape[-1])).min(axis=-1, keepdims=True)
    above, equal = scores > least, scores == least
    room = most - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    return chosen & (scores > -mx.inf)


def choose_blocks(
    q: mx.array,
    blocks: mx.array,
    complete: mx.array,
    *,
    k: int,
    tail: mx.array | None = None,
    before: mx.array | None = None,
) -> mx.array:
    """The module's formula in plain MLX, in float32.

    Raises:
        ShapeError: A tail without `before`.
    """
    scores, N = block_scores(q, blocks)[:, 0], blocks.shape[2]
    complete = complete[..., None]
    number = mx.arange(N)
    if tail is not None:
        if before is None:
            raise ShapeError("choose_blocks: a tail needs `before`, the number of its first block.")
        number, first = mx.arange(N + tail.shape[2]), before[:, None, None]
        at = mx.where(number < first, mx.minimum(number, N - 1), N + number - first)
        at = mx.broadcast_to(mx.clip(at, 0, number.size - 1), (*scores.shape[:2], number.size))
        scores = mx.concatenate([scores, block_scores(q, tail)[:, 0]], axis=-1)
        scores = mx.take_along_axis(scores, at, axis=-1)
    chosen = best_blocks(scores, number < complete, k)
    found = mx.sort(mx.where(chosen, number, complete), axis=-1)[..., :k]
    last = mx.repeat(complete, k + 1 - found.shape[-1], axis=-1)
    return mx.concatenate([found, last], axis=-1).astype(mx.int32)


_SCORES = MetalKernel(
    "block_scores",
    file="choose_blocks.metal",
    inputs=("q", "blocks", "tail", "before"),
    outputs=("scores",),
    body="""
        threadgroup float queries[QUERIES * H * DI];
        block_scores<H, DI, QUERIES, P, TAILED>(
            q, blocks, tail, before, scores, queries, q_shape[2], blocks_shape[2],
            TAILED ? tail_shape[2] : 0, threadgroup_position_in_grid,
            thread_index_in_threadgroup);
    """,
)
_CHOICE = MetalKernel(
    "best_blocks",
    file="choose_blocks.metal",
    inputs=("scores", "complete"),
    outputs=("chosen",),
    body="""
        threadgroup uint counts[SIMDGROUPS];
        const uint row = threadgroup_position_in_grid.x;
        best_blocks<K, SIMDGROUPS>(
            scores + ulong(row) * uint(scores_shape[1]), complete[row], chosen + row * (K + 1),
            counts, scores_shape[1], simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


def choose_blocks_fused(q, blocks, complete, *, k, tail=None, before=None) -> mx.array:
    """:func:`choose_blocks` in two launches: a lane scores a block for some queries, a threadgroup
    chooses for each.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, queries of one token do not fit into
            threadgroup memory, or (on Metal) there are less than 8 scores.
        UnsupportedError: MLX drives no GPU.
    """
    (B, H, T, Di), N, M = q.shape, blocks.shape[2], 0 if tail is None else tail.shape[2]
    good = blocks.shape == (B, 1, N, Di) and blocks.dtype == q.dtype and complete.shape == (B, T)
    good = good and q.dtype in FLOATS and q.size and N and complete.dtype == mx.int32
    if tail is not None:
        good = good and tail.shape == (B, 1, M, Di) and tail.dtype == q.dtype
        good = good and before is not None and before.shape == (B,) and before.dtype == mx.int32
    if not good or k < 1 or 4 * H * Di > MOST_BYTES:
        raise ShapeError(
            f"choose_blocks: {k} of blocks {blocks.dtype} {list(blocks.shape)} for q {q.dtype} "
            f"{list(q.shape)} and complete {complete.dtype} {list(complete.shape)}."
        )
    first, second = _launches(q.shape, N + M, k, tail is not None, q.dtype)
    tails = (blocks, complete) if tail is None or before is None else (tail, before)
    scores = _SCORES(q, blocks, *tails, **first)[0]
    return _CHOICE(scores, complete, **second)[0]


@functools.lru_cache(maxsize=256)
def _launches(
    shape: tuple[int, ...], blocks: int, k: int, tailed: bool, dtype: mx.Dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    B, H, T, Di = shape
    queries = max(1, min(T, MOST_SUMS // H, MOST_BYTES // (4 * H * Di)))
    template = {"H": H, "DI": Di, "QUERIES": queries, "TAILED": tailed}
    template["P"] = math.gcd(Di, 16 // dtype.size)
    places = -(-blocks // THREADS), -(-T // queries)
    scores = launch_of(template, places, THREADS, [(B * T, blocks)], mx.float32)
    x, y, _ = scores["grid"]
    scores["grid"] = x, y, B
    template = {"K": k, "SIMDGROUPS": CHOOSING // 32}
    return scores, launch_of(template, (B * T, 1), CHOOSING, [(B, T, k + 1)], mx.int32)


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    N = s.keys // 4
    complete = N - 1 - mx.arange(n)[::-1] // 4
    arrays = x(1, 4, n, 128), x(1, 1, N, 128), complete[None].astype(mx.int32)
    return arrays, {"k": max(1, N // 4)}


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    """Queries of two sequences, of which the second one's blocks are partly in the tail."""
    complete = mx.minimum(mx.array([[11], [14]]) + mx.arange(n), mx.array([[12], [16]]))
    options = {"tail": x(2, 1, 6, 32), "before": mx.array([12, 10], dtype=mx.int32), "k": 5}
    return (x(2, 8, n, 32), x(2, 1, 12, 32), complete.astype(mx.int32)), options


CHOOSE_BLOCKS = Operation(
    name="choose_blocks",
    reference=choose_blocks,
    others={"fused": Implementation(choose_blocks_fused, kernels=(_SCORES, _CHOICE))},
    size=slice(2, 3),
    tokens={"q": 2, "complete": 1},
    proof=Proof(example=_example, workloads={"": _workload}, chooses=True),
)
