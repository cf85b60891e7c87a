"""Arrays of a size that does not grow, as gated delta nets keep, for one sequence or a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache, Mark, as_ints
from mlx_moeflux.cache.traced import Step
from mlx_moeflux.errors import CacheError
from mlx_moeflux.state_arrays import RECURRENT


class RecurrentCache(BaseCache):
    """Convolution window and delta state of one layer; None until the first call.

    ``conv`` [B, width - 1, conv_dim]: the last inputs of the convolution, oldest first.
    ``delta`` [B, Hv, Dv, Dk] float32: the delta rule's state. (``state`` is both together
    with the counts, under the name by which mlx-lm saves every cache.)

    A subclass may declare other arrays, all of them [B, ...], none with a row for each token. A
    layer's call of T columns reads ``make_mask(T)`` and ``lengths``, assigns the arrays, and ends
    with ``advance(T)``. Arrays are replaced, never written in place.
    """

    conv: Any
    delta: Any

    declared, kind = RECURRENT, RECURRENT.name
    takes_steps = takes_rows = True

    def __init__(self) -> None:
        super().__init__()
        self._set([None] * len(self.declared.fields))
        self._watched: frozenset[int] = frozenset()
        self._seen_at: dict[int, tuple[mx.array | None, ...]] = {}

    def _arrays(self) -> tuple[mx.array | None, ...]:
        return tuple(vars(self)[field.name] for field in self.declared.fields)

    def _set(self, arrays: Iterable[mx.array | None]) -> None:
        """Assign all arrays, in the order of the fields."""
        vars(self).update(zip((f.name for f in self.declared.fields), arrays, strict=True))

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

    def seen_at(self, column: int) -> tuple[mx.array | None, ...] | None:
        """Return the arrays at a watched column, or None if it was not watched or passed."""
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
        if self.rows is not None:
            self._note_row(self.rows)
        if self.columns in self._watched:
            self._seen_at[self.columns] = self._arrays()

    # One column at a time.

    def begin_step(self, count: int = 1) -> tuple[mx.array | None, ...]:
        """Return the arrays, which a step of `count` columns reads."""
        return self._arrays()

    def end_step(self, *arrays: mx.array) -> None:
        """Store the arrays after the step and count its column."""
        self._set(arrays)
        self.advance(1)

    @classmethod
    def traced(cls, step: Step, arrays: Sequence[Any]) -> Self:
        """Return an entry whose rows are on trial: the host's count of columns is not asked."""
        entry = cls()
        entry._set(arrays)
        entry.begin_rows(step.rows)
        return entry

    @property
    def ends(self) -> list[tuple[mx.array, ...]]:
        """Return the arrays after each row on trial."""
        assert self.rows is not None, "traced() begins them"
        return self.rows.states[1:]

    # Going back.

    def _row_state(self) -> tuple[mx.array | None, ...]:
        return self._arrays()

    def _back_to(self, columns: int, states: list[Any]) -> None:
        self._set(states[-1])
        self.columns = columns

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
        together = zip(*(part._arrays() for part in parts), strict=True)
        self._set(_stacked(list(each), sizes) for each in together)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences, in this order."""
        keep = as_ints(batch_indices, "batch_indices")
        all_stay = keep == list(range(self.batch_size))
        self._keep(keep)
        if all_stay:
            return
        index = mx.array(keep, dtype=mx.int32)
        self._set(None if array is None else array[index] for array in self._arrays())

    def extract(self, i: int) -> RecurrentCache:
        """Return an entry for sequence i alone, with a copy of its state."""
        self._require_final("extract()")
        single = type(self)()
        single.columns = self.seen()[i]
        single._set(
            None if array is None else mx.contiguous(array[i : i + 1]) for array in self._arrays()
        )
        mx.async_eval([array for array in single._arrays() if array is not None])
        return single

    # Saving.

    @property
    def state(self) -> tuple[Any, ...]:
        """Return (*arrays, columns, left padding, ends), for saving and ``mx.eval``."""
        return *self._arrays(), self.columns, *self._padding_state()

    @state.setter
    def state(self, state) -> None:
        if isinstance(state, mx.array):
            raise CacheError("state is the whole entry; assign the delta rule's array to delta.")
        *arrays, columns, padding, ends = state
        self._set(arrays)
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
