"""ggml's types of blocks. Those listed here are quantisation modes: a row is bytes, decoded where
it is computed with.

    type    elements, bytes of a block                                element
    Q4_0    32: f16 d, 4-bit q                                        d (q - 8)
    Q4_1    32: f16 d, f16 m, 4-bit q                                 d q + m
    Q5_0    32: f16 d, fifth bits of q, 4-bit q                       d (q - 16)
    Q5_1    32: f16 d, f16 m, fifth bits of q, 4-bit q                d q + m
    Q8_0    32: f16 d, 8-bit q in two's complement                    d q
    Q2_K    256: 16 pairs of 4 bits s and t, 2-bit q, f16 d, f16 m    d s q - m t
    Q3_K    256: third bits of q, 2-bit q, 16 6-bit s, f16 d          d (s - 32) (q - 4)
    Q4_K    256: f16 d, f16 m, 8 pairs of 6 bits s and t, 4-bit q     d s q - m t
    Q5_K    256: the same, with fifth bits of q before the others     d s q - m t
    Q6_K    256: 4 bits of q, 2 bits of q, 16 8-bit s, f16 d          d s (q - 32)
    IQ4_NL  32: f16 d, 4-bit q                                        d table[q]
    IQ4_XS  256: f16 d, 8 6-bit s, 4-bit q                            d (s - 32) table[q]
    MXFP4   32: exponent s of a byte, 4-bit q                         2^(s - 128) table[q]

Values are computed in float32 in ggml's order of operations, with MLX or NumPy. A new mode is a
record of :data:`_TYPES`, in place of the type that is not decoded, and a type of its name in
``kernels/linear/blocks.metal``.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`), its types' numbers (`ggml.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Elements of IQ4_NL and IQ4_XS before they are scaled, and twice those of E2M1.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Of blocks ``[..., nbytes]`` uint8 and the module of their arrays, ``mlx.core`` or ``numpy``.
Numbers = Callable[[Any, Any], Any]
Multiples = Callable[[Any, Any], tuple[Any, ...]]


@dataclass(frozen=True)
class BlockType:
    """A type of tensors: rows of blocks, which plain numbers are too.

    name: ggml's. number: GGUF's. elements, nbytes: Of a block.
    """

    name: str
    number: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class BlockMode(BlockType):
    """A type whose values are known, a quantisation mode. A type of its name in
    ``kernels/linear/blocks.metal`` decodes it in kernels.

    bits: Of a number q.
    group: Elements that share a scale.
    numbers: Function that gives q ``[..., elements]`` uint8.
    halves: Bytes of a block at which its float16 factors are: of the scales, and of what is added
        to the elements of a group.
    multiples: Function that gives what each factor is multiplied with, ``[..., elements / group]``
        float32; without factors these are the scales.
    zero: Is subtracted from each q.
    table: q is a place in it; empty: q is a number.
    of_mlx: MLX has the mode of this name, of the same bits and size, which is taken for it.
    """

    bits: int
    group: int
    numbers: Numbers
    halves: tuple[int, ...]
    multiples: Multiples = lambda blocks, xp: (1, 1)
    zero: int = 0
    table: tuple[int, ...] = ()
    of_mlx: bool = False

    def __post_init__(self) -> None:
        faults = [
            *["a block is no whole groups"] * (self.elements % self.group != 0),
            *["a factor is not in the block"] * (not set(self.halves) <= {*range(self.nbytes - 1)}),
            *["there are other factors than one or two"] * (len(self.halves) > 2),
            *["a table has no zero"] * (bool(self.table) and self.zero != 0),
        ]
        if faults:
            raise TypeError(f"the record of '{self.name}' is wrong: {'; '.join(faults)}")

    @property
    def mode(self) -> str:
        """The name of the quantisation mode."""
        return self.name.lower()

    def scales(self, blocks: Any, xp: Any) -> tuple[Any, Any]:
        """Return the groups' scales ``[..., elements / group]`` float32, and what is added to the
        elements of each, float32 too, or None."""
        found = self.multiples(blocks, xp)
        if self.halves:
            found = [_half(blocks, at, xp) * n for at, n in zip(self.halves, found, strict=False)]
        return found[0], found[1] if len(self.halves) > 1 else None

    def values(self, blocks: Any, xp: Any) -> Any:
        """Blocks ``[..., nbytes]`` uint8 -> ``[..., elements]`` float32, arrays of module `xp`."""
        q, (scales, added) = self.numbers(blocks, xp), self.scales(blocks, xp)
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


def _fields(stored: Any, bits: int, run: int, xp: Any) -> Any:
    """Unpack numbers of `bits` bits: the lowest bits of `run` bytes are that many numbers, the next
    bits are the next. ``[..., bytes]`` -> ``[..., bytes * 8 / bits]`` uint8."""
    lead = stored.shape[:-1]
    shifts = xp.arange(0, 8, bits, dtype=xp.uint8).reshape(-1, 1)
    found = stored.reshape(*lead, -1, 1, run) >> shifts & (1 << bits) - 1
    return found.reshape(*lead, -1)


def _four_bits(at: int, run: int) -> Numbers:
    """Return the numbers of 4 bits that begin at byte `at`."""
    return lambda blocks, xp: _fields(blocks[..., at:], 4, run, xp)


def _five_bits(at: int) -> Numbers:
    """Return the numbers of a block of 32, whose fifth bits begin at byte `at`."""

    def numbers(blocks: Any, xp: Any) -> Any:
        fifth = _fields(blocks[..., at : at + 4], 1, 1, xp)
        return _fields(blocks[..., at + 4 :], 4, 16, xp) | fifth << 4

    return numbers


def _q8_0(blocks: Any, xp: Any) -> Any:
    return blocks[..., 2:] ^ 0x80


def _q2_k(blocks: Any, xp: Any) -> Any:
    return _fields(blocks[..., 16:80], 2, 32, xp)


def _q3_k(blocks: Any, xp: Any) -> Any:
    third, low = _fields(blocks[..., :32], 1, 32, xp), _fields(blocks[..., 32:96], 2, 32, xp)
    return low | third << 2


def _q5_k(blocks: Any, xp: Any) -> Any:
    fifth, low = _fields(blocks[..., 16:48], 1, 32, xp), _fields(blocks[..., 48:], 4, 32, xp)
    return low | fifth << 4


def _q6_k(blocks: Any, xp: Any) -> Any:
    low, high = _fields(blocks[..., :128], 4, 64, xp), _fields(blocks[..., 128:192], 2, 32, xp)
    return low | high << 4


def _half(blocks: Any, at: int, xp: Any) -> Any:
    """Return the float16 at byte `at` of each block, as float32 ``[..., 1]``."""
    low, high = (blocks[..., i : i + 1].astype(xp.uint16) for i in (at, at + 1))
    return (low | high << 8).view(xp.float16).astype(xp.float32)


def _q2_k_pairs(blocks: Any, xp: Any) -> tuple[Any, Any]:
    s, t = (f.astype(xp.float32) for f in (blocks[..., :16] & 15, blocks[..., :16] >> 4))
    return s, -t


def _q3_k_scales(blocks: Any, xp: Any) -> tuple[Any]:
    low, high = _fields(blocks[..., 96:104], 4, 8, xp), _fields(blocks[..., 104:108], 2, 4, xp)
    return ((low | high << 4).astype(xp.float32) - 32,)


def _pairs_of_six_bits(blocks: Any, xp: Any) -> tuple[Any, Any]:
    """Return s and -t of the eight groups of Q4_K and Q5_K.

    Bytes 4 to 7 hold s of groups 0 to 3 in their low six bits, bytes 8 to 11 t. Bytes 12 to 15 hold
    the low four bits of s and t of groups 4 to 7; their high two are on top of bytes 4 to 11.
    """
    low, high, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    s = xp.concatenate([low & 63, both & 15 | low >> 6 << 4], axis=-1).astype(xp.float32)
    t = xp.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=-1).astype(xp.float32)
    return s, -t


def _q6_k_scales(blocks: Any, xp: Any) -> tuple[Any]:
    return (blocks[..., 192:208].view(xp.int8).astype(xp.float32),)


def _iq4_xs_scales(blocks: Any, xp: Any) -> tuple[Any]:
    high, low = _fields(blocks[..., 2:4], 2, 1, xp), _fields(blocks[..., 4:8], 4, 1, xp)
    return ((low | high << 4).astype(xp.float32) - 32,)


def _powers_of_two(blocks: Any, xp: Any) -> tuple[Any]:
    """2^(s - 128) has no exponent of a normal float32 below s = 2."""
    s = blocks[..., :1].astype(xp.uint32)
    bits = xp.where(s < 2, s + 1 << 21, s - 1 << 23)
    return (bits.view(xp.float32),)


# Of modes: bits, group, numbers, halves and multiples follow name, number, elements and bytes.
_TYPES = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockMode("Q4_0", 2, 32, 18, 4, 32, _four_bits(2, 16), (0,), zero=8),
    BlockMode("Q4_1", 3, 32, 20, 4, 32, _four_bits(4, 16), (0, 2)),
    BlockMode("Q5_0", 6, 32, 22, 5, 32, _five_bits(2), (0,), zero=16),
    BlockMode("Q5_1", 7, 32, 24, 5, 32, _five_bits(4), (0, 2)),
    BlockMode("Q8_0", 8, 32, 34, 8, 32, _q8_0, (0,), zero=128),
    BlockType("Q8_1", 9, 32, 36),
    BlockMode("Q2_K", 10, 256, 84, 2, 16, _q2_k, (80, 82), _q2_k_pairs),
    BlockMode("Q3_K", 11, 256, 110, 3, 16, _q3_k, (108,), _q3_k_scales, zero=4),
    BlockMode("Q4_K", 12, 256, 144, 4, 32, _four_bits(16, 32), (0, 2), _pairs_of_six_bits),
    BlockMode("Q5_K", 13, 256, 176, 5, 32, _q5_k, (0, 2), _pairs_of_six_bits),
    BlockMode("Q6_K", 14, 256, 210, 6, 16, _q6_k, (208,), _q6_k_scales, zero=32),
    BlockType("Q8_K", 15, 256, 292),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockMode("IQ4_NL", 20, 32, 18, 4, 32, _four_bits(2, 16), (0,), table=IQ4),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockMode("IQ4_XS", 23, 256, 136, 4, 32, _four_bits(8, 16), (0,), _iq4_xs_scales, table=IQ4),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("BF16", 30, 1, 2),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockMode(
        "MXFP4", 39, 32, 17, 4, 32, _four_bits(1, 16), (), _powers_of_two, table=E2M1, of_mlx=True
    ),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
)
TYPES = {kind.number: kind for kind in _TYPES}
"""GGUF's number of a type -> type."""
DECODED = {kind.name: kind for kind in _TYPES if isinstance(kind, BlockMode)}
"""The types whose values are known, by ggml's name."""
BLOCK_MODES = {kind.mode: kind for kind in DECODED.values() if not kind.of_mlx}
"""The modes that keep blocks, by name."""
