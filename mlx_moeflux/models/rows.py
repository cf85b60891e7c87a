"""Several rows of one sequence in the form of a batch: R sequences of one token with one state.

Layers without a state compute all rows in one call, as they compute a batch, through
:mod:`mlx_moeflux.kernels.rows`. Attention does so too where the entry appends all rows in one call.
Elsewhere the part of a mixer that reads or writes the state is called row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.rows import together
from mlx_moeflux.kernels.runtime import device


class RowsEntry:
    """Entry of one sequence, or its traced form, as layers see it while they read rows at
    `positions`, int32 ``[R]``. lengths: How many keys each row sees, int32 ``[R]``, if `entry`
    appends all rows in one call; else None."""

    def __init__(self, entry: Any, positions: mx.array, lengths: mx.array | None = None):
        self.entry, self.count, self._positions = entry, positions.size, positions
        self.lengths = lengths

    def real_tokens(self, T: int) -> None:
        """Return None: no row is padding."""

    def positions(self, T: int) -> mx.array:
        """Return the position of each row, int32 ``[R]``."""
        return self._positions

    def append(self, kernels: Kernels, *rows: mx.array) -> dict[str, Any]:
        """Append `rows` ``[R, ...]`` and return what attention to them takes."""
        with together(1):
            buffers = self.entry.append(kernels, *rows)
        return buffers | {"length": self.lengths}

    def each(self, function: Callable[..., mx.array], *arrays: mx.array | None) -> mx.array:
        """Return the concatenation of what ``function(entry, *arrays)`` returns for each row
        ``[1, ...]`` of `arrays`, in order."""
        results, none = [], [None] * self.count
        columns = [none if array is None else device.rows_of(array) for array in arrays]
        with together(1):
            for row in zip(*columns, strict=True):
                results.append(function(self.entry, *row))
        return mx.concatenate(results)

    def store(self, **arrays: Sequence[mx.array]) -> None:
        """Give a recurrent entry its arrays after each row, by name."""
        for row in zip(*arrays.values(), strict=True):
            vars(self.entry).update(zip(arrays, row, strict=True))
            self.entry.advance(1)


def as_rows(
    entries: Sequence[Any], positions: mx.array, lengths: mx.array | None = None
) -> list[Any]:
    """Return all entries as layers see them, see :class:`RowsEntry`. lengths: Of a traced step,
    for entries that append all rows in one call."""
    return [
        RowsEntry(entry, positions, lengths if entry.appends_together else None)
        for entry in entries
    ]
