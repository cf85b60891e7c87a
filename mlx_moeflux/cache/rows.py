"""Rows that a model reads on trial: states after each of them, until it is known which ones stay.

``model.read_rows(tokens, cache)`` reads up to MOST_ROWS tokens in one call; :func:`keep_rows`
forgets those behind the first n. Nothing is computed again. Arrays with a row for each token drop
columns, and entries of a fixed size go back to the arrays that they kept after row n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_moeflux.cache.state.sequence import SequenceState
from mlx_moeflux.errors import CacheError, UnsupportedError


def check_rows(cache: Sequence[Any]) -> None:
    """Raise an error unless every entry can read rows on trial.

    Raises:
        UnsupportedError: An entry is of a class that cannot forget rows.
        CacheError: The cache holds no token, several sequences, or a right-padded prompt that is
            not finalised.
    """
    for i, entry in enumerate(cache):
        if not getattr(entry, "takes_rows", False):
            raise UnsupportedError(
                f"entry {i} of the cache, a {type(entry).__name__}, cannot forget single rows; "
                "read one token a call, without drafts."
            )
        if entry.empty():
            raise CacheError(
                f"entry {i} of the cache has seen no token; read the prompt before rows."
            )
        if entry.batch_size != 1:
            raise CacheError(
                f"entry {i} of the cache holds {entry.batch_size} sequences; rows are of one."
            )
        if entry.lengths is not None:
            raise CacheError(f"entry {i} of the cache is inside a prompt; call finalize() first.")


def begin_rows(cache: Sequence[Any], count: int) -> None:
    """Make all entries remember the states before and after each of the next `count` columns."""
    for entry in cache:
        entry.begin_rows(count)


def keep_rows(cache: Sequence[Any], n: int) -> None:
    """Forget all rows of the last ``read_rows`` but the first n.

    The state is then, bit for bit, the one after n calls of one token. What entries kept for it is
    freed, also by the next call of the model.

    Raises:
        CacheError: The last call was not ``read_rows``, or it read fewer rows than n.
    """
    for i, entry in enumerate(cache):
        known = getattr(entry, "rows", None)
        if known is None or entry.columns != known.start + known.count:
            raise CacheError(
                f"the last call on entry {i} of the cache did not read rows; call keep_rows() "
                "once, right after read_rows()."
            )
        if not isinstance(n, int) or not 0 <= n <= known.count:
            raise CacheError(
                f"read_rows() read {known.count} rows; keep 0 to all of them, not {n!r}."
            )
    for entry in cache:
        entry.keep_rows(n)
    if isinstance(cache, SequenceState):
        cache.forget_after(cache.position)
