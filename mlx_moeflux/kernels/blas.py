"""Matrices on the CPU, multiplied by numpy's BLAS.

MLX's own products there reach 1 to 5 GFLOP/s, numpy's 40 to 150. Quantised matrices are made dense
first, in float32. What the weights of a model look like then is kept, as long as all that is kept
takes no more than KEPT_BYTES; the rest is made anew for every call.

Each row of a call is multiplied on its own (a matrix times a vector): what it gives depends on
nothing but the row and the matrix, whichever rows are computed beside it. A BLAS promises no such
thing of matrix products, and numpy's does not keep it.

Arrays are evaluated: calls that MLX only traces are refused, and go to the references.
"""

from __future__ import annotations

import functools
import io
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import prod
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import UnsupportedError

KEPT_BYTES = 128 << 20
# Numbers that are made dense at once where they are not kept.
BLOCK = 1 << 20
# Numbers up to which several matrices of a bank are made dense at once: what they share of the
# work counts, and they are in a core's cache when they are multiplied.
SEVERAL = 1 << 17
# Numbers up to which an array is sooner copied than reshaped.
SMALL = 1 << 14


class Stored(Protocol):
    """A matrix, or one for each slot, as :class:`~mlx_moeflux.kernels.project.Weight` has it."""

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    spec: QuantSpec | None


class Kept:
    """Dense matrices that live as long as the packed ones that they were made from. One is kept
    when it is asked for again: new memory costs more than a matrix is worth to a single call."""

    def __init__(self, limit: int):
        self.limit, self.nbytes = limit, 0
        # None: asked for once.
        self._known: dict[int, dict[tuple[int | None, int], np.ndarray | None]] = {}

    def find(self, matrix: Stored, slot: int | None) -> np.ndarray | None:
        known = self._known.get(id(matrix.weight))
        return None if known is None else known.get((slot, id(matrix.scales)))

    def wants(self, matrix: Stored, slot: int | None, nbytes: int) -> bool:
        """Whether a matrix that is not here should be: it was asked for before, and fits."""
        owner, key = id(matrix.weight), (slot, id(matrix.scales))
        if owner not in self._known:
            self._known[owner] = {}
            weakref.finalize(matrix.weight, self.forget, owner)
        known = self._known[owner]
        again = key in known
        known.setdefault(key, None)
        return again and self.nbytes + nbytes <= self.limit

    def keep(self, matrix: Stored, slot: int | None, values: np.ndarray) -> None:
        self.nbytes += values.nbytes
        self._known[id(matrix.weight)][slot, id(matrix.scales)] = values

    def forget(self, owner: int) -> None:
        """What was made from the array with this id, if anything was."""
        known = self._known.pop(owner, {}).values()
        self.nbytes -= sum(values.nbytes for values in known if values is not None)


kept = Kept(KEPT_BYTES)


def values_of(x: mx.array) -> np.ndarray:
    """A view of an array, evaluated.

    Raises:
        UnsupportedError: MLX is tracing, for a compiled function or a gradient.
    """
    try:
        values = np.asarray(x)
    except ValueError:
        values = None
    if values is not None:
        graph = io.StringIO()
        mx.export_to_dot(graph, x)
        # What was computed from what a gradient is taken of keeps its graph, evaluated or not.
        if "rectangle" not in graph.getvalue():
            return values
    raise UnsupportedError(
        "numpy cannot compute what MLX traces; take the reference (MOEFLUX_KERNELS=reference)."
    )


def remember(made: Sequence[mx.array]) -> None:
    """Arrays of numbers that numpy computed: :func:`reshaped` knows the small ones until this
    thread's next."""
    _local.made = [array for array in made if array.size <= SMALL]


def reshaped(x: mx.array, *shape: int) -> mx.array:
    """``x.reshape(shape)``. On the CPU MLX hands every operation to another thread, and waiting for
    it takes some 80 us: what :func:`remember` was told of last is copied instead."""
    if any(x is made for made in vars(_local).get("made", ())):
        return mx.array(np.asarray(x).reshape(shape))
    return x.reshape(shape)


def numbers(x: mx.array) -> np.ndarray:
    """:func:`values_of` a float32 array.

    Raises:
        UnsupportedError: It is of another dtype, or MLX is tracing.
    """
    if x.dtype != mx.float32:
        raise UnsupportedError(f"BLAS takes float32, not {x.dtype}; take the reference.")
    return values_of(x)


def rows_of(x: mx.array) -> np.ndarray:
    """``[..., C]`` float32 -> ``[N, C]``; see :func:`numbers`."""
    return numbers(x).reshape(-1, x.shape[-1])


def readable(matrix: object) -> bool:
    """Whether :func:`dense` knows how a matrix is stored."""
    if getattr(matrix, "weight", None) is None:
        return False
    spec = matrix.spec
    if spec is None:
        return matrix.weight.dtype in (mx.float32, mx.float16, mx.bfloat16)
    return spec.mode == "affine" and matrix.biases is not None


