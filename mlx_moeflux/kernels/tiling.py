"""How the rows of a matrix are dealt out among threadgroups and simdgroups, for few rows of x."""

from __future__ import annotations

import functools
import math

import mlx.core as mx

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.quantised import Matrix, staged_floats

# Rows of a matrix for each simdgroup, and simdgroups for each threadgroup, where rows of x are kept
# on the chip (H100: 6 to 40 % faster than the others tried).
ROWS, SIMDGROUPS = 4, 4
# From this width on simdgroups share the columns instead, and a threadgroup's rows are so many that
# all threadgroups are there at once (H100, 16384 -> 7168: 26 us, rows on the chip 66, small groups
# 36; 7168 -> 36864: 60; 18432 -> 7168: 32 against 58).
WIDE = 4096
# So do rows of these widths, of which lanes take half as much (1536 -> 24576: 10.4 against 15.2;
# 2048 -> 12352: no difference).
MIDDLE = range(1536, 2048)
# Floats of threadgroup memory for sums of squares.
SQUARES = 32
# Columns of a simdgroup, of wide rows and of the others.
WIDE_COLUMNS, MIDDLE_COLUMNS = 1024, 512
# Rows at a time, and threadgroups that are there at once: of AT_ONCE simdgroups for each of
# PROCESSORS, of rows of middle widths MIDDLE_AT_ONCE (1536 -> 24576: 9.8 us, with 18 it is 10.3).
# More simdgroups than MOST_SIMDGROUPS have no registers, which are one for each of a lane's columns
# and some 70 besides: with twice the columns MOST_OF_TWO. A back end may allow fewer.
TOGETHER, PROCESSORS, AT_ONCE, MIDDLE_AT_ONCE = 4, 132, 18, 24
MOST_SIMDGROUPS, MOST_OF_TWO = 18, 14


def tiling(
    matrix: Matrix, out: int, width: int, dtype: mx.Dtype, threads: int, rows: int | None = None
) -> tuple[int, dict[str, int], int]:
    """How ``rows_of`` in matvec.metal is laid out for a matrix ``[out, width]``: threadgroups,
    template arguments, floats of threadgroup memory.

    dtype: Of x. threads: That a threadgroup may have. rows: Of which those are a part, if not of
        themselves.

    Raises:
        UnsupportedError: The rows are too wide.
    """
    simdgroups = simdgroups_of(width, threads)
    tile = {"BITS": matrix.bits, "GROUP": matrix.group}
    if shares_columns(width):
        tile["V"] = words_at_once(matrix, width, 16 if width >= WIDE else 8)
        middle = width < WIDE
        own, together = rows_at_once(matrix, out, dtype, rows or out, simdgroups, middle)
        tile |= {"ROWS": own, "SPLIT": together}
        return out // own, tile, SQUARES + own * simdgroups
    own, words = math.gcd(ROWS, out), matrix.access(width, 16)
    tile |= {"ROWS": own, "SPLIT": 0, "V": words}
    return -(-out // (own * simdgroups)), tile, SQUARES + sum(staged_floats(matrix, words, width))


@functools.cache
def rows_at_once(
    matrix: Matrix,
    out: int,
    dtype: mx.Dtype,
    rows: int,
    simdgroups: int,
    middle: bool = False,
) -> tuple[int, int]:
    """Of `out` rows of a matrix those of a threadgroup, so that those of all `rows` are there at
    once, and no more than it has threads; and of them those that are taken together, for x of
    `dtype`: float32 takes more registers. middle: They are of middle width."""
    together = TOGETHER // (2 if dtype == mx.float32 else 1) if matrix.bits else 1
    step, most = math.gcd(together, out), 32 * simdgroups
    groups = (MIDDLE_AT_ONCE if middle else AT_ONCE) // simdgroups
    least = -(-rows // (PROCESSORS * max(1, groups)))
    known = [own for own in range(step, most + 1, step) if out % own == 0]
    return next((own for own in known if own >= least), known[-1]), step


def words_at_once(matrix: Matrix, width: int, most: int = 16) -> int:
    """How many words a lane takes that keeps its share of x in registers: of 32 columns at most."""
    return matrix.access(width, most // 2 if matrix.bits == 2 else most)


def shares_columns(width: int) -> bool:
    """Whether simdgroups share the columns of rows of `width`."""
    return width >= WIDE or width in MIDDLE


@functools.cache
def simdgroups_of(width: int, threads: int) -> int:
    """Simdgroups for each threadgroup, which may have so many threads; what is summed in which
    order depends on them, and so on `width` and the back end alone.

    Raises:
        UnsupportedError: The rows are too wide.
    """
    if not shares_columns(width):
        return SIMDGROUPS
    parts = -(-width // (WIDE_COLUMNS if width >= WIDE else MIDDLE_COLUMNS))
    if parts <= min(MOST_SIMDGROUPS, threads // 32):
        return parts
    if parts > 2 * min(MOST_OF_TWO, threads // 32):
        raise UnsupportedError(f"kernels take no rows of {width} columns.")
    return -(-parts // 2)
