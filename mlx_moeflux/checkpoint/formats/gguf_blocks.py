"""The blocks of GGUF's quantised tensors, and their form in MLX.

Where they are read, blocks become one of MLX's forms, in groups of 32, if one has their values:

    type   elements, bytes of a block                               MLX
    Q4_0   32: f16 d, 4-bit q                                       4 bits  scale d, bias -8 d
    Q4_1   32: f16 d, f16 m, 4-bit q                                4 bits  scale d, bias m
    Q5_0   32: f16 d, a fifth bit apart, 4-bit q                    5 bits  scale d, bias -16 d
    Q5_1   32: f16 d, f16 m, a fifth bit apart, 4-bit q             5 bits  scale d, bias m
    Q8_0   32: f16 d, int8 q                                        8 bits  scale d, bias -128 d
    Q4_K   256: f16 d, f16 m, 8 pairs of 6 bits s and t, 4-bit q    4 bits  scale d s, bias -m t
    Q5_K   256: the same and a fifth bit apart                      5 bits
    MXFP4  32: exponent of a byte, E2M1 of 4 bits                   mode mxfp4, the same bits

All are exact: scales and biases are products of few bits, kept in float32. Q2_K, Q3_K, Q6_K, IQ4_NL
and IQ4_XS have no such form. Experts keep their blocks (:mod:`mlx_moeflux.checkpoint.blocks`), and
other matrices become floats; or, if that is asked for, both are quantised anew.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.formats.decoded import DecodedRef, row_chunks
from mlx_moeflux.checkpoint.names import PARTS
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError

GROUP = 32
# Decoded together: float32 values, codes, words that are packed.
ELEMENTS_AT_ONCE = 1 << 15
SCRATCH_PER_ELEMENT = 32

Scales = tuple[np.ndarray, ...]
"""Arrays ``[n, groups of a block]``: scales and biases float32, or scales uint8 alone."""


@dataclass(frozen=True)
class BlockKind:
    """One type of block, kept in experts as the quantisation mode of its name in lower case.

    elements, nbytes: Of a block.
    """

    name: str
    elements: int
    nbytes: int

    def floats(self, blocks: np.ndarray) -> np.ndarray:
        """Return the elements ``[n, elements]`` float32 of blocks, as ggml computes them."""
        with np.errstate(invalid="ignore"):  # of factors that are not finite
            return BLOCK_MODES[self.name.lower()].values(blocks, np)


@dataclass(frozen=True)
class MlxKind(BlockKind):
    """One type of block that becomes a form of MLX's.

    bits: Of MLX's form.
    codes: blocks ``[n, nbytes]`` uint8 -> q ``[n, elements]`` uint8.
    scales: blocks -> :data:`Scales`.
    values: blocks -> elements ``[n, elements]`` float32; None: what codes and scales mean.
    byte_scales: The mode is mxfp4, else affine.
    """

    bits: int
    codes: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], Scales]
    values: Callable[[np.ndarray], np.ndarray] | None = None
    byte_scales: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the arrays that a matrix becomes."""
        return PARTS[:2] if self.byte_scales else PARTS

    def floats(self, blocks: np.ndarray) -> np.ndarray:
        """See :meth:`BlockKind.floats`."""
        if self.values is not None:
            return self.values(blocks)
        scales, biases = self.scales(blocks)
        groups = self.codes(blocks).reshape(len(blocks), -1, GROUP).astype(np.float32)
        return (groups * scales[..., None] + biases[..., None]).reshape(len(blocks), -1)


