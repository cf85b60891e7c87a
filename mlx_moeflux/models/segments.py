"""A decode step of a model whose experts are partly on disk: traced between the places where the
host must look.

What lies between two routers, the experts of one layer, what comes behind them, the mixer of the
next layer and its router, is one graph that Python builds once (see
:mod:`mlx_moeflux.models.step`). Between two such segments the host learns which experts are
wanted, has the missing ones read and says which slots they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_moeflux.cache import transaction
from mlx_moeflux.experts.later import Run
from mlx_moeflux.experts.listening import collected
from mlx_moeflux.experts.prefetch import MOST_PAIRS
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.models.step import KINDS

if TYPE_CHECKING:
    from mlx_moeflux.models.decoder import DecoderModel


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

    def __init__(self, model: DecoderModel):
        # No reference to the model as an attribute: nn.Module would see a parameter tree in it.
        self._model = lambda: model
        self._plans: dict[Any, list[_Segment]] = {}
        self.traces = self._built = 0

    def fits(self, pairs: int) -> bool:
        """Whether so many (token, expert) pairs need no more slots than a layer has."""
        store = self._model().store
        return pairs <= min(MOST_PAIRS, *store.slots.values())

    def forget(self) -> None:
        """Trace again: parameters or kernels were replaced."""
        self._plans.clear()

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Every entry is one column longer afterwards; after an error all are as before."""
        model = self._model()
        store = model.store
        with (
            store.exclusive(),
            transaction(cache),
            self._told(partial := store.partial(), tokens.shape[0]) as told,
        ):
            plan = self._plan(tuple(type(entry) for entry in cache), partial, told is not None)
            columns, padding = cache[0].columns, cache[0].left_padding
            counts = [mx.array([n], dtype=mx.int32) for n in (columns, columns + 1)]
            carry, slots, bank = [tokens], None, []
            for segment in plan:
                entries, built = cache[segment.start : segment.stop], self._built
                carry, ends, noted = segment.run(
                    carry, slots, bank, *counts, padding, [entry.begin_step() for entry in entries]
                )
                # A graph that was built now asked the store itself.
                for layer in segment.wholes if self._built == built else ():
                    store.count(tokens.shape[0], layer)
                if segment.last is not None:
                    # The graph was built while blocks were on their way.
                    store.arrive()
                mx.async_eval(carry[0])
                for entry, end in zip(entries, ends, strict=True):
                    entry.end_step(*end)
                if segment.last is not None:
                    store.read_by(segment.last, carry[0])
                if told is not None:
                    told.add(noted, None if segment.ends else carry[1])
                if segment.ends:
                    break
                layer = segment.stop - 1
                ids, weights, *carry = carry
                ahead = carry.pop(0) if segment.looks_ahead else None
                slots = store.bring(layer, ids, weights, ahead=ahead)
                bank = _arrays(store.bank(layer))
                carry = [weights, *carry]
            return carry[0]

    @contextmanager
    def _told(self, partial: Sequence[int], tokens: int) -> Iterator[_Told | None]:
        """Around a step: None if no recorder listens."""
        model = self._model()
        later = getattr(model.store, "later", None)
        if later is None:
            yield None
            return
        later.land()
        told = _Told(model, partial, tokens)
        try:
            with later.listening(told.run):
                yield told
        finally:
            told.close()

    def _plan(
        self, kinds: tuple[type, ...], partial: tuple[int, ...], notes: bool
    ) -> list[_Segment]:
        key = kinds, partial, notes
        plan = self._plans.get(key)
        if plan is None:
            # With and without a recorder, of one kind.
            self._plans = {
                other: kept for other, kept in self._plans.items() if other[:2] == key[:2]
            }
            starts = [None, *partial]
            plan = self._plans[key] = [
                self._segment(last, following, kinds, notes)
                for last, following in zip(starts, [*partial, None], strict=True)
            ]
        return plan

    def _segment(
        self, last: int | None, following: int | None, kinds: tuple[type, ...], notes: bool
    ) -> _Segment:
        model = self._model()
        start = 0 if last is None else last + 1
        stop = len(model.layers) if following is None else following + 1

        def run(carry, slots, bank, columns, length, padding, states):
            entries = [
                KINDS[kind](arrays, columns, length, padding)
                for kind, arrays in zip(kinds[start:stop], states, strict=True)
            ]
            if last is None:
                self.traces += 1
                h = model.model.embed_tokens(carry[0])
            else:
                weights, post, h, *shared = carry
                held = _bank_of(bank, model.store.bank(last))
                experts = model.store.compute(post, slots, weights, held)
                h = model.layers[last].mlp.leave(h, experts, tuple(shared))
            for i in range(start, stop):
                layer, entry = model.layers[i], entries[i - start]
                if i == following:
                    h = layer.mix(h, entry, chunk=1)
                    begun = layer.mlp.begin(h, layer.post_attention_layernorm)
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
            with metal.gathered(), model.store.notes() if notes else nullcontext([]) as noted:
                return *run(*inputs), list(noted)

        looks_ahead = following is not None and model.layers[following].mlp._following is not None
        layers = (i for i in model.store.layers if start <= i < stop and i != following)
        ends = following is None
        return _Segment(last, start, stop, tuple(layers), ends, looks_ahead, mx.compile(traced))


class _Told:
    """What a step chose, for a recorder: of layers that hold every expert all, of the others the
    weights, since the host knows their ids. pairs: N K."""

    def __init__(self, model: DecoderModel, partial: Sequence[int], tokens: int):
        self._model, self.run, self._began = model, Run(tokens), perf_counter_ns()
        self._pairs = tokens * model._router.num_experts_per_tok
        seen = zip(model.store.layers, model.store.seen(), strict=True)
        self._wholes = [pair for pair in seen if pair[0] not in partial]
        self._notes: list[mx.array] = []
        self._weights: list[mx.array] = []

    def add(self, notes: Sequence[mx.array], weights: mx.array | None) -> None:
        """Of a segment, while the device is at work."""
        self._notes += notes
        if weights is not None:
            self._weights.append(weights)
        self._model.store.later.some()

    def close(self) -> None:
        """The step is over, or went no further."""
        later, kernels, logs = self._model.store.later, self._model.kernels, {}
        if self._notes:
            each = 2 * self._pairs
            count = sum(min(note.size, each) for note in self._notes) // each
            self.run.layers, self.run.counts = zip(*self._wholes[:count], strict=True)
            log = later.log("notes", each * count)
            logs["notes"] = collected(kernels, log, self._notes, self._pairs)
        if self._weights:
            log = later.log("weights", self._pairs * len(self._weights))
            logs["weights"] = kernels.collect(log, self._weights, count=self._pairs)
        if logs:
            later.add(self.run, self._began, **logs)
            later.hand_over()


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
