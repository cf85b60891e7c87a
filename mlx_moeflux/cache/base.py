"""Base class of cache entries: counts columns, tracks padding, rolls back.

Every call of a model adds T columns to each of B sequences. A column is a real token
unless it is padding:

    column        0 1 2 3 4 5 6
    sequence 0    . . a b c d e      padding 2: these columns precede the first token
    sequence 1    f g h i j . .      end 5: in a right-padded prompt the tokens end here

``prepare(lengths=...)`` announces right padding and ``finalize()`` turns it into left
padding, so that all sequences append their next token at the same column. Counts are
Python integers: reading them never waits for the device.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import mlx.core as mx

from mlx_moeflux.cache.traced import Step, TracedEntry
from mlx_moeflux.errors import CacheError
from mlx_moeflux.kernels.verify import failures
from mlx_moeflux.state_arrays import EntryKind


class Mark:
    """A moment of one cache entry, made by ``mark()`` and read by ``rollback()`` alone."""

    __slots__ = ("__weakref__", "columns", "fields", "spent")

    def __init__(self, columns: int, fields: dict[str, Any]):
        self.columns = columns
        self.fields = fields
        self.spent = False


MOST_ROWS = 4
"""Rows that a call reads on trial at most."""


class Rows:
    """Columns that were read on trial, see :mod:`mlx_moeflux.cache.rows`.

    start: Columns before them. count: Their number. states: What the entry kept before the first
    and after each.
    """

    __slots__ = ("count", "start", "states")

    def __init__(self, start: int, count: int, states: list[Any]):
        self.start, self.count, self.states = start, count, states


def as_ints(numbers: Sequence[int] | mx.array, what: str) -> list[int]:
    """Return Python ints from a list, tuple or integer array; errors call it ``what``."""
    listed: Any = numbers.tolist() if isinstance(numbers, mx.array) else numbers
    try:
        return [int(number) for number in listed]
    except TypeError:
        raise CacheError(f"{what} must be a list of integers, not {listed!r}.") from None


def _one_width(lengths: list[int], right: list[int]) -> bool:
    return (
        len(lengths) == len(right)
        and len({a + b for a, b in zip(lengths, right, strict=True)}) <= 1
    )


_NUMBERS = itertools.count()


class BaseCache:
    """Column counts of B sequences; the base of every cache entry. Not thread-safe.

    ``columns``: columns written so far, padding included, the same for all sequences.
    ``on_advance``: called without arguments whenever columns were written.

    A subclass names its arrays in ``declared``, returns them in that order from ``_arrays()``, and
    defines ``advance(T)``, which counts T columns as written and calls the hook.
    """

    declared: ClassVar[EntryKind]
    kind: ClassVar[str]
    """Name of ``declared``, and how rows are packed."""
    takes_steps: ClassVar[bool] = False
    """True if a traced step may take the arrays by ``begin_step``; see :meth:`traced`."""
    appends_together: bool = False
    """See :class:`~mlx_moeflux.cache.traced.TracedEntry`."""
    takes_rows: ClassVar[bool] = False
    """True if ``keep_rows`` can go back to the state after each of the last rows."""
    rows: Rows | None = None
    """Rows that the last call read on trial; see :mod:`mlx_moeflux.cache.rows`."""
    sequences: list[int | None] | None = None
    """A number of each sequence that :meth:`numbered` gave; None: it has none yet."""
    scratch = False
    """True if no later call reads this entry: layers in training compute on a copy of it."""
    state: Any
    _join: Callable[[list[Any]], None]

    def __init__(self) -> None:
        self.columns = 0
        self.on_advance: Callable[[], None] | None = None
        self._padding: list[int] | None = None
        self._ends: list[int] | None = None

    @classmethod
    def traced(cls, step: Step, arrays: Sequence[Any]) -> TracedEntry:
        """Return the traced form of an entry of this class, which does with `arrays`, those of
        ``begin_step``, what the entry does. A class whose entries append in another way than its
        base class has another form."""
        raise NotImplementedError

    def short_views(self) -> Sequence[mx.array | None]:
        """Return views that launches on Metal take in place of the first arrays of ``begin_step``;
        None for an array that has none."""
        return ()

    def _arrays(self) -> Sequence[mx.array | None]:
        raise NotImplementedError

    @property
    def arrays(self) -> Sequence[mx.array | None]:
        """Return the arrays in the order of ``declared``, every written row included."""
        return self._arrays()

    @property
    def batch_size(self) -> int:
        """Return B; 1 for an entry that has seen nothing and was not merged."""
        for array in self._arrays():
            if array is not None:
                return array.shape[0]
        return 1 if self._padding is None else len(self._padding)

    def _batch_known(self) -> bool:
        return self._padding is not None or any(a is not None for a in self._arrays())

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays, unused rows included."""
        return sum(array.nbytes for array in self._arrays() if array is not None)

    def empty(self) -> bool:
        """Return True while no column was written."""
        return self.columns == 0

    def seen(self) -> list[int]:
        """Return the tokens that each sequence has read, without padding."""
        last = [self.columns] * self.batch_size if self._ends is None else self._ends
        first = self._padding or [0] * len(last)
        return [max(min(self.columns, b) - a, 0) for a, b in zip(first, last, strict=True)]

    def size(self) -> int:
        """Return the tokens that the longest sequence has read."""
        return max(self.seen(), default=0)

    @property
    def offset(self) -> int | mx.array:
        """Return the position of the next token: an int, or int32 [B] where sequences differ."""
        first = self._padding
        if not first:
            return self.columns
        if min(first) == max(first):
            return self.columns - first[0]
        return mx.array([self.columns - a for a in first], dtype=mx.int32)

    @property
    def first_column(self) -> int:
        """Return the first column that is not padding of all sequences."""
        return min(self._padding or [0])

    def shorter(self, most: int) -> mx.array | None:
        """Return which sequences have at most `most` tokens, bool ``[B]``; None: none or all."""
        found = [self.columns - first <= most for first in self._padding or [0]]
        return mx.array(found) if any(found) and not all(found) else None

    @property
    def left_padding(self) -> mx.array | None:
        """Return the padding columns before each first token, int32 [B], or None if all are 0."""
        if not self._padding or not any(self._padding):
            return None
        return mx.array(self._padding, dtype=mx.int32)

    @property
    def lengths(self) -> mx.array | None:
        """Return the columns up to each sequence's end, int32 [B], or None unless prepared."""
        if self._ends is None:
            return None
        return mx.array([end - self.columns for end in self._ends], dtype=mx.int32)

    def real_tokens(self, T: int) -> mx.array | None:
        """Return a mask of tokens in the next T columns, bool [B, T], or None if all are."""
        now = self.columns
        left, ends = self._padding or (), self._ends or ()
        masked_left = left and any(a > now for a in left)
        masked_right = ends and any(b < now + T for b in ends)
        if not masked_left and not masked_right:
            return None
        column = mx.arange(now, now + T)
        mask = None
        if masked_left:
            mask = column >= mx.array(left)[:, None]
        if masked_right:
            before_end = column < mx.array(ends)[:, None]
            mask = before_end if mask is None else mask & before_end
        return mask

    # Rows on trial.

    def begin_rows(self, count: int) -> None:
        """Remember the states before and after each of the next `count` columns."""
        self.rows = Rows(self.columns, count, [self._row_state()])

    def rows_ahead(self) -> int:
        """Return the most columns that the next traced step may append."""
        return MOST_ROWS if self.takes_steps else 0

    def _row_state(self) -> Any:
        """Return what :meth:`_back_to` needs of this moment."""
        raise NotImplementedError

    def _back_to(self, columns: int, states: list[Any]) -> None:
        """Return to the moment after `columns` columns. states: Before the first row, and after
        each of those that stay."""
        raise NotImplementedError

    def keep_rows(self, n: int) -> None:
        """Forget all rows on trial but the first n, and what was kept for them."""
        rows, self.rows = self.rows, None
        assert rows is not None, "the caller checks it"
        if n < rows.count:
            self._back_to(rows.start + n, rows.states[: n + 1])

    def _note_row(self, rows: Rows) -> None:
        """Keep the state after a row on trial; a column behind the last one ends the trial."""
        if self.columns > rows.start + rows.count:
            self.rows = None
        elif len(rows.states) <= self.columns - rows.start:
            rows.states.append(self._row_state())

    def parts(self, T: int, size: int) -> list[tuple[int, int]]:
        """Split the next T columns for a layer's mixer into (start, stop) of at most `size`."""
        return [(start, min(start + size, T)) for start in range(0, T, size)]

    def numbered(self, count: int) -> list[int]:
        """Return a number of each of the `count` sequences that the next call reads. No other
        sequence of the process has it, and it stays while batches change."""
        known = self.sequences
        if known is None or len(known) != count:
            known = [None] * count
        found = [next(_NUMBERS) if number is None else number for number in known]
        self.sequences = [*found]
        return found

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | mx.array | None = None,
        lengths: Sequence[int] | mx.array | None = None,
        right_padding: Sequence[int] | mx.array | None = None,
    ) -> None:
        """Announce the padding of the columns to come, one number per sequence.

        ``left_padding``: columns before the first token; only for an empty entry.
        ``lengths``: tokens among the columns that arrive until ``finalize()``, counted after
        the left padding; the rest is right padding, and ``right_padding`` (optional) must
        agree with it.
        """
        if self._ends is not None:
            raise CacheError("prepare() was called twice; call finalize() between two prompts.")
        lengths = None if lengths is None else as_ints(lengths, "lengths")
        if right_padding is not None:
            right = as_ints(right_padding, "right_padding")
            if lengths is None and any(right):
                raise CacheError("right_padding needs lengths; pass both to prepare().")
            if lengths is not None and not _one_width(lengths, right):
                raise CacheError(
                    f"lengths {lengths} and right_padding {right} do not add up to one width; "
                    "pad every sequence to the longest."
                )
        if left_padding is not None:
            left = as_ints(left_padding, "left_padding")
            if not self.empty():
                raise CacheError(
                    f"left_padding was given after {self.columns} columns; it must come first."
                )
            self._set_padding(left)
        if lengths is not None:
            self._set_ends(lengths)

    def _set_padding(self, left: list[int]) -> None:
        if min(left, default=0) < 0:
            raise CacheError(f"left_padding must not be negative, got {left}.")
        if self._padding is not None and len(left) != len(self._padding):
            raise CacheError(
                f"left_padding has {len(left)} numbers for {len(self._padding)} sequences."
            )
        self._padding = left

    def _set_ends(self, lengths: list[int]) -> None:
        if self._batch_known() and len(lengths) != self.batch_size:
            raise CacheError(f"lengths has {len(lengths)} numbers for {self.batch_size} sequences.")
        if min(lengths, default=0) < 0:
            raise CacheError(f"lengths must not be negative, got {lengths}.")
        if self._padding is None:
            self._padding = [0] * len(lengths)
        start = [max(a, self.columns) for a in self._padding]
        self._ends = [a + n for a, n in zip(start, lengths, strict=True)]

    def finalize(self) -> None:
        """End a right-padded prompt: its padding becomes left padding of what follows."""
        if self._ends is None:
            return
        extra = [max(self.columns - end, 0) for end in self._ends]
        if any(extra):
            self._move_right(extra)
            self._padding = [a + e for a, e in zip(self._padding or [], extra, strict=True)]
        self._ends = None

    def _move_right(self, extra: list[int]) -> None:
        """Move the stored columns of sequence b by ``extra[b]`` to the right."""

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """Return one entry for all sequences of ``caches``, which stay as they are."""
        merged = cls()
        merged._join(list(caches))
        return merged

    def extend(self, other: Self) -> None:
        """Append the sequences of ``other`` to the batch."""
        self._join([copy.copy(self), other])

    def _require_final(self, what: str) -> None:
        if self._ends is not None:
            raise CacheError(f"{what} inside a right-padded prompt; call finalize() first.")

    def _keep(self, keep: list[int]) -> int:
        """Keep these sequences' counts; drop the columns that pad all of them, return how many."""
        padding = self._padding or [0] * self.batch_size
        padding = [padding[i] for i in keep]
        drop = min(min(padding, default=0), self.columns)
        self.columns -= drop
        self._padding = [first - drop for first in padding]
        if self._ends is not None:
            self._ends = [self._ends[i] - drop for i in keep]
        if self.sequences is not None:
            self.sequences = [self.sequences[i] for i in keep]
        return drop

    def _join_counts(self, parts: list[Any]) -> None:
        """Take the counts of all sequences of ``parts``, aligned at their last columns."""
        for part in parts:
            part._require_final("merge() or extend()")
        self.columns = max(part.columns for part in parts)
        self._padding = [
            first + self.columns - part.columns
            for part in parts
            for first in part._padding or [0] * part.batch_size
        ]
        self.sequences = [
            number for part in parts for number in part.sequences or [None] * part.batch_size
        ]
        self._ends = None

    def __deepcopy__(self, memo: dict[int, Any]):
        """Return an independent entry of another sequence that shares arrays; a write replaces the
        writer's only."""
        other = copy.copy(self)
        other.on_advance = other.rows = other.sequences = None
        return other

    @classmethod
    def from_state(cls, state):
        """Return an entry with the given ``state``; mlx-lm's ``load_prompt_cache`` calls this."""
        entry = cls()
        entry.state = state
        return entry

    def _padding_state(self) -> tuple[mx.array | None, mx.array | None]:
        def array(numbers):
            return None if numbers is None else mx.array(numbers, dtype=mx.int32)

        return array(self._padding), array(self._ends)

    def _load_padding(self, columns, padding, ends) -> None:
        self.columns = int(columns)
        self._padding = None if padding is None else as_ints(padding, "left_padding")
        self._ends = None if ends is None else as_ints(ends, "ends")
        for numbers in (self._padding, self._ends):
            if numbers is not None and len(numbers) != self.batch_size:
                raise CacheError(
                    f"The saved state pads {len(numbers)} sequences but holds {self.batch_size}; "
                    "the file belongs to another cache."
                )


def check_positions(cache: Sequence[BaseCache]) -> list[int]:
    """Return the tokens seen by each sequence, which all entries of a cache must agree on.

    Raises:
        CacheError: An entry disagrees, because a call was interrupted without ``transaction`` or
            entries of different caches were mixed.
    """
    expected: list[int] | None = None
    for index, entry in enumerate(cache):
        seen = entry.seen()
        if expected is None:
            expected = seen
        elif seen != expected:
            raise CacheError(
                f"Cache entry {index} has seen {seen} tokens but entry 0 has seen {expected}; "
                "start again from a new cache."
            )
    return expected or [0]


@contextmanager
def transaction(cache: Sequence[Any] | None) -> Iterator[None]:
    """Roll every entry of ``cache`` back if the block raises, then re-raise.

    A kernel's failure is raised as :class:`~mlx_moeflux.errors.KernelError`. Recurrent entries
    keep their old state arrays alive until the block ends. ``None`` has no entries.
    """
    entries = list(cache or ())
    marks = [entry.mark() for entry in entries]
    try:
        with failures.reported():
            yield
    except BaseException:
        for entry, mark in zip(entries, marks, strict=True):
            entry.rollback(mark)
        if isinstance(cache, list):
            cache[:] = entries
        raise
