"""Which experts a token takes, and with what weight.

    p = softmax(logits);  ids = the K largest of p, ascending;  w = p[ids] (/ sum p[ids])

Ties go to the lower id. Ids come out ascending, because expert outputs are added in that order.
"""

from __future__ import annotations

import mlx.core as mx


def softmax_top_k(logits: mx.array, *, k: int, normalise: bool = True) -> tuple[mx.array, mx.array]:
    """logits ``[N, E]`` -> ids ``[N, K]`` uint32 ascending, weights ``[N, K]`` float32.

    Source: transformers `Qwen3_5MoeTopKRouter`; the softmax is over all experts in float32.
    """
    p = mx.softmax(logits.astype(mx.float32), axis=-1)
    ids = mx.stop_gradient(mx.sort(top_k_ids(p, k), axis=-1))
    weights = mx.take_along_axis(p, ids, axis=-1)
    if normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids.astype(mx.uint32), weights


def top_k_ids(scores: mx.array, k: int) -> mx.array:
    """The k largest of ``[N, E]`` per row, best first; ties to the lower index.

    A stable sort of the negated scores: argpartition promises no order among equals.
    """
    return mx.argsort(-scores, axis=-1)[:, :k]
