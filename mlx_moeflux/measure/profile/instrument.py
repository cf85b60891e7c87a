"""Watching calls of single objects without a line in the code that is watched.

An object's class is exchanged for a subclass of it that has one method replaced, and put back
afterwards. Modules stay where they are in their tree, and nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

Around = Callable[..., Any]
"""(original, arguments, options) -> what the caller gets; `original` takes both."""


class Retyped:
    """Objects whose class was exchanged; :meth:`restore` puts all of them back."""

    def __init__(self):
        self._kinds: list[tuple[Any, type]] = []

    def watch(self, target: Any, method: str, around: Around) -> None:
        """Let `around` make every call of ``target.method``.

        Raises:
            TypeError: The object's class cannot be exchanged (slots, built-in types).
        """
        kind = type(target)
        original = getattr(kind, method)

        def call(self, *arguments, **options):
            return around(lambda *a, **o: original(self, *a, **o), arguments, options)

        watched = type(kind.__name__, (kind,), {method: call, "__slots__": ()})
        # Modules keep some attributes elsewhere: the class is an object's own business.
        object.__setattr__(target, "__class__", watched)
        self._kinds.append((target, kind))

    def restore(self) -> None:
        """Every object is what it was; the last exchange is undone first."""
        while self._kinds:
            target, kind = self._kinds.pop()
            object.__setattr__(target, "__class__", kind)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions as they are written: their inside cannot be watched otherwise."""
    mx.disable_compile()
    try:
        yield
    finally:
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()


def evaluate(*values: Any) -> None:
    """Evaluate arrays, also those in lists, options and cache entries."""
    mx.eval([array for value in values for array in _arrays(value)])


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)
    elif hasattr(value, "update_and_fetch") or hasattr(value, "advance"):
        yield from _arrays(value.state)
