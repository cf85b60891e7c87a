"""A gated delta net between its projections in one launch, token by token: for decode.

Formulas and shapes are in :mod:`mlx_moeflux.kernels.delta_mixer`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.metal import LEAST_INPUT, MetalKernel, float_bits

# Registers of a thread of a decode step beside its share of the state, and those that 512 threads
# of CUDA or 384 of Metal may have.
_STEP_REGISTERS, _REGISTERS_OF_512 = 85, 128

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

STEP = MetalKernel(
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
        delta_step<T, Hk, Hv, Dk, Dv, W, 0, Simdgroups, Masked, Ragged>(
            qkv, conv, weight, z, a, b, a_log, dt_bias, state, norm, mask, lengths, y, new_conv,
            new_state, as_type<float>(Epsilon), qkv_shape[1], token, scratch,
            threadgroup_position_in_grid.x, thread_index_in_threadgroup);
    """,
)  # fmt: skip

# The same with qkv, z, a and b in one row, for whole sequences without a mask.
STEP_OF_ROWS = MetalKernel(
    "delta_step_of_rows",
    file="delta_mixer.metal",
    inputs=("row", "conv", "weight", "a_log", "dt_bias", "state", "norm"),
    outputs=("y", "new_conv", "new_state"),
    body="""
        threadgroup float token[(2 * Dk + Dv) / 32 * 33 + 2];
        threadgroup float scratch[Simdgroups];
        delta_step<T, Hk, Hv, Dk, Dv, W, Row, Simdgroups, false, false>(
            row, conv, weight, row + 2 * Hk * Dk + Hv * Dv, row + 2 * Hk * Dk + 2 * Hv * Dv,
            row + 2 * Hk * Dk + 2 * Hv * Dv + Hv, a_log, dt_bias, state, norm, row, nullptr, y,
            new_conv, new_state, as_type<float>(Epsilon), row_shape[1], token, scratch,
            threadgroup_position_in_grid.x, thread_index_in_threadgroup);
    """,
)


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
        signature_of(qkv, a, b, conv_weight, conv_state, a_log, dt_bias, mask, lengths),
        (z.shape, state.shape, norm_weight.shape),
        (z.dtype, state.dtype),
        eps,
        threads,
        metal.backend().name,
    )
    y, new_conv, new_state = STEP(
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
        no_lengths() if lengths is None else lengths,
        **launch,
    )
    return y, new_conv, new_state


def delta_step_of_rows(
    row: mx.array,
    *,
    conv_weight: mx.array,
    conv_state: mx.array,
    state: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """:func:`delta_step` of rows ``[B, T, 2 Hk Dk + 2 Hv Dv + 2 Hv]`` that hold qkv, z, a and b."""
    B, T, width = row.shape
    Hv, Dv = state.shape[1:3]
    gates, dtype = (B, T, Hv), row.dtype
    shapes = [array.shape for array in (conv_weight, conv_state, a_log, dt_bias)]
    launch = _step_launch(
        (
            ((B, T, width - Hv * Dv - 2 * Hv), gates, gates, *shapes),
            (dtype, dtype, dtype, a_log.dtype, dt_bias.dtype),
            None,
            None,
        ),
        ((B, T, Hv * Dv), state.shape, norm_weight.shape),
        (dtype, state.dtype),
        eps,
        None,
        metal.backend().name,
    )
    template = {**launch["template"], "Row": width}
    y, new_conv, new_state = STEP_OF_ROWS(
        *(row, conv_state.astype(dtype), conv_weight, a_log, dt_bias, state, norm_weight),
        **{**launch, "template": template},
    )
    return y, new_conv, new_state


class Shapes(NamedTuple):
    """B sequences of T tokens, heads and widths, and the width of the convolution."""

    B: int
    T: int
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    W: int


def signature_of(qkv, a, b, weight, conv, a_log, dt_bias, mask, lengths):
    """What a launch depends on."""
    return (
        (qkv.shape, a.shape, b.shape, weight.shape, conv.shape, a_log.shape, dt_bias.shape),
        (qkv.dtype, a.dtype, b.dtype, a_log.dtype, dt_bias.dtype),
        None if mask is None else (mask.shape, mask.dtype),
        None if lengths is None else (lengths.shape, lengths.dtype),
    )


@functools.lru_cache(maxsize=1024)
def _step_launch(signature, shapes, dtypes, eps, threads, backend) -> dict[str, Any]:
    (B, T, D), W, dtype = signature[0][0], signature[0][3][-1], signature[1][0]
    if len(shapes[1]) != 4:
        raise ShapeError(f"delta mixer: state is {list(shapes[1])}, expected four axes.")
    Hv, Dv, Dk = shapes[1][1:]
    s = Shapes(B, T, (D - Hv * Dv) // (2 * Dk), Hv, Dk, Dv, W)
    check(s, *signature)
    wanted = ((B, T, Hv * Dv), (B, Hv, Dv, Dk), (Dv,))
    if shapes != wanted or dtypes != (dtype, mx.float32):
        raise ShapeError(
            f"delta mixer: z, state, norm are {[list(shape) for shape in shapes]}, z and state "
            f"{[str(d) for d in dtypes]}; expected {[list(shape) for shape in wanted]}, {dtype} "
            "and float32."
        )
    simdgroups = _simdgroups(Dv, threads or _step_threads(Dk, Dv, backend))
    return {
        "template": {
            **template_of(s, signature),
            "Simdgroups": simdgroups,
            "Epsilon": float_bits(eps),
        },
        "grid": (32 * simdgroups * B * Hv, 1, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [wanted[0], (B, W - 1, D), wanted[1]],
        "output_dtypes": [dtype, dtype, mx.float32],
    }


def template_of(s: Shapes, signature) -> dict[str, Any]:
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


def _simdgroups(Dv: int, threads: int) -> int:
    """Of four rows of the state at a time: as many as fit and leave equal shares."""
    return max(n for n in range(1, threads // 32 + 1) if Dv // 4 % n == 0)


def _step_threads(Dk: int, Dv: int, backend: str) -> int:
    """As many as registers allow: 256 always fit."""
    state = Dk // 8 * (Dv // 4) // _simdgroups(Dv, 512)
    fits = backend != "metal" and state + _STEP_REGISTERS <= _REGISTERS_OF_512
    return 512 if fits else 256


@functools.cache
def no_lengths() -> mx.array:
    """Stands in for lengths that nobody reads."""
    array = mx.zeros((LEAST_INPUT,), mx.int32)
    mx.eval(array)
    return array


def check(s: Shapes, found, dtypes, mask, lengths) -> None:
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
    if dtypes[0] not in FLOATS or len(set(dtypes[:3])) > 1 or dtypes[3] != dtypes[4]:
        raise ShapeError(
            f"delta mixer: qkv, a, b, a_log and dt_bias are {[str(d) for d in dtypes]}; the first "
            "three must share float32, float16 or bfloat16, the others one dtype."
        )
    if mask not in (None, ((s.B, s.T), mx.bool_)):
        raise ShapeError(f"delta mixer: mask is {mask}, expected bool {[s.B, s.T]}.")
    if lengths not in (None, ((s.B,), mx.int32)):
        raise ShapeError(f"delta mixer: lengths is {lengths}, expected int32 {[s.B]}.")
