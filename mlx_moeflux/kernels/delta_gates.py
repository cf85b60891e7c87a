"""What surrounds the delta rule: key and query normalisation, decay, write strength, gated norm.

    q <- q / sqrt(sum q^2 + 1e-6) * Dk^-1/2;   k <- k / sqrt(sum k^2 + 1e-6)
    g  = -exp(A_log) softplus(a + dt_bias);    beta = sigmoid(b)
    y  = rms_norm(x) w silu(z)

The epsilon is added to the sum of squares, as in transformers 5 (`l2norm`), not to the mean.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

L2_EPSILON = 1e-6


def l2_normalise(x: mx.array) -> mx.array:
    """``[..., D]`` to unit length over D, in float32, returned in the dtype of x."""
    f = x.astype(mx.float32)
    return (f * mx.rsqrt((f * f).sum(axis=-1, keepdims=True) + L2_EPSILON)).astype(x.dtype)


def normalise_qk(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """q, k ``[B, T, Hk, Dk]``: both to unit length, q also scaled by Dk^-1/2."""
    return l2_normalise(q) * (q.shape[-1] ** -0.5), l2_normalise(k)


def decay_beta(
    a: mx.array, b: mx.array, *, a_log: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """a, b ``[B, T, Hv]``; a_log, dt_bias ``[Hv]`` -> log decay (<= 0) and beta, float32."""
    step = nn.softplus(a.astype(mx.float32) + dt_bias.astype(mx.float32))
    log_decay = -mx.exp(a_log.astype(mx.float32)) * step
    return log_decay, mx.sigmoid(b.astype(mx.float32))


def gated_rms_norm(x: mx.array, z: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    """x, z ``[..., Dv]``, weight ``[Dv]`` -> ``rms_norm(x) * weight * silu(z)`` in z's dtype."""
    f, gate = x.astype(mx.float32), z.astype(mx.float32)
    normed = f * mx.rsqrt((f * f).mean(axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(mx.float32) * nn.silu(gate)).astype(z.dtype)
