"""Causal attention over a cache, and the per-head norm and rotary embedding before it.

Shapes:
    q: ``[B, Hq, T, Dh]``; k, v: ``[B, Hkv, S, Dh]``, S >= T; query t sees keys up to S - T + t.
    mask: None (every query sees every key), "causal", or bool ``[B or 1, 1, T, S]``.
    returns: ``[B, Hq, T, Dv]`` in the dtype of q. Query head h reads KV head h // (Hq / Hkv).
"""

from __future__ import annotations

import mlx.core as mx


def causal_sdpa(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str | None
) -> mx.array:
    """softmax(q k^T scale) v, softmax in float32 (stock MLX)."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def norm_rope(
    x: mx.array,
    weight: mx.array | None,
    *,
    eps: float,
    dims: int,
    base: float,
    offset: int | mx.array,
    traditional: bool = False,
) -> mx.array:
    """RMS norm of each head, then rotary embedding of its first `dims` values.

    Shapes:
        x: ``[B, T, H, Dh]``; weight: ``[Dh]`` or None (no norm); offset: the position of the
        first token, an int or ``[B]`` int32.
        returns: ``[B, H, T, Dh]`` in the dtype of x.

    Pairs (i, i + dims / 2) turn by position * base^(-2 i / dims); with `traditional` pairs
    (2 i, 2 i + 1).
    """
    if weight is not None:
        x = mx.fast.rms_norm(x, weight, eps)
    return mx.fast.rope(
        x.swapaxes(1, 2), dims, traditional=traditional, base=base, scale=1.0, offset=offset
    )
