"""Causal depthwise convolution over time with carried state, then SiLU.

    y[t, c] = silu(sum_j w[c, j] x[t - (W - 1) + j, c])

Shapes:
    x: ``[B, T, D]``; weight: ``[D, W]``; state: ``[B, W - 1, D]``, the last W - 1 inputs before
    x, oldest first, raw (before SiLU).
    lengths: ``[B]`` int32 or None; how many of the T tokens are real where rows are padded on
    the right. The new state ends at the last real token.
    returns: y ``[B, T, D]`` and the new state, both in the dtype of x.

Accumulates in float32. Source: reference formula of Qwen3-Next's short convolution.
"""

from __future__ import annotations

import mlx.core as mx


def causal_conv_silu(
    x: mx.array, weight: mx.array, state: mx.array, *, lengths: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The module's formula as W shifted multiply-adds."""
    T, W = x.shape[1], weight.shape[1]
    window = mx.concatenate([state.astype(x.dtype), x], axis=1)  # [B, W - 1 + T, D]
    taps = weight.astype(mx.float32)
    total = sum(window[:, j : j + T].astype(mx.float32) * taps[:, j] for j in range(W))
    y = (total * mx.sigmoid(total)).astype(x.dtype)
    if lengths is None:
        # A copy: a slice would keep the whole window's buffer alive.
        return y, mx.contiguous(window[:, T:])
    ends = mx.clip(lengths, 0, T)[:, None] + mx.arange(W - 1)[None]  # [B, W - 1]
    return y, mx.take_along_axis(window, ends[..., None], axis=1)
