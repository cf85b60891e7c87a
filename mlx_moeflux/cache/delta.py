"""Convolution window and delta state of gated delta net layers, for one sequence or a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache, Mark, as_ints
from mlx_moeflux.errors import CacheError


class RecurrentCache(BaseCache):
    """Convolution window and delta state of one layer; None until the first call.

    ``conv`` [B, width - 1, conv_dim]: the last inputs of the convolution, oldest first.
    ``delta`` [B, Hv, Dv, Dk] float32: the delta rule's state. (``state`` is both together
    with the counts, under the name by which mlx-lm saves every cache.)

    A layer's call of T columns reads ``make_mask(T)`` and ``lengths``, assigns ``conv`` and
    ``delta``, and ends with ``advance(T)``. Arrays are replaced, never written in place.
    """

    kind, fields = "recurrent", ("conv", "delta")

    def __init__(self) -> None:
        super().__init__()
        self.conv: Any = None
        self.delta: Any = None
        self._watched: frozenset[int] = frozenset()
        self._seen_at: dict[int, tuple[mx.array, mx.array]] = {}

    def make_mask(self, T: int) -> mx.array | None:
        """Return a mask of tokens in the next T columns, bool [B, T], or None if all are.

        Padding must not change ``delta``. In ``conv``, left padding counts as zeros, and the
        window ends at the last token, whose place ``lengths`` gives.
        """
        return self.real_tokens(T)

    # Looking back.

    def watch(self, positions: Iterable[int]) -> None:
        """Keep the state at these columns for :meth:`seen_at` and forget the ones kept before.

        The layer's mixer splits its call there, see :meth:`parts`.
        """
        self._watched, self._seen_at = frozenset(positions), {}

    def seen_at(self, column: int) -> tuple[mx.array, mx.array] | None:
        """Return (conv, delta) at a watched column, or None if it was not watched or passed."""
        return self._seen_at.get(column)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentCache:
        other = super().__deepcopy__(memo)
        other.watch(())
        return other

    def parts(self, T: int, size: int) -> list[tuple[int, int]]:
        """Split as :meth:`BaseCache.parts` does, and also at watched columns."""
        now = self.columns
        cuts = {column - now for column in self._watched if now < column < now + T}
        parts = []
        for start, stop in pairwise(sorted({0, T} | cuts)):
            parts += [(a, min(a + size, stop)) for a in range(start, stop, size)]
        return parts

    def advance(self, T: int) -> None:
        """Count T columns as written, call the hook, and keep the state if it is watched here."""
        self.columns += T
        if self.on_advance is not None:
            self.on_advance()
        if self.columns in self._watched:
            self._seen_at[self.columns] = self.conv, self.delta

    # One column at a time.

    def begin_step(self) -> tuple[mx.array, mx.array]:
        """Return ``conv`` and ``delta``, which a step of one column reads."""
        return self.conv, self.delta

    def end_step(self, conv: mx.array, delta: mx.array) -> None:
        """Store the arrays after the step and count its column."""
        self.conv, self.delta = conv, delta
        self.advance(1)

    # Going back.

    def is_trimmable(self) -> bool:
        """Return False: the state before a token cannot be recomputed."""
        return False

    def trim(self, n: int) -> int:
        """Raise CacheError unless n is 0."""
        if n == 0:
            return 0
        raise CacheError(
            f"A recurrent state cannot forget its last {n} tokens; restore a snapshot taken "
            "before them."
        )

    def mark(self) -> Mark:
        """Return a mark of this moment for ``rollback``; it holds the state's arrays."""
        return Mark(self.columns, dict(self.__dict__))

    def rollback(self, mark: Mark) -> None:
        """Return to the moment of ``mark``."""
        self.__dict__.update(mark.fields)

    # Batches.

    def _join(self, parts: list[RecurrentCache]) -> None:
        self._join_counts(parts)
        sizes = [part.batch_size for part in parts]
        self.conv = _stacked([part.conv for part in parts], sizes)
        self.delta = _stacked([part.delta for part in parts], sizes)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences, in this order."""
        keep = as_ints(batch_indices, "batch_indices")
        all_stay = keep == list(range(self.batch_size))
        self._keep(keep)
        if all_stay:
            return
        index = mx.array(keep, dtype=mx.int32)
        self.conv = None if self.conv is None else self.conv[index]
        self.delta = None if self.delta is None else self.delta[index]

    def extract(self, i: int) -> RecurrentCache:
        """Return an entry for sequence i alone, with a copy of its state."""
        self._require_final("extract()")
        single = type(self)()
        single.columns = self.seen()[i]
        if self.conv is not None:
            single.conv = mx.contiguous(self.conv[i : i + 1])
        if self.delta is not None:
            single.delta = mx.contiguous(self.delta[i : i + 1])
        mx.async_eval([array for array in single._arrays() if array is not None])
        return single

    # Saving.

    @property
    def state(self) -> tuple[Any, ...]:
        """Return (conv, delta, columns, left padding, ends), for saving and ``mx.eval``."""
        return self.conv, self.delta, self.columns, *self._padding_state()

    @state.setter
    def state(self, state) -> None:
        if isinstance(state, mx.array):
            raise CacheError("state is the whole entry; assign the delta rule's array to delta.")
        self.conv, self.delta, columns, padding, ends = state
        self._load_padding(columns, padding, ends)


def _stacked(arrays: list[mx.array | None], sizes: list[int]) -> mx.array | None:
    """Concatenate the arrays of several batches, with zeros where a batch has none yet."""
    shape = next((array for array in arrays if array is not None), None)
    if shape is None:
        return None
    return mx.concatenate(
        [
            mx.zeros((B, *shape.shape[1:]), shape.dtype) if array is None else array
            for array, B in zip(arrays, sizes, strict=True)
        ]
    )
