"""The gated delta rule: a linear-attention state that decays, forgets and learns one key a token.

    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   y = S q

per value head, with S [Dv, Dk] in float32. Value head h reads key head h // (Hv / Hk).

Shapes:
    q, k: ``[B, T, Hk, Dk]``; already normalised, q already scaled.
    v: ``[B, T, Hv, Dv]``.
    log_decay (g <= 0, -inf allowed), beta: ``[B, T, Hv]``.
    state: ``[B, Hv, Dv, Dk]`` float32.
    mask: ``[B, T]`` bool or None; a token at False leaves the state as it was.
    returns: y ``[B, T, Hv, Dv]`` in the dtype of v, and the new state.

Decay enters as a logarithm, so that a decay of exactly zero needs no floor.

Source: Gated Delta Networks (arXiv:2412.06464), equations 8 to 10 and section 3.3 for the
    chunkwise form (WY representation).

The kernels take q, k and v in float32, float16 or bfloat16, all three alike. Both keep the state
in float32: the chunkwise form's products lose at most 2^-17 of a float factor and nothing of the
16-bit ones.

H100, B 1, Hk 16, Hv 32, D 128, bfloat16, microseconds (launches included; MLX 0.32.4's own
operation takes 170,000 at T = 1024)::

    T             1     8    16    24    64  1024  4096  16384
    recurrent   6.2  10.3  15.4  20.5  46.3
    chunkwise              16.8  16.6  18.4  91.9   316   1223
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.rounding import rounded
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

# Tokens whose delta updates are solved together. CPU back end, 2 cores, Hk 16, Hv 32, D 128,
# T 512: chunks of 8, 16, 32, 64 take 0.53, 0.44, 0.42, 0.68 s; token by token 0.67 s.
CHUNK = 32
# Added to the sum of squares of q and of k where they are normalised.
L2_EPSILON = 1e-6


def l2_normalise(x: mx.array) -> mx.array:
    """``[..., D]`` to unit length over D, in float32, returned in the dtype of x."""
    f = x.astype(mx.float32)
    return (f * mx.rsqrt((f * f).sum(axis=-1, keepdims=True) + L2_EPSILON)).astype(x.dtype)


def token_by_token(
    mixer: Callable[..., tuple[mx.array, mx.array, mx.array]],
    tokens: Iterable[Sequence[mx.array | None]],
    conv_state: mx.array,
    state: mx.array,
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Call a ``delta_mixer`` for one token after another; return what it gives with ``every``.

    tokens: What is projected of each, ``[B, 1, ...]``.
    """
    results, windows, states = [], [], []
    for token in tokens:
        y, conv_state, state = mixer(*token, conv_state=conv_state, state=state)
        results.append(y)
        windows.append(conv_state)
        states.append(state)
    return mx.concatenate(results, axis=1), windows, states


