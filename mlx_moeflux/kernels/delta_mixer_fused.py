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
import struct
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.gated_delta_fused import gated_delta_fused
from mlx_moeflux.kernels.metal import LEAST_INPUT, MetalKernel, launches

# Tokens up to which everything is one launch: on the GPU as fast as four, on the host faster.
STEP_UP_TO = 8

# Tokens that a simdgroup convolves: they share the rows that they read.
_RUN = 8

# Registers of a thread of a decode step beside its share of the state, and those that 512 threads
# of CUDA or 384 of Metal may have.
_STEP_REGISTERS, _REGISTERS_OF_512 = 85, 128

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)

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

_STEP = MetalKernel(
    "delta_step",
    file="delta_mixer.metal",
    inputs=(
        "qkv", "conv", "weight", "z", "a", "b", "a_log", "dt_bias", "state", "norm", "mask",
        "lengths",
    ),
    outputs=("y", "new_conv", "new_state"),
    body="""
        threadgroup float token[(2 * Dk + Dv) / 32 * 33 + 2];
        threadgroup float scratch[Simdgroups];
        delta_step<T, Hk, Hv, Dk, Dv, W, Simdgroups, Masked, Ragged>(
            qkv, conv, weight, z, a, b, a_log, dt_bias, state, norm, mask, lengths, y, new_conv,
            new_state, as_type<float>(Epsilon), qkv_shape[1], token, scratch,
            threadgroup_position_in_grid.x, thread_index_in_threadgroup);
    """,
)  # fmt: skip


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
        _signature(qkv, a, b, conv_weight, conv_state, a_log, dt_bias, mask, lengths),
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
            _none() if lengths is None else lengths,
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
    if x.dtype not in _FLOATS or z.dtype not in _FLOATS:
        raise ShapeError(f"gated norm: x is {x.dtype}, z {z.dtype}; expected floats.")
    rows = z.size // D
    together = next(n for n in (8, 4, 2, 1) if rows % n == 0)
    return _GATED_NORM(
        x,
        z,
        weight,
        template={"T": z.dtype, "D": D, "P": _pack(D), "Epsilon": _bits(eps)},
        grid=(32, rows, 1),
        threadgroup=(32, together, 1),
        output_shapes=[z.shape],
        output_dtypes=[z.dtype],
    )[0]


