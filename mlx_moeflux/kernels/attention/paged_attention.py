"""Attention of one token a sequence over keys and values in blocks of one pool.

    what sdpa gives for k'[b, :, c] = k[table[b, i // P] P + i % P], i = c - start[b], v' likewise

Shapes:
    q: ``[B, Hq, 1, Dh]``; k: ``[R, Hkv, Dh]``, v: ``[R, Hkv, Dv]``, rows in blocks of P (`page`);
    table: int32 ``[B, n]``, the blocks of each sequence in order, any number where it has none;
    length, start, tail, gate, sinks: see :mod:`mlx_moeflux.kernels.attention.attention`, of n P
    columns; start may be None. returns: ``[B, Hq, 1, Dv]`` in the dtype of q.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.attention.plan import (
    SHARED,
    AttentionCall,
    check_dtypes,
    check_tail,
    launch_attention,
    plan_of,
)
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import backend


class References:
    """Attention in plain MLX."""

    sdpa = staticmethod(causal_sdpa)


def paged_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    table: mx.array,
    page: int,
    scale: float,
    length: mx.array,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array],
    gate: mx.array | None = None,
    sinks: mx.array | None = None,
    steps: Any = References,
) -> mx.array:
    """The module's formula in stock MLX: `steps` computes attention over copies of all columns."""
    B, n = table.shape
    row = mx.arange(n * page)
    if start is not None:
        row = row - start.reshape(-1, 1)
    row = mx.broadcast_to(mx.maximum(row, 0), (B, n * page))
    index = mx.take_along_axis(table, row // page, axis=1) * page + row % page
    index = mx.clip(index, 0, k.shape[0] - 1)
    keys, values = (x[index].swapaxes(1, 2) for x in (k, v))
    options = {"length": length, "start": start, "tail": tail, "gate": gate}
    if sinks is not None:
        options["sinks"] = sinks
    return steps.sdpa(q, keys, values, scale=scale, mask=None, **options)


def paged_sdpa_fused(
    q, k, v, *, table, page, scale, length, start=None, tail, gate=None, sinks=None
):
    """:func:`paged_sdpa` through the table, nothing is copied; to the bit what ``sdpa_fused`` gives
    for buffers of n P columns.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, see ``sdpa_fused``.
        UnsupportedError: MLX drives no GPU.
    """
    B, n = table.shape
    if table.dtype != mx.int32 or q.shape[0] != B or k.shape[0] % page or v.shape[0] != k.shape[0]:
        raise ShapeError(
            f"paged_sdpa: {B} rows of {table.dtype} blocks of {page} rows do not fit pools of "
            f"{k.shape[0]} and {v.shape[0]} rows for {q.shape[0]} sequences."
        )
    (_, Hkv, D), Dv = k.shape, v.shape[2]
    call = AttentionCall(
        "paged_sdpa", q.shape, (B, Hkv, n * page, D), (B, Hkv, n * page, Dv), q.dtype, False,
        gate=None if gate is None else gate.shape[-1], tail=tail[0].shape[2],
        sinks=sinks is not None,
    )  # fmt: skip
    check_dtypes("paged_sdpa", q.dtype, {"k": k, "v": v, "gate": gate})
    check_tail(call, *tail)
    plan = plan_of(backend().name, call, PAGE=page)
    return launch_attention(
        plan, (q, q, k, k, v), scale=scale, length=length, start=start,
        number=n, tail=tail, table=table, gate=gate, sinks=sinks,
    )  # fmt: skip


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    """Arguments for n sequences with consecutive blocks."""
    pages, tail = (
        (s.keys + 256) // examples.BLOCK,
        (x(n, s.Hkv, s.tail, s.Dh), x(n, s.Hkv, s.tail, s.Dh)),
    )
    rows = (n * pages + 1) * examples.BLOCK
    table = (1 + mx.arange(n * pages)).reshape(n, pages).astype(mx.int32)
    options = {
        "table": table,
        "page": examples.BLOCK,
        "length": mx.array([s.keys + 1], dtype=mx.int32),
    }
    return (x(n, s.Hq, 1, s.Dh), x(rows, s.Hkv, s.Dh), x(rows, s.Hkv, s.Dh)), {
        **options, "tail": tail, "scale": s.Dh**-0.5
    }  # fmt: skip


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    tail = (x(2, s.Hkv, s.tail, s.Dh), x(2, s.Hkv, s.tail, s.Dhv))
    table = mx.array([[2, 0, 3, 0], [1, 4, 5, 0]], dtype=mx.int32)
    length, start = (mx.array(value, dtype=mx.int32) for value in ([40], [7, 0]))
    options = {
        "table": table,
        "page": examples.BLOCK,
        "length": length,
        "start": start,
        "tail": tail,
        "scale": s.Dh**-0.5,
    }
    pool = (6 * examples.BLOCK, s.Hkv)
    return (x(2, s.Hq, 1, s.Dh), x(*pool, s.Dh), x(*pool, s.Dhv)), options


PAGED_SDPA = Operation(
    name="paged_sdpa",
    reference=paged_sdpa,
    others={"fused": Implementation(paged_sdpa_fused, kernels=SHARED)},
    size=slice(0, 1),
    replaces=("sdpa",),
    proof=Proof(example=_example, workloads={"": _workload}),
)
