"""Export of cache entries as named arrays, and the arrays that a model's entries must have.

Saved states and prompt caches consist of these; :mod:`mlx_moeflux.state_arrays` declares them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache
from mlx_moeflux.checkpoint.tensors import mlx_dtype
from mlx_moeflux.errors import CacheError
from mlx_moeflux.state_arrays import ROW_AXIS, ArraySpec, EntrySpec

# safetensors code of each dtype that a state or its logits may have.
DTYPE_CODES = {mlx_dtype(code): code for code in ("F32", "BF16", "F16", "I32", "U32", "U16", "U8")}


def spec_of(entry: BaseCache) -> EntrySpec:
    """Return the spec of an entry that has seen a token; evaluates nothing."""
    arrays = {}
    for field, array in zip(entry.declared.fields, entry.arrays, strict=True):
        assert array is not None  # it has seen a token
        shape = list(array.shape)
        if field.grows:
            shape[ROW_AXIS] = 0
        arrays[field.name] = ArraySpec(DTYPE_CODES[array.dtype], tuple(shape))
    return EntrySpec(entry.kind, arrays, entry.declared.step)


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
        for field, array in zip(entry.declared.fields, _at(entry, stop), strict=True):
            if array is None:
                continue
            if field.grows:
                array = array[:, :, start : entry.columns if stop is None else stop]
            found[f"layers.{i}.{field.name}"] = mx.contiguous(array)
    return found


def _at(entry: Any, position: int | None) -> Sequence[mx.array | None]:
    if position in (None, entry.columns) or entry.declared.grows:
        return entry.arrays
    found = entry.seen_at(position)
    if found is None:
        raise CacheError(f"The state at position {position} was not watched; it is gone.")
    return found


def adopt(entries: Sequence[BaseCache], arrays: Mapping[str, mx.array], *, position: int) -> None:
    """Set each entry to one sequence of `position` tokens; the reverse of :func:`export`.

    The caller has checked `arrays` against a :class:`StateSpec`, so no entry can fail.
    """
    for i, entry in enumerate(entries):
        held = (arrays.get(f"layers.{i}.{field.name}") for field in entry.declared.fields)
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