def normalise_qk(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """q, k ``[B, T, Hk, Dk]``: both to unit length, q also scaled by Dk^-1/2."""
    return l2_normalise(q) * (q.shape[-1] ** -0.5), l2_normalise(k)


def gated_delta_recurrent(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Token by token, exactly as the formula in the module's docstring reads."""
    q, k, v, log_decay, beta, dtype = _prepare(q, k, v, log_decay, beta, mask)
    repeats = v.shape[2] // k.shape[2]
    q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)  # [B, T, Hv, Dk]
    decay = mx.exp(log_decay)
    outputs = []
    for t in range(q.shape[1]):
        key = k[:, t, :, None, :]  # [B, Hv, 1, Dk]
        state = state * decay[:, t, :, None, None]
        recalled = (state * key).sum(axis=-1)  # [B, Hv, Dv]
        delta = (v[:, t] - recalled) * beta[:, t, :, None]
        state = rounded(state) + rounded(delta[..., None] * key)
        outputs.append((state * q[:, t, :, None, :]).sum(axis=-1))
    return mx.stack(outputs, axis=1).astype(dtype), state


def gated_delta_chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """Compute chunk by chunk; the work inside chunks is matrix products over all chunks.

    With G[l, i] = exp(sum of g over (i, l]) the deltas U of a chunk solve the unit lower
    triangular system (I + A) U = beta (V - exp(G_l) S K), A[l, i] = beta_l G[l, i] (k_l . k_i).
    Its inverse needs no state, so only three products a chunk are sequential. The number of
    MLX operations grows with T / chunk; differentiable.
    """
    B, T, Hk, Dk = k.shape
    Hv, Dv = v.shape[2:]
    q, k, v, log_decay, beta, dtype = _prepare(q, k, v, log_decay, beta, mask)
    padding = -T % chunk
    if padding:
        # Padded tokens have beta 0 and decay 1: they change nothing.
        ends = [(0, 0), (0, padding), (0, 0), (0, 0)]
        q, k, v = (mx.pad(a, ends) for a in (q, k, v))
        log_decay, beta = (mx.pad(a, ends[:3]) for a in (log_decay, beta))
    n, R = (T + padding) // chunk, Hv // Hk

    def heads(a, groups):  # [B, n*chunk, H, D] -> [B, Hk, R, n, chunk, D]
        return a.reshape(B, n, chunk, Hk, groups, -1).transpose(0, 3, 4, 1, 2, 5)

    q, k = heads(q, 1), heads(k, 1)  # [B, Hk, 1, n, chunk, Dk]
    v, beta = heads(v, R), heads(beta, R)  # [B, Hk, R, n, chunk, Dv or 1]
    log_decay = heads(log_decay, R)[..., 0]  # [B, Hk, R, n, chunk]

    lower = mx.tril(mx.ones((chunk, chunk), dtype=mx.bool_))
    strictly = mx.tril(mx.ones((chunk, chunk), dtype=mx.bool_), k=-1)
    between = mx.exp(_segment_sums(log_decay, strictly))  # G, 1 on the diagonal
    since_start = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]  # [..., chunk, 1]
    kt = k.swapaxes(-1, -2)
    a = mx.where(strictly, beta * between * (k @ kt), 0.0)
    inverse = _unit_lower_inverse(a)
    scores = mx.where(lower, between * (q @ kt), 0.0)  # [..., chunk, chunk]
    fresh = inverse @ (beta * v)  # [..., chunk, Dv]
    from_state = inverse @ (beta * since_start * k)  # [..., chunk, Dk]
    reads = mx.concatenate([from_state, since_start * q], axis=-2)  # [..., 2 chunk, Dk]
    writes = (between[..., -1, :, None] * k).swapaxes(-1, -2)  # [..., Dk, chunk]
    kept = since_start[..., -1, :, None]  # [B, Hk, R, n, 1, 1]

    s = state.reshape(B, Hk, R, Dv, Dk).swapaxes(-1, -2)  # [B, Hk, R, Dk, Dv]
    outputs = []
    for c in range(n):
        read = reads[:, :, :, c] @ s
        u = fresh[:, :, :, c] - read[..., :chunk, :]
        outputs.append(read[..., chunk:, :] + scores[:, :, :, c] @ u)
        s = kept[:, :, :, c] * s + writes[:, :, :, c] @ u
    y = mx.stack(outputs, axis=3)  # [B, Hk, R, n, chunk, Dv]
    y = y.transpose(0, 3, 4, 1, 2, 5).reshape(B, T + padding, Hv, Dv)[:, :T]
    return y.astype(dtype), s.swapaxes(-1, -2).reshape(B, Hv, Dv, Dk)


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Token by token for a few tokens, chunked from half a chunk on."""
    chosen = gated_delta_recurrent if q.shape[1] <= CHUNK // 2 else gated_delta_chunked
    return chosen(q, k, v, log_decay=log_decay, beta=beta, state=state, mask=mask)


def _prepare(q, k, v, log_decay, beta, mask):
    dtype = v.dtype
    q, k, v, log_decay, beta = (a.astype(mx.float32) for a in (q, k, v, log_decay, beta))
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0.0)
        log_decay = mx.where(mask[..., None], log_decay, 0.0)
    return q, k, v, log_decay, beta, dtype


def _segment_sums(g: mx.array, strictly: mx.array) -> mx.array:
    """``out[..., l, i]`` = sum of g over (i, l] for i <= l.

    Summed from zero for every i: a difference of two running sums would cancel, and would be
    NaN after a decay of exactly zero.
    """
    spread = mx.broadcast_to(g[..., :, None], (*g.shape, g.shape[-1]))
    return mx.cumsum(mx.where(strictly, spread, 0.0), axis=-2)


def _unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + a)^-1 for a strictly lower triangular ``a [..., n, n]``, n a power of two.

    Doubles the size of the inverted diagonal blocks: inverse - inverse @ L @ inverse, where L
    holds the blocks of `a` that join two neighbours. As stable as forward substitution, and
    2 log2(n) products instead of n steps.
    """
    n = a.shape[-1]
    row = mx.arange(n)
    inverse = mx.eye(n)
    size = 1
    while size < n:
        block = row // size
        joins = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
        inverse = inverse - inverse @ mx.where(joins, a, 0.0) @ inverse
        size *= 2
    return inverse


FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_THREADGROUP_BYTES = 32768

_RECURRENT = MetalKernel(
    "gated_delta_recurrent",
    file="gated_delta.metal",
    inputs=("q", "k", "v", "log_decay", "beta", "state", "mask"),
    outputs=("y", "new_state"),
    body="""
        gated_delta_recurrent<T, Hk, Hv, Dk, Dv, Masked>(
            q, k, v, log_decay, beta, state, mask, y, new_state, v_shape[1],
            thread_position_in_grid, thread_index_in_simdgroup);
    """,
)

