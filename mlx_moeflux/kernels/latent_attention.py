"""Latent attention with absorbed projections: every head reads the same latents.

    y = softmax((q_latent latents^T + q_rotary rotary_keys^T) scale) latents

Shapes:
    q_latent: ``[B, H, T, R]`` (queries through the key half of kv_b_proj); q_rotary:
    ``[B, H, T, P]``; latents: ``[B, 1, S, R]``; rotary_keys: ``[B, 1, S, P]``.
    mask, length, start: as in :mod:`mlx_moeflux.kernels.attention`.
    returns: ``[B, H, T, R]``; the value half of kv_b_proj comes after.

The fused form never holds ``[H, T, S]`` scores: a threadgroup owns 32 rows (heads x tokens) and
a part of the keys.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention import LATENT, Call, causal_sdpa, check_dtypes, run
from mlx_moeflux.kernels.metal import launches


def latent_attention(
    q_latent: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    length: int | mx.array | None = None,
    start: mx.array | None = None,
) -> mx.array:
    """Stock MLX: attention over latents and rotary keys side by side (scores may be held)."""
    return causal_sdpa(
        mx.concatenate([q_latent, q_rotary], axis=-1),
        mx.concatenate([latents, rotary_keys], axis=-1),
        latents,
        scale=scale,
        mask=mask,
        length=length,
        start=start,
    )


@launches(*LATENT)
def latent_attention_fused(
    q_latent: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    length: int | mx.array | None = None,
    start: mx.array | None = None,
) -> mx.array:
    """:func:`latent_attention` in one launch and, over parts of the keys, one that joins them. A
    mask that is an array goes to the reference.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, R is no multiple of 64 or P of 16, or
            they are too large for threadgroup memory (R 512 in float32 on Metal).
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return latent_attention(
            q_latent, q_rotary, latents, rotary_keys,
            scale=scale, mask=mask, length=length, start=start,
        )  # fmt: skip
    R, P = latents.shape[-1], rotary_keys.shape[-1]
    if q_rotary.shape != (*q_latent.shape[:3], P) or (*latents.shape[:3], P) != rotary_keys.shape:
        raise ShapeError(
            f"latent_attention: q_rotary {q_rotary.shape} and rotary_keys {rotary_keys.shape} do "
            f"not fit q_latent {q_latent.shape} and latents {latents.shape}."
        )
    if latents.shape[1] != 1 or R % 64:
        raise ShapeError(
            f"latent_attention: latents {latents.shape} must be [B, 1, S, R], R a multiple of 64."
        )
    others = {"q_rotary": q_rotary, "latents": latents, "rotary_keys": rotary_keys}
    check_dtypes("latent_attention", q_latent.dtype, others)
    call = Call(
        "latent_attention", q_latent.shape, latents.shape, latents.shape, None, q_latent.dtype,
        mask is not None, P,
    )  # fmt: skip
    tensors = (q_latent, q_rotary, latents, rotary_keys)
    return run(call, tensors, None, scale=scale, length=length, start=start)
