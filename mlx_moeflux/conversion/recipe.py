"""One weight on its way from a checkpoint to another: in row chunks, never held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.names import PARTS
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.refs import TensorRef
from mlx_moeflux.checkpoint.writer import Tensor

# Elements of a row chunk: 16 Mi of float32 are 64 MiB.
CHUNK_ELEMENTS = 16 << 20
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Recipe:
    """What happens to one weight.

    source: its weight and, when quantised, scales and biases. spec: how it is quantised on disk
    now. target: how it shall be. dtype: code of the output's floats. transform: of its rows.
    """

    source: tuple[TensorRef, ...]
    spec: QuantSpec | None
    target: QuantSpec | None
    dtype: str
    transform: Callable[[mx.array], mx.array] | None = None

    def outputs(self) -> dict[str, Tensor]:
        """Part (``weight``, ``scales``, ``biases``) -> what will be written."""
        rows, width = self.source[0].shape[0], self._width()
        if self.target is None:
            shape = self.source[0].shape
            if self.spec is not None:
                shape = (rows, width)
            elif self.transform is not None:
                shape = self._transformed_shape()
            return {"weight": Tensor(self.dtype, shape)}
        groups = Tensor(self.dtype, (rows, self.target.groups(width)))
        weight = Tensor("U32", (rows, self.target.words(width)))
        return {"weight": weight, "scales": groups, "biases": groups}

    def _width(self) -> int:
        last = self.source[0].shape[-1]
        return last if self.spec is None else last * 32 // self.spec.bits

    def _transformed_shape(self) -> tuple[int, ...]:
        ref = self.source[0]
        row = self.transform(mx.zeros((1, *ref.shape[1:])))
        return (ref.shape[0], *row.shape[1:])

    def chunks(self) -> Iterator[tuple[str, int, bytes]]:
        """(part, byte offset in that part, bytes), a row chunk at a time.

        Evaluates: each chunk.
        """
        ref = self.source[0]
        if not ref.shape:
            yield "weight", 0, self._converted(ref)["weight"]
            return
        step = max(1, CHUNK_ELEMENTS // max(self._width(), prod(ref.shape[1:])))
        done = dict.fromkeys(PARTS, 0)
        for start in range(0, ref.shape[0], step):
            stop = min(start + step, ref.shape[0])
            for part, data in self._rows(start, stop).items():
                yield part, done[part], data
                done[part] += len(data)

    def _rows(self, start: int, stop: int) -> dict[str, bytes]:
        arrays = [ref.rows(start, stop).load() for ref in self.source]
        if self.spec is not None and self.spec == self.target:
            parts = {"weight": arrays[0]}
            parts |= zip(("scales", "biases"), (self._cast(a) for a in arrays[1:]), strict=True)
        else:
            w = arrays[0]
            if self.spec is not None:
                w = mx.dequantize(*arrays, self.spec.group_size, self.spec.bits)
            if self.transform is not None:
                w = self.transform(w)
            if self.target is None:
                parts = {"weight": self._cast(w)}
            else:
                parts = dict(
                    zip(
                        PARTS,
                        mx.quantize(self._cast(w), self.target.group_size, self.target.bits),
                        strict=True,
                    )
                )
        return {part: _bytes(array) for part, array in parts.items()}

    def _converted(self, ref: TensorRef) -> dict[str, bytes]:
        return {"weight": _bytes(self._cast(ref.load()))}

    def _cast(self, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype({"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}[self.dtype])


def _bytes(array: mx.array) -> bytes:
    array = mx.contiguous(array)
    mx.eval(array)
    return bytes(memoryview(array).cast("B")) if array.ndim else np.array(array).tobytes()
