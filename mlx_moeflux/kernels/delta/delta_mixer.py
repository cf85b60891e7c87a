"""A gated delta net between its projections: convolution, norms, gates, delta rule, gated norm.

    q, k, v <- silu(conv(qkv));   q, k normalised;   g, beta <- gates(a, b)
    y, S <- delta rule(q, k, v, g, beta, S);   y <- rms_norm(y) w gate(z)

Shapes:
    qkv: ``[B, T, D]`` with D = 2 Hk Dk + Hv Dv, channels in the order q, k, v.
    z: ``[B, T, Hv Dv]``; a, b: ``[B, T, Hv]``; if all three are None, the rows of qkv continue with
    them.
    conv_weight: ``[D, W]``; conv_state: ``[B, W - 1, D]``; state: ``[B, Hv, Dv, Dk]`` float32.
    a_log, dt_bias: ``[Hv]``; norm_weight: ``[Dv]``.
    mask: ``[B, T]`` bool or None; a token at False counts as zeros in the convolution and leaves
    the state as it was. lengths: ``[B]`` int32 or None; the new window ends after so many tokens.
    gate: ``"silu"`` or ``"sigmoid"``.
    returns: y ``[B, T, Hv Dv]``, the new conv state and the new state; with `every` two lists of T,
    the states after each token, every one with the bits of a call of one token. There is no mask
    then, and no lengths.

Convolution (causal, depthwise, with carried state):

    y[t, c] = silu(sum_j w[c, j] x[t - (W - 1 - j) n, c])

Shapes:
    x: ``[B, T, D]``; weight: ``[D, W]``; state: ``[B, (W - 1) n, D]``, the last inputs before x,
    oldest first, raw (before SiLU). n: The dilation, 1 in delta nets.
    lengths: ``[B]`` int32 or None; how many of the T tokens are real where rows are padded on
    the right. The new state ends at the last real token.
    returns: y ``[B, T, D]`` and the new state, both in the dtype of x.

Accumulates in float32. Source: reference formula of Qwen3-Next's short convolution.

Gates and norms:

    q <- q / sqrt(sum q^2 + 1e-6) * Dk^-1/2;   k <- k / sqrt(sum k^2 + 1e-6)
    g  = -exp(A_log) softplus(a + dt_bias);    beta = sigmoid(b)
    y  = rms_norm(x) w gate(z)

The epsilon is added to the sum of squares, as in transformers 5 (`l2norm`), not to the mean.

Kernels: one launch for decode, four for prefill. They compute in float32 and round what they write;
activations are all float32, all float16 or all bfloat16. Times are in docs/notes/kernels.md.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.cpu import blas_delta
from mlx_moeflux.kernels.delta.gated_delta import (
    GATED_DELTA,
    gated_delta,
    gated_delta_chunkwise_fused,
    gated_delta_recurrent_fused,
    normalise_qk,
    token_by_token,
)
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.rounding import rounded
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.runtime.launcher import LEAST_INPUT, MetalKernel, float_bits


class References:
    """The delta rule in plain MLX."""

    gated_delta = staticmethod(gated_delta)


def causal_conv_silu(
    x: mx.array,
    weight: mx.array,
    state: mx.array,
    *,
    lengths: mx.array | None = None,
    dilation: int = 1,
) -> tuple[mx.array, mx.array]:
    """The module's formula as W shifted multiply-adds."""
    T, held = x.shape[1], state.shape[1]
    window = mx.concatenate([state.astype(x.dtype), x], axis=1)  # [B, held + T, D]
    starts, taps = range(0, held + 1, dilation), weight.astype(mx.float32)
    shifted = (window[:, i : i + T].astype(mx.float32) for i in starts)
    terms = (rounded(each * taps[:, j]) for j, each in enumerate(shifted))
    total = functools.reduce(operator.add, terms)
    y = rounded(total * mx.sigmoid(total)).astype(x.dtype)
    if lengths is None:
        # A copy: a slice would keep the whole window's buffer alive.
        return y, mx.contiguous(window[:, T:])
    ends = mx.clip(lengths, 0, T)[:, None] + mx.arange(held)[None]  # [B, held]
    return y, mx.take_along_axis(window, ends[..., None], axis=1)


