"""Rotary embedding with frequencies of its own (YaRN).

pair i of position p turns by p / periods[i] and is scaled by `scale`
"""

from __future__ import annotations

import mlx.core as mx


def rope(
    x: mx.array,
    periods: mx.array,
    *,
    offset: int | mx.array,
    scale: float = 1.0,
    interleaved: bool = False,
) -> mx.array:
    """x ``[B, H, T, D]``, periods ``[D / 2]`` float32 -> ``[B, H, T, D]`` in the dtype of x.

    offset: Position of the first token, an int or ``[B]`` int32. Pairs are (i, i + D / 2), or
    (2 i, 2 i + 1) if `interleaved`.
    """
    if scale != 1.0:
        x = x * scale
    return mx.fast.rope(
        x,
        x.shape[-1],
        traditional=interleaved,
        base=None,
        scale=1.0,
        offset=offset,
        freqs=periods,
    )
