"""Quantisation modes that keep ggml's blocks: a row is bytes, decoded where it is computed with.

    mode    elements, bytes of a block                                element
    q4_0    32: f16 d, 4-bit q                                        d (q - 8)
    q4_1    32: f16 d, f16 m, 4-bit q                                 d q + m
    q5_0    32: f16 d, fifth bits of q, 4-bit q                       d (q - 16)
    q5_1    32: f16 d, f16 m, fifth bits of q, 4-bit q                d q + m
    q8_0    32: f16 d, 8-bit q in two's complement                    d q
    q2_k    256: 16 pairs of 4 bits s and t, 2-bit q, f16 d, f16 m    d s q - m t
    q3_k    256: third bits of q, 2-bit q, 16 6-bit s, f16 d          d (s - 32) (q - 4)
    q4_k    256: f16 d, f16 m, 8 pairs of 6 bits s and t, 4-bit q     d s q - m t
    q5_k    256: the same, with fifth bits of q before its others     d s q - m t
    q6_k    256: 4 bits of q, 2 bits of q, 16 8-bit s, f16 d          d s (q - 32)
    iq4_nl  32: f16 d, 4-bit q                                        d table[q]
    iq4_xs  256: f16 d, 8 6-bit s, 4-bit q                            d (s - 32) table[q]

Values are computed in float32 in ggml's order of operations, with MLX or NumPy.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Elements of IQ4_NL and IQ4_XS before they are scaled.
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Parts = tuple[Any, Any, Any]
"""Numbers q ``[..., elements]`` uint8; scales ``[..., groups]`` float32; what is added to the
elements of each group, float32 too, or None."""


@dataclass(frozen=True)
class BlockMode:
    """One mode.

    bits: Of a number without its scales. elements, nbytes: Of a block. parts: Blocks
    ``[..., nbytes]`` uint8 and the module of their arrays, ``mlx.core`` or ``numpy`` ->
    :data:`Parts`. zero: What is subtracted from each q. table: What q indexes; empty: q counts.
    """

    bits: int
    elements: int
    nbytes: int
    parts: Callable[[Any, Any], Parts]
    zero: int = 0
    table: tuple[int, ...] = ()

    def values(self, blocks: Any, xp: Any) -> Any:
        """Blocks ``[..., nbytes]`` uint8 -> ``[..., elements]`` float32, arrays of module `xp`."""
        q, scales, added = self.parts(blocks, xp)
        if self.table:
            table = xp.array([self.table], dtype=xp.float32)
            # MLX's CPU looks up single numbers along an axis several times faster than it indexes.
            numbers = xp.take_along_axis(table, q.reshape(1, -1), axis=-1)
        else:
            numbers = q.astype(xp.float32) - self.zero
        # Where something is added the product is exact: a trace may fuse the two.
        values = scales[..., None] * numbers.reshape(*scales.shape, -1)
        return (values if added is None else values + added[..., None]).reshape(q.shape)

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


def _q4_0(blocks: Any, xp: Any) -> Parts:
    return _fields(blocks[..., 2:], 4, 16, xp), _half(blocks, 0, xp), None


def _q4_1(blocks: Any, xp: Any) -> Parts:
    return _fields(blocks[..., 4:], 4, 16, xp), _half(blocks, 0, xp), _half(blocks, 2, xp)


def _five_bits(blocks: Any, at: int, xp: Any) -> Any:
    """Return the numbers of Q5_0 and Q5_1, whose fifth bits begin at byte `at`."""
    fifth = _fields(blocks[..., at : at + 4], 1, 1, xp)
    return _fields(blocks[..., at + 4 :], 4, 16, xp) | fifth << 4


def _q5_0(blocks: Any, xp: Any) -> Parts:
    return _five_bits(blocks, 2, xp), _half(blocks, 0, xp), None


def _q5_1(blocks: Any, xp: Any) -> Parts:
    return _five_bits(blocks, 4, xp), _half(blocks, 0, xp), _half(blocks, 2, xp)


def _q8_0(blocks: Any, xp: Any) -> Parts:
    return blocks[..., 2:] ^ 0x80, _half(blocks, 0, xp), None


def _q2_k(blocks: Any, xp: Any) -> Parts:
    pairs, q = blocks[..., :16], _fields(blocks[..., 16:80], 2, 32, xp)
    scales = _half(blocks, 80, xp) * (pairs & 15).astype(xp.float32)
    return q, scales, -_half(blocks, 82, xp) * (pairs >> 4).astype(xp.float32)


def _q3_k(blocks: Any, xp: Any) -> Parts:
    third, low = _fields(blocks[..., :32], 1, 32, xp), _fields(blocks[..., 32:96], 2, 32, xp)
    q = low | third << 2
    low, high = _fields(blocks[..., 96:104], 4, 8, xp), _fields(blocks[..., 104:108], 2, 4, xp)
    scales = (low | high << 4).astype(xp.float32) - 32
    return q, _half(blocks, 108, xp) * scales, None


def _pairs_of_six_bits(blocks: Any, xp: Any) -> tuple[Any, Any]:
    """Return what scales and adds the groups of Q4_K and Q5_K. Of the 12 bytes behind the two
    halves, eight hold four s and four t in their low six bits. The other four hold the low bits of
    four more of each, whose high ones are on top of the eight."""
    low, high, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    s = xp.concatenate([low & 63, both & 15 | low >> 6 << 4], axis=-1).astype(xp.float32)
    t = xp.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=-1).astype(xp.float32)
    return _half(blocks, 0, xp) * s, -_half(blocks, 2, xp) * t


def _q4_k(blocks: Any, xp: Any) -> Parts:
    return _fields(blocks[..., 16:], 4, 32, xp), *_pairs_of_six_bits(blocks, xp)


def _q5_k(blocks: Any, xp: Any) -> Parts:
    fifth, low = _fields(blocks[..., 16:48], 1, 32, xp), _fields(blocks[..., 48:], 4, 32, xp)
    return low | fifth << 4, *_pairs_of_six_bits(blocks, xp)


def _q6_k(blocks: Any, xp: Any) -> Parts:
    low, high = _fields(blocks[..., :128], 4, 64, xp), _fields(blocks[..., 128:192], 2, 32, xp)
    scales = blocks[..., 192:208].view(xp.int8).astype(xp.float32)
    return low | high << 4, _half(blocks, 208, xp) * scales, None


def _iq4_xs(blocks: Any, xp: Any) -> Parts:
    high, low = _fields(blocks[..., 2:4], 2, 1, xp), _fields(blocks[..., 4:8], 4, 1, xp)
    scales = (low | high << 4).astype(xp.float32) - 32
    return _fields(blocks[..., 8:], 4, 16, xp), _half(blocks, 0, xp) * scales, None


BLOCK_MODES = {
    "q4_0": BlockMode(4, 32, 18, _q4_0, zero=8),
    "q4_1": BlockMode(4, 32, 20, _q4_1),
    "q5_0": BlockMode(5, 32, 22, _q5_0, zero=16),
    "q5_1": BlockMode(5, 32, 24, _q5_1),
    "q8_0": BlockMode(8, 32, 34, _q8_0, zero=128),
    "q2_k": BlockMode(2, 256, 84, _q2_k),
    "q3_k": BlockMode(3, 256, 110, _q3_k, zero=4),
    "q4_k": BlockMode(4, 256, 144, _q4_k),
    "q5_k": BlockMode(5, 256, 176, _q5_k),
    "q6_k": BlockMode(6, 256, 210, _q6_k, zero=32),
    "iq4_nl": BlockMode(4, 32, 18, _q4_0, table=TABLE),
    "iq4_xs": BlockMode(4, 256, 136, _iq4_xs, table=TABLE),
}
"""By name, which is ggml's in lower case."""
