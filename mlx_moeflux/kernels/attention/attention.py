"""Causal attention over a cache: softmax(q k^T scale) v, optionally times sigmoid(gate).

Shapes:
    q: ``[B, Hq, T, Dh]``; k: ``[B, Hkv, S, Dh]``; v: ``[B, Hkv, S, Dv]``. Query head h reads KV
    head h // (Hq / Hkv). Several rows of one sequence: q ``[R, Hq, 1, Dh]``, `length` int32
    ``[R]``, one more from row to row, `gate` of R; k, v, tail and start of one sequence.
    mask: None (every query sees every key), "causal" (query t sees keys up to length - T + t),
    or bool ``[B or 1, 1, T, length]``, with an int `length` or None and without `start`.
    length: keys in use, an int or int32 ``[B]``; None: all S. With it k and v may be whole
    preallocated buffers.
    start: int32 ``[B]``, each sequence's first key (left padding); None: 0.
    tail: keys and values ``[B, Hkv, R, D]`` of the newest rows, or None: row s of a sequence of
    `length`, which is at most S, is row s - s0 of them from s0 = (length - 1) // R * R on, and of
    k and v before. With R = 4 and length 11, rows 8 to 10 are rows 0 to 2 of the tail.
    sinks: ``[Hq]`` or None: logits that take part in each head's softmax, without a value.
    gate: ``[B, T, Hq, Dv]``, or ``[B, T, Hq, 2 Dv]`` whose second halves are the gate.
    returns: ``[B, Hq, T, Dv]`` in the dtype of q, softmax in float32.

On a GPU :func:`sdpa_fused` computes in tiles of queries and keys, see
:mod:`~mlx_moeflux.kernels.attention.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.attention.plan import (
    SDPA_KERNELS,
    AttentionCall,
    check_dtypes,
    check_tail,
    launch_attention,
    operations_of_a_token,
    plan_of,
)
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import backend
from mlx_moeflux.kernels.runtime.pieces import pieces


def causal_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    length: int | mx.array | None = None,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    gate: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stock MLX. Rows past an int `length` are not read; past an array they are, and masked. A
    query that sees no key attends to its own.

    Raises:
        ShapeError: A mask as an array beside `start` or a length on the device; a tail without
            length.
    """
    if isinstance(mask, mx.array) and (start is not None or isinstance(length, mx.array)):
        raise ShapeError("sdpa: a mask as an array says what is seen; leave out start, length.")
    if tail is not None:
        if length is None:
            raise ShapeError("sdpa: a tail needs the length.")
        k, v = (joined(x, end, length) for x, end in zip((k, v), tail, strict=True))
    if k.shape[0] == 1 < q.shape[0] and isinstance(length, mx.array):
        k, v = (mx.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
    if isinstance(length, int) and length < k.shape[2]:
        k, v = k[:, :, :length], v[:, :, :length]
    if start is not None or isinstance(length, mx.array):
        mask = _visible(q, k, causal=mask == "causal", length=length, start=start)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    parts = []
    if q.shape[2] > 1:
        operations = operations_of_a_token(q.shape, k.shape[2], q.shape[3] + v.shape[3])
        parts = pieces(q.shape[2], operations)
    if len(parts) > 1:
        y = mx.concatenate([_piece(q, k, v, part, scale, mask, sinks) for part in parts], axis=2)
    else:
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if gate is None:
        return y
    gate = gate[..., gate.shape[-1] - v.shape[-1] :]
    return y * mx.sigmoid(gate.swapaxes(1, 2))


def _piece(q, k, v, part: slice, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Stock attention of some of the queries."""
    if isinstance(mask, mx.array):
        mask = mask[..., part, :]
    elif mask is not None:
        seen = k.shape[2] - q.shape[2] + part.stop
        k, v = k[:, :, :seen], v[:, :, :seen]
    q = q[:, :, part]
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def joined(buffer: mx.array, tail: mx.array, length: int | mx.array) -> mx.array:
    """The buffer with the rows of the tail in their places."""
    R, row = tail.shape[2], mx.arange(buffer.shape[2])
    length = mx.array(length).reshape(-1, 1)
    newest = (row >= (length - 1) // R * R)[:, None, :, None]
    index = (row % R)[None, None, :, None]
    return mx.where(newest, mx.take_along_axis(tail, index, axis=2), buffer)


def _visible(q, k, *, causal, length, start) -> mx.array:
    """bool [B, 1, T, S]; a query before its sequence's start sees its own key only."""
    T, S = q.shape[2], k.shape[2]
    past = mx.array(S if length is None or isinstance(length, int) else length)
    past = past.reshape(-1, 1, 1, 1)
    key = mx.arange(S)
    query = past - T + mx.arange(T)[:, None]
    mask = key <= query if causal else mx.broadcast_to(key < past, (past.shape[0], 1, T, S))
    if start is not None:
        mask = (mask & (key >= start.reshape(-1, 1, 1, 1))) | (key == query)
    return mask


def sdpa_fused(q, k, v, *, scale, mask, length=None, start=None, tail=None, gate=None, sinks=None):
    """:func:`causal_sdpa` without scores in device memory; rows outside a sequence's range are
    never read, and a query that sees no key gets zeros. A mask that is an array goes to the
    reference.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, Dh is no multiple of 16 or Dv of 32, or
            they are too large for threadgroup memory.
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return causal_sdpa(
            q, k, v, scale=scale, mask=mask, length=length, start=start, tail=tail, gate=gate,
            sinks=sinks,
        )  # fmt: skip
    apart = False
    if k.shape[0] == 1 < q.shape[0] and isinstance(length, mx.array):
        apart, q, length = True, q.swapaxes(0, 2), length[-1:]
        gate = None if gate is None else gate.swapaxes(0, 1)
    call = AttentionCall(
        "sdpa", q.shape, k.shape, v.shape, q.dtype, apart or mask is not None,
        gate=None if gate is None else gate.shape[-1], tail=0 if tail is None else tail[0].shape[2],
        sinks=sinks is not None, tokens=1 if apart else 0,
    )  # fmt: skip
    check_dtypes("sdpa", q.dtype, {"k": k, "v": v, "gate": gate})
    if tail is not None:
        check_tail(call, *tail)
    y = launch_attention(
        plan_of(backend().name, call), (q, q, k, k, v), scale=scale, length=length, start=start,
        tail=tail, gate=gate, sinks=sinks,
    )  # fmt: skip
    return y.swapaxes(0, 2) if apart else y


# What stock MLX may allocate for scores: it keeps those of wide heads, of all queries and keys.
MOST_SCORES = 128 << 20


def is_timed(q: mx.array, k: mx.array, *others: Any, **options: Any) -> bool:
    """Return True for prompts whose scores are few. One token has the bits of attention over pages,
    of tokens that are chosen, and of rows of one sequence."""
    length = options.get("length")
    if q.shape[2] == 1 or isinstance(length, mx.array):
        return False
    keys = k.shape[2] if length is None else length
    return math.prod(q.shape[:3]) * keys * q.dtype.size <= MOST_SCORES


def call_of_size(s: Sizes, n: int, x: Normal, Dh: int, Dv: int, Hq: int, Hkv: int) -> Arguments:
    rows = s.keys + -(-n // s.step) * s.step  # buffers are larger than what they hold
    keys, values = x(s.B, Hkv, rows, Dh), x(s.B, Hkv, rows, Dv)
    options = {"scale": Dh**-0.5, "mask": None if n == 1 else "causal", "length": s.keys + n}
    return (x(s.B, Hq, n, Dh), keys, values), options


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    args, options = call_of_size(s, n, x, s.Dh, s.Dhv, s.Hq, s.Hkv)
    return args, options | {"start": mx.array([0, 1]), "gate": x(s.B, n, s.Hq, 2 * s.Dhv)}


def _cases(example: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield what traced steps on GPUs and other callers pass too: a tail, a length on the device, a
    mask as an array, queries that are padding."""
    (q, k, v), every = example
    T, length = q.shape[2], every["length"]
    plain = {name: every[name] for name in ("scale", "mask", "length")}
    cases = [every, plain | {"gate": every["gate"]}, plain]
    if T > 1:
        visible = mx.random.uniform(shape=(1, 1, T, length)) < 0.5
        visible[..., 0] = True
        # The first query of the second sequence is padding.
        cases += [plain | {"mask": visible}, plain | {"start": mx.array([0, length - T + 1])}]
    else:
        rows = next(n for n in (8, 4, 2, 1) if k.shape[2] % n == 0)
        tail = tuple(examples.normal(q.dtype)(*x.shape[:2], rows, x.shape[3]) for x in (k, v))
        cases += [every | {"tail": tail, "length": mx.array([length], dtype=mx.int32)}]
    for options in cases:
        yield _given(options), ((q, k, v), options)


def _given(options: dict[str, Any]) -> str:
    """The arguments of a call of attention that change what is computed."""
    names = [name for name in ("start", "tail", "gate") if name in options]
    mask, length = options["mask"], options["length"]
    shown = "an array" if isinstance(mask, mx.array) else mask
    on_device = ["length on the device"] if isinstance(length, mx.array) else []
    return ", ".join([f"mask {shown}", *names, *on_device])


def _without_padding(call: Arguments, y: mx.array) -> mx.array:
    """Return the result with 0 for queries of padding if they have finite numbers: later layers
    compute with them."""
    (q, *_), options = call
    if "start" not in options or not isinstance(y, mx.array):
        return y
    T = q.shape[2]
    query = options["length"] - T + mx.arange(T)
    padding = (query < options["start"].reshape(-1, 1))[:, None, :, None]
    return mx.where(padding & mx.isfinite(y), mx.zeros_like(y), y)


SDPA = Operation(
    name="sdpa",
    reference=causal_sdpa,
    others={
        "fused": Implementation(sdpa_fused, kernels=SDPA_KERNELS, joins=True),
        "blas": Implementation(blas.sdpa_blas, on_cpu=True),
    },
    size=slice(2, 3),
    kind=lambda q, *others: str(q.shape[-1]),
    tokens={"q": 2, "gate": 1},
    rows=("q", "gate", "length"),
    proof=Proof(
        example=_example,
        workloads={
            "": lambda s, n, x: call_of_size(s, n, x, s.Dh, s.Dh, s.Hq, s.Hkv),
            "64": lambda s, n, x: call_of_size(s, n, x, 64, 64, 2 * s.Hq, s.Hq // 2),
            "128": lambda s, n, x: call_of_size(s, n, x, 128, 128, 2 * s.Hq, 2 * s.Hkv),
            "192": lambda s, n, x: call_of_size(s, n, x, 192, 128, s.heads, s.heads),
        },
        cases=_cases,
        unread=_without_padding,
        positions={"k": 2, "v": 2},
        apart=True,
        timed=is_timed,
    ),
)
