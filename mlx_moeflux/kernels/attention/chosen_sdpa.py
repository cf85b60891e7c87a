"""Attention of one token a sequence to chosen blocks of its keys, and to those behind all blocks.

    what sdpa gives for the keys and values of the columns that the token sees

Shapes:
    q: ``[B, Hq, 1, Dh]``; k: ``[B, Hkv, S, Dh]``; v: ``[B, Hkv, S, Dv]``; length, start, tail and
    gate: see :mod:`mlx_moeflux.kernels.attention.attention`; `length` is given.
    blocks: int32 ``[B, n + 1]``, of `ratio` columns each, from a sequence's first one on, as
    :mod:`~mlx_moeflux.kernels.attention.choose_blocks` gives them. The last is the number c of
    complete blocks: the token sees the first min(n, c) numbers' blocks, and of block c the columns
    that are there.
    returns: ``[B, Hq, 1, Dv]`` in the dtype of q.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
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


def chosen_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    blocks: mx.array,
    *,
    ratio: int,
    scale: float,
    length: int | mx.array,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    gate: mx.array | None = None,
    steps: Any = References,
) -> mx.array:
    """The module's formula in stock MLX: `steps` computes attention over copies of the columns."""
    B, n, S = blocks.shape[0], blocks.shape[1] - 1, k.shape[2]
    first = mx.zeros((B, 1), mx.int32) if start is None else start.reshape(-1, 1)
    past = mx.array(length).reshape(-1, 1)
    token, complete = mx.arange(ratio), blocks[:, n:]
    columns = (first + blocks[:, :n] * ratio)[..., None] + token
    behind = first + complete * ratio + token
    found = mx.arange(n) < complete
    seen = mx.concatenate([mx.repeat(found, ratio, axis=-1), behind < past], -1)[:, None, None]
    columns = mx.minimum(mx.concatenate([columns.reshape(B, -1), behind], axis=-1), S - 1)
    columns = columns[:, None, :, None]
    keys, values = (mx.take_along_axis(rows, columns, axis=2) for rows in (k, v))
    if tail is not None:
        R = tail[0].shape[2]
        row = columns - ((past - 1) // R * R)[..., None, None]
        inside, row = row >= 0, mx.clip(row, 0, R - 1)
        keys, values = (
            mx.where(inside, mx.take_along_axis(end, row, axis=2), rows)
            for end, rows in zip(tail, (keys, values), strict=True)
        )
    return steps.sdpa(q, keys, values, scale=scale, mask=seen, gate=gate)


def chosen_sdpa_fused(
    q, k, v, blocks, *, ratio, scale, length, start=None, tail=None, gate=None, steps=None
) -> mx.array:
    """:func:`chosen_sdpa`, which reads the columns where they are; nothing is copied. `steps` plays
    no part.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, see ``sdpa_fused``.
        UnsupportedError: MLX drives no GPU.
    """
    if blocks.dtype != mx.int32 or blocks.shape[:-1] != q.shape[:1] or q.shape[2] != 1:
        raise ShapeError(
            f"chosen_sdpa: {blocks.dtype} blocks {list(blocks.shape)} do not fit one token each of "
            f"q {list(q.shape)}."
        )
    call = AttentionCall(
        "chosen_sdpa", q.shape, k.shape, v.shape, q.dtype, False,
        gate=None if gate is None else gate.shape[-1], tail=0 if tail is None else tail[0].shape[2],
    )  # fmt: skip
    check_dtypes("chosen_sdpa", q.dtype, {"k": k, "v": v, "gate": gate})
    if tail is not None:
        check_tail(call, *tail)
    chosen = blocks.shape[1]
    plan = plan_of(backend().name, call, seen=chosen * ratio, PAGE=ratio, CHOSEN=True)
    return launch_attention(
        plan, (q, q, k, k, v), scale=scale, length=length,
        start=start, number=chosen, tail=tail, table=blocks, gate=gate,
    )  # fmt: skip


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    """Arguments for n sequences that see a quarter of their blocks."""
    ratio, length, tail = 4, s.keys + 3, (x(n, s.Hkv, s.tail, s.Dh), x(n, s.Hkv, s.tail, s.Dh))
    chosen = mx.arange(0, s.keys // ratio, 4)
    blocks = mx.concatenate([chosen, mx.array([length // ratio])]).astype(mx.int32)
    k, v = (x(n, s.Hkv, s.keys + s.step, s.Dh) for _ in range(2))
    options = {"ratio": ratio, "scale": s.Dh**-0.5, "tail": tail}
    options["length"] = mx.array([length], dtype=mx.int32)
    return (x(n, s.Hq, 1, s.Dh), k, v, mx.tile(blocks, (n, 1))), options


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    tail = (x(2, s.Hkv, s.tail, s.Dh), x(2, s.Hkv, s.tail, s.Dhv))
    blocks = mx.array([[0, 2, 5, 8, 9], [1, 3, 4, 10, 11]], dtype=mx.int32)
    length, start = (mx.array(value, dtype=mx.int32) for value in ([36], [7, 3]))
    options = {"ratio": 3, "scale": s.Dh**-0.5, "length": length, "start": start, "tail": tail}
    k, v = x(2, s.Hkv, 48, s.Dh), x(2, s.Hkv, 48, s.Dhv)
    return (x(2, s.Hq, 1, s.Dh), k, v, blocks), options | {"gate": x(2, 1, s.Hq, 2 * s.Dhv)}


CHOSEN_SDPA = Operation(
    name="chosen_sdpa",
    reference=chosen_sdpa,
    others={"fused": Implementation(chosen_sdpa_fused, kernels=SHARED)},
    size=slice(0, 1),
    replaces=("sdpa",),
    proof=Proof(example=_example, workloads={"": _workload}),
)