_FACTORS = MetalKernel(
    "gated_delta_factors",
    file="gated_delta_chunks.metal",
    inputs=("q", "k", "log_decay", "beta", "mask"),
    outputs=("factors", "gains"),
    body="""
        threadgroup float work[Work];
        threadgroup float scores[2 * C * (C + 4)];
        gated_delta_factors<T, X, Parts, Hk, Hv, Dk, C, Simdgroups, Masked>(
            q, k, log_decay, beta, mask, factors, gains, q_shape[1], (q_shape[1] + C - 1) / C,
            work, scores, threadgroup_position_in_grid, thread_index_in_threadgroup,
            thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
    """,
)

_WALK = MetalKernel(
    "gated_delta_walk",
    file="gated_delta_chunks.metal",
    inputs=("q", "k", "v", "factors", "gains", "state"),
    outputs=("y", "new_state"),
    body="""
        threadgroup T keys[2 * C * (Dk + 16 / sizeof(T))];
        threadgroup X lower[2 * Parts * C * (C + 16 / sizeof(X))];
        threadgroup T values[C * (16 * Simdgroups + 16 / sizeof(T))];
        threadgroup float gain[2 * C];
        gated_delta_walk<T, X, Parts, Hk, Hv, Dk, Dv, C, Simdgroups, Prefetch>(
            q, k, v, factors, gains, state, y, new_state, v_shape[1], (v_shape[1] + C - 1) / C,
            keys, lower, values, gain, threadgroup_position_in_grid, thread_index_in_threadgroup,
            thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
    """,
)


def gated_delta_recurrent_fused(q, k, v, *, log_decay, beta, state, mask=None):
    """Token by token in one launch, the state in registers.

    Raises:
        ShapeError: A width is no multiple of 32, or shapes or dtypes do not fit together.
    """
    y, new_state = _RECURRENT(
        q,
        k,
        v,
        log_decay.astype(mx.float32),
        beta.astype(mx.float32),
        state,
        state if mask is None else mask,
        **_recurrent_launch(*_signature(q, k, v, log_decay, beta, state, mask)),
    )
    return y, new_state


def gated_delta_chunkwise_fused(
    q,
    k,
    v,
    *,
    log_decay,
    beta,
    state,
    mask=None,
    parts: int | None = None,
    prefetch: bool | None = None,
):
    """Compute chunk by chunk: first, for all chunks, what needs no state, then the state.

    Args:
        parts: How float matrices enter products: 1 as floats, 2 as pairs of bfloats (bfloat16
            only); by default 2 where matrix units take no floats.
        prefetch: True to read a chunk while the one before is computed, which takes registers;
            by default on CUDA.

    Raises:
        ShapeError: As :func:`gated_delta_recurrent_fused`; or Dk is above 256.
    """
    cuda = launcher.backend().name == "cuda"
    if parts is None:
        parts = 2 if cuda and v.dtype == mx.bfloat16 else 1
    first, second = _chunkwise_launches(
        *_signature(q, k, v, log_decay, beta, state, mask),
        parts,
        cuda if prefetch is None else prefetch,
    )
    factors, gains = _FACTORS(
        q,
        k,
        log_decay.astype(mx.float32),
        beta.astype(mx.float32),
        state if mask is None else mask,
        **first,
    )
    y, new_state = _WALK(q, k, v, factors, gains, state, **second)
    return y, new_state


def _signature(q, k, v, log_decay, beta, state, mask):
    """Return the arguments on which a launch depends."""
    return (
        (q.shape, k.shape, v.shape, log_decay.shape, beta.shape, state.shape),
        (q.dtype, k.dtype, v.dtype, state.dtype),
        None if mask is None else (mask.shape, mask.dtype),
    )


