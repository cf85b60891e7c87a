"""Tensors that other formats' bytes are decoded into: FP8 with block scales, symmetric int4, global
scales of NVFP4, rows and columns in another order, tensors in one, functions of numbers.

A :class:`DecodedRef` stands where a :class:`~mlx_moeflux.checkpoint.tensors.TensorRef` does. It
says which byte ranges it needs and how they become its bytes, in NumPy alone, so that reading
threads can decode what they read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import cast

import numpy as np

from mlx_moeflux.checkpoint.tensors import ITEMSIZE, Ref, TensorRef
from mlx_moeflux.errors import CheckpointError

# Bounds the scratch of decoding: float32, its rounding, indices.
ELEMENTS_AT_ONCE = 1 << 18
SCRATCH_PER_ELEMENT = 16
# Largest numbers of E2M1 and E4M3.
NVFP4_UNIT = 6 * 448


class DecodedRef(Ref):
    """One tensor made of others' bytes; nothing is read until asked.

    `sources` are the byte ranges that it is made of, `dtype` and `shape` what comes out.
    """

    __slots__ = ("dtype", "file", "name", "offset", "shape", "sources")

    def __init__(
        self, name: str, sources: tuple[TensorRef, ...], *, dtype: str, shape: tuple[int, ...]
    ) -> None:
        self.name, self.sources, self.dtype, self.shape = name, sources, dtype, shape
        # Messages name the first source.
        self.file, self.offset = sources[0].file, sources[0].offset

    @abstractmethod
    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """The bytes of the sources (uint8, flat, in their order) -> this tensor's, into `out`
        (uint8, flat). Allocates no more than :attr:`scratch_bytes`."""

    @property
    def scratch_bytes(self) -> int:
        """Most bytes that :meth:`decode` allocates: some rows in float32 and intermediate
        values."""
        return SCRATCH_PER_ELEMENT * min(prod(self.shape), ELEMENTS_AT_ONCE + self.shape[-1])

    def _fill(self, view: memoryview) -> None:
        raw = [np.empty(ref.nbytes, np.uint8) for ref in self.sources]
        for ref, array in zip(self.sources, raw, strict=True):
            ref.read_into(array.data)
        self.decode(raw, np.frombuffer(view, np.uint8))


class BlockScaledRef(DecodedRef):
    """bfloat16 of an FP8 (E4M3) weight ``[R, W]`` with one scale per block.

    sources: the weight's rows and the scales ``[blocks, ceil(W / block columns)]`` of the blocks
    that hold them; `first` is the first row's place in its block. The product is computed in
    float32 and rounded once.
    """

    __slots__ = ("block", "first")

    def __init__(
        self,
        name: str,
        weight: TensorRef,
        scales: TensorRef,
        *,
        block: tuple[int, int],
        first: int = 0,
    ) -> None:
        super().__init__(name, (weight, scales), dtype="BF16", shape=weight.shape)
        self.block, self.first = block, first

    def rows(self, start: int, stop: int) -> BlockScaledRef:
        """See :meth:`Ref.rows`; only the scales of their blocks come along."""
        self._check_rows(start, stop)
        weight, scales = self.sources
        begin, rows = self.first + start, self.block[0]
        last = -(-(self.first + stop) // rows)
        return BlockScaledRef(
            f"{self.name}[{start}:{stop}]",
            weight.rows(start, stop),
            scales.rows(begin // rows, max(last, begin // rows)),
            block=self.block,
            first=begin % rows,
        )

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        rows, width = self.shape
        codes, decoded = raw[0].reshape(rows, width), out.view(np.uint16).reshape(rows, width)
        scales = floats(raw[1], self.sources[1].dtype).reshape(-1, -(-width // self.block[1]))
        step, columns = self.block
        for i in range(scales.shape[0]):
            part = slice(max(i * step - self.first, 0), max((i + 1) * step - self.first, 0))
            # What each of the 256 codes means in each block of these rows.
            meaning = bfloat16(E4M3 * scales[i][:, None])  # [blocks, 256]
            for j in range(scales.shape[1]):
                place = part, slice(j * columns, (j + 1) * columns)
                decoded[place] = meaning[j][codes[place]]

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`: tables of a row of blocks, and one block."""
        blocks = -(-self.shape[1] // self.block[1])
        one = min(self.block[0] * self.block[1], prod(self.shape))
        return SCRATCH_PER_ELEMENT * (256 * blocks + one)


class ScaledRef(DecodedRef):
    """`factor` times a float tensor, in its own dtype: the biases of a symmetric quantisation,
    where q means (q - 8) scale. A power of two, so nothing is rounded."""

    __slots__ = ("factor",)

    def __init__(self, name: str, tensor: TensorRef, factor: float) -> None:
        super().__init__(name, (tensor,), dtype=tensor.dtype, shape=tensor.shape)
        self.factor = factor

    def rows(self, start: int, stop: int) -> ScaledRef:
        """See :meth:`Ref.rows`."""
        self._check_rows(start, stop)
        part = self.sources[0].rows(start, stop)
        return ScaledRef(f"{self.name}[{start}:{stop}]", part, self.factor)

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        width = self.shape[1]
        size = ITEMSIZE[self.dtype] * width
        for start, stop in row_chunks(self.shape[0], ELEMENTS_AT_ONCE // width):
            part = slice(start * size, stop * size)
            values = floats(raw[0][part], self.dtype) * np.float32(self.factor)
            out[part] = encoded(values, self.dtype)


class GlobalScaleRef(DecodedRef):
    """The global scale ``[1]`` float32 of a matrix in NVFP4, from another library's one number.

    MLX divides it by 2688, see :mod:`mlx_moeflux.checkpoint.quantization`. inverse: The stored
    number divides the weights, else it multiplies them.
    """

    __slots__ = ("inverse",)

    def __init__(self, name: str, number: TensorRef, *, inverse: bool) -> None:
        super().__init__(name, (number,), dtype="F32", shape=(1,))
        self.inverse = inverse

    def rows(self, start: int, stop: int) -> GlobalScaleRef:
        """See :meth:`Ref.rows`; there is one."""
        self._check_rows(start, stop)
        return self

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`; rounded once."""
        number = floats(raw[0], self.sources[0].dtype).astype(np.float64)
        with np.errstate(divide="ignore", over="ignore"):
            value = NVFP4_UNIT / number if self.inverse else NVFP4_UNIT * number
            out.view(np.float32)[...] = value


class PickedRef(DecodedRef):
    """Every `step`-th row of a tensor from row `first` on, in order; with `transposed` of a matrix
    ``[in, out]``, whose columns become rows. Values keep their bits.

    window: Which of these rows; None: all.
    """

    __slots__ = ("first", "step", "transposed", "window")

    def __init__(
        self,
        name: str,
        source: TensorRef,
        *,
        first: int,
        step: int,
        transposed: bool,
        window: tuple[int, int] | None = None,
    ) -> None:
        shape = source.shape[::-1] if transposed else source.shape
        start, stop = window or (0, len(range(first, shape[0], step)))
        super().__init__(name, (source,), dtype=source.dtype, shape=(stop - start, *shape[1:]))
        self.first, self.step, self.transposed, self.window = first, step, transposed, (start, stop)

    def rows(self, start: int, stop: int) -> PickedRef:
        """See :meth:`Ref.rows`; the whole source is read."""
        self._check_rows(start, stop)
        return PickedRef(
            f"{self.name}[{start}:{stop}]",
            self.sources[0],
            first=self.first,
            step=self.step,
            transposed=self.transposed,
            window=(self.window[0] + start, self.window[0] + stop),
        )

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`; allocates nothing."""
        kind = f"u{ITEMSIZE[self.dtype]}"
        source = raw[0].view(kind).reshape(self.sources[0].shape)
        source = source.T if self.transposed else source
        start, stop = (self.first + self.step * row for row in self.window)
        out.view(kind).reshape(self.shape)[...] = source[start : stop : self.step]

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`."""
        return 0


class JoinedRef(DecodedRef):
    """Tensors of one dtype and width after each other on axis 0."""

    __slots__ = ("parts",)

    def __init__(self, name: str, parts: Sequence[Ref]) -> None:
        self.parts = tuple(parts)
        super().__init__(
            name,
            tuple(source for part in parts for source in sources_of(part)),
            dtype=parts[0].dtype,
            shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
        )

    def rows(self, start: int, stop: int) -> JoinedRef:
        """See :meth:`Ref.rows`; the parts outside are left out."""
        self._check_rows(start, stop)
        picked, begin = [], 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, part.shape[0])
            if first < last:
                picked.append(part.rows(first, last))
            begin += part.shape[0]
        return JoinedRef(f"{self.name}[{start}:{stop}]", picked or [self.parts[0].rows(0, 0)])

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        first, begin = 0, 0
        for part in self.parts:
            last = first + len(sources_of(part))
            _decode(part, raw[first:last], out[begin : begin + part.nbytes])
            first, begin = last, begin + part.nbytes

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`."""
        return max(map(_scratch_of, self.parts))


class ColumnsRef(DecodedRef):
    """A matrix with its columns in another order. order: Of equal runs of columns, which of the
    source's stands at each place."""

    __slots__ = ("matrix", "order")

    def __init__(self, name: str, matrix: Ref, order: Sequence[int]) -> None:
        self.matrix, self.order = matrix, tuple(order)
        super().__init__(name, sources_of(matrix), dtype=matrix.dtype, shape=matrix.shape)

    def rows(self, start: int, stop: int) -> ColumnsRef:
        """See :meth:`Ref.rows`."""
        name = f"{self.name}[{start}:{stop}]"
        return ColumnsRef(name, self.matrix.rows(start, stop), self.order)

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`."""
        matrix = np.empty_like(out)
        _decode(self.matrix, raw, matrix)
        count = len(self.order)
        runs = self.shape[0], count, self.shape[1] * ITEMSIZE[self.dtype] // count
        np.take(matrix.reshape(runs), self.order, axis=1, out=out.reshape(runs), mode="clip")

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`: the matrix once more."""
        return self.nbytes + _scratch_of(self.matrix)


class MappedRef(DecodedRef):
    """float32 of a function of each number of a float tensor, computed in float64 and rounded once.

    function: float64 -> float64.
    """

    __slots__ = ("function",)

    def __init__(
        self, name: str, tensor: TensorRef, function: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        super().__init__(name, (tensor,), dtype="F32", shape=tensor.shape)
        self.function = function

    def rows(self, start: int, stop: int) -> MappedRef:
        """See :meth:`Ref.rows`."""
        part = self.sources[0].rows(start, stop)
        return MappedRef(f"{self.name}[{start}:{stop}]", part, self.function)

    def decode(self, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
        """See :meth:`DecodedRef.decode`.

        Raises:
            CheckpointError: A number of the file has no value.
        """
        source = self.sources[0]
        with np.errstate(all="ignore"):
            values = self.function(floats(raw[0], source.dtype).astype(np.float64))
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{source.file}: '{source.name}' has numbers that no model has there; the file is "
                "damaged, download it again."
            )
        out[...] = encoded(values.astype(np.float32), "F32")

    @property
    def scratch_bytes(self) -> int:
        """See :attr:`DecodedRef.scratch_bytes`: float64, twice."""
        return 2 * SCRATCH_PER_ELEMENT * prod(self.shape)


def sources_of(ref: Ref) -> tuple[TensorRef, ...]:
    """Return the byte ranges that a tensor is made of."""
    return ref.sources if isinstance(ref, DecodedRef) else (cast("TensorRef", ref),)


def _decode(ref: Ref, raw: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Put the bytes of one part of another tensor into `out`."""
    if isinstance(ref, DecodedRef):
        ref.decode(raw, out)
    else:
        out[...] = raw[0]


def _scratch_of(ref: Ref) -> int:
    return ref.scratch_bytes if isinstance(ref, DecodedRef) else 0


def row_chunks(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Start and stop of chunks of `step` rows, at least one."""
    for start in range(0, rows, max(1, step)):
        yield start, min(start + max(1, step), rows)


def _e4m3() -> np.ndarray:
    """The 256 values of FP8 E4M3 without infinities, as float32."""
    code = np.arange(256)
    sign, exponent, mantissa = 1 - 2 * (code >> 7), (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[(code & 127) == 127] = np.nan
    return (sign * values).astype(np.float32)


E4M3 = _e4m3()


def floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of the bytes of a BF16, F16 or F32 tensor."""
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> the bytes of a BF16, F16 or F32 tensor, rounded to nearest."""
    if dtype == "F32":
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if dtype == "F16":
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    return bfloat16(values).reshape(-1).view(np.uint8)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16 as uint16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
