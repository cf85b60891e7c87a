"""Decode steps traced once under ``mx.compile``.

Building the graph of a step in Python takes longer than a GPU needs to compute it. A trace takes
positions as arrays, and states as inputs and outputs. It is reused until a key-value buffer grows.

:class:`CompiledStep` traces a whole step. :class:`SegmentedStep` serves a model with experts on
disk: a segment spans the experts of one layer up to the router of the next partly resident layer.
Between two segments the host reads the chosen ids and loads missing experts into slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import BaseCache, transaction
from mlx_moeflux.cache.traced import ChosenPositions, Step, TracedEntry
from mlx_moeflux.experts.policies.prefetch import MOST_PAIRS
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.runtime import device, views
from mlx_moeflux.kernels.verify import trials
from mlx_moeflux.models.protocol import Decoder
from mlx_moeflux.models.rows import as_rows

# Logits, the output of the last layer, and what several ranks have to compare.
Outputs = tuple[mx.array, ...]


class CompiledStep:
    """One trace of ``forward(tokens [B, 1], entries) -> (logits [B, 1, V], h [B, 1, C], ...)``, and
    one for each number of rows of a sequence, see :mod:`~mlx_moeflux.models.rows`. h: The output of
    the last layer.

    forward: Has no side effects except on `entries`. traces: How often it was called; the first
    step makes a trace, and each change of shapes.
    """

    def __init__(self, forward: Callable[[mx.array, Sequence[Any]], Outputs]):
        self._forward = forward
        self._compiled: dict[tuple[int, tuple[type, ...]], Callable[..., Any]] = {}
        self.traces = 0

    def fits(self, cache: Sequence[Any]) -> bool:
        """Return True if every entry has a traced form and holds tokens, and each sequence takes
        one real token."""
        return all(
            entry.takes_steps
            and not entry.empty()
            and entry.lengths is None
            and entry.real_tokens(1) is None
            for entry in cache
        )

    def forget(self) -> None:
        """Drop the traces, after parameters, kernels or banks were replaced."""
        self._compiled.clear()

    def __call__(
        self,
        tokens: mx.array,
        cache: Sequence[Any],
        *,
        count: int = 1,
        repeated: Callable[[], object] = lambda: None,
    ) -> Outputs:
        """Return what the function does of tokens ``[B, 1]``; each entry grows by one column.

        count: Rows of one sequence, if B is their number; each entry grows by so many columns.
        repeated: See :class:`~mlx_moeflux.kernels.verify.trials.compiled`.
        """
        kinds = tuple(type(entry) for entry in cache)
        run = self._compiled.get((count, kinds))
        if run is None:
            run = self._compiled[count, kinds] = trials.compiled(self._traced(kinds, count))
        states, short = _begin_steps(cache, count)
        outputs, states = run(tokens, *_counts(cache, count), states, short, repeated=repeated)
        _end_steps(cache, states, count)
        return outputs

    def untraced(self, tokens: mx.array, cache: Sequence[Any]) -> Outputs:
        """Return what :meth:`__call__` does, with the same operations, without a trace: `forward`
        may evaluate. Arithmetic in stock MLX has other bits where it gets positions as numbers."""
        states, short = _begin_steps(cache, 1)
        kinds = tuple(type(entry) for entry in cache)
        outputs, states = self._run(kinds, tokens, *_counts(cache, 1), states, short)
        _end_steps(cache, states, 1)
        return outputs

    def _traced(self, kinds: tuple[type, ...], count: int) -> Callable[..., Any]:
        def run(*inputs):
            self.traces += 1
            return self._run(kinds, *inputs)

        return run

    def _run(self, kinds, tokens, counts, padding, states, short) -> tuple[Outputs, list[Any]]:
        """Return the outputs of `forward`, and the arrays of each entry after each row."""
        step = Step(counts, padding, ChosenPositions())
        entries = _entries(kinds, states, short, step)
        outputs = self._forward(tokens, _as_rows(entries, step))
        return outputs, [entry.ends for entry in entries]


@dataclass
class _Segment:
    """Traced part of a step: from the experts of layer `last` (None: from the tokens) through the
    router of layer `stop - 1`, or, if it `ends` the step, to the logits.

    It updates the cache entries of layers [start, stop). complete: Layers in it that hold every
    expert.
    """

    last: int | None
    start: int
    stop: int
    complete: tuple[int, ...]
    ends: bool
    looks_ahead: bool
    run: Callable[..., Any]


class SegmentedStep:
    """Traced segments of a step ``tokens [B, 1] -> logits [B, 1, V]``. traces: How often the first
    segment was built."""

    def __init__(self, model: Decoder):
        # A closure, since nn.Module would take an attribute for a child module.
        self._model = lambda: model
        # With and without a look-ahead, for each number of rows: what the segments were planned
        # for, and they.
        self._plans: dict[tuple[bool, int], tuple[Any, list[_Segment]]] = {}
        self.traces = self._graphs_built = 0

    def most_pairs(self) -> int:
        """Return for how many (token, expert) pairs every layer has slots."""
        return min([MOST_PAIRS, *self._model().store.steps.slots.values()])

    def forget(self) -> None:
        """Drop the traces, after parameters or kernels were replaced."""
        self._plans.clear()

    def __call__(self, tokens: mx.array, cache: Sequence[Any], *, count: int = 1) -> Outputs:
        """Return logits and h; each entry grows by one column, or by none if the call raises.
        count: See :meth:`CompiledStep.__call__`."""
        model = self._model()
        store = model.store.steps
        with store.exclusive(), transaction(cache):
            kinds = tuple(type(entry) for entry in cache)
            plan = self._plan(kinds, store.partial(), model.store.looks_ahead, count)
            counts, padding = _counts(cache, count)
            carry, slots, bank, call, chosen = [tokens], None, ([], []), None, []
            for segment in plan:
                entries, built = cache[segment.start : segment.stop], self._graphs_built
                carry, ends, chosen = segment.run(
                    carry, slots, bank, chosen, counts, padding, *_begin_steps(entries, count),
                    ready=lambda call=call: call and store.wait(call),
                )  # fmt: skip
                # While a graph is traced, its layers call the store, which counts.
                for layer in segment.complete if self._graphs_built == built else ():
                    store.count(tokens.shape[0], layer)
                if call is not None:
                    # Only now: building the graph overlaps with reading blocks.
                    store.wait(call)
                mx.async_eval(carry[0])
                _end_steps(entries, ends, count)
                if call is not None:
                    store.release_after(call, carry[0])
                if segment.ends:
                    break
                layer = segment.stop - 1
                ids, weights, *carry = carry
                ahead = carry.pop(0) if segment.looks_ahead else None
                call = store.begin_load(layer, ids, weights, ahead=ahead)
                # Not the bank itself: a trace would keep it alive.
                slots, arrays = store.slots_of(call), store.bank(layer).flat
                bank = arrays, views.known(arrays) if device.takes_views() else []
                carry = [weights, *carry]
            logits, h = carry
            return logits, h

    def _plan(
        self, kinds: tuple[type, ...], partial: tuple[int, ...], looks_ahead: bool, count: int
    ) -> list[_Segment]:
        known = self._plans.get((looks_ahead, count))
        if known is None or known[0] != (kinds, partial):
            segments = [
                self._segment(last, following, kinds, looks_ahead, count)
                for last, following in zip([None, *partial], [*partial, None], strict=True)
            ]
            self._plans[looks_ahead, count] = known = (kinds, partial), segments
        return known[1]

    def _segment(
        self,
        last: int | None,
        following: int | None,
        kinds: tuple[type, ...],
        looks_ahead: bool,
        count: int,
    ) -> _Segment:
        model = self._model()
        start = 0 if last is None else last + 1
        stop = len(model.layers) if following is None else following + 1

        def segment(carry, slots, bank, chosen, counts, padding, states, short):
            step = Step(counts, padding, ChosenPositions(chosen))
            traced_entries = _entries(kinds[start:stop], states, short, step)
            entries = _as_rows(traced_entries, step)
            if last is None:
                self.traces += 1
                (h,) = model.embed(carry)
            else:
                weights, post, h, *more = carry
                arrays, known = bank
                views.bind(arrays, known)
                experts = model.store.steps.compute_slots(
                    post, slots, weights, _bank_of(arrays, model.store.steps.bank(last))
                )
                h = model.layers[last].end_experts(h, experts, tuple(more))
            for i in range(start, stop):
                layer, entry = model.layers[i], entries[i - start]
                if i == following:
                    h = layer.mix(h, entry)
                    begun = layer.begin_experts(h)
                    ahead = [] if begun.ahead is None else [begun.ahead]
                    more = [] if begun.shared is None else begun.shared
                    out = [begun.ids, begun.weights, *ahead, begun.post, h, *more]
                    break
                h = layer(h, entry, chunk=1)
            else:
                out = [model.logits(h), h]
            return out, [entry.ends for entry in traced_entries], step.chosen.parts

        def traced(*inputs):
            self._graphs_built += 1
            with device.gathered():
                return segment(*inputs)

        if following is None or model.layers[following].mlp._lookahead is None:
            looks_ahead = False
        layers = (i for i in model.store.layers if start <= i < stop and i != following)
        ends = following is None
        return _Segment(
            last, start, stop, tuple(layers), ends, looks_ahead, trials.compiled(traced)
        )


def _counts(cache: Sequence[Any], count: int) -> tuple[list[mx.array], mx.array | None]:
    """Return the columns before a step of `count` rows and after each, int32 ``[1]``, and left
    padding."""
    columns = cache[0].columns
    counts = [mx.array([columns + row], dtype=mx.int32) for row in range(count + 1)]
    return counts, cache[0].left_padding


def _begin_steps(cache: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Return the arrays of each entry for a step of `count` columns, and their short views; none
    where no launch takes them."""
    states = [entry.begin_step(count) for entry in cache]
    return states, [entry.short_views() for entry in cache] if device.takes_views() else []


