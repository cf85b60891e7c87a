"""State of a layer that looks rows up by the last tokens' n-grams, beside a gated delta net's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.delta import RecurrentCache
from mlx_moeflux.cache.traced import Step
from mlx_moeflux.errors import InputError
from mlx_moeflux.state_arrays import NGRAMS


class Reading(Protocol):
    """Rows that are being read."""

    def rows(self, columns: slice) -> mx.array:
        """Wait for them and return those of some of the T columns, ``[B, n, heads, width]``."""
        ...


class Fed(NamedTuple):
    """Tokens of a call of T columns. history: int32 ``[B, context + T]``, as ``tokens`` has them.
    start, stop: Columns before and after the call. reading: The tokens' rows."""

    history: np.ndarray
    start: int
    stop: int
    reading: Reading


class NgramCache(RecurrentCache):
    """``tokens`` [B, context] int32: the last tokens plus one, 0 where there was none; oldest
    first. ``ngram_conv`` [B, rows, D]: the last inputs of the dilated convolution.

    The model feeds a call's tokens before its layers run. The layer takes them part by part.
    """

    tokens: Any
    ngram_conv: Any

    declared, kind = NGRAMS, NGRAMS.name
    _fed: Fed | None = None
    _tokens_after: Iterator[mx.array] = iter(())

    def history(self, ids: np.ndarray, context: int) -> np.ndarray:
        """Return int32 ``[B, context + T]``: the last tokens, then ids ``[B, T]``, each plus one, 0
        for padding and where there was none.

        Evaluates: ``tokens``.
        """
        real, before = self.real_tokens(ids.shape[1]), np.zeros((len(ids), context), np.int32)
        now = ids + 1 if real is None else np.where(np.array(real), ids + 1, 0)
        if self.tokens is not None:
            before = np.array(self.tokens)
        return np.concatenate([before, now.astype(np.int32)], axis=1)

    def feed(self, history: np.ndarray, T: int, reading: Reading) -> None:
        """Take the tokens of a call of T columns, see :meth:`history`, and their rows."""
        self._fed = Fed(history, self.columns, self.columns + T, reading)

    def taken(self, T: int, skip: int = 0) -> tuple[mx.array, mx.array]:
        """Return the rows ``[B, T, heads, width]`` of the next T tokens behind `skip`, and
        ``tokens`` after them. ``advance(T)`` is the caller's to call."""
        if self._fed is None:
            raise InputError(
                "a layer with n-grams was called by itself; call the model, which knows the ids."
            )
        history, start, stop, reading = self._fed
        first, context = self.columns + skip - start, history.shape[1] - (stop - start)
        ends = np.full(len(history), first + T)
        if self.lengths is not None:
            ends = first + np.clip(np.array(self.lengths), 0, T)
        last = np.take_along_axis(history, ends[:, None] + np.arange(context), axis=1)
        return reading.rows(slice(first, first + T)), mx.array(last)

    def begin_step(self, count: int = 1) -> tuple[mx.array, ...]:
        """Return the arrays that a step of `count` columns reads and changes, and the tokens'
        rows."""
        taken = [self.taken(1, skip) for skip in range(count)]
        self._tokens_after = iter([tokens for _, tokens in taken])
        rows = [rows for rows, _ in taken]
        rows = rows[0] if count == 1 else mx.concatenate(rows, axis=1)
        return self.conv, self.delta, self.ngram_conv, rows

    @classmethod
    def traced(cls, step: Step, arrays: Sequence[Any]) -> TracedNgrams:
        """See :meth:`RecurrentCache.traced`."""
        *state, rows = arrays
        entry = TracedNgrams(rows)
        entry._set((*state, None))
        entry.begin_rows(step.rows)
        return entry

    def end_step(self, *arrays: mx.array) -> None:
        """See :meth:`RecurrentCache.end_step`."""
        super().end_step(*arrays, next(self._tokens_after))

    def advance(self, T: int) -> None:
        """See :meth:`RecurrentCache.advance`; lets go of the rows after a call's last token."""
        super().advance(T)
        if self._fed is not None and self.columns >= self._fed.stop:
            self._fed = None


class TracedNgrams(NgramCache):
    """Traced form of :class:`NgramCache`: the step is given the rows, and the entry itself keeps
    the tokens."""

    def __init__(self, rows: mx.array):
        super().__init__()
        self._rows = rows

    def _arrays(self) -> tuple[mx.array | None, ...]:
        return super()._arrays()[:-1]

    def taken(self, T: int, skip: int = 0) -> tuple[mx.array, None]:
        """See :meth:`NgramCache.taken`."""
        whole = self._rows.shape[1] == T
        return self._rows if whole else self._rows[:, self.columns : self.columns + T], None
