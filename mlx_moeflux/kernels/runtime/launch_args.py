"""Numbers that change from call to call, as kernels take them: arrays of eight at least.

On CUDA MLX keeps arrays of up to 8 bytes in the host's memory, where a kernel's first look takes
some 4 us (H100). Longer ones that the host makes are managed memory, and the first kernel that
looks waits for the page, 50 us and more: those that many layers share are kept.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_moeflux.kernels.runtime.launcher import LEAST_INPUT


def ranges(B: int, S: int, length: int | mx.array | None, start: mx.array | None) -> mx.array:
    """int32 [B, 2] (longer where B is small): first and past-the-last key of each sequence."""
    if length is None:
        length = S
    if start is None and isinstance(length, int):
        return _plain_ranges(B, length)
    first, last = (
        mx.array(0 if n is None else n).reshape(-1, 1).astype(mx.int32) for n in (start, length)
    )
    # One launch. mx.stack copies twice, and on CUDA each launch that reads its result begins later,
    # in every layer.
    return mx.where(_firsts(LEAST_INPUT // 2 if B == 1 else B), first, last)


def on_the_device(number: mx.array, count: int = 1) -> mx.array:
    """int32 ``[count]``, longer where that is less than eight, of one number or of `count`."""
    number = number.reshape(-1).astype(mx.int32)
    if number.size == 1:
        return number + _zeros(max(count, LEAST_INPUT))
    return mx.broadcast_to(number, (count,))


@functools.lru_cache(maxsize=64)
def _firsts(rows: int) -> mx.array:
    array = mx.array([[True, False]] * rows)
    mx.eval(array)
    return array


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> mx.array:
    array = mx.zeros((count,), dtype=mx.int32)
    mx.eval(array)  # no two threads may evaluate one array
    return array


@functools.lru_cache(maxsize=256)
def _plain_ranges(B: int, length: int) -> mx.array:
    return mx.array([0, length] * max(B, LEAST_INPUT // 2), dtype=mx.int32)


@functools.lru_cache(maxsize=256)
def equal(number: int, count: int) -> mx.array:
    """int32 ``[count]``."""
    return mx.array([number] * count, dtype=mx.int32)


@functools.lru_cache(maxsize=64)
def filled(*values: float) -> mx.array:
    """Eight times `values`, float32."""
    return mx.array(values * LEAST_INPUT, dtype=mx.float32)
