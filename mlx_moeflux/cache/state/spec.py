"""Export of cache entries as named arrays, and the arrays that a model's entries must have.

Saved states and prompt caches consist of these. An entry defines its ``kind``, the ``fields`` that
hold arrays, and the ``token_axis`` along which they have one row per token (None: their size does
not depend on the length of the sequence).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache
from mlx_moeflux.checkpoint.tensors import ITEMSIZE, mlx_dtype
from mlx_moeflux.errors import CacheError

# safetensors code of each dtype that a state or its logits may have.
DTYPE_CODES = {mlx_dtype(code): code for code in ("F32", "BF16", "F16", "I32", "U32", "U16", "U8")}


@dataclass(frozen=True)
class ArraySpec:
    """Dtype (safetensors code) and shape of an array; a dimension 0 stands for the tokens' rows."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of such an array."""
        return ITEMSIZE[self.dtype] * prod(self.shape)

    def rows(self, count: int) -> ArraySpec:
        """Return this spec with `count` rows of tokens."""
        return ArraySpec(self.dtype, tuple(n or count for n in self.shape))


@dataclass(frozen=True)
class EntrySpec:
    """Arrays of one layer's entry that has seen a token.

    step: Rows of tokens by which its arrays grow.
    """

    kind: str
    arrays: Mapping[str, ArraySpec]
    step: int = 1

    @classmethod
    def of(cls, entry: BaseCache) -> EntrySpec:
        """Return the spec of an entry that has seen a token; evaluates nothing."""
        arrays = {}
        for name in entry.fields:
            array = getattr(entry, name)
            shape = list(array.shape)
            if entry.token_axis is not None:
                shape[entry.token_axis] = 0
            arrays[name] = ArraySpec(DTYPE_CODES[array.dtype], tuple(shape))
        return cls(entry.kind, arrays, entry.step)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token; 0 for entries that do not grow."""
        return sum(array.rows(1).nbytes for array in self.arrays.values() if 0 in array.shape)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes after `tokens` tokens, reserved rows included."""
        rows = -(-tokens // self.step) * self.step
        return sum(array.rows(rows).nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class StateSpec:
    """Identity and arrays of one model's states.

    identity: Hash of everything that a state depends on. vocabulary: Number of logits.
    """

    identity: str
    entries: tuple[EntrySpec, ...]
    vocabulary: int

    def expected(self, tokens: int) -> dict[str, ArraySpec]:
        """Return ``layers.<i>.<field>`` -> array of a state's export of `tokens` tokens."""
        return {
            f"layers.{i}.{name}": array.rows(tokens)
            for i, entry in enumerate(self.entries)
            for name, array in entry.arrays.items()
        }


def export(entries: Sequence[Any], start: int = 0, stop: int | None = None) -> dict[str, mx.array]:
    """Return lazy copies of one sequence's arrays by ``layers.<i>.<field>``.

    Arrays with one row per token give the rows of tokens ``[start, stop)``. The others give their
    value at `stop`, which the entry must have watched; None means the present.

    Raises:
        CacheError: The entries hold several sequences, or one did not watch `stop`.
    """
    found = {}
    for i, entry in enumerate(entries):
        if entry.batch_size != 1:
            raise CacheError(
                f"The state holds {entry.batch_size} sequences; extract() one of them first."
            )
        if entry.columns != entry.seen()[0]:
            entry = entry.extract(0)
        for name, array in zip(entry.fields, _at(entry, stop), strict=True):
            if array is None:
                continue
            if entry.token_axis is not None:
                rows = [slice(None)] * array.ndim
                rows[entry.token_axis] = slice(start, entry.columns if stop is None else stop)
                array = array[tuple(rows)]
            found[f"layers.{i}.{name}"] = mx.contiguous(array)
    return found


def _at(entry: Any, position: int | None) -> Sequence[mx.array | None]:
    if position in (None, entry.columns) or entry.token_axis is not None:
        return [getattr(entry, name) for name in entry.fields]
    found = entry.seen_at(position)
    if found is None:
        raise CacheError(f"The state at position {position} was not watched; it is gone.")
    return found


def adopt(entries: Sequence[BaseCache], arrays: Mapping[str, mx.array], *, position: int) -> None:
    """Set each entry to one sequence of `position` tokens; the reverse of :func:`export`.

    The caller has checked `arrays` against a :class:`StateSpec`, so no entry can fail.
    """
    for i, entry in enumerate(entries):
        held = (arrays.get(f"layers.{i}.{name}") for name in entry.fields)
        entry.state = (*held, position, None, None)


def check_arrays(
    path: os.PathLike[str], found: Mapping[str, ArraySpec], expected: Mapping[str, ArraySpec]
) -> None:
    """Raise CacheError unless the arrays of a file are the expected ones."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            has, needs = (
                f"{array.dtype} {list(array.shape)}" if array else "nothing"
                for array in (found.get(name), expected.get(name))
            )
            raise CacheError(
                f"{path} has {has} as {name!r}, this model's states have {needs}; remove the file."
            )
