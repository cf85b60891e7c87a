"""A call whose experts all fit into the slots: read what is missing, compute."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.compute import FEW_PAIRS
from mlx_moeflux.experts.events import EventHook
from mlx_moeflux.experts.fetch import ReadThreads
from mlx_moeflux.experts.layer import StreamedLayer, missing_of
from mlx_moeflux.experts.pairs import Early, ExpertSum, Pairs, begin_few, few_pairs
from mlx_moeflux.kernels import metal


def begin_reads(
    state: StreamedLayer, needed: list[int], threads: ReadThreads, events: EventHook | None
) -> list[int]:
    """Look `needed` up and begin to read those that are missing, which are returned."""
    missing = missing_of(state.table, needed)
    state.look_up(needed, missing, events)
    if missing:
        slots = state.make_room(len(missing), frozenset(needed), events)
        state.start(threads, missing, slots, events)
    return missing


def at_once(
    state: StreamedLayer,
    pairs: Pairs,
    needed: list[int],
    total: ExpertSum,
    *,
    overlap: bool,
    threads: ReadThreads,
    events: EventHook | None,
) -> mx.array:
    """Compute `pairs`, whose distinct experts `needed` (ascending) fit: ``[N, C]`` float32.

    total: The call's inputs, and their sum where there are many pairs. overlap: Begin with the
    experts that are there while others are read.

    Evaluates: long calls.
    """
    missing = begin_reads(state, needed, threads, events)
    x, weights, form = total.x, total.weights, total.form
    bank, slot_of = state.bank.experts, state.table.slots_by_expert
    few = len(pairs) == weights.size and form.takes_few(len(pairs), x.shape[0], bank)
    early = None
    if few and overlap and 0 < len(missing) < len(needed):
        early = _hits_first(state, pairs, total)
    state.finish(events)
    if few:
        y = few_pairs(x, weights, pairs, slot_of, bank, form, early=early)
    else:
        total.add(pairs, slot_of, bank)
        y = total.total
    # A long output is evaluated now rather than kept.
    if weights.size > FEW_PAIRS:
        metal.settle()
        mx.eval(y)
    else:
        state.remember(y)
    return y


def _hits_first(state: StreamedLayer, pairs: Pairs, total: ExpertSum) -> Early | None:
    """Begin to compute the pairs whose experts are resident."""
    hits = np.isin(pairs.expert, list(state.table.slot_of))
    slot_of, bank = state.table.slots_by_expert, state.bank.experts
    early = begin_few(total.x, total.weights, pairs, hits, slot_of, bank, total.form)
    if early is not None:
        state.remember(early.rows)
        metal.settle()
        mx.async_eval(early.rows)
    return early