def _entries(
    kinds: Sequence[type[BaseCache]], states: Sequence[Any], short: Sequence[Any], step: Step
) -> list[TracedEntry]:
    """Return the traced forms of cache entries. short: Views of the arrays of each, or none of
    any."""
    for arrays, known in zip(states, short, strict=False):
        views.bind(arrays, known, any_rows=True)
    return [kind.traced(step, arrays) for kind, arrays in zip(kinds, states, strict=True)]


def _as_rows(entries: list[TracedEntry], step: Step) -> list[Any]:
    """Return what layers get for `entries` in a step: of several rows, see :func:`as_rows`."""
    if step.rows == 1:
        return entries
    positions, lengths = (mx.concatenate([*some]) for some in (step.counts[:-1], step.counts[1:]))
    if step.padding is not None:
        positions = positions - step.padding
    return as_rows(entries, positions, lengths)


def _end_steps(entries: Sequence[Any], ends: Sequence[Any], count: int) -> None:
    """Give entries their arrays after a step of `count` columns. ends: See
    :attr:`~mlx_moeflux.cache.traced.TracedEntry.ends`."""
    for entry, after in zip(entries, ends, strict=True):
        for row in range(count):
            entry.end_step(*after[min(row, len(after) - 1)])


def _bank_of(arrays: Sequence[mx.array], like: ExpertBank) -> ExpertBank:
    """Return a bank whose arrays are `arrays`, as in its ``flat``, structured as `like`."""
    left = iter(arrays)

    def part(p: ProjectionBank) -> ProjectionBank:
        weight, scales = next(left), None if p.scales is None else next(left)
        biases = None if p.biases is None else next(left)
        bias = None if p.bias is None else next(left)
        whole = None if p.global_scale is None else next(left)
        return ProjectionBank(weight, scales, biases, p.spec, bias, whole)

    gate, up, down = part(like.gate), part(like.up), part(like.down)
    return ExpertBank(gate, up, down, activation=like.activation)
