"""Latent attention of a few tokens, each to chosen positions.

    what latent_attention gives for the latents of the columns that a token sees

Shapes:
    q_latent: ``[B, H, T, R]``; q_rotary: ``[B, H, T, Dr]``; latents: ``[B, 1, capacity, R]``;
    rotary_keys: ``[B, 1, capacity, Dr]``; length, start, tail, values: see
    :mod:`mlx_moeflux.kernels.mla.latent_attention`; the T tokens are the last of `length` columns.
    positions: int32 ``[B, T, k]``, as :mod:`~mlx_moeflux.kernels.mla.choose_positions` gives them:
    of a token with n columns up to its own the first min(k, n) count.
    returns: ``[B, H, T, R]``, with `values` ``[B, H, T, Dv]``, in the dtype of q_latent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.plan import JOIN, AttentionCall, check_dtypes, join_options
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.mla import latent_token, latent_values
from mlx_moeflux.kernels.mla.head_product import (
    HEAD_PRODUCT,
    HeadMatrices,
    head_product,
    head_product_fused,
)
from mlx_moeflux.kernels.mla.latent_attention import latent_attention
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import filled, ranges
from mlx_moeflux.kernels.runtime.launcher import backend


class References:
    """The steps in plain MLX."""

    latent_attention = staticmethod(latent_attention)
    head_product = staticmethod(head_product)


def chosen_latent_attention(
    q_latent: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    positions: mx.array,
    *,
    length: int | mx.array,
    scale: float,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    values: HeadMatrices | None = None,
    steps: Any = References,
) -> mx.array:
    """The module's formula in stock MLX: `steps` computes attention over copies of the columns."""
    (B, H, T, _), k = q_latent.shape, positions.shape[2]
    past, first = mx.array(length).reshape(-1, 1), 0 if start is None else start[:, None]
    count = mx.clip(past - T + 1 + mx.arange(T) - first, 1, k)
    count = mx.broadcast_to(count, (B, T)).reshape(-1).astype(mx.int32)
    columns = positions.reshape(B, 1, T * k, 1)
    rows = [mx.take_along_axis(x, columns, axis=2) for x in (latents, rotary_keys)]
    if tail is not None:
        R = tail[0].shape[2]
        row = columns - ((past - 1) // R * R)[..., None, None]
        newest, row = row >= 0, mx.clip(row, 0, R - 1)
        rows = [
            mx.where(newest, mx.take_along_axis(end, row, axis=2), x)
            for end, x in zip(tail, rows, strict=True)
        ]
    # Each token as a sequence.
    queries = (q.swapaxes(1, 2).reshape(B * T, H, 1, -1) for q in (q_latent, q_rotary))
    keys = (x.reshape(B * T, 1, k, -1) for x in rows)
    y = steps.latent_attention(*queries, *keys, length=count, scale=scale, mask=None)
    y = y if values is None else steps.head_product(y, values)
    return y.reshape(B, T, H, -1).swapaxes(1, 2)


def chosen_latent_attention_fused(
    q_latent,
    q_rotary,
    latents,
    rotary_keys,
    positions,
    *,
    length,
    scale,
    start=None,
    tail=None,
    values=None,
    steps=References,
) -> mx.array:
    """:func:`chosen_latent_attention`, which reads the columns where they are; nothing is copied.
    How a token's sums are made depends on the number of its positions alone. `steps` plays no part.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, there is no multiple of 16 heads, or a
            tile of R and Dr does not fit into threadgroup memory.
        UnsupportedError: MLX drives no GPU.
    """
    (B, H, T, R), S, Dr = q_latent.shape, latents.shape[2], rotary_keys.shape[3]
    rows = 0 if tail is None else tail[0].shape[2]
    others = {"q_rotary": q_rotary, "latents": latents, "rotary_keys": rotary_keys}
    others |= {} if tail is None else {"tail of latents": tail[0], "tail of rotary_keys": tail[1]}
    check_dtypes("chosen_latent_attention", q_latent.dtype, others)
    good = q_rotary.shape == (B, H, T, Dr) and latents.shape == (B, 1, S, R)
    good = good and rotary_keys.shape == (B, 1, S, Dr)
    if tail is not None:
        ends = [(B, 1, rows, R), (B, 1, rows, Dr)]
        good = good and rows > 0 and S % rows == 0 and [end.shape for end in tail] == ends
    good = good and positions.dtype == mx.int32 and positions.shape == (B, T, positions.shape[-1])
    launch = good and latent_token.launch_of(
        *latent_token.memory_and_more(backend().name), q_latent.shape, latents.shape, Dr, rows,
        q_latent.dtype, positions.shape[2],
    )  # fmt: skip
    if not launch:
        raise ShapeError(
            f"chosen_latent_attention: {positions.dtype} positions {list(positions.shape)} and "
            f"{q_latent.dtype} q_latent {list(q_latent.shape)}, q_rotary {list(q_rotary.shape)}, "
            f"latents {list(latents.shape)} and rotary_keys {list(rotary_keys.shape)}."
        )
    queries = [q if T == 1 else q.swapaxes(1, 2) for q in (q_latent, q_rotary)]
    arrays = *queries, latents, rotary_keys, *(tail or (latents, rotary_keys)), positions
    bounds = ranges(B, S, length, start)
    partial, stats = latent_token.CHOSEN(*arrays, bounds, filled(scale), **launch)
    if values is not None and latent_values.takes_values(values, R):
        y = latent_values.attend_values(partial, stats, values, q_latent.dtype)
    else:
        shapes = (B * T, H, 1, R), latents.shape, latents.shape
        call = AttentionCall("chosen_latent_attention", *shapes, q_latent.dtype, False)
        (y,) = JOIN(partial, stats, partial, partial, **join_options(call, H, 0))
        y = y.swapaxes(1, 2)
        y = y if values is None else head_product_fused(y, values)
    return y if T == 1 else y.reshape(B, T, H, -1).swapaxes(1, 2)


def _arguments(
    s: Sizes, x: Normal, B: int, n: int, S: int, length: int, chosen: int
) -> tuple[mx.array, ...]:
    """Arrays of n tokens of `chosen` positions each, which lie apart."""
    positions = mx.linspace(0, length - n, chosen).astype(mx.int32)
    positions = mx.broadcast_to(positions, (B, n, chosen))
    heads = -(-s.heads // 16) * 16
    queries = x(B, heads, n, s.latent), x(B, heads, n, s.Dr)
    return *queries, x(B, 1, S, s.latent), x(B, 1, S, s.Dr), positions


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    S, length = s.keys + s.step, s.keys + n
    options = {"length": length, "scale": (s.Dn + s.Dr) ** -0.5}
    return _arguments(s, x, 1, n, S, length, s.keys // 4), options


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    """Tokens of two sequences, whose newest columns are in the tail; the second has fewer than are
    chosen. A tile of these latents fits into the least threadgroup memory."""
    s = replace(s, latent=32)
    options = {"length": mx.array([90], mx.int32), "scale": (s.Dn + s.Dr) ** -0.5}
    options |= {"start": mx.array([0, 70], mx.int32)}
    options |= {"tail": (x(2, 1, s.tail, s.latent), x(2, 1, s.tail, s.Dr))}
    return _arguments(s, x, 2, n, 96, 90, 33), options


CHOSEN_LATENT_ATTENTION = Operation(
    name="chosen_latent_attention",
    reference=chosen_latent_attention,
    others={
        "fused": Implementation(
            chosen_latent_attention_fused,
            kernels=(
                latent_token.CHOSEN,
                JOIN,
                latent_values.KERNEL,
                *HEAD_PRODUCT.others["fused"].kernels,
            ),
        )
    },
    size=slice(2, 3),
    replaces=("latent_attention", "head_product"),
    proof=Proof(example=_example, example_tokens=3, workloads={"": _workload}),
)
