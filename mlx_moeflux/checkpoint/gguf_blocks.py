"""GGUF's quantised blocks as MLX's affine form: element = q * scale + bias in groups of 32.

    Q8_0  32 elements: f16 d, int8 q                       8 bits  scale d, bias -128 d
    Q4_K  256: f16 d, f16 m, 8 pairs of 6 bits, 4-bit q    4 bits  scale d s, bias -m t
    Q5_K  256: the same and a fifth bit apart              5 bits
    Q6_K  256: 6-bit q, int8 scale for each 16, f16 d      8 bits, quantised anew

The first three are exact: scales and biases are products of few bits, kept in float32. Groups of
16 do not exist in MLX: Q6_K is quantised anew, with an error of at most half a 255th of the range
of 32 elements.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_moeflux.checkpoint.decoded import DecodedRef
from mlx_moeflux.checkpoint.refs import TensorRef
from mlx_moeflux.errors import CheckpointError

GROUP = 32
# Decoded at once: float32 values of Q6_K, codes, words that are packed.
ELEMENTS_AT_ONCE = 1 << 15
SCRATCH_PER_ELEMENT = 32

Affine = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class BlockKind:
    """One type of block.

    elements, nbytes: Of a block. bits: Of the affine form. codes: blocks ``[n, nbytes]`` uint8 ->
    q ``[n, elements]`` uint8. affine: blocks -> scales and biases ``[n, elements / 32]`` float32.
    exact: Whether nothing is lost.
    """

    name: str
    elements: int
    nbytes: int
    bits: int
    codes: Callable[[np.ndarray], np.ndarray]
    affine: Callable[[np.ndarray], Affine]
    exact: bool = True


class BlocksRef(DecodedRef):
    """One part of the affine form of a matrix whose rows are blocks.

    source: ``[R, bytes of a row]`` U8. part: ``weight`` (U32), ``scales`` or ``biases`` (F32).
    """

    __slots__ = ("kind", "part", "width")

    def __init__(self, name: str, source: TensorRef, *, kind: BlockKind, part: str) -> None:
        rows, row_bytes = source.shape
        if row_bytes % kind.nbytes:
            raise CheckpointError(
                f"{source.file}: a row of '{name}' has {row_bytes} bytes, no whole blocks of "
                f"{kind.name}."
            )
        self.kind, self.part = kind, part
        self.width = row_bytes // kind.nbytes * kind.elements
        columns = self.width * kind.bits // 32 if part == "weight" else self.width // GROUP
        dtype = "U32" if part == "weight" else "F32"
        super().__init__(f"{name}.{part}", (source,), dtype=dtype, shape=(rows, columns))

    @classmethod
    def parts(cls, name: str, source: TensorRef, kind: BlockKind) -> dict[str, BlocksRef]:
        """All three of one matrix, by part."""
        return {
            part: cls(name, source, kind=kind, part=part) for part in ("weight", "scales", "biases")
        }

    def rows(self, start: int, stop: int) -> BlocksRef:
        """See :meth:`DecodedRef.rows`."""
        self._check_rows(start, stop)
        name = f"{self.name.removesuffix(f'.{self.part}')}[{start}:{stop}]"
        return BlocksRef(name, self.sources[0].rows(start, stop), kind=self.kind, part=self.part)

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        rows, kind = self.shape[0], self.kind
        blocks = raw[0].reshape(rows, -1, kind.nbytes)
        out = out.reshape(rows, -1)
        for start, stop in self._row_chunks():
            some = blocks[start:stop].reshape(-1, kind.nbytes)
            if self.part == "weight":
                packed = pack(kind.codes(some), kind.bits)
                out[start:stop] = packed.reshape(stop - start, -1)
            else:
                values = kind.affine(some)[self.part == "biases"]
                out[start:stop] = (
                    np.ascontiguousarray(values).view(np.uint8).reshape(stop - start, -1)
                )

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`."""
        elements = min(self.shape[0] * self.width, ELEMENTS_AT_ONCE + self.width)
        return SCRATCH_PER_ELEMENT * elements

    def _row_chunks(self) -> Iterator[tuple[int, int]]:
        step = max(1, ELEMENTS_AT_ONCE // self.width)
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])


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


def _q8_affine(blocks: np.ndarray) -> Affine:
    d = _half(blocks, 0)
    return d, -128 * d


def _six_bit_pairs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima ``[n, 8]`` of the 12 bytes behind the two halves: four of each in the low
    six bits of eight bytes; of the other four the low halves, then the high ones on top."""
    low, high, both = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([low & 63, both & 15 | (low >> 6) << 4], axis=1)
    minima = np.concatenate([high & 63, both >> 4 | (high >> 6) << 4], axis=1)
    return scales, minima


def _k_affine(blocks: np.ndarray) -> Affine:
    scales, minima = _six_bit_pairs(blocks)
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


def q6_values(blocks: np.ndarray) -> np.ndarray:
    """Blocks of Q6_K ``[n, 210]`` -> elements ``[n, 256]`` float32."""
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 2, 32)  # halves of 128 elements, two stretches of bytes
    high = blocks[:, 128:192].reshape(n, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    pairs = high >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    q = (nibbles | pairs << 4).reshape(n, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[..., None].astype(np.float32) * q


def _q6_affine(blocks: np.ndarray) -> Affine:
    groups = q6_values(blocks).reshape(len(blocks), -1, GROUP)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    return ((high - low) / np.float32(255)).astype(np.float32), low


def _q6_codes(blocks: np.ndarray) -> np.ndarray:
    scales, biases = _q6_affine(blocks)
    groups = q6_values(blocks).reshape(len(blocks), -1, GROUP)
    steps = np.where(scales == 0, np.float32(1), scales)[..., None]
    q = np.rint((groups - biases[..., None]) / steps)
    return np.clip(q, 0, 255).astype(np.uint8).reshape(len(blocks), -1)


KINDS = {
    "Q8_0": BlockKind("Q8_0", 32, 34, 8, _q8_codes, _q8_affine),
    "Q4_K": BlockKind("Q4_K", 256, 144, 4, _q4_codes, _k_affine),
    "Q5_K": BlockKind("Q5_K", 256, 176, 5, _q5_codes, _k_affine),
    "Q6_K": BlockKind("Q6_K", 256, 210, 8, _q6_codes, _q6_affine, exact=False),
}
"""By GGUF's name."""
