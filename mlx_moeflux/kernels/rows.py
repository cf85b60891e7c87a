"""Calls for several rows of one sequence, each of which has the bits of a call by itself.

Inside :func:`together` models call operations with R rows, each as a sequence of one token. An
operation then takes the implementation that it would take for one of them. Where the record says
that this one ``joins`` rows, it computes all in one call, else one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class Calls(threading.local):
    """What the calls of a thread are. count: Their rows of one sequence."""

    count = 1


# An attribute and no function: each operation of a step asks.
calls = Calls()


@contextmanager
def together(count: int) -> Iterator[None]:
    """Take calls inside the block, in this thread, for calls of so many rows."""
    before, calls.count = calls.count, count
    try:
        yield
    finally:
        calls.count = before


def of_row(value: Any, r: int) -> Any:
    """Return row r of arrays ``[R, ...]``; anything else, such as None, is for all rows."""
    return value[r : r + 1] if isinstance(value, mx.array) else value


def one_by_one(
    function: Callable[..., Any],
    count: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    named: Sequence[str],
    rows: Sequence[str],
) -> Any:
    """Call `function` for each of `count` rows and return the results as those of one call.

    named: Names of its positional arguments. rows: Those arguments whose arrays have a row each.
    """
    results = []
    with together(1):
        for r in range(count):
            one = [
                of_row(value, r) if name in rows else value
                for name, value in zip(named, args, strict=False)
            ]
            others = {k: of_row(v, r) if k in rows else v for k, v in kwargs.items()}
            results.append(function(*one, **others))
    return joined(results)


def joined(results: Sequence[Any]) -> Any:
    """Return the results of single rows, which are alike, as one: arrays along their first axis."""
    first = results[0]
    if isinstance(first, mx.array):
        return mx.concatenate(list(results))
    if isinstance(first, (list, tuple)):
        return type(first)(map(joined, zip(*results, strict=True)))
    return first
