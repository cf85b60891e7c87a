"""Routed experts, the shared expert and the residual become the layer's output.

    y = residual + experts + sigmoid(score) shared

Shapes:
    residual, shared: ``[N, C]``; experts: ``[N, C]`` float32; score: ``[N, 1]`` or None (shared
    is added as it is). returns: ``[N, C]`` in the dtype of residual; one rounding, at the end.
"""

from __future__ import annotations

import mlx.core as mx


def moe_combine(
    residual: mx.array,
    experts: mx.array,
    *,
    shared: mx.array | None = None,
    score: mx.array | None = None,
) -> mx.array:
    """The module's formula in float32."""
    total = residual.astype(mx.float32) + experts
    if shared is not None:
        shared = shared.astype(mx.float32)
        total = total + (shared if score is None else mx.sigmoid(score.astype(mx.float32)) * shared)
    return total.astype(residual.dtype)
