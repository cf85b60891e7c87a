"""A decode step of a model whose experts are partly on disk: traced between the places where the
host must look.

What lies between two routers, the experts of one layer, what comes behind them, the mixer of the
next layer and its router, is one graph that Python builds once (see
:mod:`mlx_moeflux.models.step`). Between two such segments the host learns which experts are
wanted, has the missing ones read and says which slots they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache import transaction
from mlx_moeflux.experts.prefetch import MOST_PAIRS
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.models.step import KINDS

if TYPE_CHECKING:
    from mlx_moeflux.models.decoder import DecoderModel


@dataclass
class _Segment:
    """From behind the router of layer `last` (None: from the tokens) to behind that of layer
    `stop - 1`, or to the logits. Entries of layers [start, stop) belong to it."""

    last: int | None
    start: int
    stop: int
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
        self.traces = 0

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
        with store.exclusive(), transaction(cache):
            partial = store.partial()
            plan = self._plan(tuple(type(entry) for entry in cache), partial)
            columns, padding = cache[0].columns, cache[0].left_padding
            counts = [mx.array([n], dtype=mx.int32) for n in (columns, columns + 1)]
            carry, slots, bank, traces = [tokens], None, [], self.traces
            for segment in plan:
                entries = cache[segment.start : segment.stop]
                carry, ends = segment.run(
                    carry, slots, bank, *counts, padding, [entry.begin_step() for entry in entries]
                )
                if segment.last is not None:
                    # The graph was built while blocks were on their way.
                    store.arrive()
                mx.async_eval(carry[0])
                for entry, end in zip(entries, ends, strict=True):
                    entry.end_step(*end)
                if segment.last is not None:
                    store.read_by(segment.last, carry[0])
                if segment.ends:
                    break
                layer = segment.stop - 1
                ids, weights, *carry = carry
                ahead = carry.pop(0) if segment.looks_ahead else None
                slot_of, host = store.bring(layer, ids, weights, ahead=ahead)
                slots, bank = mx.array(slot_of[host].astype(np.uint32)), _arrays(store.bank(layer))
                carry = [weights, *carry]
            if self.traces == traces:
                for layer in set(store.layers) - set(partial):
                    store.count(tokens.shape[0], layer)
            return carry[0]

    def _plan(self, kinds: tuple[type, ...], partial: tuple[int, ...]) -> list[_Segment]:
        plan = self._plans.get((kinds, partial))
        if plan is None:
            self._plans.clear()
            starts = [None, *partial]
            plan = self._plans[kinds, partial] = [
                self._segment(last, following, kinds)
                for last, following in zip(starts, [*partial, None], strict=True)
            ]
        return plan

    def _segment(
        self, last: int | None, following: int | None, kinds: tuple[type, ...]
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
            with metal.gathered():
                return run(*inputs)

        looks_ahead = following is not None and model.layers[following].mlp._following is not None
        return _Segment(last, start, stop, following is None, looks_ahead, mx.compile(traced))


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