@functools.lru_cache(maxsize=1024)
def _recurrent_launch(shapes, dtypes, mask) -> dict[str, Any]:
    _check(shapes, dtypes, mask)
    (B, T, Hv, Dv), (Hk, Dk) = shapes[2], shapes[1][2:]
    return {
        "template": {
            "T": dtypes[2],
            "Hk": Hk,
            "Hv": Hv,
            "Dk": Dk,
            "Dv": Dv,
            "Masked": mask is not None,
        },
        "grid": (32, Dv // 4, B * Hv),
        "threadgroup": (32, 4, 1),
        "output_shapes": [(B, T, Hv, Dv), (B, Hv, Dv, Dk)],
        "output_dtypes": [dtypes[2], mx.float32],
    }


@functools.lru_cache(maxsize=1024)
def _chunkwise_launches(shapes, dtypes, mask, parts, prefetch) -> tuple[dict[str, Any], ...]:
    _check(shapes, dtypes, mask)
    (B, T, Hv, Dv), (Hk, Dk), dtype = shapes[2], shapes[1][2:], dtypes[2]
    C, simdgroups = _tiles(dtype.size, parts, Dk, Dv)
    chunks, groups = -(-T // C), min(4, max(2, Hv // Hk))
    X = mx.bfloat16 if parts == 2 else mx.float32
    common = {"T": dtype, "X": X, "Parts": parts, "Hk": Hk, "Hv": Hv, "Dk": Dk, "C": C}
    factors = {
        "template": {
            **common,
            "Simdgroups": groups,
            "Masked": mask is not None,
            "Work": max(2 * C * (Dk * dtype.size + 16) // 4, groups * C * (C + 4)),
        },
        "grid": (32 * groups, chunks, B * Hk),
        "threadgroup": (32 * groups, 1, 1),
        "output_shapes": [(B, chunks, Hv, 2, parts, C, C), (B, chunks, Hv, 2, C)],
        "output_dtypes": [X, mx.float32],
    }
    walk = {
        "template": {**common, "Dv": Dv, "Simdgroups": simdgroups, "Prefetch": prefetch},
        "grid": (2 * Dv, B * Hv, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [(B, T, Hv, Dv), (B, Hv, Dv, Dk)],
        "output_dtypes": [dtype, mx.float32],
    }
    return factors, walk


def _tiles(size: int, parts: int, Dk: int, Dv: int) -> tuple[int, int]:
    """Tokens in a chunk, simdgroups in a threadgroup: the most that threadgroup memory holds."""
    lower = 2 if parts == 2 else 4
    for C in (32, 16):
        for simdgroups in (4, 2):
            factors = max(2 * C * (Dk * size + 16), 4 * 4 * C * (C + 4)) + 8 * C * (C + 4)
            walk = 2 * C * (Dk * size + 16) + 2 * parts * C * (C * lower + 16)
            walk += C * (16 * simdgroups * size + 16) + 8 * C
            if Dv % (16 * simdgroups) == 0 and max(walk, factors) <= _THREADGROUP_BYTES:
                return C, simdgroups
    raise ShapeError(
        f"gated delta rule: no chunk of keys {Dk} wide fits into threadgroup memory; take the "
        "recurrent form."
    )


def _check(shapes, dtypes, mask) -> None:
    k, v = shapes[1:3]
    if len(v) != 4 or len(k) != 4:
        raise ShapeError(f"gated delta rule: k {list(k)} and v {list(v)} need four axes.")
    (B, T, Hv, Dv), (Hk, Dk) = v, k[2:]
    if Dk % 32 or Dv % 32 or Hv % Hk or not T:
        raise ShapeError(
            f"gated delta rule: k {list(k)}, v {list(v)}: widths must be multiples of 32, Hv a "
            "multiple of Hk and T positive; take the reference."
        )
    wanted = ((B, T, Hk, Dk),) * 2 + (v,) + ((B, T, Hv),) * 2 + ((B, Hv, Dv, Dk),)
    for name, shape, want in zip(
        ("q", "k", "v", "log_decay", "beta", "state"), shapes, wanted, strict=True
    ):
        if shape != want:
            raise ShapeError(f"gated delta rule: {name} is {list(shape)}, expected {list(want)}.")
    if dtypes[2] not in FLOATS or len(set(dtypes[:3])) > 1 or dtypes[3] != mx.float32:
        raise ShapeError(
            f"gated delta rule: q, k, v, state are {[str(d) for d in dtypes]}; q, k and v must "
            "share float32, float16 or bfloat16, and the state is float32."
        )
    if mask is not None and mask != ((B, T), mx.bool_):
        raise ShapeError(f"gated delta rule: mask is {mask}, expected bool {[B, T]}.")


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    q, k = normalise_qk(x(s.B, n, s.Hk, s.Dk), x(s.B, n, s.Hk, s.Dk))
    return (q, k, x(s.B, n, s.Hv, s.Dv)), {
        "log_decay": -0.3 * mx.abs(x(s.B, n, s.Hv, dtype=mx.float32)),
        "beta": mx.sigmoid(x(s.B, n, s.Hv, dtype=mx.float32)),
        "state": x(s.B, s.Hv, s.Dv, s.Dk, dtype=mx.float32),
    }


GATED_DELTA = Operation(
    name="gated_delta",
    reference=gated_delta,
    others={
        "recurrent": Implementation(gated_delta_recurrent_fused, kernels=(_RECURRENT,)),
        "chunkwise": Implementation(gated_delta_chunkwise_fused, kernels=(_FACTORS, _WALK)),
    },
    size=slice(1, 2),
    tokens=dict.fromkeys(("q", "k", "v", "log_decay", "beta", "mask"), 1),
    proof=Proof(example=_workload, workloads={"": _workload}),
)