def product(
    rows: np.ndarray,
    matrix: Stored,
    slot: int | None = None,
    *,
    views: Views | None = None,
    keep: bool = True,
    known: np.ndarray | None = None,
) -> np.ndarray:
    """rows ``[N, in]`` -> ``[N, out]``, each row on its own.

    slot: Which matrix of a bank. views: Its arrays, if they are known. keep: What is in the matrix
    never changes, so that its dense form may be kept. known: Its dense form, if that was made.
    """
    out = matrix.weight.shape[-2]
    if known is None and keep and matrix.weight.dtype != mx.float32:
        known = kept.find(matrix, slot)
        if known is None and kept.wants(matrix, slot, 4 * out * rows.shape[1]):
            known = dense(matrix, slot, views)
            kept.keep(matrix, slot, known)
    # The same blocks whether they are kept or not: the same bits.
    step = max(64, BLOCK // rows.shape[1] // 64 * 64)
    if known is None and views is None:
        views = Views.of(matrix)
    parts = []
    for start in range(0, out, step):
        part = slice(start, start + step)
        if known is None:
            into = scratch("block", BLOCK)
            parts.append(times(rows, dense(matrix, slot, views, part, into=into)))
        else:
            parts.append(times(rows, known[part]))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class Views(NamedTuple):
    """The arrays of a matrix as numpy sees them; bfloat16 as integers of 16 bits."""

    weight: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None

    @classmethod
    def of(cls, matrix: Stored) -> Views:
        return cls(*(None if a is None else _view(a) for a in
                     (matrix.weight, matrix.scales, matrix.biases)))  # fmt: skip


def dense_each(
    matrix: Stored, slots: Sequence[int], width: int, views: Views, role: str
) -> Iterator[np.ndarray | None]:
    """:func:`dense` of these slots of a bank, one after the other, in the :func:`scratch` of this
    role; width: Their ``in``. None where a matrix is better made in parts, by :func:`product`."""
    some = SEVERAL // (matrix.weight.shape[-2] * width)
    if some < 2:
        yield from repeat(None, len(slots))
        return
    for start in range(0, len(slots), some):
        part = np.array(slots[start : start + some])
        yield from dense(matrix, part, views, into=scratch(role, SEVERAL))


_local = threading.local()


def scratch(role: str, count: int) -> np.ndarray:
    """`count` numbers of this thread's, the same memory for each call in a role: what is fresh from
    the system costs a fault for every page, more than is computed with it."""
    known = vars(_local).get(role)
    if known is None or known.size < count:
        known = vars(_local)[role] = np.empty(count, np.float32)
    return known


def dense(
    matrix: Stored,
    slot: int | np.ndarray | None = None,
    views: Views | None = None,
    part: slice = slice(None),
    into: np.ndarray | None = None,
) -> np.ndarray:
    """A matrix, or those of one slot or several, or some of their rows, ``[..., out, in]`` in
    float32; see :func:`product`. into: Memory to use, if there is enough."""
    spec, views = matrix.spec, views or Views.of(matrix)
    index = part if slot is None else (slot, part)
    views = Views(*(None if a is None else a[index] for a in views))
    if spec is None:
        return _single(views.weight, into)
    scales, biases = (_single(a)[..., None] for a in views[1:])
    if spec.bits == 8:
        eight = views.weight.view(np.uint8)
        values = _memory(into, eight.shape)
        values[...] = eight
    elif spec.bits in _TABLES:
        packed = views.weight.view(_TABLES[spec.bits][0])
        values = _memory(into, (*packed.shape[:-1], 4 * packed.shape[-1]))
        np.take(_table(spec.bits), packed, mode="clip", out=values.view(np.complex128))
    else:
        values = _unpacked(views.weight, spec.bits)
    grouped = values.reshape(*scales.shape[:-1], spec.group_size)
    grouped *= scales
    grouped += biases
    return values


def floats(array: mx.array) -> np.ndarray:
    """In float32; a view where it is that already."""
    return _single(_view(array))


def _view(array: mx.array) -> np.ndarray:
    return values_of(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _single(values: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
    if values.dtype == np.uint16:
        whole = _memory(into, values.shape).view(np.uint32)
        whole[...] = values
        whole <<= 16
        return whole.view(np.float32)
    return values.astype(np.float32, copy=False)


def _memory(into: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    count = prod(shape)
    if into is None or into.size < count:
        return np.empty(shape, np.float32)
    return into[:count].reshape(shape)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """``[..., W]`` uint32 -> ``[..., 32 W / bits]`` float32, for numbers that cross words."""
    stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(*packed.shape[:-1], -1, bits)
    return stream.astype(np.float32) @ (2.0 ** np.arange(bits, dtype=np.float32))


# Bits -> integers that hold four numbers.
_TABLES = {2: (np.uint8, 4), 4: (np.uint16, 4)}


@functools.cache
def _table(bits: int) -> np.ndarray:
    """Integer -> its four numbers as floats, seen as one element of 16 bytes."""
    integers, count = _TABLES[bits]
    packed = np.arange(np.iinfo(integers).max + 1, dtype=np.uint16)
    values = np.empty((len(packed), count), np.float32)
    for i in range(count):
        values[:, i] = packed >> i * bits & (1 << bits) - 1
    return values.view(np.complex128)[:, 0]


# As MLX does: infinities and NaN go their way without a word.
quiet = np.errstate(all="ignore")


def times(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """rows ``[N, in]``, matrix ``[out, in]`` -> ``[N, out]``, row by row."""
    return np.matmul(rows[:, None], matrix.T)[:, 0]


def rms_norm(rows: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """``[N, C]`` -> ``[N, C]``."""
    # What np.mean computes, without its checks.
    mean = np.add.reduce(rows * rows, axis=-1, keepdims=True) / np.float32(rows.shape[-1])
    return rows * (1.0 / np.sqrt(mean + np.float32(eps))) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp(-x) may overflow to infinity: the result is 0 then, as it should be.
    return 1.0 / (1.0 + np.exp(-x))
