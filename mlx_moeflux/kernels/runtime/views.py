"""Short views of large arrays, which launches of few rows on Metal get in their place.

MLX ends a command buffer after 40 or 50 launches, or after launches that were given arrays of more
than 40 or 50 Mi elements. It counts the elements of the array that it is given, but binds the whole
buffer. So a view of a few elements that begins where the array does is the same to a kernel, and
counts next to nothing. It has the array's length along one axis, which kernels may read.

A view keeps the buffer of its array in memory, and MLX writes in place only where nothing else
holds the buffer. Views of parameters and banks therefore die with their arrays. Those of a cache
live from one write of its buffers to the next.

Launches of many rows get whole arrays: MLX then ends command buffers soon enough for macOS, and
frees what they used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import mlx.core as mx

# A launch has few rows if its first input has at most so many: a token, drafts, small batches, with
# a row for each of their experts.
MOST_ROWS = 512
# Elements of an array that is worth a view. A command buffer has some hundred inputs.
LEAST_ELEMENTS = 1 << 16
# MLX passes inputs of fewer elements in Metal's `constant` address space, where functions that
# take `device` pointers do not compile.
LEAST_INPUT = 8


class Short(NamedTuple):
    """The view of an array. Nothing here keeps the array alive. any_rows: True if launches of many
    rows take it too."""

    owner: weakref.ref[mx.array]
    view: mx.array
    any_rows: bool


# By id() of the array, as long as it lives.
SHORTS: dict[int, Short] = {}


def short(array: mx.array, axis: int = 0) -> mx.array | None:
    """Return a view of the first elements of `array`, which is dense, as long along `axis` if there
    are several axes; None if the array is not large."""
    if array.size < LEAST_ELEMENTS:
        return None
    shape = [1] * array.ndim
    if array.ndim > 1:
        shape[axis] = array.shape[axis]
    shape[-1] *= -(-LEAST_INPUT // (shape[axis] if array.ndim > 1 else 1))
    return mx.as_strided(array, shape, [*accumulate(shape[:0:-1], mul, initial=1)][::-1])


def is_dense(array: mx.array) -> bool:
    """Return True if the elements lie in order and without gaps: a view of others would be of a
    copy. Evaluates: the array, and the host looks at it."""
    # MLX's stubs do not declare the buffer protocol.
    return memoryview(array).c_contiguous  # pyright: ignore[reportArgumentType]


def keep(arrays: Iterable[mx.array]) -> None:
    """Make a view of each of `arrays`, which are dense, that is large and has none, for as long as
    the array lives. Evaluates: the views."""
    new = [array for array in arrays if id(array) not in SHORTS]
    made = [short(array) for array in new]
    mx.eval([view for view in made if view is not None])
    bind(new, made)


def bind(
    arrays: Sequence[mx.array], views: Sequence[mx.array | None], *, any_rows: bool = False
) -> None:
    """Let launches that get one of `arrays` take its view, as long as the array lives. There may be
    fewer views than arrays. any_rows: See :class:`Short`; a cache has one of its own, because its
    queries have a row for each head."""
    for array, view in zip(arrays, views, strict=False):
        if view is not None:
            SHORTS[id(array)] = Short(_dying(array), view, any_rows)


def _dying(array: mx.array) -> weakref.ref[mx.array]:
    key = id(array)
    return weakref.ref(array, lambda _: SHORTS.pop(key, None))


def known(arrays: Iterable[mx.array]) -> list[mx.array | None]:
    """Return the views of `arrays`, None for those that have none."""
    found = (SHORTS.get(id(array)) for array in arrays)
    return [one and one.view for one in found]
