"""What a call of an attention is: what its launch depends on, and whether its arrays fit."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError


class Call(NamedTuple):
    """What a launch depends on: shapes of q, k, v, widths of the gate and of rotary parts.

    expanded: Beside the rotary part, which heads share, each has keys and values of its own; else
    values are the first columns of the keys. q_heads: Queries lie as a projection gives them,
    ``[B, T, q_heads, q[3] + rotary]``, and `q` is the shape of those that are meant; 0: they lie as
    it says.
    """

    name: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    gate: int | None
    dtype: mx.Dtype
    causal: bool
    rotary: int = 0
    tail: int = 0
    page: int = 0
    expanded: bool = False
    q_heads: int = 0


def check_tail(call: Call, k: mx.array, v: mx.array) -> None:
    """Shapes and dtypes of a tail; v: of the rotary keys where there are such."""
    check_dtypes(call.name, call.dtype, {"tail of k": k, "tail of v": v})
    width = call.rotary or call.v[3]
    for name, x, last in (("k", k, call.k[3]), ("v", v, width)):
        if x.shape != (*call.k[:2], call.tail, last) or call.k[2] % call.tail:
            raise ShapeError(
                f"{call.name}: the tail of {name} is {x.shape}, that of {call.k} cannot be."
            )
    if call.q[2] != 1:
        raise ShapeError(f"{call.name}: with a tail one token is asked at a time, not {call.q[2]}.")


def check_shapes(call: Call) -> None:
    """Shapes of queries, keys, values and gate."""
    (B, Hq, _, D), (_, Hkv, S, _), (_, _, _, Dv) = call.q, call.k, call.v
    if call.k != (B, Hkv, S, D) or call.v[:3] != (B, Hkv, S) or Hq % Hkv:
        raise ShapeError(
            f"{call.name}: q {call.q}, k {call.k} and v {call.v} do not fit together; expected "
            "[B, Hq, T, Dh], [B, Hkv, S, Dh] and [B, Hkv, S, Dv]."
        )
    if D % 16 or Dv % 32 or call.rotary % 16:
        raise ShapeError(
            f"{call.name}: head sizes {D + call.rotary} and {Dv} must be multiples of 16 and 32; "
            "take the reference."
        )
    if call.gate not in (None, Dv, 2 * Dv):
        raise ShapeError(f"{call.name}: the gate is {call.gate} wide, not {Dv} or {2 * Dv}.")


def check_dtypes(name: str, dtype: mx.Dtype, others: dict[str, mx.array | None]) -> None:
    """All as q."""
    for other, array in others.items():
        if array is not None and array.dtype != dtype:
            raise ShapeError(f"{name}: {other} is {array.dtype} and q {dtype}; cast one.")
