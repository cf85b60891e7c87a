"""References to bytes on disk: one tensor, or one component of many experts.

Nothing here reads before it is asked; see ``tensors.py`` for where references come from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, overload

from mlx_moeflux.checkpoint.files import read_exact, unreadable
from mlx_moeflux.errors import CheckpointError, ShapeError

if TYPE_CHECKING:
    import mlx.core as mx

ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by safetensors dtype code."""

_MLX_NAMES = {
    "BOOL": "bool_",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def mlx_dtype(code: str) -> mx.Dtype:
    """The MLX dtype that holds a safetensors dtype; 8-bit floats are held as uint8."""
    import mlx.core as mx

    if code not in ITEMSIZE:
        raise CheckpointError(
            f"dtype {code!r} is not one that this package reads; known are {', '.join(ITEMSIZE)}."
        )
    return getattr(mx, _MLX_NAMES.get(code, "uint8"))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor's bytes lie: nothing is read until asked.

    ``offset`` is absolute in ``file``; ``dtype`` is a safetensors code; the bytes are row-major
    and little-endian.
    """

    name: str
    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    def index(self, i: int) -> TensorRef:
        """Entry ``i`` of axis 0, which is dropped: [E, ...] -> [...]."""
        self._check_axis_0(i, i + 1)
        inner = self.shape[1:]
        offset = self.offset + i * prod(inner) * ITEMSIZE[self.dtype]
        return TensorRef(f"{self.name}[{i}]", self.file, offset, self.dtype, inner)

    def rows(self, start: int, stop: int) -> TensorRef:
        """Entries ``start`` to ``stop`` of axis 0, which is kept: [R, ...] -> [stop-start, ...]."""
        self._check_axis_0(start, stop)
        inner = self.shape[1:]
        offset = self.offset + start * prod(inner) * ITEMSIZE[self.dtype]
        name = f"{self.name}[{start}:{stop}]"
        return TensorRef(name, self.file, offset, self.dtype, (stop - start, *inner))

    def read_into(self, view: memoryview) -> None:
        """Read the tensor's bytes into a writable buffer of exactly ``nbytes`` bytes.

        Raises CheckpointError, naming file and offset, if the file cannot be read or ends early.
        """
        if view.nbytes != self.nbytes:
            raise ShapeError(
                f"{self.name!r} has {self.nbytes} bytes, but the buffer to fill has {view.nbytes};"
                " pass a view of exactly the tensor's size."
            )
        if not self.nbytes:
            return
        try:
            fd = os.open(self.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as cause:
            raise unreadable(self.file, cause) from cause
        try:
            read_exact(
                fd, view.cast("B"), offset=self.offset, file=self.file, error=CheckpointError
            )
        finally:
            os.close(fd)

    def load(self) -> mx.array:
        """The tensor as an evaluated array of :func:`mlx_dtype`; 8-bit floats come as uint8."""
        import mlx.core as mx
        import numpy as np

        dtype = mlx_dtype(self.dtype)
        if self.nbytes and mx.cuda.is_available():
            # A host view of a CUDA array would move it to managed memory for good.
            raw = np.empty(self.nbytes, dtype=np.uint8)
            self.read_into(raw.data)
            array = mx.array(raw).view(dtype).reshape(self.shape)
        else:
            # Straight into MLX's own storage: a copy would double the peak of a large embedding.
            array = mx.empty(self.shape, dtype=dtype)
            self.read_into(memoryview(array))
        mx.eval(array)
        return array

    def _check_axis_0(self, start: int, stop: int) -> None:
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(
                f"{self.name!r} has shape {list(self.shape)}: no rows {start} to {stop} on axis 0."
            )


class StridedRefs(Sequence[TensorRef]):
    """One component of E experts at a fixed stride in one file; entries are made when asked.

    Entry ``e`` lies at ``offset + e * stride`` and has ``dtype`` and ``shape``.
    """

    __slots__ = ("dtype", "file", "name", "num_experts", "offset", "shape", "stride")

    def __init__(
        self,
        *,
        name: str,
        file: Path,
        offset: int,
        stride: int,
        num_experts: int,
        dtype: str,
        shape: tuple[int, ...],
    ) -> None:
        self.name, self.file, self.dtype, self.shape = name, file, dtype, shape
        self.offset, self.stride, self.num_experts = offset, stride, num_experts

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's entry."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    def __len__(self) -> int:
        return self.num_experts

    @overload
    def __getitem__(self, index: int) -> TensorRef: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorRef]: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[e] for e in range(*index.indices(self.num_experts)))
        e = index + self.num_experts if index < 0 else index
        if not 0 <= e < self.num_experts:
            raise IndexError(f"{self.name!r} has {self.num_experts} experts: there is no {index}.")
        offset = self.offset + e * self.stride
        return TensorRef(f"{self.name}[{e}]", self.file, offset, self.dtype, self.shape)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, {self.num_experts} x {self.dtype}"
            f" {list(self.shape)} at {self.file}:{self.offset} + e * {self.stride})"
        )


class StackedRefs(StridedRefs):
    """The experts of one stacked tensor [E, R, ...], or rows ``start`` to ``stop`` of each.

    The window splits a fused projection: of ``gate_up_proj`` [E, 2F, C] the rows (0, F) are the
    gate and (F, 2F) the up projection.
    """

    __slots__ = ()

    def __init__(self, stacked: TensorRef, rows: tuple[int, int] | None = None) -> None:
        if not stacked.shape or not stacked.shape[0]:
            raise CheckpointError(
                f"{stacked.name!r} in {stacked.file} has shape {list(stacked.shape)}, but a stack"
                " of experts needs an axis 0 of at least one; check that it is the right tensor."
            )
        first = stacked.index(0)
        entry = first if rows is None else first.rows(*rows)
        super().__init__(
            name=stacked.name if rows is None else f"{stacked.name}[:, {rows[0]}:{rows[1]}]",
            file=stacked.file,
            offset=entry.offset,
            stride=first.nbytes,
            num_experts=stacked.shape[0],
            dtype=stacked.dtype,
            shape=entry.shape,
        )


ExpertRefs = Sequence[TensorRef]
"""Entry ``e`` is expert e's bytes of one component; all have the same dtype and shape."""
