"""A decode step whose graph is built once by Python and then by MLX.

Building some 400 operations in Python takes longer than a GPU needs to compute them. A step of one
token a sequence is therefore traced under ``mx.compile``: counts go in as arrays, states go in and
come out, and the trace serves until a key-value buffer grows.

:class:`CompiledStep` is the whole step as one trace. :class:`SegmentedStep` is for a model whose
experts are partly on disk: what lies between two routers, the experts of one layer, what comes
behind them, the mixer of the next layer and its router, is one trace. Between two of these the
host learns which experts are wanted, has the missing ones read and says which slots they are in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import AttentionCache, KVCache, LatentCache, RecurrentCache, transaction
from mlx_moeflux.cache.paged import BLOCK_TOKENS, PagedCache
from mlx_moeflux.experts.policies.prefetch import MOST_PAIRS
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import metal
from mlx_moeflux.models.protocol import Decoder


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

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """tokens ``[B, 1]`` -> logits ``[B, 1, V]``; every entry is one column longer then."""
        kinds = tuple(type(entry) for entry in cache)
        run = self._compiled.get(kinds)
        if run is None:
            run = self._compiled[kinds] = mx.compile(self._traced(kinds))
        counts, padding = _counts(cache)
        states = [entry.begin_step() for entry in cache]
        logits, states = run(tokens, *counts, padding, states)
        for entry, ends in zip(cache, states, strict=True):
            entry.end_step(*ends)
        return logits

    def _traced(self, kinds: tuple[type, ...]) -> Callable[..., Any]:
        def run(tokens, columns, length, padding, states):
            self.traces += 1
            entries = _entries(kinds, states, columns, length, padding)
            return self._forward(tokens, entries), [entry.ends for entry in entries]

        return run


@dataclass
class _Segment:
    """From behind the router of layer `last` (None: from the tokens) to behind that of layer
    `stop - 1`, or to the logits. Entries of layers [start, stop) belong to it. wholes: Layers in it
    that hold every expert."""

    last: int | None
    start: int
    stop: int
    wholes: tuple[int, ...]
    ends: bool
    looks_ahead: bool
    run: Callable[..., Any]


class SegmentedStep:
    """Runs ``tokens [B, 1] -> logits [B, 1, V]`` segment by segment. traces: How often the first
    was traced."""

    def __init__(self, model: Decoder):
        # No reference to the model as an attribute: nn.Module would see a parameter tree in it.
        self._model = lambda: model
        self._planned: Any = None
        self._segments: list[_Segment] = []
        self.traces = self._built = 0

    def fits(self, pairs: int) -> bool:
        """Whether so many (token, expert) pairs need no more slots than a layer has."""
        store = self._model().store
        return pairs <= min(MOST_PAIRS, *store.slots.values())

    def forget(self) -> None:
        """Trace again: parameters or kernels were replaced."""
        self._planned = None
        self._segments.clear()

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Every entry is one column longer afterwards; after an error all are as before."""
        model = self._model()
        store = model.store
        with store.exclusive(), transaction(cache):
            plan = self._plan(tuple(type(entry) for entry in cache), store.partial())
            counts, padding = _counts(cache)
            carry, slots, bank, call = [tokens], None, [], None
            for segment in plan:
                entries, built = cache[segment.start : segment.stop], self._built
                carry, ends = segment.run(
                    carry, slots, bank, *counts, padding, [entry.begin_step() for entry in entries]
                )
                # A graph that was built now asked the store itself.
                for layer in segment.wholes if self._built == built else ():
                    store.count(tokens.shape[0], layer)
                if call is not None:
                    # The graph was built while blocks were on their way.
                    store.wait(call)
                mx.async_eval(carry[0])
                for entry, end in zip(entries, ends, strict=True):
                    entry.end_step(*end)
                if call is not None:
                    store.release_after(call, carry[0])
                if segment.ends:
                    break
                layer = segment.stop - 1
                ids, weights, *carry = carry
                ahead = carry.pop(0) if segment.looks_ahead else None
                call = store.begin_load(layer, ids, weights, ahead=ahead)
                slots, bank = store.slots_of(call), _arrays(store.bank(layer))
                carry = [weights, *carry]
            return carry[0]

    def _plan(self, kinds: tuple[type, ...], partial: tuple[int, ...]) -> list[_Segment]:
        if self._planned != (kinds, partial):
            self._segments = [
                self._segment(last, following, kinds)
                for last, following in zip([None, *partial], [*partial, None], strict=True)
            ]
            self._planned = kinds, partial
        return self._segments

    def _segment(
        self, last: int | None, following: int | None, kinds: tuple[type, ...]
    ) -> _Segment:
        model = self._model()
        start = 0 if last is None else last + 1
        stop = len(model.layers) if following is None else following + 1

        def run(carry, slots, bank, columns, length, padding, states):
            entries = _entries(kinds[start:stop], states, columns, length, padding)
            if last is None:
                self.traces += 1
                h = model.model.embed_tokens(carry[0])
            else:
                weights, post, h, *shared = carry
                held = _bank_of(bank, model.store.bank(last))
                experts = model.store.compute_slots(post, slots, weights, held)
                h = model.layers[last].mlp.combine(h, experts, tuple(shared))
            for i in range(start, stop):
                layer, entry = model.layers[i], entries[i - start]
                if i == following:
                    h = layer.mix(h, entry, chunk=1)
                    begun = layer.mlp.prepare(h, layer.post_attention_layernorm)
                    ahead = [] if begun.ahead is None else [begun.ahead]
                    shared = [] if begun.shared is None else begun.shared
                    out = [begun.ids, begun.weights, *ahead, begun.post, h, *shared]
                    break
                h = layer(h, entry, chunk=1)
            else:
                out = [model.logits(h)]
            return out, [entry.ends for entry in entries]

        def traced(*inputs):
            self._built += 1
            with metal.gathered():
                return run(*inputs)

        looks_ahead = following is not None and model.layers[following].mlp._lookahead is not None
        layers = (i for i in model.store.layers if start <= i < stop and i != following)
        ends = following is None
        return _Segment(last, start, stop, tuple(layers), ends, looks_ahead, mx.compile(traced))


def _counts(cache: Sequence[Any]) -> tuple[list[mx.array], mx.array | None]:
    """Columns before and after the step, int32 ``[1]`` each, and left padding."""
    columns = cache[0].columns
    return [mx.array([n], dtype=mx.int32) for n in (columns, columns + 1)], cache[0].left_padding


def _entries(kinds: Sequence[type], states: Sequence[Any], *counts: Any) -> list[Any]:
    """The stand-ins of cache entries while tracing."""
    return [KINDS[kind](arrays, *counts) for kind, arrays in zip(kinds, states, strict=True)]


def _arrays(bank: ExpertBank) -> list[mx.array]:
    """What a trace takes of a bank: given anew each time, so that it keeps none alive."""
    parts = (bank.gate, bank.up, bank.down)
    return [a for p in parts for a in (p.weight, p.scales, p.biases) if a is not None]


def _bank_of(arrays: Sequence[mx.array], like: ExpertBank) -> ExpertBank:
    """Inverse of :func:`_arrays`; `like` says what is there."""
    left = iter(arrays)
    return ExpertBank(
        *(
            ProjectionBank(
                *(next(left) if a is not None else None for a in (p.weight, p.scales, p.biases)),
                p.spec,
            )
            for p in (like.gate, like.up, like.down)
        )
    )
