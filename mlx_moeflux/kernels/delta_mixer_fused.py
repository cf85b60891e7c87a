"""A gated delta net between its projections as kernels: one launch for decode, four for prefill.

Formulas and shapes are in :mod:`mlx_moeflux.kernels.delta_mixer`. Everything is computed in
float32 and rounded where it is written; activations are float32, float16 or bfloat16, all alike.

H100, Hk 16, Hv 32, D 128, bfloat16, microseconds (launches included; host: until the launch is in
MLX's graph)::

                           one launch        four launches
    T                   1     2     4     8     8    64  1024
    GPU, B 1          9.7  12.6  18.3  29.1  26.6  35.1   164
    host             10.7  10.7  10.6  10.6  26.5  34.7  37.6
    operations of MLX, T = 1: 45.6, host 95.9; one launch, T = 1, B = 8: 21.3
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.delta_mixer import split_rows
from mlx_moeflux.kernels.delta_step import (
    FLOATS,
    STEP,
    STEP_OF_ROWS,
    Shapes,
    check,
    delta_step,
    delta_step_of_rows,
    no_lengths,
    signature_of,
    template_of,
)
from mlx_moeflux.kernels.gated_delta_fused import gated_delta_fused
from mlx_moeflux.kernels.metal import MetalKernel, float_bits, launches

# Tokens up to which everything is one launch: on the GPU as fast as four, on the host faster.
STEP_UP_TO = 8

# Tokens that a simdgroup convolves: they share the rows that they read.
_RUN = 8


_PREPARE = MetalKernel(
    "delta_prepare",
    file="delta_mixer.metal",
    inputs=("qkv", "conv", "weight", "a", "b", "a_log", "dt_bias", "mask", "lengths"),
    outputs=("q", "k", "v", "log_decay", "beta", "new_conv"),
    body="""
        delta_prepare<T, Hk, Hv, Dk, Dv, W, Pk, Pv, Run, Masked, Ragged>(
            qkv, conv, weight, a, b, a_log, dt_bias, mask, lengths, q, k, v, log_decay, beta,
            new_conv, qkv_shape[1], thread_position_in_grid, thread_index_in_simdgroup);
    """,
)

_GATED_NORM = MetalKernel(
    "gated_rms_norm",
    file="delta_mixer.metal",
    inputs=("x", "z", "weight"),
    outputs=("y",),
    body="""
        gated_rms_norm<T, D, P>(
            x, z, weight, y, as_type<float>(Epsilon), thread_position_in_grid.y,
            thread_index_in_simdgroup);
    """,
)


def delta_prepare(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    conv_weight: mx.array,
    conv_state: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    key_heads: int,
    key_dim: int,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, ...]:
    """What precedes the delta rule, in one launch.

    Returns:
        q, k ``[B, T, Hk, Dk]`` normalised and q scaled, v ``[B, T, Hv, Dv]``, log decay and beta
        ``[B, T, Hv]`` float32 (both 0 where masked, so that the rule needs no mask), and the new
        conv state.
    """
    launch = _prepare_launch(
        signature_of(qkv, a, b, conv_weight, conv_state, a_log, dt_bias, mask, lengths),
        key_heads,
        key_dim,
    )
    return tuple(
        _PREPARE(
            qkv,
            conv_state.astype(qkv.dtype),
            conv_weight,
            a,
            b,
            a_log,
            dt_bias,
            qkv if mask is None else mask,
            no_lengths() if lengths is None else lengths,
            **launch,
        )
    )


@launches(_GATED_NORM)
def gated_rms_norm_fused(x: mx.array, z: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    """x, z ``[..., Dv]``, weight ``[Dv]`` -> ``rms_norm(x) weight silu(z)`` in z's dtype.

    Raises:
        ShapeError: Shapes differ, Dv is no multiple of 32, or a dtype is no float of 16 or 32 bits.
    """
    D = z.shape[-1]
    if x.shape != z.shape or weight.shape != (D,) or D % 32 or not z.size:
        raise ShapeError(
            f"gated norm: x {list(x.shape)}, z {list(z.shape)}, weight {list(weight.shape)}; "
            "expected x like z and rows of a multiple of 32."
        )
    if x.dtype not in FLOATS or z.dtype not in FLOATS:
        raise ShapeError(f"gated norm: x is {x.dtype}, z {z.dtype}; expected floats.")
    rows = z.size // D
    together = next(n for n in (8, 4, 2, 1) if rows % n == 0)
    return _GATED_NORM(
        x,
        z,
        weight,
        template={"T": z.dtype, "D": D, "P": _pack(D), "Epsilon": float_bits(eps)},
        grid=(32, rows, 1),
        threadgroup=(32, together, 1),
        output_shapes=[z.shape],
        output_dtypes=[z.dtype],
    )[0]


@launches(STEP, STEP_OF_ROWS, _PREPARE, _GATED_NORM, *gated_delta_fused.kernels)
def delta_mixer_fused(
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
    steps: Any = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """One launch for up to ``STEP_UP_TO`` tokens; else prepare, delta rule, gated norm.

    `steps` is for the composed form and plays no part here.

    Raises:
        ShapeError: Key or value width is no multiple of 32, or shapes or dtypes do not fit.
    """
    around = {
        "conv_weight": conv_weight,
        "conv_state": conv_state,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "mask": mask,
        "lengths": lengths,
    }
    T, (Hv, Dv, Dk) = qkv.shape[1], state.shape[1:]
    if z is None:
        if T <= STEP_UP_TO and mask is None and lengths is None:
            del around["mask"], around["lengths"]
            return delta_step_of_rows(qkv, state=state, norm_weight=norm_weight, eps=eps, **around)
        qkv, z, a, b = split_rows(qkv, Hv, Dv)
    B, T, D = qkv.shape
    if T <= STEP_UP_TO:
        return delta_step(qkv, z, a, b, state=state, norm_weight=norm_weight, eps=eps, **around)
    q, k, v, log_decay, beta, new_conv = delta_prepare(
        qkv, a, b, key_heads=(D - Hv * Dv) // (2 * Dk), key_dim=Dk, **around
    )
    y, new_state = gated_delta_fused(q, k, v, log_decay=log_decay, beta=beta, state=state)
    y = gated_rms_norm_fused(y, z.reshape(B, T, Hv, Dv), norm_weight, eps=eps)
    return y.reshape(B, T, Hv * Dv), new_conv, new_state


@functools.lru_cache(maxsize=1024)
def _prepare_launch(signature, Hk: int, Dk: int) -> dict[str, Any]:
    (B, T, D), Hv, W = signature[0][0], signature[0][1][-1], signature[0][3][-1]
    s = Shapes(B, T, Hk, Hv, Dk, (D - 2 * Hk * Dk) // Hv, W)
    check(s, *signature)
    units, runs = -(-(2 * Hk + Hv + 1) // 4) * 4, -(-T // _RUN) + 1
    keys, gates, dtype = (B, T, Hk, Dk), (B, T, Hv), signature[1][0]
    return {
        "template": {
            **template_of(s, signature),
            "Pk": _pack(Dk),
            "Pv": _pack(s.Dv),
            "Run": _RUN,
        },
        "grid": (32, units, B * runs),
        "threadgroup": (32, 4, 1),
        "output_shapes": [keys, keys, (B, T, Hv, s.Dv), gates, gates, (B, W - 1, D)],
        "output_dtypes": [dtype] * 3 + [mx.float32] * 2 + [dtype],
    }


def _pack(width: int) -> int:
    """Neighbours that a lane takes at once of rows of `width`: as many as divide its share."""
    return math.gcd(width // 32, 4)
