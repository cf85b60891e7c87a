"""The newest rows of a key-value buffer, apart, so that a decode step writes few bytes.

MLX updates a buffer in place only when nobody else holds it, and one step ahead of the GPU the
step before still does: 20 buffers of 32k rows then cost 3 ms of copies a token. So decode steps
append to a block of at most TAIL_ROWS rows, which a kernel writes anew each time, and the buffer
gets the block when it is full.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Divides the rows by which buffers grow; a multiple of the keys that kernels take at once.
TAIL_ROWS = 64


class Tail(NamedTuple):
    """Rows start, start + 1, ... of a sequence: keys ``[B, Hkv, TAIL_ROWS, Dk]``, values likewise.

    start: A multiple of TAIL_ROWS. Rows past the sequence's end hold garbage.
    """

    start: int
    keys: mx.array
    values: mx.array


def tail_start(columns: int) -> int:
    """Where the tail of a sequence begins that appends its row `columns`."""
    return columns // TAIL_ROWS * TAIL_ROWS


def cut(keys: mx.array, values: mx.array, columns: int) -> Tail:
    """The tail that appends row `columns`, from buffers ``[B, Hkv, capacity, D]`` that hold all
    rows before it."""
    start = tail_start(columns)
    rows = slice(start, start + TAIL_ROWS)
    return Tail(start, keys[:, :, rows], values[:, :, rows])