class _OfBlocks(DecodedRef):
    """Base of what is made of rows of blocks. source: ``[..., bytes of a row]`` U8."""

    __slots__ = ("kind", "width")

    def __init__(
        self, name: str, source: TensorRef, *, kind: BlockKind, dtype: str, bits: int
    ) -> None:
        *rows, row_bytes = source.shape
        if row_bytes % kind.nbytes:
            raise CheckpointError(
                f"{source.file}: a row of '{name}' has {row_bytes} bytes, no whole blocks of "
                f"{kind.name}."
            )
        self.kind, self.width = kind, row_bytes // kind.nbytes * kind.elements
        super().__init__(name, (source,), dtype=dtype, shape=(*rows, self.width * bits // 32))

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        rows, kind = prod(self.shape[:-1]), self.kind
        blocks = raw[0].reshape(rows, -1, kind.nbytes)
        out = out.reshape(rows, -1)
        for start, stop in row_chunks(rows, ELEMENTS_AT_ONCE // self.width):
            some = self._bytes(blocks[start:stop].reshape(-1, kind.nbytes))
            out[start:stop] = some.reshape(stop - start, -1)

    def _bytes(self, blocks: np.ndarray) -> np.ndarray:
        """Return what blocks ``[n, nbytes]`` become, in bytes."""
        raise NotImplementedError

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`."""
        elements = min(prod(self.shape[:-1]) * self.width, ELEMENTS_AT_ONCE + self.width)
        return SCRATCH_PER_ELEMENT * elements


class BlocksRef(_OfBlocks):
    """One part of MLX's form of matrices whose rows are blocks.

    source: ``[..., R, bytes of a row]`` U8. part: ``weight`` (U32), ``scales`` (F32, of mxfp4 U8)
    or ``biases`` (F32).
    """

    __slots__ = ("part",)
    kind: MlxKind

    def __init__(self, name: str, source: TensorRef, *, kind: MlxKind, part: str) -> None:
        dtype, bits = "F32", 32 // GROUP
        if part == "weight":
            dtype, bits = "U32", kind.bits
        elif kind.byte_scales:
            dtype = "U8"
        self.part = part
        super().__init__(f"{name}.{part}", source, kind=kind, dtype=dtype, bits=bits)

    @classmethod
    def parts(cls, name: str, source: TensorRef, kind: MlxKind) -> dict[str, TensorRef]:
        """All of one tensor, by part."""
        parts = {part: cls(name, source, kind=kind, part=part) for part in kind.parts}
        # Readers ask for what both kinds of reference have.
        return cast("dict[str, TensorRef]", parts)

    def rows(self, start: int, stop: int) -> BlocksRef:
        """See :meth:`DecodedRef.rows`."""
        self._check_rows(start, stop)
        name = f"{self.name.removesuffix(f'.{self.part}')}[{start}:{stop}]"
        return BlocksRef(name, self.sources[0].rows(start, stop), kind=self.kind, part=self.part)

    def _bytes(self, blocks: np.ndarray) -> np.ndarray:
        if self.part == "weight":
            return pack(self.kind.codes(blocks), self.kind.bits)
        scales = self.kind.scales(blocks)[self.kind.parts.index(self.part) - 1]
        return np.ascontiguousarray(scales).view(np.uint8)


class BlockValuesRef(_OfBlocks):
    """The elements of rows of blocks in float32, where no quantised form can take them."""

    __slots__ = ()

    def __init__(self, name: str, source: TensorRef, *, kind: BlockKind) -> None:
        super().__init__(name, source, kind=kind, dtype="F32", bits=32)

    def rows(self, start: int, stop: int) -> BlockValuesRef:
        """See :meth:`DecodedRef.rows`."""
        self._check_rows(start, stop)
        name = f"{self.name}[{start}:{stop}]"
        return BlockValuesRef(name, self.sources[0].rows(start, stop), kind=self.kind)

    def _bytes(self, blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self.kind.floats(blocks)).view(np.uint8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """q ``[n, elements]`` uint8 -> MLX's bytes ``[n, elements * bits / 8]``, low bits first."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    # Eight elements fill `bits` bytes.
    eight = codes.reshape(len(codes), -1, 8).astype(np.uint64)
    words = (eight << (np.uint64(bits) * np.arange(8, dtype=np.uint64))).sum(axis=-1)
    return words.astype("<u8")[..., None].view(np.uint8)[..., :bits].reshape(len(codes), -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 ``[n, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _q8_codes(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:] ^ 0x80


def _centred(zero: int) -> Callable[[np.ndarray], Scales]:
    """Return the scales of a type whose q `zero` means 0."""

    def scales(blocks: np.ndarray) -> Scales:
        d = _half(blocks, 0)
        return d, np.float32(-zero) * d

    return scales


def _with_minimum(blocks: np.ndarray) -> Scales:
    return _half(blocks, 0), _half(blocks, 2)


def _halves(stored: np.ndarray) -> np.ndarray:
    """16 bytes ``[n, 16]``: their low nibbles are 16 elements, their high ones the next 16."""
    return np.concatenate([stored & 15, stored >> 4], axis=1)


def _halves_at(at: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the codes of a type with 4 bits for each element from byte `at` on."""
    return lambda blocks: _halves(blocks[:, at:])


def _fifth_bits_at(at: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the codes of a type with a fifth bit for each element from byte `at` on, the first
    element's lowest, and four more from byte ``at + 4`` on."""

    def codes(blocks: np.ndarray) -> np.ndarray:
        fifth = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
        return _halves(blocks[:, at + 4 :]) | fifth << 4

    return codes


def _k_affine(blocks: np.ndarray) -> Scales:
    """Scales and minima have six bits. Of the 12 bytes behind the two halves, eight hold four of
    each in their low six bits; of the other four the low halves, then the high ones on top."""
    low, high, both = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([low & 63, both & 15 | (low >> 6) << 4], axis=1)
    minima = np.concatenate([high & 63, both >> 4 | (high >> 6) << 4], axis=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """Stretches of 32 bytes ``[n, 128]``: their low nibbles are 32 elements, their high ones the
    next 32."""
    stretch = stored.reshape(len(stored), -1, 1, 32)
    return np.concatenate([stretch & 15, stretch >> 4], axis=2).reshape(len(stored), -1)


def _q4_codes(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks[:, 16:])


def _q5_codes(blocks: np.ndarray) -> np.ndarray:
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _nibbles(blocks[:, 48:]) | fifth.reshape(len(blocks), -1) << 4


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def _mx_scales(blocks: np.ndarray) -> Scales:
    return (blocks[:, :1],)


def _mx_values(blocks: np.ndarray) -> np.ndarray:
    exponents = blocks[:, :1].astype(np.int32) - 127
    return np.ldexp(E2M1[_halves(blocks[:, 1:])], exponents)


_IN_MLX = (
    MlxKind("Q4_0", 32, 18, 4, _halves_at(2), _centred(8)),
    MlxKind("Q4_1", 32, 20, 4, _halves_at(4), _with_minimum),
    MlxKind("Q5_0", 32, 22, 5, _fifth_bits_at(2), _centred(16)),
    MlxKind("Q5_1", 32, 24, 5, _fifth_bits_at(4), _with_minimum),
    MlxKind("Q8_0", 32, 34, 8, _q8_codes, _centred(128)),
    MlxKind("Q4_K", 256, 144, 4, _q4_codes, _k_affine),
    MlxKind("Q5_K", 256, 176, 5, _q5_codes, _k_affine),
    MlxKind("MXFP4", 32, 17, 4, _halves_at(1), _mx_scales, _mx_values, byte_scales=True),
)
_NAMES = [kind.name for kind in _IN_MLX]
_KEPT = [
    BlockKind(name.upper(), block.elements, block.nbytes)
    for name, block in BLOCK_MODES.items()
    if name.upper() not in _NAMES
]
KINDS = {kind.name: kind for kind in (*_IN_MLX, *_KEPT)}
"""By GGUF's name."""


def _requantised(kind: BlockKind) -> MlxKind:
    """Return blocks of `kind` in 8 bits in groups of 32, with an error of at most half a 255th of
    the range of 32 elements."""

    def groups_of(blocks: np.ndarray) -> np.ndarray:
        return kind.floats(blocks).reshape(len(blocks), -1, GROUP)

    def scales(blocks: np.ndarray) -> Scales:
        groups = groups_of(blocks)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        return ((high - low) / np.float32(255)).astype(np.float32), low

    def codes(blocks: np.ndarray) -> np.ndarray:
        steps, low = (values[..., None] for values in scales(blocks))
        q = np.rint((groups_of(blocks) - low) / np.where(steps == 0, np.float32(1), steps))
        return np.clip(q, 0, 255).astype(np.uint8).reshape(len(blocks), -1)

    return MlxKind(kind.name, kind.elements, kind.nbytes, 8, codes, scales, kind.floats)


REQUANTISED = {kind.name: _requantised(kind) for kind in _KEPT}
"""By GGUF's name, the types that have no form of MLX's in one that they nearly have."""