def delta_step(
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
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
    threads: int | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The whole mixer in one launch, token by token: for decode.

    A threadgroup of at most `threads` takes a value head, so that the gated norm needs no second
    launch.
    """
    launch = _step_launch(
        _signature(qkv, a, b, conv_weight, conv_state, a_log, dt_bias, mask, lengths),
        (z.shape, state.shape, norm_weight.shape),
        (z.dtype, state.dtype),
        eps,
        threads,
        metal.backend().name,
    )
    y, new_conv, new_state = _STEP(
        qkv,
        conv_state.astype(qkv.dtype),
        conv_weight,
        z,
        a,
        b,
        a_log,
        dt_bias,
        state,
        norm_weight,
        qkv if mask is None else mask,
        _none() if lengths is None else lengths,
        **launch,
    )
    return y, new_conv, new_state


@launches(_STEP, _PREPARE, _GATED_NORM, *gated_delta_fused.kernels)
def delta_mixer_fused(
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
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
    B, T, D = qkv.shape
    if T <= STEP_UP_TO:
        return delta_step(qkv, z, a, b, state=state, norm_weight=norm_weight, eps=eps, **around)
    Hv, Dv, Dk = state.shape[1:]
    q, k, v, log_decay, beta, new_conv = delta_prepare(
        qkv, a, b, key_heads=(D - Hv * Dv) // (2 * Dk), key_dim=Dk, **around
    )
    y, new_state = gated_delta_fused(q, k, v, log_decay=log_decay, beta=beta, state=state)
    y = gated_rms_norm_fused(y, z.reshape(B, T, Hv, Dv), norm_weight, eps=eps)
    return y.reshape(B, T, Hv * Dv), new_conv, new_state


class _Shapes(NamedTuple):
    """B sequences of T tokens, heads and widths, and the width of the convolution."""

    B: int
    T: int
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    W: int


def _signature(qkv, a, b, weight, conv, a_log, dt_bias, mask, lengths):
    """What a launch depends on."""
    return (
        (qkv.shape, a.shape, b.shape, weight.shape, conv.shape, a_log.shape, dt_bias.shape),
        (qkv.dtype, a.dtype, b.dtype, a_log.dtype, dt_bias.dtype),
        None if mask is None else (mask.shape, mask.dtype),
        None if lengths is None else (lengths.shape, lengths.dtype),
    )


@functools.lru_cache(maxsize=1024)
def _prepare_launch(signature, Hk: int, Dk: int) -> dict[str, Any]:
    (B, T, D), Hv, W = signature[0][0], signature[0][1][-1], signature[0][3][-1]
    s = _Shapes(B, T, Hk, Hv, Dk, (D - 2 * Hk * Dk) // Hv, W)
    _check(s, *signature)
    units, runs = -(-(2 * Hk + Hv + 1) // 4) * 4, -(-T // _RUN) + 1
    keys, gates, dtype = (B, T, Hk, Dk), (B, T, Hv), signature[1][0]
    return {
        "template": {
            **_template(s, signature),
            "Pk": _pack(Dk),
            "Pv": _pack(s.Dv),
            "Run": _RUN,
        },
        "grid": (32, units, B * runs),
        "threadgroup": (32, 4, 1),
        "output_shapes": [keys, keys, (B, T, Hv, s.Dv), gates, gates, (B, W - 1, D)],
        "output_dtypes": [dtype] * 3 + [mx.float32] * 2 + [dtype],
    }


@functools.lru_cache(maxsize=1024)
def _step_launch(signature, shapes, dtypes, eps, threads, backend) -> dict[str, Any]:
    (B, T, D), W, dtype = signature[0][0], signature[0][3][-1], signature[1][0]
    if len(shapes[1]) != 4:
        raise ShapeError(f"delta mixer: state is {list(shapes[1])}, expected four axes.")
    Hv, Dv, Dk = shapes[1][1:]
    s = _Shapes(B, T, (D - Hv * Dv) // (2 * Dk), Hv, Dk, Dv, W)
    _check(s, *signature)
    wanted = ((B, T, Hv * Dv), (B, Hv, Dv, Dk), (Dv,))
    if shapes != wanted or dtypes != (dtype, mx.float32):
        raise ShapeError(
            f"delta mixer: z, state, norm are {[list(shape) for shape in shapes]}, z and state "
            f"{[str(d) for d in dtypes]}; expected {[list(shape) for shape in wanted]}, {dtype} "
            "and float32."
        )
    simdgroups = _simdgroups(Dv, threads or _step_threads(Dk, Dv, backend))
    return {
        "template": {**_template(s, signature), "Simdgroups": simdgroups, "Epsilon": _bits(eps)},
        "grid": (32 * simdgroups * B * Hv, 1, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [wanted[0], (B, W - 1, D), wanted[1]],
        "output_dtypes": [dtype, dtype, mx.float32],
    }


def _template(s: _Shapes, signature) -> dict[str, Any]:
    return {
        "T": signature[1][0],
        "Hk": s.Hk,
        "Hv": s.Hv,
        "Dk": s.Dk,
        "Dv": s.Dv,
        "W": s.W,
        "Masked": signature[2] is not None,
        "Ragged": signature[3] is not None,
    }


def _pack(width: int) -> int:
    """Neighbours that a lane takes at once of rows of `width`: as many as divide its share."""
    return math.gcd(width // 32, 4)


def _simdgroups(Dv: int, threads: int) -> int:
    """Of four rows of the state at a time: as many as fit and leave equal shares."""
    return max(n for n in range(1, threads // 32 + 1) if Dv // 4 % n == 0)


def _step_threads(Dk: int, Dv: int, backend: str) -> int:
    """As many as registers allow: 256 always fit."""
    state = Dk // 8 * (Dv // 4) // _simdgroups(Dv, 512)
    fits = backend != "metal" and state + _STEP_REGISTERS <= _REGISTERS_OF_512
    return 512 if fits else 256


def _bits(x: float) -> int:
    """Of a float32: templates take no floats."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


@functools.cache
def _none() -> mx.array:
    """Stands in for lengths that nobody reads."""
    array = mx.zeros((LEAST_INPUT,), mx.int32)
    mx.eval(array)
    return array


def _check(s: _Shapes, found, dtypes, mask, lengths) -> None:
    if min(s.B, s.T, s.Hk, s.W - 1) < 1 or s.Hv % s.Hk or s.Dk % 32 or s.Dv % 32:
        raise ShapeError(
            f"delta mixer: {s}: widths must be multiples of 32 and Hv a multiple of Hk; take the "
            "reference."
        )
    D, gates = 2 * s.Hk * s.Dk + s.Hv * s.Dv, (s.B, s.T, s.Hv)
    wanted = ((s.B, s.T, D), gates, gates, (D, s.W), (s.B, s.W - 1, D), (s.Hv,), (s.Hv,))
    names = ("qkv", "a", "b", "conv_weight", "conv_state", "a_log", "dt_bias")
    for name, shape, want in zip(names, found, wanted, strict=True):
        if shape != want:
            raise ShapeError(f"delta mixer: {name} is {list(shape)}, expected {list(want)}.")
    if dtypes[0] not in _FLOATS or len(set(dtypes[:3])) > 1 or dtypes[3] != dtypes[4]:
        raise ShapeError(
            f"delta mixer: qkv, a, b, a_log and dt_bias are {[str(d) for d in dtypes]}; the first "
            "three must share float32, float16 or bfloat16, the others one dtype."
        )
    if mask not in (None, ((s.B, s.T), mx.bool_)):
        raise ShapeError(f"delta mixer: mask is {mask}, expected bool {[s.B, s.T]}.")
    if lengths not in (None, ((s.B,), mx.int32)):
        raise ShapeError(f"delta mixer: lengths is {lengths}, expected int32 {[s.B]}.")
