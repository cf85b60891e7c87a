"""Cuts calls of many rows into launches that end in time.

macOS ends a command buffer after some 5 s, and the call with it. So on Metal a call of more than
:data:`MOST_OPERATIONS` is cut into pieces of rows, a launch each. A row does not depend on the rows
beside it, and a piece is laid out as the whole call would be, so that no bit changes. Nothing is
evaluated: a piece reads so many numbers that MLX itself ends the command buffer after a few.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_moeflux.kernels.runtime import launcher

# The GPU of an M1 has 2.6 T float operations a second. A launch may take half a second, and kernels
# reach perhaps half of that rate.
MOST_OPERATIONS = round(2.6e12 * 0.5 * 0.5)
# The slowest GPUs of two classes, by the last letter of their architecture, have so many times the
# rate: an M1 Max of 24 cores, an M1 Ultra of 48. Smaller pieces would leave cores without work.
TIMES_AN_M1 = {"s": 3, "d": 6}
# A piece has a multiple of so many rows, the last one at least half as many: tiles are full, and no
# piece has so few rows that stock MLX computes it by another kernel than the whole call.
UNIT_ROWS = 64


def pieces(rows: int, operations: int, unit: int | None = None) -> list[slice]:
    """Return the rows of each launch that a call of `rows` rows is cut into: all in one, but on
    Metal where they have too many operations.

    operations: Of a row; a multiplication and an addition are two. unit: A piece has a multiple of
    so many rows; None: :data:`UNIT_ROWS`.
    """
    most = MOST_OPERATIONS // max(operations, 1)
    if rows <= most or not _is_limited():
        return [slice(0, rows)]
    most *= _times_an_m1()
    unit = unit or UNIT_ROWS
    units = max(1, rows // unit + (2 * (rows % unit) >= unit))
    count = -(-units // max(1, most // unit))
    starts = [i * units // count * unit for i in range(count)]
    return list(map(slice, starts, [*starts[1:], rows]))


def _times_an_m1() -> int:
    if not mx.metal.is_available():
        return 1
    architecture = str(mx.device_info(mx.gpu).get("architecture", ""))
    return TIMES_AN_M1.get(architecture[-1:], 1)


def _is_limited() -> bool:
    """Return True if operations run on Metal."""
    backend = launcher.backend()
    if backend.name != "metal":
        return False
    return not backend.follows_device or mx.default_device().type == mx.gpu
