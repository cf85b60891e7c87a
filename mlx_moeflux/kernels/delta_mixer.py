"""A gated delta net between its projections: convolution, norms, gates, delta rule, gated norm.

    q, k, v <- silu(conv(qkv));   q, k normalised;   g, beta <- gates(a, b)
    y, S <- delta rule(q, k, v, g, beta, S);   y <- rms_norm(y) w silu(z)

Shapes:
    qkv: ``[B, T, D]`` with D = 2 Hk Dk + Hv Dv, channels in the order q, k, v.
    z: ``[B, T, Hv Dv]``; a, b: ``[B, T, Hv]``; where all three are None, they follow in the rows of
    qkv.
    conv_weight: ``[D, W]``; conv_state: ``[B, W - 1, D]``; state: ``[B, Hv, Dv, Dk]`` float32.
    a_log, dt_bias: ``[Hv]``; norm_weight: ``[Dv]``.
    mask: ``[B, T]`` bool or None; a token at False counts as zeros in the convolution and leaves
    the state as it was. lengths: ``[B]`` int32 or None; the new window ends after so many tokens.
    returns: y ``[B, T, Hv Dv]``, the new conv state and the new state.

The parts are defined in causal_conv.py, delta_gates.py and gated_delta.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from mlx_moeflux.kernels import causal_conv, delta_gates, gated_delta


class DeltaSteps(Protocol):
    """The operations that a mixer is composed of."""

    causal_conv: Callable[..., Any]
    normalise_qk: Callable[..., Any]
    decay_beta: Callable[..., Any]
    gated_delta: Callable[..., Any]
    gated_rms_norm: Callable[..., Any]


class References:
    """The steps in plain MLX."""

    causal_conv = staticmethod(causal_conv.causal_conv_silu)
    normalise_qk = staticmethod(delta_gates.normalise_qk)
    decay_beta = staticmethod(delta_gates.decay_beta)
    gated_delta = staticmethod(gated_delta.gated_delta)
    gated_rms_norm = staticmethod(delta_gates.gated_rms_norm)


def split_rows(rows: mx.array, Hv: int, Dv: int) -> list[mx.array]:
    """``[B, T, D + Hv Dv + 2 Hv]`` -> qkv, z, a, b."""
    ends = (2 * Hv + Hv * Dv, 2 * Hv, Hv)
    return mx.split(rows, [rows.shape[-1] - end for end in ends], axis=-1)


def delta_mixer(
    qkv: mx.array,
    z: mx.array | None,
    a: mx.array | None,
    b: mx.array | None,
    *,
    conv_weight: mx.array,
    conv_state: mx.array,
    state: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    eps: float,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    steps: type[DeltaSteps] | DeltaSteps = References,
) -> tuple[mx.array, mx.array, mx.array]:
    """Operation by operation, each as `steps` computes it."""
    Hv, Dv, Dk = state.shape[1:]
    if z is None:
        qkv, z, a, b = split_rows(qkv, Hv, Dv)
    B, T, D = qkv.shape
    keys = (D - Hv * Dv) // 2
    if mask is not None:
        qkv = mx.where(mask[..., None], qkv, 0.0)
    y, new_conv = steps.causal_conv(qkv, conv_weight, conv_state, lengths=lengths)
    q, k, v = mx.split(y, [keys, 2 * keys], axis=-1)
    q, k = steps.normalise_qk(q.reshape(B, T, -1, Dk), k.reshape(B, T, -1, Dk))
    log_decay, beta = steps.decay_beta(a, b, a_log=a_log, dt_bias=dt_bias)
    y, new_state = steps.gated_delta(
        q,
        k,
        v.reshape(B, T, Hv, Dv),
        log_decay=log_decay,
        beta=beta,
        state=state,
        mask=mask,
    )
    y = steps.gated_rms_norm(y, z.reshape(B, T, Hv, Dv), norm_weight, eps=eps)
    return y.reshape(B, T, Hv * Dv), new_conv, new_state
