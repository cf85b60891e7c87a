"""Quantisation modes that keep ggml's blocks: a row is bytes, decoded where it is computed with.

    mode    elements, bytes of a block                                        element
    q2_k    256: 16 pairs of 4 bits s and t, 2-bit q, f16 d, f16 m            d s q - m t
    q3_k    256: third bits of q, 2-bit q, 16 scales s of 6 bits, f16 d       d (s - 32) (q - 4)
    q6_k    256: 4 bits of q, 2 bits of q, 16 scales s of 8 bits, f16 d       d s (q - 32)
    iq4_nl  32: f16 d, 4-bit q                                                d table[q]
    iq4_xs  256: f16 d, 8 scales s of 6 bits, 4-bit q                         d (s - 32) table[q]

Their groups of 16, their minima and their table do not exist among MLX's modes. Values are computed
in float32 in ggml's order of operations, with MLX or NumPy.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Elements of IQ4_NL and IQ4_XS before they are scaled.
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockMode:
    """One mode. No two have the same bytes for each element: a row's shape tells its mode.

    bits: Of a number without its scales. elements, nbytes: Of a block. values: Blocks
    ``[..., nbytes]`` uint8 and the module of their arrays, ``mlx.core`` or ``numpy`` -> elements
    ``[..., elements]`` float32.
    """

    bits: int
    elements: int
    nbytes: int
    values: Callable[[Any, Any], Any]

    def decode(self, rows: Any, xp: Any) -> Any:
        """Rows ``[..., bytes]`` uint8 -> ``[..., width]`` float32, arrays of the module `xp`."""
        lead = rows.shape[:-1]
        return self.values(rows.reshape(*lead, -1, self.nbytes), xp).reshape(*lead, -1)


def _half(blocks: Any, at: int, xp: Any) -> Any:
    """Return the float16 at byte `at` of each block, as float32 ``[..., 1]``."""
    low, high = (blocks[..., i : i + 1].astype(xp.uint16) for i in (at, at + 1))
    return (low | high << 8).view(xp.float16).astype(xp.float32)


def _fields(stored: Any, bits: int, run: int, xp: Any) -> Any:
    """Unpack numbers of `bits` bits: the lowest bits of `run` bytes are that many numbers, the next
    bits are the next. ``[..., bytes]`` -> ``[..., bytes * 8 / bits]`` uint8."""
    lead = stored.shape[:-1]
    shifts = xp.arange(0, 8, bits, dtype=xp.uint8).reshape(-1, 1)
    found = stored.reshape(*lead, -1, 1, run) >> shifts & (1 << bits) - 1
    return found.reshape(*lead, -1)


def _scaled(scales: Any, q: Any) -> Any:
    """Multiply each group of numbers by its scale: ``[..., groups]``, ``[..., elements]``."""
    groups = q.reshape(*scales.shape, -1)
    return (scales[..., None] * groups).reshape(q.shape)


def _q2_k(blocks: Any, xp: Any) -> Any:
    pairs = blocks[..., :16]
    q = _fields(blocks[..., 16:80], 2, 32, xp).astype(xp.float32)
    scales = _half(blocks, 80, xp) * (pairs & 15).astype(xp.float32)
    minima = _half(blocks, 82, xp) * (pairs >> 4).astype(xp.float32)
    # In another shape: a trace would fuse product and difference, which would then round once.
    groups = _scaled(scales, q).reshape(*scales.shape, -1)
    return (groups - minima[..., None]).reshape(q.shape)


def _q3_k(blocks: Any, xp: Any) -> Any:
    third, low = _fields(blocks[..., :32], 1, 32, xp), _fields(blocks[..., 32:96], 2, 32, xp)
    q = (low | third << 2).astype(xp.float32) - 4
    low, high = _fields(blocks[..., 96:104], 4, 8, xp), _fields(blocks[..., 104:108], 2, 4, xp)
    scales = (low | high << 4).astype(xp.float32) - 32
    return _scaled(_half(blocks, 108, xp) * scales, q)


def _q6_k(blocks: Any, xp: Any) -> Any:
    low, high = _fields(blocks[..., :128], 4, 64, xp), _fields(blocks[..., 128:192], 2, 32, xp)
    q = (low | high << 4).astype(xp.float32) - 32
    scales = blocks[..., 192:208].view(xp.int8).astype(xp.float32)
    return _scaled(_half(blocks, 208, xp) * scales, q)


def _from_table(stored: Any, xp: Any) -> Any:
    """Return the elements, unscaled, of runs of 16 bytes."""
    numbers, table = _fields(stored, 4, 16, xp), xp.array([TABLE], dtype=xp.float32)
    # MLX's CPU looks up single numbers along an axis several times faster than it indexes.
    return xp.take_along_axis(table, numbers.reshape(1, -1), axis=-1).reshape(numbers.shape)


def _iq4_nl(blocks: Any, xp: Any) -> Any:
    return _half(blocks, 0, xp) * _from_table(blocks[..., 2:], xp)


def _iq4_xs(blocks: Any, xp: Any) -> Any:
    high, low = _fields(blocks[..., 2:4], 2, 1, xp), _fields(blocks[..., 4:8], 4, 1, xp)
    scales = (low | high << 4).astype(xp.float32) - 32
    return _scaled(_half(blocks, 0, xp) * scales, _from_table(blocks[..., 8:], xp))


BLOCK_MODES = {
    "q2_k": BlockMode(2, 256, 84, _q2_k),
    "q3_k": BlockMode(3, 256, 110, _q3_k),
    "q6_k": BlockMode(6, 256, 210, _q6_k),
    "iq4_nl": BlockMode(4, 32, 18, _iq4_nl),
    "iq4_xs": BlockMode(4, 256, 136, _iq4_xs),
}
"""By name, which is ggml's in lower case."""
