"""A decode step whose graph is built once by Python and then by MLX.

Building some 400 operations in Python takes longer than a GPU needs to compute them. A step of one
token a sequence is therefore traced under ``mx.compile``: counts go in as arrays, states go in and
come out, and the trace serves until a key-value buffer grows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import AttentionCache, KVCache, LatentCache, RecurrentCache
from mlx_moeflux.cache.paged import BLOCK_TOKENS, PagedCache
from mlx_moeflux.kernels.choice import Kernels


class _Attention:
    """What an attention layer asks of its cache, with counts as arrays."""

    def __init__(
        self,
        arrays: Sequence[mx.array],
        columns: mx.array,
        length: mx.array,
        padding: mx.array | None,
    ):
        self._keys, self._values, *tail = arrays
        self._tail, self._columns, self._length = tuple(tail), columns, length
        self.left_padding = padding

    @property
    def ends(self) -> tuple[mx.array, ...]:
        return self._tail

    def real_tokens(self, T: int) -> None:
        return None

    def positions(self, T: int) -> mx.array:
        return self._columns if self.left_padding is None else self._columns - self.left_padding

    def windowed(self, T: int, window: int) -> dict[str, Any]:
        first = self._columns + 1 - window
        padding = 0 if self.left_padding is None else self.left_padding
        return {"start": mx.maximum(first, padding)}

    @property
    def newest(self) -> tuple[mx.array, mx.array] | None:
        """The tail, for who writes the next row himself; see :meth:`appended`."""
        return self._tail

    @property
    def columns(self) -> mx.array:
        """Where the next row stands, int32 ``[1]``."""
        return self._columns

    def append(self, kernels: Kernels, keys: mx.array, values: mx.array) -> dict[str, Any]:
        return self.appended(kernels.append_row(self._tail, keys, values, position=self._columns))

    def appended(self, tail: tuple[mx.array, mx.array]) -> dict[str, Any]:
        """:meth:`append` with a tail that has the row already."""
        self._tail = tail
        return {
            "k": self._keys,
            "v": self._values,
            "length": self._length,
            "start": self.left_padding,
            "tail": self._tail,
        }


class _PagedAttention(_Attention):
    """The same with a pool of blocks; no layer has a window."""

    def __init__(self, arrays: Sequence[mx.array], *counts: mx.array | None):
        *others, self._table = arrays
        super().__init__(others, *counts)

    def append(self, kernels: Kernels, keys: mx.array, values: mx.array) -> dict[str, Any]:
        held = super().append(kernels, keys, values)
        return held | {"table": self._table, "page": BLOCK_TOKENS}


class _PackedAttention(_Attention):
    """The same with rows in 4 or 8 bits: all of the buffer is unpacked at each step."""

    newest = None

    def __init__(
        self,
        kind: type[AttentionCache],
        arrays: Sequence[mx.array],
        *counts: mx.array | None,
    ):
        super().__init__(arrays, *counts)
        self._kind = kind

    def append(self, kernels: Kernels, keys: mx.array, values: mx.array) -> dict[str, Any]:
        held = super().append(kernels, self._kind.packed(keys), self._kind.packed(values))
        unpacked = self._kind.unpacked
        return held | {
            "k": unpacked(held["k"]),
            "v": unpacked(held["v"]),
            "tail": tuple(map(unpacked, held["tail"])),
        }


class _Recurrent:
    """What a gated delta net asks of its cache."""

    lengths = None

    def __init__(self, arrays: Sequence[mx.array], *counts: mx.array | None):
        self.conv, self.delta = arrays

    @property
    def ends(self) -> tuple[mx.array, ...]:
        return self.conv, self.delta

    def real_tokens(self, T: int) -> None:
        return None

    def make_mask(self, T: int) -> None:
        return None

    def advance(self, T: int) -> None:
        pass


# Kind of entry -> its stand-in while tracing.
KINDS = {
    KVCache: _Attention,
    LatentCache: _Attention,
    PagedCache: _PagedAttention,
    RecurrentCache: _Recurrent,
}


def _known(kind: type) -> bool:
    """Whether there is a stand-in for entries of this kind."""
    if kind not in KINDS and getattr(kind, "packs", False) and kind.__base__ in KINDS:
        KINDS[kind] = functools.partial(_PackedAttention, kind)
    return kind in KINDS


class CompiledStep:
    """Runs ``forward(tokens [B, 1], entries, ...) -> logits [B, 1, V]`` as one traced graph.

    forward: Must be free of side effects other than on the entries that it is given. It may take
        arrays besides, and may return some with the logits.
    traces: How often it was traced: at the first step, and when shapes change.
    """

    def __init__(self, forward: Callable[..., Any]):
        self._forward = forward
        self._compiled: dict[tuple[type, ...], Callable[..., Any]] = {}
        self.traces = 0

    def fits(self, cache: Sequence[Any]) -> bool:
        """Whether every entry has begun, and each sequence goes on by one real token."""
        return all(
            _known(type(entry))
            and entry.takes_steps
            and not entry.empty()
            and entry.lengths is None
            and entry.real_tokens(1) is None
            for entry in cache
        )

    def forget(self) -> None:
        """Trace again: parameters, kernels or banks were replaced."""
        self._compiled.clear()

    def __call__(self, tokens: mx.array, cache: Sequence[Any], *more: mx.array) -> Any:
        """tokens ``[B, 1]`` -> what `forward` gives; every entry is one column longer then."""
        kinds = tuple(type(entry) for entry in cache)
        run = self._compiled.get(kinds)
        if run is None:
            run = self._compiled[kinds] = mx.compile(self._traced(kinds))
        columns = cache[0].columns
        counts = [mx.array([n], dtype=mx.int32) for n in (columns, columns + 1)]
        padding = cache[0].left_padding
        states = [entry.begin_step() for entry in cache]
        result, states = run(tokens, *counts, padding, states, *more)
        for entry, ends in zip(cache, states, strict=True):
            entry.end_step(*ends)
        return result

    def _traced(self, kinds: tuple[type, ...]) -> Callable[..., Any]:
        def run(tokens, columns, length, padding, states, *more):
            self.traces += 1
            entries = [
                KINDS[kind](arrays, columns, length, padding)
                for kind, arrays in zip(kinds, states, strict=True)
            ]
            return self._forward(tokens, entries, *more), [entry.ends for entry in entries]

        return run
