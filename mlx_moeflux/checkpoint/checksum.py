"""CRC-32, as ``zlib.crc32`` gives it, of joined byte strings from that of each."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

# A number stands for a polynomial over two elements modulo x^32 + POLYNOMIAL; bit i is the
# coefficient of x^(31 - i).
POLYNOMIAL = 0xEDB88320
ONE = 1 << 31


def joined(first: np.ndarray, second: np.ndarray, nbytes: int) -> np.ndarray:
    """Return the checksum of each pair of strings, joined, from their checksums: all uint32
    ``[N]``. nbytes: Of each second string."""
    result = second.copy()
    for bit, moved in enumerate(_moved(nbytes)):
        result ^= np.where(first >> np.uint32(bit) & 1, np.uint32(moved), np.uint32(0))
    return result


@lru_cache(maxsize=64)
def _moved(nbytes: int) -> tuple[int, ...]:
    """Return each bit times x^(8 nbytes)."""
    power, square, n = ONE, ONE >> 1, 8 * nbytes
    while n:
        if n & 1:
            power = _times(power, square)
        square, n = _times(square, square), n >> 1
    return tuple(_times(1 << bit, power) for bit in range(32))


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product
