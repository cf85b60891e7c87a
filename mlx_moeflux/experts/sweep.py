"""More experts than slots: bank-fulls in ascending id, the next read while one computes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_moeflux.experts.events import EventHook
from mlx_moeflux.experts.fetch import ReadThreads
from mlx_moeflux.experts.layer import StreamedLayer
from mlx_moeflux.experts.pairs import ExpertSum, Pairs
from mlx_moeflux.experts.turns import BankFull, Plan, take_turns


def sweep(
    state: StreamedLayer,
    pairs: Pairs,
    needed: Sequence[int],
    total: ExpertSum,
    *,
    threads: ReadThreads,
    events: EventHook | None,
) -> mx.array:
    """Compute `pairs`, whose distinct experts `needed` (ascending) exceed the slots.

    Evaluates: the result ``[N, C]``, bank-full by bank-full, so that the slots of one may be
    read into once it is done.
    """
    plan = Plan(state.table, needed)

    def begin(full: BankFull) -> None:
        state.look_up(full.experts, full.missing, events)
        slots = state.make_room(len(full.missing), plan.protected, events)
        state.start(threads, full.missing, slots, events)

    def compute(full: BankFull) -> None:
        part = pairs.between(full.experts[0], full.experts[-1])
        total.add(part, state.table.slots_by_expert, state.bank.experts)
        total.evaluate()

    take_turns(plan, begin, lambda: state.finish(events), compute)
    return total.total
