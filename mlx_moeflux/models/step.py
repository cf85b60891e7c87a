"""A decode step whose graph is built once by Python and then by MLX.

Building some 400 operations in Python takes longer than a GPU needs to compute them. A step of one
token a sequence is therefore traced under ``mx.compile``: counts go in as arrays, states go in and
come out, and the trace serves until a key-value buffer grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import KVCache, RecurrentCache


class _Attention:
    """What an attention layer asks of its cache, with counts as arrays."""

    def __init__(self, keys, values, columns: mx.array, padding: mx.array | None):
        self.keys, self.values = keys, values
        self._columns, self.left_padding = columns, padding

    def real_tokens(self, T: int) -> None:
        return None

    def make_mask(self, T: int) -> None:
        return None

    def positions(self, T: int) -> mx.array:
        return self._columns if self.left_padding is None else self._columns - self.left_padding

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
        self.keys = mx.slice_update(self.keys, keys, self._columns, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._columns, axes=(2,))

    def buffer(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.keys, self.values, self._columns + 1


class _Recurrent:
    """What a gated delta net asks of its cache."""

    lengths = None

    def __init__(self, conv, delta, columns: mx.array, padding: mx.array | None):
        self.conv, self.delta = conv, delta

    def real_tokens(self, T: int) -> None:
        return None

    def make_mask(self, T: int) -> None:
        return None

    def advance(self, T: int) -> None:
        pass


# Kind of entry -> its stand-in while tracing, and the attributes that go in and come out.
_KINDS = {
    KVCache: (_Attention, ("keys", "values")),
    RecurrentCache: (_Recurrent, ("conv", "delta")),
}


class CompiledStep:
    """Runs ``forward(tokens [B, 1], entries) -> logits [B, 1, V]`` as one traced graph.

    forward: Must be free of side effects other than on the entries that it is given.
    traces: How often it was traced: at the first step, and when shapes change.
    """

    def __init__(self, forward: Callable[[mx.array, Sequence[Any]], mx.array]):
        self._forward = forward
        self._compiled: dict[tuple[type, ...], Callable[..., Any]] = {}
        self.traces = 0

    def fits(self, cache: Sequence[Any]) -> bool:
        """Whether every entry has begun, and each sequence goes on by one real token."""
        return all(
            type(entry) in _KINDS
            and not entry.empty()
            and entry.lengths is None
            and entry.real_tokens(1) is None
            and None not in entry._arrays()
            for entry in cache
        )

    def forget(self) -> None:
        """Trace again: parameters, kernels or banks were replaced."""
        self._compiled.clear()

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """tokens ``[B, 1]`` -> logits ``[B, 1, V]``; every entry is one column longer then."""
        kinds = tuple(type(entry) for entry in cache)
        run = self._compiled.get(kinds)
        if run is None:
            run = self._compiled[kinds] = mx.compile(self._traced(kinds))
        for entry in cache:
            if isinstance(entry, KVCache):
                entry.reserve(1)
        columns = mx.array([cache[0].columns], dtype=mx.int32)
        padding = cache[0].left_padding
        states = [array for entry in cache for array in entry._arrays()]
        logits, *states = run(tokens, columns, *([] if padding is None else [padding]), *states)
        for i, entry in enumerate(cache):
            first, second = _KINDS[kinds[i]][1]
            setattr(entry, first, states[2 * i])
            setattr(entry, second, states[2 * i + 1])
            entry.advance(1)
        return logits

    def _traced(self, kinds: tuple[type, ...]) -> Callable[..., Any]:
        count = 2 * len(kinds)

        def run(tokens: mx.array, columns: mx.array, *arrays: mx.array):
            self.traces += 1
            padding = arrays[0] if len(arrays) > count else None
            states = arrays[len(arrays) - count :]
            entries = [
                _KINDS[kind][0](states[2 * i], states[2 * i + 1], columns, padding)
                for i, kind in enumerate(kinds)
            ]
            logits = self._forward(tokens, entries)
            ends = [
                getattr(entry, name)
                for entry, kind in zip(entries, kinds, strict=True)
                for name in _KINDS[kind][1]
            ]
            return (logits, *ends)

        return run