def decay_beta(
    a: mx.array, b: mx.array, *, a_log: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """a, b ``[B, T, Hv]``; a_log, dt_bias ``[Hv]`` -> log decay (<= 0) and beta, float32."""
    step = nn.softplus(a.astype(mx.float32) + dt_bias.astype(mx.float32))
    log_decay = -mx.exp(a_log.astype(mx.float32)) * step
    return log_decay, mx.sigmoid(b.astype(mx.float32))


GATES = {"silu": nn.silu, "sigmoid": mx.sigmoid}


def gated_rms_norm(
    x: mx.array, z: mx.array, weight: mx.array, *, eps: float, gate: str = "silu"
) -> mx.array:
    """x, z ``[..., Dv]``, weight ``[Dv]`` -> ``rms_norm(x) * weight * gate(z)`` in z's dtype."""
    f, factor = x.astype(mx.float32), GATES[gate](z.astype(mx.float32))
    normed = f * mx.rsqrt(rounded((f * f).mean(axis=-1, keepdims=True)) + eps)
    return (normed * weight.astype(mx.float32) * factor).astype(z.dtype)


def split_rows(rows: mx.array, Hv: int, Dv: int) -> list[mx.array]:
    """``[B, T, D + Hv Dv + 2 Hv]`` -> qkv, z, a, b."""
    ends = (2 * Hv + Hv * Dv, 2 * Hv, Hv)
    return list(mx.split(rows, [rows.shape[-1] - end for end in ends], axis=-1))


def check_whole(mask: mx.array | None, lengths: mx.array | None) -> None:
    """
    Raises:
        ShapeError: There is one, with which nobody asks for the states after each token.
    """
    if mask is not None or lengths is not None:
        raise ShapeError("delta mixer: the states after every token have no mask and no lengths.")


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
    gate: str = "silu",
    every: bool = False,
    steps: Any = References,
) -> tuple[mx.array, Any, Any]:
    """The module's formulas in plain MLX; `steps` computes the delta rule."""
    if every:
        check_whole(mask, lengths)
        around = {"conv_weight": conv_weight, "a_log": a_log, "dt_bias": dt_bias, "gate": gate}
        around |= {"norm_weight": norm_weight, "eps": eps, "steps": steps}
        tokens = (
            [None if part is None else part[:, t : t + 1] for part in (qkv, z, a, b)]
            for t in range(qkv.shape[1])
        )
        mixer = functools.partial(delta_mixer, **around)
        return token_by_token(mixer, tokens, conv_state, state)
    Hv, Dv, Dk = state.shape[1:]
    if z is None:
        qkv, z, a, b = split_rows(qkv, Hv, Dv)
    if a is None or b is None:
        raise ShapeError("delta mixer: z is given, but not a and b.")
    B, T, D = qkv.shape
    keys = (D - Hv * Dv) // 2
    if mask is not None:
        qkv = mx.where(mask[..., None], qkv, 0.0)
    y, new_conv = causal_conv_silu(qkv, conv_weight, conv_state, lengths=lengths)
    q, k, v = mx.split(y, [keys, 2 * keys], axis=-1)
    q, k = normalise_qk(q.reshape(B, T, -1, Dk), k.reshape(B, T, -1, Dk))
    log_decay, beta = decay_beta(a, b, a_log=a_log, dt_bias=dt_bias)
    y, new_state = steps.gated_delta(
        q,
        k,
        v.reshape(B, T, Hv, Dv),
        log_decay=log_decay,
        beta=beta,
        state=state,
        mask=mask,
    )
    y = gated_rms_norm(y, z.reshape(B, T, Hv, Dv), norm_weight, eps=eps, gate=gate)
    return y.reshape(B, T, Hv * Dv), new_conv, new_state


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
        delta_step<T, Hk, Hv, Dk, Dv, W, 0, Simdgroups, Masked, Ragged, Sigmoid, Every>(
            qkv, conv, weight, z, a, b, a_log, dt_bias, state, norm, mask, lengths, y, new_conv,
            new_state, as_type<float>(Epsilon), qkv_shape[1], token, scratch,
            threadgroup_position_in_grid.x, threadgroups_per_grid.x, thread_index_in_threadgroup);
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
        delta_step<T, Hk, Hv, Dk, Dv, W, Row, Simdgroups, false, false, Sigmoid, Every>(
            row, conv, weight, row + 2 * Hk * Dk + Hv * Dv, row + 2 * Hk * Dk + 2 * Hv * Dv,
            row + 2 * Hk * Dk + 2 * Hv * Dv + Hv, a_log, dt_bias, state, norm, row, nullptr, y,
            new_conv, new_state, as_type<float>(Epsilon), row_shape[1], token, scratch,
            threadgroup_position_in_grid.x, threadgroups_per_grid.x, thread_index_in_threadgroup);
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
    gate: str = "silu",
    every: bool = False,
    threads: int | None = None,
) -> tuple[mx.array, Any, Any]:
    """The whole mixer in one launch, token by token: for decode.

    A threadgroup of at most `threads` takes a value head, so that the gated norm needs no second
    launch.
    """
    launch = _step_launch(
        signature_of(qkv, a, b, conv_weight, conv_state, a_log, dt_bias, mask, lengths),
        (z.shape, state.shape, norm_weight.shape),
        (z.dtype, state.dtype),
        eps,
        gate,
        threads,
        launcher.backend().name,
        every,
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
    return (y, apart(new_conv), apart(new_state)) if every else (y, new_conv, new_state)


def apart(states: mx.array) -> list[mx.array]:
    """Return the states ``[B, ...]`` of ``[T, B, ...]``, as views."""
    return [states[t : t + 1].squeeze(0) for t in range(len(states))]


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
    gate: str = "silu",
    every: bool = False,
) -> tuple[mx.array, Any, Any]:
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
        gate,
        None,
        launcher.backend().name,
        every,
    )
    template = {**launch["template"], "Row": width}
    y, new_conv, new_state = STEP_OF_ROWS(
        *(row, conv_state.astype(dtype), conv_weight, a_log, dt_bias, state, norm_weight),
        **{**launch, "template": template},
    )
    return (y, apart(new_conv), apart(new_state)) if every else (y, new_conv, new_state)


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
    """Return the arguments on which a launch depends."""
    return (
        (qkv.shape, a.shape, b.shape, weight.shape, conv.shape, a_log.shape, dt_bias.shape),
        (qkv.dtype, a.dtype, b.dtype, a_log.dtype, dt_bias.dtype),
        None if mask is None else (mask.shape, mask.dtype),
        None if lengths is None else (lengths.shape, lengths.dtype),
    )


