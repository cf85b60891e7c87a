"""The form in MLX of GGUF's quantised tensors, made where they are read.

    Q4_0, Q4_1, Q4_K   affine, 4 bits          exact
    Q5_0, Q5_1, Q5_K   affine, 5 bits          exact
    Q8_0               affine, 8 bits          exact
    MXFP4              mxfp4, the same bits    exact
    others             affine, 8 bits          lossy, with requantize alone

Groups have 32 elements. Scales and biases are products of few bits, kept in float32. Blocks are
described in :mod:`mlx_moeflux.checkpoint.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np

from mlx_moeflux.checkpoint.blocks import DECODED, BlockMode
from mlx_moeflux.checkpoint.formats.decoded import DecodedRef, row_chunks
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError

GROUP = 32
# Decoded together: float32 values, codes, words that are packed.
ELEMENTS_AT_ONCE = 1 << 15
SCRATCH_PER_ELEMENT = 32


@dataclass(frozen=True)
class MlxForm:
    """A form of MLX's that blocks become.

    numbers: blocks ``[n, nbytes]`` uint8 -> q ``[n, elements]`` uint8. scales: blocks -> arrays
    ``[n, groups of a block]``: scales and, if affine, biases. exact: The values are the blocks'.
    """

    spec: QuantSpec
    numbers: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    exact: bool = True


def block_values(kind: BlockMode, blocks: np.ndarray) -> np.ndarray:
    """Return the elements ``[n, elements]`` float32 of blocks, as ggml computes them."""
    with np.errstate(invalid="ignore", over="ignore"):  # of factors that are not finite or large
        return kind.values(blocks, np)


class OfBlocks(DecodedRef):
    """Base of what is made of rows of blocks. source: ``[..., bytes of a row]``, each a byte."""

    __slots__ = ("kind", "width")

    def __init__(
        self, name: str, source: TensorRef, *, kind: BlockMode, dtype: str, bits: int
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
            some = self._made(blocks[start:stop].reshape(-1, kind.nbytes))
            some = np.ascontiguousarray(some).view(np.uint8)
            out[start:stop] = some.reshape(stop - start, -1)

    def _made(self, blocks: np.ndarray) -> np.ndarray:
        """Return what blocks ``[n, nbytes]`` become."""
        raise NotImplementedError

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`."""
        elements = min(prod(self.shape[:-1]) * self.width, ELEMENTS_AT_ONCE + self.width)
        return SCRATCH_PER_ELEMENT * elements


class BlocksRef(OfBlocks):
    """One part of MLX's form of matrices whose rows are blocks.

    part: ``weight`` (U32), ``scales`` (F32, of mxfp4 U8) or ``biases`` (F32).
    """

    __slots__ = ("form", "part")

    def __init__(
        self, name: str, source: TensorRef, *, kind: BlockMode, form: MlxForm, part: str
    ) -> None:
        dtype, bits = "F32" if form.spec.is_affine else "U8", 32 // GROUP
        if part == "weight":
            dtype, bits = "U32", form.spec.bits
        self.form, self.part = form, part
        super().__init__(f"{name}.{part}", source, kind=kind, dtype=dtype, bits=bits)

    @classmethod
    def parts(
        cls, name: str, source: TensorRef, kind: BlockMode, form: MlxForm
    ) -> dict[str, TensorRef]:
        """All of one tensor, by part."""
        parts = {
            part: cls(name, source, kind=kind, form=form, part=part) for part in form.spec.parts
        }
        # Readers ask for what both kinds of reference have.
        return cast("dict[str, TensorRef]", parts)

    def rows(self, start: int, stop: int) -> BlocksRef:
        """See :meth:`DecodedRef.rows`."""
        self._check_rows(start, stop)
        name = f"{self.name.removesuffix(f'.{self.part}')}[{start}:{stop}]"
        source = self.sources[0].rows(start, stop)
        return BlocksRef(name, source, kind=self.kind, form=self.form, part=self.part)

    def _made(self, blocks: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            if self.part == "weight":
                return pack(self.form.numbers(blocks), self.form.spec.bits)
            return self.form.scales(blocks)[self.form.spec.parts.index(self.part) - 1]


class BlockValuesRef(OfBlocks):
    """The elements of rows of blocks in float32, where no quantised form can take them."""

    __slots__ = ()

    def __init__(self, name: str, source: TensorRef, *, kind: BlockMode) -> None:
        super().__init__(name, source, kind=kind, dtype="F32", bits=32)

    def rows(self, start: int, stop: int) -> BlockValuesRef:
        """See :meth:`DecodedRef.rows`."""
        self._check_rows(start, stop)
        name = f"{self.name}[{start}:{stop}]"
        return BlockValuesRef(name, self.sources[0].rows(start, stop), kind=self.kind)

    def _made(self, blocks: np.ndarray) -> np.ndarray:
        return block_values(self.kind, blocks)


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


def _affine(kind: BlockMode) -> MlxForm:
    """Return the affine form of a type whose groups have it."""

    def scales(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        d, added = kind.scales(blocks, np)
        return d, np.float32(-kind.zero) * d if added is None else added

    return MlxForm(QuantSpec(kind.bits, GROUP), lambda blocks: kind.numbers(blocks, np), scales)


def _eight_bits(kind: BlockMode) -> MlxForm:
    """Return 8 bits in groups of 32 for any type, with an error of at most half a 255th of the
    range of 32 elements."""

    def groups_of(blocks: np.ndarray) -> np.ndarray:
        return kind.values(blocks, np).reshape(len(blocks), -1, GROUP)

    def scales(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        groups = groups_of(blocks)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        return ((high - low) / np.float32(255)).astype(np.float32), low

    def numbers(blocks: np.ndarray) -> np.ndarray:
        steps, low = (values[..., None] for values in scales(blocks))
        q = np.rint((groups_of(blocks) - low) / np.where(steps == 0, np.float32(1), steps))
        return np.clip(q, 0, 255).astype(np.uint8).reshape(len(blocks), -1)

    return MlxForm(QuantSpec(8, GROUP), numbers, scales, exact=False)


def _same_bytes(kind: BlockMode) -> MlxForm:
    """Return the mode of MLX that has the same numbers and the first byte as their scale."""
    spec = QuantSpec.of_mode(kind.mode)
    return MlxForm(spec, lambda blocks: kind.numbers(blocks, np), lambda blocks: (blocks[:, :1],))


EXACT = {
    name: _same_bytes(kind) if kind.of_mlx else _affine(kind)
    for name, kind in DECODED.items()
    if kind.of_mlx or (kind.group == GROUP and not kind.table)
}
"""The forms that have the values of blocks, by the type's name."""
REQUANTISED = {n: EXACT.get(n) or _eight_bits(kind) for n, kind in DECODED.items()}
"""A form for each type."""
