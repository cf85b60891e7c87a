"""Traced forms of cache entries, which layers get in their place while MLX traces a decode step.

Positions are arrays there, and the arrays of an entry are inputs and outputs of the step. The class
of each entry makes its own form, see :meth:`~mlx_moeflux.cache.base.BaseCache.traced`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx


class ChosenPositions:
    """Positions that the indexer of one layer chose, for the layers behind it that have none.

    Each part of a layer's input has its own, int32 ``[B, T, k]``, under the column of its first
    token; those of a traced step are under the numbers of its rows. parts: What an earlier segment
    of a step chose.
    """

    def __init__(self, parts: Iterable[mx.array] = ()) -> None:
        self._layer: Any = None
        self._parts = dict(enumerate(parts))

    @property
    def parts(self) -> list[mx.array]:
        """Return all that are kept."""
        return list(self._parts.values())

    def put(self, layer: Any, column: int, positions: mx.array) -> None:
        """Keep those of a part; another layer's are forgotten."""
        if layer is not self._layer:
            self._layer, self._parts = layer, {}
        self._parts[column] = positions

    def take(self, column: int, *, last: bool) -> mx.array:
        """Return those of a part. last: Nothing needs them afterwards."""
        return self._parts.pop(column) if last else self._parts[column]


class Step(NamedTuple):
    """Counts, padding and chosen positions that the entries of a traced step share.

    counts: Columns before the step and after each of its rows, int32 ``[1]`` each. padding: Of each
    sequence, on the left, int32 ``[B]``; None if there is none.
    """

    counts: Sequence[mx.array]
    padding: mx.array | None
    chosen: ChosenPositions

    @property
    def rows(self) -> int:
        """Return the rows of a sequence that the step reads."""
        return len(self.counts) - 1


class TracedEntry(Protocol):
    """Traced form of an entry: a step reads these members, layers call the entry's methods."""

    appends_together: bool
    """True if one call of ``append`` takes all rows of the step."""

    @property
    def ends(self) -> Sequence[tuple[mx.array, ...]]:
        """Arrays for ``end_step`` after each row of the step, or only the last, which hold those of
        all."""
        ...