@functools.lru_cache(maxsize=1024)
def _step_launch(signature, shapes, dtypes, eps, gate, threads, backend, every) -> dict[str, Any]:
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
    times = (T,) * every
    simdgroups = _simdgroups(Dv, threads or _step_threads(Dk, Dv, backend))
    return {
        "template": {
            **template_of(s, signature),
            "Sigmoid": is_sigmoid(gate),
            "Every": every,
            "Simdgroups": simdgroups,
            "Epsilon": float_bits(eps),
        },
        "grid": (32 * simdgroups * B * Hv, 1, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [wanted[0], *((*times, *shape) for shape in ((B, W - 1, D), wanted[1]))],
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
    """Return the simdgroups of four rows of the state: as many as fit, with equal shares."""
    return max(n for n in range(1, threads // 32 + 1) if Dv // 4 % n == 0)


def _step_threads(Dk: int, Dv: int, backend: str) -> int:
    """Return the threads of a step, as many as registers allow: 256 always fit."""
    state = Dk // 8 * (Dv // 4) // _simdgroups(Dv, 512)
    fits = backend != "metal" and state + _STEP_REGISTERS <= _REGISTERS_OF_512
    return 512 if fits else 256


@functools.cache
def no_lengths() -> mx.array:
    """Return a placeholder for lengths that the kernel does not read."""
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
        gated_rms_norm<T, D, P, Sigmoid>(
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
    """Compute the inputs of the delta rule in one launch.

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


def is_sigmoid(gate: str) -> bool:
    """Return True for ``"sigmoid"``, False for ``"silu"``.

    Raises:
        UnsupportedError: It is neither.
    """
    if gate not in GATES:
        raise UnsupportedError(f"delta mixer: the gate is {gate!r}; there are {', '.join(GATES)}.")
    return gate == "sigmoid"


def gated_rms_norm_fused(
    x: mx.array, z: mx.array, weight: mx.array, *, eps: float, gate: str = "silu"
) -> mx.array:
    """x, z ``[..., Dv]``, weight ``[Dv]`` -> ``rms_norm(x) weight gate(z)`` in z's dtype.

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
        template={
            "T": z.dtype,
            "D": D,
            "P": _pack(D),
            "Sigmoid": is_sigmoid(gate),
            "Epsilon": float_bits(eps),
        },
        grid=(32, rows, 1),
        threadgroup=(32, together, 1),
        output_shapes=[z.shape],
        output_dtypes=[z.dtype],
    )[0]


def delta_mixer_fused(
    qkv,
    z,
    a,
    b,
    *,
    conv_weight,
    conv_state,
    state,
    a_log,
    dt_bias,
    norm_weight,
    eps,
    mask=None,
    lengths=None,
    gate: str = "silu",
    every: bool = False,
    steps: Any = None,
):
    """One launch for up to ``STEP_UP_TO`` tokens; else prepare, delta rule as the table of
    gated_delta says, gated norm.

    `steps` plays no part.

    Raises:
        ShapeError: Key or value width is no multiple of 32, or shapes or dtypes do not fit.
        UnsupportedError: The states after every one of more than ``STEP_UP_TO`` tokens are asked.
    """
    if every:
        check_whole(mask, lengths)
    if every and qkv.shape[1] > STEP_UP_TO:
        raise UnsupportedError(
            f"delta mixer: one launch gives the states after {STEP_UP_TO} tokens, not after "
            f"{qkv.shape[1]}; take the reference."
        )
    around = {
        "conv_weight": conv_weight,
        "conv_state": conv_state,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "mask": mask,
        "lengths": lengths,
    }
    T, (Hv, Dv, Dk) = qkv.shape[1], state.shape[1:]
    end = {"norm_weight": norm_weight, "eps": eps, "gate": gate}
    if z is None:
        if T <= STEP_UP_TO and mask is None and lengths is None:
            del around["mask"], around["lengths"]
            return delta_step_of_rows(qkv, state=state, every=every, **end, **around)
        qkv, z, a, b = split_rows(qkv, Hv, Dv)
    B, T, D = qkv.shape
    if T <= STEP_UP_TO:
        return delta_step(qkv, z, a, b, state=state, every=every, **end, **around)
    q, k, v, log_decay, beta, new_conv = delta_prepare(
        qkv, a, b, key_heads=(D - Hv * Dv) // (2 * Dk), key_dim=Dk, **around
    )
    name = dispatch.pick(dispatch.rows("gated_delta", launcher.backend().name), T)
    delta = gated_delta_chunkwise_fused if name == "chunkwise" else gated_delta_recurrent_fused
    y, new_state = delta(q, k, v, log_decay=log_decay, beta=beta, state=state)
    y = gated_rms_norm_fused(y, z.reshape(B, T, Hv, Dv), norm_weight, eps=eps, gate=gate)
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
    """Return the neighbours in a row of `width` that a lane reads together: a divisor of its
    share."""
    return math.gcd(width // 32, 4)


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    D, gates = 2 * s.Hk * s.Dk + s.Hv * s.Dv, (s.B, n, s.Hv)
    return (x(s.B, n, D), x(s.B, n, s.Hv * s.Dv), x(*gates), x(*gates)), {
        "conv_weight": x(D, 4),
        "conv_state": x(s.B, 3, D),
        "state": x(s.B, s.Hv, s.Dv, s.Dk, dtype=mx.float32),
        "a_log": x(s.Hv, dtype=mx.float32),
        "dt_bias": x(s.Hv, dtype=mx.float32),
        "norm_weight": x(s.Dv),
        "eps": 1e-6,
    }


DELTA_MIXER = Operation(
    name="delta_mixer",
    reference=delta_mixer,
    others={
        "fused": Implementation(
            delta_mixer_fused,
            kernels=(
                STEP,
                STEP_OF_ROWS,
                _PREPARE,
                *(k for other in GATED_DELTA.others.values() for k in other.kernels),
                _GATED_NORM,
            ),
        ),
        "blas": Implementation(blas_delta.delta_mixer_blas, on_cpu=True),
    },
    size=slice(1, 2),
    tokens=dict.fromkeys(("qkv", "z", "a", "b", "mask"), 1),
    replaces=("gated_delta",),
    proof=Proof(example=_workload, workloads={"": _workload}),
)
